"""Tests of the engine: every request gets the same text as alone, and no event of one request affects another."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support.ear import WAIT, Ear, ask, run_engine
from support.grid import grid
from support.mock_shared import MockShared
from support.mock_target import MockTarget, plain_generate

from ngramspec.backend import ExactnessMode, Part
from ngramspec.batching.request import Done, Event, Prefilled, Scored, Slot, Started
from ngramspec.batching.writer import choose_sizes
from ngramspec.cost.bits import DEFAULT_LOGIT_SHIFT, SHARED_SIZES
from ngramspec.cost.fixed_curves import find_curves
from ngramspec.data import PromptError, ShutdownError, TargetError
from ngramspec.drafting.mixture.drafter import MixtureDrafter, TextIndexSet
from ngramspec.request import Request
from ngramspec.sampling.distribution import logprobs
from ngramspec.sampling.settings import Sampling, TextRules
from ngramspec.steps import Step


def prompts(n: int, length: int = 30) -> list[list[int]]:
    return [[(7 * i + j * (i + 2)) % 16 for j in range(length + 5 * i)] for i in range(n)]


def alone(prompt: list[int], tokens: int = 60, sampling: Sampling | None = None, **settings: Any) -> list[int]:
    return plain_generate(MockTarget(**settings), prompt, tokens, sampling or Sampling())


@grid(sequences=(1, 3, 4), split=(False, True), temperature=(0.9, 0.0), early=(True, False))
def test_engine_with_simultaneous_requests_keeps_text_of_each(
    sequences: int, split: bool, temperature: float, early: bool
) -> None:
    """If passes return early, the next one overwrites logits that were not fetched yet."""
    begin = threading.Event()
    model = MockShared(sequences, split=split, early=early, peak=5.0, fails=lambda _: not begin.wait(WAIT))
    with run_engine(model) as engine:
        asked = [(prompt, Sampling(temperature, seed=i)) for i, prompt in enumerate(prompts(7))]
        ears = [ask(engine, prompt, sampling=sampling) for prompt, sampling in asked]
        begin.set()
        for ear in ears:
            assert ear.wait().reason == "length"
    for ear, (prompt, sampling) in zip(ears, asked, strict=True):
        assert ear.tokens == alone(prompt, sampling=sampling, peak=5.0)
    assert any(size > 1 for done in model.passes for _, size in done)
    assert max(map(len, model.passes)) == sequences
    assert all(len(sequence.tokens) <= sequence.n_ctx for sequence in model.sequences)


def test_engine_with_many_requests_of_one_client_does_not_delay_others() -> None:
    begin, order = threading.Event(), list[str]()
    model = MockShared(2, fails=lambda _: not begin.wait(WAIT))

    def listener(name: str, ear: Ear) -> Callable[[Event], None]:
        def listen(event: Event) -> None:
            if isinstance(event, Started):
                order.append(name)
            ear(event)

        return listen

    with run_engine(model) as engine:
        ears = [Ear() for _ in range(8)]
        for number, ear in enumerate(ears[:6]):
            engine.submit(Request([number, 1], 8), listener("many", ear), number)
        for ear in ears[6:]:
            engine.submit(Request([5, 6], 8), listener("other", ear))
        begin.set()
        for ear in ears:
            assert ear.wait().reason == "length"
    # Up to two of the many start before the others arrive.
    assert order[:4].count("other") == 2
    assert order.count("many") == 6


def test_engine_sends_events_in_order_and_sums_counters() -> None:
    model = MockShared(2, peak=6.0, n_batch=16)
    with run_engine(model) as engine:
        ears = [ask(engine, prompt, 40) for prompt in prompts(3, 50)]
        ends = [ear.wait() for ear in ears]
        report = engine.report()
    for ear, end in zip(ears, ends, strict=True):
        kinds = [type(event) for event in ear.events]
        assert kinds[0] is Started
        assert kinds[1] is Prefilled
        assert kinds[-1] is Done
        assert kinds[-1 - len(ear.steps) : -1] == [Step] * len(ear.steps)
        assert end.stats.generated == 40 == len(ear.tokens)
        assert sum(step.seconds for step in ear.steps) == pytest.approx(end.stats.seconds + end.stats.prefill_seconds)
    assert report.stats.generated == 120
    assert report.stats.drafted == sum(end.stats.drafted for end in ends) > 0
    assert report.prompt_tokens + report.cached_tokens == sum(map(len, prompts(3, 50)))
    assert report.passes == len(model.passes)
    assert report.busy == sum(map(len, model.passes))
    assert not any(slot.request for slot in report.slots)


def test_engine_with_scored_request_returns_prompt_logprobs() -> None:
    prompt, model = prompts(1, 100)[0], MockShared(2, max_batch=16)
    with run_engine(model) as engine:
        plain = ask(engine, prompt, 20, logprobs=2)
        plain.wait()
        ear = ask(engine, prompt, 20, logprobs=2, scored=True)
        ear.wait()
    (found,) = [event for event in ear.events if isinstance(event, Scored)]
    assert ear.tokens == plain.tokens
    target = MockTarget()
    expected = [logprobs(target.prefill(prompt[:i]), prompt[i], 2) for i in range(1, len(prompt))]
    assert found.logprobs == tuple(expected)


def test_engine_with_known_prefix_reuses_cache() -> None:
    model = MockShared(2)
    with run_engine(model, cache_room=1 << 20) as engine:
        first, second, third = ([i] * 40 for i in (1, 2, 3))
        for prompt in (first, second, third):
            ask(engine, prompt, 5).wait()
        # The third text took the sequence of the first, which now takes that of the second; both are restored from RAM.
        ends = [ask(engine, [*prompt, 5], 5).wait() for prompt in (first, second)]
        assert [end.n_cached for end in ends] == [40, 40]
        assert sum(sequence.n_restored for sequence in model.sequences) == 2
        # A beginning in another sequence's cache is copied.
        held = ask(engine, [*first, 5, 6, 7], 5, slot=1).wait()
        assert held.n_cached >= 40
        again = ask(engine, [*first, 5], 5, slot=1, cache_prompt=False).wait()
        assert again.n_cached == 0
    with run_engine(MockShared(1)) as engine:  # no second sequence
        for prompt in (first, second):
            ask(engine, prompt, 5).wait()
        assert ask(engine, [*first, 5], 5).wait().n_cached == 0


@pytest.mark.parametrize("early", [False, True])
def test_engine_cancel_ends_only_cancelled_requests(early: bool) -> None:
    begin, gate = threading.Event(), threading.Event()
    model = MockShared(
        2, early=early, fails=lambda parts: not begin.wait(WAIT) or (len(parts) == 2 and not gate.wait(WAIT))
    )
    with run_engine(model) as engine:
        asked = prompts(3)
        stays, goes, waits = Ear(), Ear(), Ear()
        engine.submit(Request(asked[0], 50), stays)
        ticket = engine.submit(Request(asked[1], 50), goes)
        queued = engine.submit(Request(asked[2], 50), waits)
        begin.set()
        goes.wait_for(Step)
        ticket.cancel()
        queued.cancel()
        gate.set()
        assert goes.wait().reason == waits.wait().reason == "cancelled"
        assert stays.wait().reason == "length"
        assert stays.tokens == alone(asked[0], 50)
        assert goes.tokens == alone(asked[1], 50)[: len(goes.tokens)]
        assert not waits.tokens
        assert ask(engine, asked[2], 50).wait().reason == "length"


def test_engine_decode_failure_ends_only_affected_request() -> None:
    bad, begin = {1}, threading.Event()

    def fails(parts: Sequence[Part]) -> bool:
        assert begin.wait(WAIT)  # until all have arrived
        return len(model.passes) > 8 and any(part.sequence.number in bad for part in parts)

    model = MockShared(3, fails=fails)
    with run_engine(model) as engine:
        ears = [ask(engine, prompt, 400) for prompt in prompts(3)]
        begin.set()
        ends = [ear.wait() for ear in ears]
        failed = [ear for ear, end in zip(ears, ends, strict=True) if isinstance(end, Exception)]
        assert len(failed) == 1
        assert isinstance(failed[0].events[-1], TargetError)
        bad.clear()
        assert ask(engine, prompts(1)[0], 10).wait().reason == "length"
    for ear, prompt in zip(ears, prompts(3), strict=True):
        assert ear.tokens == alone(prompt, 400)[: len(ear.tokens)]
        assert ear in failed or len(ear.tokens) == 400


def test_engine_unexpected_error_ends_request_and_keeps_engine_run_engine() -> None:
    def breaks(_: object) -> bool:
        if broken:
            raise ZeroDivisionError("a bug")
        return False

    broken, seen = [1], list[BaseException]()
    with run_engine(MockShared(2, fails=breaks), on_crash=seen.append) as engine:
        end = ask(engine, [1, 2, 3], 10).wait()
        assert isinstance(end, Exception)
        assert "ZeroDivisionError" in str(end)
        broken.clear()
        ear = ask(engine, [1, 2, 3], 10)
        assert ear.wait().reason == "length"
        assert ear.tokens == alone([1, 2, 3], 10)
    assert [type(error) for error in seen] == [ZeroDivisionError]


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (Request([], 5), PromptError),
        (Request([1] * 5000, 5), PromptError),
        (Request([1], 5, logprobs=1000), ValueError),
        (Request([1], 5, stop=("",)), ValueError),
    ],
)
def test_engine_rejects_invalid_request_before_start(request_: Request, error: type[Exception]) -> None:
    with run_engine(MockShared(1)) as engine:
        ear = Ear()
        engine.submit(request_, ear)
        assert isinstance(ear.wait(), error)
        assert len(ear.events) == 1
        assert ask(engine, [1, 2], 5).wait().reason == "length"


def test_engine_with_zero_tokens_only_prefills_prompt() -> None:
    model = MockShared(1, n_batch=16)
    with run_engine(model) as engine:
        ear = ask(engine, [1] * 50, 0)
        assert ear.wait().reason == "prefilled"
        assert not ear.tokens
        assert ask(engine, [1] * 51, 5).wait().n_cached == 50


def test_engine_stop_drains_or_cancels_and_rejects_new_requests() -> None:
    for drain, tokens, reason in ((WAIT, 30, "length"), (0.0, 1 << 19, "cancelled")):
        gate = threading.Event()
        model = MockShared(1, n_ctx=1 << 20, fails=lambda _, gate=gate: not gate.wait(WAIT))  # type: ignore[misc]
        with run_engine(model, drafter=None) as engine:
            ears = [ask(engine, prompt, tokens) for prompt in prompts(2)]
            threading.Timer(0.1, gate.set).start()
            engine.stop(drain=drain)
            assert [ear.wait().reason for ear in ears] == [reason, reason]
            assert isinstance(ask(engine, [1], 5).wait(), ShutdownError)


def test_engine_alternates_long_prefill_and_decoding() -> None:
    model = MockShared(2, n_batch=64, n_ctx=1 << 15, seconds=lambda n: 0.01 * n)
    order: list[str] = []
    both = threading.Event()

    def watch(name: str) -> Callable[[Event], None]:
        def listen(event: Event) -> None:
            order.append(f"{name}-{type(event).__name__}")
            ear[name](event)
            if name == "writes":
                assert both.wait(WAIT)  # otherwise the text is complete before the other request

        return listen

    ear = {"writes": Ear(), "reads": Ear()}
    with run_engine(model) as engine:
        engine.submit(Request([1, 2, 3], 2000), watch("writes"))
        ear["writes"].wait_for(Started)
        engine.submit(Request([4] * 6000, 5), watch("reads"))
        both.set()
        for one in ear.values():
            one.wait()
    began, read = order.index("reads-Started"), order.index("reads-Step")
    between = order[began:read]
    assert between.count("reads-Prefilled") > 90
    assert between.count("writes-Step") > 10


@pytest.mark.parametrize(
    ("kernels", "options", "sizes", "aligned"),
    [
        (lambda size, _: size > 3, {}, (1, 2, 3), True),
        (lambda size, _: size > 1, {"n_batch": 256}, SHARED_SIZES[1:], True),
        (None, {"n_batch": 256}, SHARED_SIZES, False),
        (None, {"fail_rollback": True}, (1,), True),
        (None, {"replays": True}, (1,), True),
    ],
)
def test_choose_sizes_returns_sizes_whose_logits_agree(
    kernels: Any, options: dict[str, Any], sizes: tuple[int, ...], aligned: bool, tmp_path: Path
) -> None:
    model = MockShared(2, kernels=kernels, n_vocab=30, **options)
    assert choose_sizes(model, exact=False) == ExactnessMode(max_logit_shift=DEFAULT_LOGIT_SHIFT)
    assert choose_sizes(model, exact=True, folder=tmp_path) == ExactnessMode(sizes, aligned, bit_identical=True)


def test_engine_with_exact_sizes_keeps_batches_in_class() -> None:
    """Batches of 1 to 3 agree, so at most three texts share a pass, and drafts must not make it larger."""
    begin = threading.Event()
    model = MockShared(4, kernels=lambda size, _: size > 3, noise=1.0, peak=6.0, fails=lambda _: not begin.wait(WAIT))
    with run_engine(model, exactness=ExactnessMode((1, 2, 3), bit_identical=True)) as engine:
        ears = [ask(engine, prompt, 50) for prompt in prompts(4)]
        begin.set()
        for ear in ears:
            ear.wait()
    assert max(sum(size for _, size in done) for done in model.passes) == 3
    assert {number for done in model.passes for number, _ in done} == {0, 1, 2, 3}


def test_engine_with_padded_exact_sizes_decodes_one_sequence_per_call() -> None:
    model = MockShared(2, peak=6.0)
    with run_engine(model, exactness=ExactnessMode((4, 8), bit_identical=True)) as engine:
        ears = [ask(engine, prompt, 50) for prompt in prompts(2)]
        for ear in ears:
            ear.wait()
    assert {size for done in model.passes for _, size in done} <= {4, 8}
    assert max(map(len, model.passes)) == 1
    for ear, prompt in zip(ears, prompts(2), strict=True):
        assert ear.tokens == alone(prompt, 50, peak=6.0)


@pytest.mark.parametrize("replays", [False, True])
def test_engine_with_drafts_alone_drafts_only_for_single_sequence(replays: bool) -> None:
    model = MockShared(3, drafts_alone=True, replays=replays, peak=6.0)  # raises otherwise
    lengths = (40, 40, 120)
    with run_engine(model) as engine:
        ears = [ask(engine, prompt, length) for prompt, length in zip(prompts(3), lengths, strict=True)]
        for ear in ears:
            ear.wait()
    for ear, prompt, length in zip(ears, prompts(3), lengths, strict=True):
        assert ear.tokens == alone(prompt, length, peak=6.0)
    assert any(len(done) == 1 and done[0][1] > 1 for done in model.passes)


def test_engine_error_while_saving_slot_frees_the_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    model = MockShared(1)
    with run_engine(model, cache_room=1 << 20) as engine:
        ask(engine, [1] * 50, 5).wait()
        monkeypatch.setattr(model.sequences[0], "save_state", lambda: 1 / 0)
        assert isinstance(ask(engine, [2] * 50, 5).wait(), Exception)
        monkeypatch.undo()
        assert ask(engine, [2] * 50, 5).wait().reason == "length"


def test_engine_saves_drafter_state_after_requests(tmp_path: Path) -> None:
    path = tmp_path / "judge.npz"
    with run_engine(MockShared(2, peak=5.0), drafter=MixtureDrafter(TextIndexSet(), path)) as engine:
        assert isinstance(ask(engine, prompts(1)[0]).wait(), Done)
    assert path.exists()


def test_engine_report_describes_request_of_each_slot() -> None:
    found: list[Slot] = []
    text: list[int] = []

    def listener(event: Event) -> None:
        if isinstance(event, Step):
            text.extend(event.tokens)
            found.append(engine.report().slots[0])

    model = MockShared(1, peak=3.0)
    vars(model.sequences[0])["piece"] = lambda token: b"\n" if token == 5 else b"a"
    with run_engine(model, drafter=None) as engine:
        ask(engine, [1] * 40, 1).wait()
        request = Request([1] * 40, 60)
        engine.submit(request, listener)
        ask(engine, [1], 1).wait()
        idle = engine.report().slots[0]
    assert all((slot.number_of_request, slot.n_cached, slot.request) == (1, 39, request) for slot in found)
    assert [slot.new_line for slot in found] == [5 in text[: i + 1] for i in range(60)]
    assert 5 in text[1:]
    assert (idle.number_of_request, idle.request) == (-1, None)


@grid(temperature=(0.0, 0.9), peak=(3.0, 6.0))
def test_engine_with_text_rules_enforces_them_and_keeps_text(temperature: float, peak: float) -> None:
    free = alone(prompts(1)[0], 200, Sampling(temperature), peak=peak, eog=(3,))
    pairs = Counter(pairwise(alone(prompts(1)[0], 200, Sampling(temperature), peak=peak)))
    words = tuple(pair for pair, _ in pairs.most_common(3))
    rules = TextRules(min_tokens=len(free) + 20, stop_token_ids=frozenset({5}), bad_words=words)
    texts = []
    for drafter in (None, MixtureDrafter(TextIndexSet())):
        with run_engine(MockShared(1, peak=peak, eog=(3,)), drafter=drafter) as engine:
            ear = ask(engine, prompts(1)[0], 400, sampling=Sampling(temperature), rules=rules)
            ear.wait()
            texts.append(ear.tokens)
    (text, drafted) = texts
    assert text == drafted
    assert not set(pairwise(text)) & set(rules.bad_words)
    assert not {3, 5} & set(text[: rules.min_tokens])
    assert len(text) == 400 or text[-1] in (3, 5)
    assert not {3, 5} & set(text[rules.min_tokens : -1])


# --------------------------------------------------------------------------- work next to requests


def steps(told: list[str], name: str, count: int, end: Any = None) -> Callable[[Callable[[], int]], Any]:
    """Return work of `count` steps that then returns `end`, or raises it."""

    def work(most: Callable[[], int]) -> Generator[None, None, Any]:
        for i in range(count):
            yield
            told.append(f"{name}{i}")
            assert most() > 0
        if isinstance(end, Exception):
            raise end
        return end

    return work


def test_engine_background_work_runs_in_steps_and_keeps_texts() -> None:
    told: list[str] = []
    model = MockShared(2, peak=5.0)
    with run_engine(model) as engine:
        ears = [ask(engine, prompt) for prompt in prompts(3)]
        done = [
            engine.run_between_passes(steps(told, "a", 3, 7)),
            engine.run_between_passes(steps(told, "b", 2, TargetError("no"))),
        ]
        done.append(engine.run_between_passes(steps(told, "c", 1, "end")))
        assert (done[0].result(WAIT), done[2].result(WAIT)) == (7, "end")
        with pytest.raises(TargetError, match="no"):
            done[1].result(WAIT)
        for ear in ears:
            ear.wait()
        assert engine.run_between_passes(steps(told, "d", 1)).result(WAIT) is None  # also without other work
    assert told == ["a0", "a1", "a2", "b0", "b1", "c0", "d0"]
    assert [ear.tokens for ear in ears] == [alone(prompt, peak=5.0) for prompt in prompts(3)]


def test_engine_shares_time_between_decoding_and_background_work() -> None:
    told: list[str] = []
    model = MockShared(1, peak=5.0)

    def slow(most: Callable[[], int]) -> Generator[None, None, None]:
        for _ in range(4):
            yield
            told.append(f"work after {len(model.passes)}")
            model.clock.now += 8e-3  # as long as several passes

    with run_engine(model, drafter=None) as engine:
        gate = threading.Event()
        held = ask(engine, prompts(1)[0], 200)
        while not held.tokens:
            gate.wait(0.001)
        engine.run_between_passes(slow).result(WAIT)
        held.wait()
    passes = [int(line.split()[-1]) for line in told]
    assert all(later - earlier >= 7 for earlier, later in pairwise(passes))


def test_engine_drops_cancelled_background_work_and_ends_it_at_stop() -> None:
    told: list[str] = []
    begin = threading.Event()
    model = MockShared(1, peak=5.0, fails=lambda _: not begin.wait(WAIT))
    with run_engine(model) as engine:
        ear = ask(engine, prompts(1)[0], 5)
        left, kept = (
            engine.run_between_passes(steps(told, "left", 10**9)),
            engine.run_between_passes(steps(told, "kept", 1)),
        )
        assert left.cancel()
        begin.set()
        kept.result(WAIT)
        ear.wait()
        endless = engine.run_between_passes(steps([], "endless", 10**9))
        engine.stop()
        with pytest.raises(ShutdownError):
            endless.result(WAIT)
        with pytest.raises(ShutdownError):
            engine.run_between_passes(steps(told, "late", 1)).result(WAIT)
    assert told == ["kept0"]


# --------------------------------------------------------------------------- repeated requests

PROMPT = list(range(100, 140))
LENGTH, VOCABULARY = 96, 2048


def asks(*requests: Request) -> list[tuple[int, int, int]]:
    """Return the numbers of draft tokens, accepted tokens and decode calls of each request, one after the other."""
    times, memory = find_curves("cpu-1.5b-q4_0")["cpu-1.5b-q4_0"], TextIndexSet()
    model = MockShared(1, n_vocab=VOCABULARY, seconds=times.ratio)
    counts = []
    with run_engine(model, times=times, drafter=MixtureDrafter(memory), memory=memory) as engine:
        for request in requests:
            ear = Ear()
            engine.submit(request, ear)
            assert isinstance(ear.wait(), Done)
            steps = [step for step in ear.steps if step.batch]
            counts.append((sum(len(step.drafted) for step in steps), sum(step.accepted for step in steps), len(steps)))
    return counts


def misleading(last: int) -> Request:
    """Return a request whose prompt repeats a text that the answer leaves after its first token."""
    start = [last, last + 1]
    first = int(MockTarget(VOCABULARY).row(start).argmax())
    return Request([*start, first, *range(1000, 1008)] * 6 + start, 8)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, seed=5)])
def test_engine_with_repeated_request_drafts_earlier_answer(sampling: Sampling) -> None:
    request = Request(PROMPT, LENGTH, sampling=sampling)
    first, *repeated = asks(request, request, request)
    assert first == (0, 0, LENGTH - 1)
    # The loss budget allows 3 tokens first, and more after each success, up to its limit.
    assert repeated == [(90, 90, 5)] * 2


def test_engine_after_losses_elsewhere_drafts_repeated_request_fully() -> None:
    request = Request(PROMPT, LENGTH)
    _, *others, repeated = asks(request, *[misleading(200 + 20 * i) for i in range(4)], request)
    assert others == [(3, 0, 7)] * 3 + [(0, 0, 7)]  # the budget is used up
    assert repeated == (90, 90, 5)


def test_engine_with_prediction_drafts_it_from_first_token() -> None:
    answer = plain_generate(MockTarget(VOCABULARY), PROMPT, LENGTH, Sampling())
    predicted, other = asks(Request(PROMPT, LENGTH, prediction=answer), Request([7, 8, 9], LENGTH))
    assert predicted == (86, 86, 9)
    assert other == (0, 0, LENGTH - 1)
