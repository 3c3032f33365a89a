"""Tests of the value of a draft with the passes after it, also if refused passes are evaluated again."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence

import pytest
from support.passes import UnlimitedPolicy, draft, known

from ngramspec.cost.times import PassTimes, RestoreCost
from ngramspec.policies.draft_value import DraftValue

SIZES = range(1, 65)
COPY = [0.6] + [0.97] * 30
"""Chances of a copy that may not begin, but continues if it does."""


def cuts(n: int) -> Iterator[list[int]]:
    """Yield all lists of draft lengths with which passes can cover a chain of n guesses; each pass adds one token."""
    for k in range(n + 1):
        if n - k - 1 <= 0:
            yield [k]
        else:
            yield from ([k, *rest] for rest in cuts(n - k - 1))


def worth_of(lengths: Sequence[int], chances: Sequence[float], times: Sequence[float], worth: float) -> float:
    """Return expected tokens less the cost of time, summed over every position at which the chain may fail."""
    total = 0.0
    for wrong in range(len(chances) + 1):
        at, value = 0, 0.0
        for k in lengths:
            right = min(k, wrong - at)
            value += 1 + right - worth * times[k]
            at += right + 1
            if at > min(wrong, len(chances) - 1):
                break
        total += math.prod(chances[:wrong]) * (1 - chances[wrong] if wrong < len(chances) else 1.0) * value
    return total


@pytest.mark.parametrize("seed", range(40))
def test_draft_value_equals_value_of_best_split_of_the_chain(seed: int) -> None:
    rng = random.Random(seed)
    chances = [rng.random() ** 0.4 for _ in range(rng.randrange(1, 8))]
    times = [1.0, *(rng.uniform(0.8, 5.0) for _ in chances)]
    worth = rng.uniform(0.5, 2.0)
    valued = DraftValue()
    longest = valued.read(chances, [(n, times[n - 1] if n else 0.0) for n in range(len(times) + 1)], worth, math.inf)
    assert longest == len(chances)
    for k in range(longest + 1):
        best = max(worth_of(c, chances, times, worth) for c in cuts(len(chances)) if c[0] == k)
        assert valued.gross[k] - worth * times[k] == pytest.approx(best)


def test_cost_policy_with_uncertain_first_token_uses_plain_decoding() -> None:
    steep = known({1: 1.0, 2: 1.6, 16: 4.0, 64: 16.0})
    lengths = [
        UnlimitedPolicy().plan(draft(chances), steep, SIZES)[0] for chances in (COPY, COPY[1:], [0.9, *COPY[1:]])
    ]
    assert lengths[0] == 0
    assert min(lengths[1:]) > 10


def test_draft_value_with_lower_cost_limit_counts_fewer_tokens() -> None:
    costs = [(n, 0.5 + 0.5 * n) for n in range(65)]
    rich, poor = DraftValue(), DraftValue()
    rich.read(COPY, costs, 1.0, math.inf)
    poor.read(COPY, costs, 1.0, 2.0)
    assert rich.gross[0] > poor.gross[0] > 1


def curve(slope: float) -> PassTimes:
    return known({1: 1.0, 64: 1 + 63 * slope})


def worth_with_restore(k: int, acceptance: list[float], t: PassTimes, restore: RestoreCost) -> float:
    """Return expected tokens less seconds, summed over every possible refusal; a second is worth a token."""
    value = 0.0
    for outcome in itertools.product((True, False), repeat=k):
        p = 1.0
        for right, a in zip(outcome, acceptance, strict=False):
            p *= a if right else 1 - a
        accepted = next((i for i, right in enumerate(outcome) if not right), k)
        seconds = t.ratio(restore.recompute + 1 + k) + (restore.save if k else 0.0)
        if accepted < k:
            seconds += restore.load + t.ratio(restore.recompute + accepted + 2) - t.ratio(1)
        value += p * (1 + accepted - seconds)
    return value


@pytest.mark.parametrize("seed", range(30))
def test_cost_policy_with_restore_cost_plans_optimal_length(seed: int) -> None:
    rng = random.Random(seed)
    acceptance = [rng.random() ** 0.3 for _ in range(6)]
    t = curve(rng.choice((0.02, 0.1, 0.4)))
    again = rng.choice((0, 0, 3, 20))
    restore = RestoreCost(rng.choice((0.0, 0.1, 0.5)), rng.choice((0.0, 0.1)), again)
    best = max(range(7), key=lambda k: worth_with_restore(k, acceptance, t, restore))
    assert UnlimitedPolicy().plan(draft(acceptance), t, SIZES, restore) == (best, 1 + best)


def test_cost_policy_with_restore_tokens_keeps_batch_within_maximum() -> None:
    k, size = UnlimitedPolicy().plan(draft([0.99] * 60), curve(0.01), SIZES, RestoreCost(0.0, 0.0, 40))
    assert size == 1 + k
    assert 40 + size <= 64
