"""Tests of batch sizes if a change of size has a cost: a simulated machine with and without a charge, and hindsight."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from itertools import product

import pytest
from support.passes import draft, make_step

from ngramspec.cost.fixed_curves import CURVES, Points, make_fixed_curve
from ngramspec.cost.times import RestoreCost
from ngramspec.drafting.draft import NO_DRAFT, Draft
from ngramspec.policies.cost import CostPolicy

ALL = range(1, 65)
FLAT = CURVES["cuda-4090-8b-q4_0"][0]
"""Cost curve on which long drafts are cheap and all lengths have almost the same value."""


def text(passes: int, seed: int = 0) -> list[tuple[Draft, int]]:
    """Return calibrated drafts and the number of their correct tokens; good and bad ones come in runs, as in texts."""
    rng = random.Random(seed)
    found, copying = [], False
    for _ in range(passes):
        copying = copying != (rng.random() < 0.1)
        p = rng.choice([0.6, 0.7])
        length = 0 if rng.random() < 0.3 else rng.randrange(1, 21) if copying else rng.randrange(10)
        right = next((i for i in range(length) if rng.random() >= p), length)
        found.append((draft([p] * length), right))
    return found


def run(
    guesses: Sequence[tuple[Draft, int]],
    charged: float,
    true: float,
    points: Points = FLAT,
    allowed: Sequence[int] = ALL,
) -> tuple[float, Counter[int]]:
    """Return the tokens per T(1) and the passes by size; a change costs `true`, and the policy expects `charged`."""
    policy, curve = CostPolicy(), make_fixed_curve(points, charged)
    tokens, seconds, last, sizes = 0, 0.0, 1, Counter[int]()
    for guess, right in guesses:
        k, size = policy.plan(guess, curve, allowed) if policy.limit() else (0, 1)
        spent = curve.ratio(size) + (true if size != last else 0.0)
        curve.observe(size, spent)
        policy.record(make_step(1 + min(k, right), k, min(k, right), spent, 0.0))
        tokens, seconds, last = tokens + 1 + min(k, right), seconds + spent, size
        sizes[size] += 1
    return tokens / seconds, sizes


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in (1, 2, 3))])
def test_cost_policy_with_switch_cost_uses_few_sizes_and_is_near_best_fixed_ones(seed: int) -> None:
    """Compare with hindsight, in which every pass is plain or has one other size, whichever is better for it."""
    guesses = text(3000, seed)
    costs = [make_fixed_curve(FLAT).ratio(n) for n in range(33)]
    best = 0.0
    for size, least in product((8, 12, 16, 20, 32), (0.0, 0.5, 1.0, 1.5, 2.0)):
        tokens, seconds, last = 0, 0.0, 1
        for guess, right in guesses:
            expected = sum(guess.acceptance_probs[0] ** i for i in range(1, min(size, 1 + len(guess))))
            k, n = (min(size - 1, len(guess)), size) if expected > least else (0, 1)
            seconds += costs[n] + (0.3 if n != last else 0.0)
            tokens, last = tokens + 1 + min(k, right), n
        best = max(best, tokens / seconds)
    knowing, few = run(guesses, 0.3, 0.3)
    ignorant, many = run(guesses, 0.0, 0.3)
    assert knowing > max(0.97 * best, 1.04 * ignorant)
    assert sum(n for _, n in few.most_common(3)) > 0.9 * few.total()
    assert len(many) > 8


def test_cost_policy_with_tiny_switch_cost_keeps_plan() -> None:
    # The curve has no plateaus, since on these, where a larger batch costs nothing, any charge leads to padding.
    guesses = text(1500)
    slope = {1: 1.0, 64: 3.0}
    assert run(guesses, 1e-9, 0.0, slope)[1] == run(guesses, 0.0, 0.0, slope)[1]


def test_cost_policy_with_switch_cost_keeps_to_allowed_sizes() -> None:
    sizes = run(text(1500), 0.3, 0.3, allowed=(1, 2, 4, 8))[1]
    assert {1, 8} <= {*sizes} <= {1, 2, 4, 8}


@pytest.mark.parametrize(
    ("cost", "least", "most"), [(1.0, 100, 100), (1.05, 2, 6), (1.1, 1, 3), (1.25, 0, 1), (1.4, 0, 0)]
)
def test_cost_policy_without_draft_keeps_size_while_cheaper_than_switch(cost: float, least: int, most: int) -> None:
    policy, curve = CostPolicy(), make_fixed_curve({1: 1.0, 2: 1.0, 8: cost, 64: 8.0}, 0.3)
    assert policy.plan(NO_DRAFT, curve, ALL) == (0, 1), "no size recurs yet"
    n = 0
    while n < 300 or curve.last != 8:  # until the size of good drafts is the recurring one
        k, size = policy.plan(draft([0.95] * 7), curve, ALL) if policy.limit() else (0, 1)
        curve.observe(size, 1.0)
        policy.record(make_step(1 + k, k, k, curve.ratio(size), 0.0))
        n += 1
    assert policy.plan(NO_DRAFT, curve, ALL, RestoreCost(0.1, 0.1)) == (0, 1), "padding would be evaluated again"
    kept = 0
    while policy.limit() and kept < 100 and policy.plan(NO_DRAFT, curve, ALL) == (0, 8):
        curve.observe(8, cost)
        policy.record(make_step(1, 0, 0, cost, 0.0))
        kept += 1
    assert least <= kept <= most
