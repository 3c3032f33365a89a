"""Texts that share a pass: the budget goes where it gains most, and is spent only where it pays."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.mock_shared import MockShared
from support.mock_target import MockTarget, plain_generate
from support.passes import Rich

from ngramspec.batching.job import Job
from ngramspec.batching.request import Request
from ngramspec.batching.writing import Writing
from ngramspec.cost.calibration import Calibration
from ngramspec.cost.curve import CostCurve
from ngramspec.cost.measure import SHARED_ORDER
from ngramspec.decoding.speculation import Proposer
from ngramspec.drafting.draft import Draft, Drafter
from ngramspec.exactness.auto import Footing
from ngramspec.policies.cost_aware import CostPolicy
from ngramspec.sampling.settings import Sampling
from ngramspec.tokens import common_prefix

SIZES = range(1, 65)


def draft(chances: Sequence[float]) -> Draft:
    return Draft(tuple(range(len(chances))), chances=tuple(chances))


def whole(lengths: Sequence[int]) -> Sequence[int]:
    return [sum(lengths)]


def value(chances: Sequence[Sequence[float]], lengths: Sequence[int], rate: float, cost: float) -> float:
    """E[tokens] - rate * T."""
    expected = float(len(chances))
    for of, length in zip(chances, lengths, strict=True):
        expected += sum(math.prod(of[: i + 1]) for i in range(length))
    return expected - rate * cost


def test_what_may_be_lost_is_divided_among_the_drafters() -> None:
    curve = CostCurve(dict.fromkeys(SIZES, 1.0))  # so that a pass of four texts costs what one costs
    alone, shared = (CostPolicy(texts=texts).price(curve, SIZES) for texts in (1, 4))
    assert alone is not None
    assert shared is not None
    assert 0 < shared.stake == pytest.approx(alone.stake / 4)


CHANCES = st.lists(st.lists(st.floats(0.01, 0.99), max_size=4), min_size=2, max_size=4)


@given(CHANCES, st.floats(0.05, 1.5), st.floats(0.0, 0.2))
@settings(max_examples=200, deadline=None)
def test_one_pool_gets_the_best_of_all_choices(chances: list[list[float]], slope: float, bend: float) -> None:
    curve = CostCurve({n: 1 + slope * (n - 1) * (1 + bend * n) for n in SIZES})
    curve.worst = math.inf
    policy = Rich(texts=len(chances))
    planned = policy.plan_together([draft(of) for of in chances], curve, SIZES, whole)
    rate = len(chances) / curve.ratio(len(chances))

    def of(lengths: Sequence[int]) -> float:
        size = sum(1 + length for length in lengths)
        extra = curve.switching(size, len(chances)) if any(lengths) else 0.0
        return value(chances, lengths, rate, curve.ratio(size) + extra)

    best = max(map(of, itertools.product(*(range(len(c) + 1) for c in chances))))
    assert of([length for length, _ in planned]) == pytest.approx(best)
    assert all(size == 1 + length for length, size in planned)


def test_lanes_of_their_own_are_padded_to_one_batch_where_that_is_cheaper() -> None:
    """Reading the weights costs 1, a token 0.05: a second batch for a longer draft costs as much as 20 tokens."""
    curve = CostCurve({n: 1 + 0.05 * (n - 1) for n in SIZES})
    shared = MockShared(4, split=True)
    chances = [[0.9, 0.9], [0.9, 0.9, 0.9], [0.9], []]
    planned = Rich(texts=4).plan_together([draft(of) for of in chances], curve, SIZES, shared.batches)
    sizes = {size for _, size in planned}
    assert len(sizes) == 1 < sizes.pop()
    assert [length for length, _ in planned][3] == 0


def test_more_texts_leave_less_room_for_drafts() -> None:
    """Where tokens past eight cost their full price, eight texts draft nothing, and one drafts."""
    curve = CostCurve({n: 1.0 if n <= 8 else 1.0 + 0.5 * (n - 8) for n in SIZES})
    lengths = {}
    for texts in (2, 4, 8):
        drafts = [draft([0.6] * 6)] * texts
        planned = Rich(texts=texts).plan_together(drafts, curve, SIZES, whole)
        lengths[texts] = sum(length for length, _ in planned)
    assert lengths[2] == 6
    assert lengths[4] == 4
    assert lengths[8] == 0


# --------------------------------------------------------------------------- never slower


class Guess(Drafter):
    """Knows the text, and is wrong as often as it is told to be; it knows nothing of that itself."""

    name = "guess"

    def __init__(self, text: Sequence[int], right: float, seed: int) -> None:
        self._text, self._right, self._random = list(text), right, random.Random(seed)
        self._guess: list[int] = []

    def begin(self, prompt: Sequence[int]) -> None:
        self._at = 0

    def propose(self, limit: int, choose: object = None, *, blind: bool = False, price: object = None) -> Draft:
        true = self._text[self._at : self._at + min(limit, 8)]
        self._guess = [t if self._random.random() < self._right else (t + 1) % 16 for t in true]
        return Draft(tuple(self._guess), source="guess")

    def accept(self, tokens: Sequence[int]) -> int:
        self._at += len(tokens)
        return common_prefix(self._guess, tokens)


def seconds(
    texts: int, right: float, cost: Callable[[int], float], *, drafts: bool, split: bool, tokens: int = 400
) -> float:
    """The time in which so many texts of that many tokens are written, by the mock's clock."""
    model = MockShared(texts, split=split, seconds=cost, peak=3.0)
    curve = CostCurve({n: cost(n) for n in SHARED_ORDER})
    clock = model.clock.perf_counter
    writing = Writing(model, Calibration.given(curve), Footing(), drafts=drafts, draft_max=63, clock=clock)
    jobs = []
    for lane in model.lanes:
        job = Job(Request([1, lane.number], tokens), lambda _: None, clock)
        job.prepare(lane, lane.piece, n_ctx=lane.n_ctx, n_vocab=lane.n_vocab, counts_calls=False)
        # The text is known from a run alone.
        text = known(lane.number, tokens)
        job.start(lane, Proposer(Guess(text, right, lane.number)), aligned=False, most=lambda: 512)
        while job.reading:
            step = job.read()
        assert step is not None
        jobs.append(job)
    began = model.clock.now
    while jobs:
        _, ended = writing.step(jobs)
        jobs = [job for job in jobs if job not in [one for one, _ in ended]]
    return model.clock.now - began


@cache
def known(number: int, tokens: int) -> tuple[int, ...]:
    """What the mock writes after the prompt of that lane."""
    return tuple(plain_generate(MockTarget(peak=3.0), [1, number], tokens, Sampling()))


CURVES: dict[str, Callable[[int], float]] = {
    "flat": lambda n: 0.01,
    "a little more each": lambda n: 0.01 * (1 + 0.03 * (n - 1)),
    "half": lambda n: 0.01 * (0.5 + 0.5 * n),
    "no gain": lambda n: 0.01 * n,
    "knee": lambda n: 0.01 * max(1.0, n / 8),
}


@cache
def undrafted(curve: str, texts: int, split: bool) -> float:
    """The time without drafts, whatever they would be."""
    return seconds(texts, 0.0, CURVES[curve], drafts=False, split=split)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("right", [0.0, 0.5, 0.95])
@pytest.mark.parametrize("texts", [1, 2, 4, 8])
@pytest.mark.parametrize("curve", CURVES)
def test_drafting_is_never_slower_however_many_share_a_pass(curve: str, texts: int, right: float, split: bool) -> None:
    drafted = seconds(texts, right, CURVES[curve], drafts=True, split=split)
    plain = undrafted(curve, texts, split)
    assert drafted <= 1.02 * plain
    if curve == "flat" and right > 0.9:
        assert drafted < 0.5 * plain
