"""Tests of a backend that returns early: the loop submits the next pass before it reports the last one."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest
from architectures.oracle import Oracle
from numpy.typing import NDArray
from support.decoder_loop import make_decoder, make_model
from support.ear import WAIT, Ear, ask, run_engine
from support.mock_shared import MockShared
from support.mock_target import Clock, MockTarget, plain_generate

from ngramspec.backend import ExactnessMode
from ngramspec.batching.request import Event
from ngramspec.cost.times import PassTimes
from ngramspec.data import TargetError
from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.decoding.loop import DecodingLoop, Pass
from ngramspec.decoding.text import DraftedText, Drafts
from ngramspec.drafting.draft import Draft
from ngramspec.policies.cost import CostPolicy
from ngramspec.policies.policy import FixedPolicy
from ngramspec.request import Request
from ngramspec.sampling.distribution import BadLogits
from ngramspec.sampling.settings import Sampling
from ngramspec.steps import Step


class EarlyTarget(MockTarget):
    """Model whose `submit` returns at once and whose logits arrive later."""

    returns_early = True

    def __init__(self, n_vocab: int = 60, **options: Any) -> None:
        super().__init__(n_vocab, **options)
        self.events: list[str] = []

    def submit(self, tokens: Sequence[int]) -> None:
        self.events.append("submit")
        super().submit(tokens)

    def fetch(self) -> NDArray[Any]:
        self.events.append("fetch")
        return super().fetch()


@pytest.mark.parametrize("drafter", [None, "ngram", "mixture"])
def test_generate_with_early_backend_submits_before_yielding_step(drafter: str | None) -> None:
    target = make_model(kind=EarlyTarget)
    assert isinstance(target, EarlyTarget)
    steps = make_decoder(target, drafter=drafter).generate([1, 2, 3], max_tokens=40, sampling=Sampling(0.7, seed=4))
    passes = 0
    for step in steps:
        if step.batch:
            passes += 1
            ahead = 0 if step.stop is not None else 1
            assert target.events == ["submit", "fetch"] * passes + ["submit"] * ahead
    assert passes > 5


def test_generate_with_early_backend_when_closed_restores_cache() -> None:
    target = make_model(kind=EarlyTarget)
    steps = make_decoder(target).generate([1, 2, 3], max_tokens=40)
    tokens = [token for _, step in zip(range(9), steps, strict=False) for token in step.tokens]
    steps.close()
    assert target.tokens == [1, 2, 3, *tokens[:-1]]


def test_generate_with_early_backend_yields_step_before_next_error() -> None:
    class Failing(EarlyTarget):
        def submit(self, tokens: Sequence[int]) -> None:
            if len(self.tokens) > 9:
                raise TargetError("no room")
            super().submit(tokens)

    target = make_model(kind=Failing)
    steps = make_decoder(target, drafter=None).generate([1, 2, 3], max_tokens=40)
    tokens = [next(steps).tokens[0] for _ in range(8)]
    with pytest.raises(TargetError, match="no room"):
        next(steps)
    assert tokens == plain_generate(make_model(), [1, 2, 3], len(tokens), Sampling())
    assert target.tokens == [1, 2, 3, *tokens[:-1]]


def test_generate_with_early_backend_submits_no_pass_after_bad_logits() -> None:
    target = make_model(kind=EarlyTarget, broken=lambda context: len(context) == 9)
    assert isinstance(target, EarlyTarget)
    with pytest.raises(BadLogits):
        list(make_decoder(target, drafter="ngram").generate([1, 2, 3], max_tokens=40))
    assert target.events == ["submit", "fetch"] * (len(target.events) // 2)


def test_decoding_loop_wait_adds_time_until_logits_arrive() -> None:
    class Waiting(EarlyTarget):
        def fetch(self) -> NDArray[Any]:
            clock.now += 2.0
            return super().fetch()

    clock = Clock()
    target = Waiting(seconds=lambda _: 0.0, clock=clock)
    target.prefill([1, 2, 3])
    text = DraftedText(Drafts(None), target)
    text.last, text.tokens_left = 4, 9
    loop = DecodingLoop(FixedPolicy(), clock.perf_counter)
    current = loop.submit((text,))
    assert not current.rows
    assert current.seconds < 1.0
    loop.wait(current)
    assert len(current.rows[0]) == 1
    assert current.seconds > 2.0


def test_submit_ahead_charges_changes_of_size_after_the_pass_before_it() -> None:
    class Recording(CostPolicy):
        def plan(self, draft: Draft, times: PassTimes | None, *args: Any) -> tuple[int, int]:
            assert times is not None
            seen.append((times.last, times.change_now(times.last) > 0))
            return super().plan(draft, times, *args)

    seen: list[tuple[int, bool]] = []
    times = PassTimes({1: 1.0, 64: 1.2}, (0.2, 0.1), is_fixed=True)
    text = plain_generate(make_model(), [1, 2, 3], 200, Sampling())
    oracle = Oracle(lambda _: text, 60)
    decoder = SpeculativeDecoder(make_model(kind=EarlyTarget), drafter=oracle, policy=Recording(), times=times)
    sizes = [1, *(step.batch for step in decoder.generate([1, 2, 3], max_tokens=200) if step.batch)]
    assert len({*sizes}) > 1
    assert seen == [(last, last != before) for before, last in zip([1, *sizes], sizes[:-1], strict=False)][: len(seen)]


def test_submit_ahead_restores_the_size_of_the_last_pass_even_after_an_error() -> None:
    times, target = PassTimes(), make_model(kind=EarlyTarget)
    loop = DecodingLoop(FixedPolicy(), Clock().perf_counter)
    loop.prepare(times, (1,))
    text = DraftedText(Drafts(None), target)
    text.last, text.tokens_left = 4, 9
    for tokens, works in (([1, 2, 3], True), ([1] * target.n_ctx, False)):
        target.prefill(tokens)
        target._slack = 0
        with suppress(ValueError):
            assert (loop.submit_ahead((text,), Pass((), (), 5, 2, False)) is not None) == works
        assert times.last == 1


def test_engine_with_early_backend_submits_before_reporting_step() -> None:
    shared = MockShared(2, early=True)
    submitted: list[int] = []
    ear = Ear()

    def listen(event: Event) -> None:
        if isinstance(event, Step) and event.batch:
            submitted.append(len(shared.passes))
        ear(event)

    with run_engine(shared, drafter=None) as engine:
        engine.submit(Request([1, 2, 3], 10), listen)
        assert ear.wait().reason == "length"
    assert submitted == [2, 3, 4, 5, 6, 7, 8, 9, 9]


def test_engine_with_early_backend_lets_more_texts_than_fit_take_turns() -> None:
    begin = threading.Event()
    shared = MockShared(4, early=True, fails=lambda _: not begin.wait(WAIT))
    with run_engine(shared, drafter=None, exactness=ExactnessMode((1, 2), bit_identical=True)) as engine:
        ears = [ask(engine, [i, 2, 3], 30) for i in range(4)]
        begin.set()
        assert {ear.wait().reason for ear in ears} == {"length"}
    pairs = [tuple(sorted(number for number, _ in each)) for each in shared.passes if len(each) == 2]
    assert {*pairs[:6]} == {(0, 1), (2, 3)}
