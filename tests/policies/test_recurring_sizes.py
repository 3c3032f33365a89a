"""Tests of batch sizes if a change of size has a cost: a simulated machine with and without a charge, and hindsight."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from itertools import product

import pytest
from support.passes import draft, known, make_step

from ngramspec.cost.fixed_curves import CURVES, Points, make_fixed_curve
from ngramspec.cost.times import PassTimes, RestoreCost
from ngramspec.drafting.draft import NO_DRAFT, Draft
from ngramspec.policies.cost import CostPolicy
from ngramspec.policies.recurring_sizes import Candidate, RecurringSizes

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
    policy: CostPolicy, guesses: Sequence[tuple[Draft, int]], charged: float, true: float, points: Points = FLAT
) -> tuple[float, Counter[int]]:
    """Return the tokens per T(1) and the passes by size; a change costs `true`, and the policy expects `charged`."""
    curve = make_fixed_curve(points, charged)
    tokens, seconds, last = 0, 0.0, 1
    sizes: Counter[int] = Counter()
    for guess, right in guesses:
        k, size = policy.plan(guess, curve, ALL) if policy.limit() else (0, 1)
        spent = curve.ratio(size) + (true if size != last else 0.0)
        curve.observe(size, spent)
        policy.record(make_step(1 + min(k, right), k, min(k, right), spent, 0.0))
        tokens, seconds, last = tokens + 1 + min(k, right), seconds + spent, size
        sizes[size] += 1
    return tokens / seconds, sizes


def test_cost_policy_with_known_switch_cost_is_faster_with_few_sizes() -> None:
    guesses = text(4000)
    knowing, few = run(CostPolicy(), guesses, charged=0.3, true=0.3)
    ignorant, many = run(CostPolicy(), guesses, charged=0.0, true=0.3)
    assert knowing > 1.04 * ignorant
    assert sum(n for _, n in few.most_common(3)) > 0.9 * few.total()
    assert len(many) > 8


def test_cost_policy_without_switch_cost_skips_recurring_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(*_: object) -> Candidate:
        raise AssertionError("there was nothing to choose")

    monkeypatch.setattr(RecurringSizes, "choose", choose)
    assert run(CostPolicy(), text(300), 0.0, 0.0)[1].total() == 300


def test_cost_policy_with_tiny_switch_cost_keeps_plan() -> None:
    # The curve has no plateaus, since on these, where a larger batch costs nothing, any charge leads to padding.
    guesses = text(1500)
    slope = {1: 1.0, 64: 3.0}
    assert run(CostPolicy(), guesses, 1e-9, 0.0, slope)[1] == run(CostPolicy(), guesses, 0.0, 0.0, slope)[1]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in (1, 2, 3))])
def test_cost_policy_with_switch_cost_is_near_best_fixed_sizes(seed: int) -> None:
    """Compare with hindsight, in which every pass is plain or has one other size, whichever is better for it."""
    guesses = text(3000, seed)
    costs = [make_fixed_curve(FLAT).ratio(n) for n in range(33)]
    best = 0.0
    for size, least in product((8, 12, 16, 20, 32), (0.0, 0.5, 1.0, 1.5, 2.0)):
        tokens, seconds, last = 0, 0.0, 1
        for guess, right in guesses:
            expected = (
                sum(guess.acceptance_probs[0] ** i for i in range(1, min(size, 1 + len(guess)))) if len(guess) else 0.0
            )
            k, n = (min(size - 1, len(guess)), size) if expected > least else (0, 1)
            seconds += costs[n] + (0.3 if n != last else 0.0)
            tokens, last = tokens + 1 + min(k, right), n
        best = max(best, tokens / seconds)
    assert run(CostPolicy(), guesses, 0.3, 0.3)[0] > 0.97 * best


def candidates(*values: tuple[int, float, int, float]) -> list[Candidate]:
    return [Candidate(*value) for value in values]


def test_recurring_sizes_choose_prefers_recurring_size() -> None:
    recurring, curve = RecurringSizes(), known({1: 1.0, 4: 1.5, 8: 1.6, 16: 1.7}, switch=0.3)
    eight = candidates((0, 1.0, 1, 1.0), (7, 4.0, 8, 1.6))
    for _ in range(200):
        curve.begin_pass(recurring.choose(eight, curve, ALL, 1.0, 9.0, 0.0).size)
        recurring.record_pass()
    assert curve.last == 8
    either = candidates((0, 1.0, 1, 1.0), (3, 3.1, 4, 1.5), (7, 3.1, 8, 1.6), (15, 3.25, 16, 1.7))
    assert recurring.choose(either, curve, ALL, 1.0, 9.0, 0.0).size == 8
    shorter = candidates((0, 1.0, 1, 1.0), (3, 3.1, 4, 1.5))
    assert recurring.choose(shorter, curve, ALL, 1.0, 9.0, 0.0) == Candidate(3, 3.1, 8, 1.6), "padded to what recurs"
    assert recurring.choose(shorter, curve, ALL, 1.0, 1.55, 0.0).size == 4, "that would cost too much"
    assert recurring.choose(shorter, curve, (1, 2, 4), 1.0, 9.0, 0.0).size == 4, "that size is not allowed"
    assert recurring.choose(shorter, curve, ALL, 1.0, 9.0, 0.0).size == 8
    sixteen = candidates((0, 1.0, 1, 1.0), (7, 4.0, 8, 1.6), (15, 4.2, 16, 1.7))
    for _ in range(300):  # A size that is better for long becomes the recurring one.
        curve.begin_pass(recurring.choose(sixteen, curve, ALL, 1.0, 9.0, 0.0).size)
        recurring.record_pass()
    assert curve.last == 16


def test_recurring_sizes_choose_after_long_plain_decoding_charges_switch() -> None:
    recurring, curve = RecurringSizes(), known({1: 1.0, 8: 1.6}, switch=0.3)
    good, poor = (candidates((0, 1.0, 1, 1.0), (7, value, 8, 1.6)) for value in (4.0, 1.7))
    for _ in range(300):
        curve.begin_pass(recurring.choose(good, curve, ALL, 1.0, 9.0, 0.0).size)
        recurring.record_pass()
    curve.begin_pass(1)
    assert recurring.choose(poor, curve, ALL, 1.0, 9.0, 0.0).size == 8, "the size that pays is used again"
    for _ in range(300):
        recurring.record_pass()
    assert recurring.choose(poor, curve, ALL, 1.0, 9.0, 0.0).size == 1


def settled(policy: CostPolicy, curve: PassTimes, passes: int = 300) -> None:
    """Run passes with good drafts until their size is the recurring one."""
    for _ in range(passes):
        k, size = policy.plan(draft([0.95] * 7), curve, ALL) if policy.limit() else (0, 1)
        curve.observe(size, 1.0)
        policy.record(make_step(1 + k, k, k, curve.ratio(size), 0.0))
    while curve.last != 8:
        curve.observe(policy.plan(draft([0.95] * 7), curve, ALL)[1], 1.0)
        policy.record(make_step(8, 7, 7, curve.ratio(8), 0.0))


@pytest.mark.parametrize(
    ("cost", "least", "most"), [(1.0, 100, 100), (1.05, 2, 6), (1.1, 1, 3), (1.25, 0, 1), (1.4, 0, 0)]
)
def test_cost_policy_without_draft_keeps_size_while_cheaper_than_switch(cost: float, least: int, most: int) -> None:
    policy, curve = CostPolicy(), make_fixed_curve({1: 1.0, 2: 1.0, 8: cost, 64: 8.0}, 0.3)
    settled(policy, curve)
    kept = 0
    while policy.limit() and kept < 100:
        k, size = policy.plan(NO_DRAFT, curve, ALL)
        assert k == 0
        if size == 1:
            break
        assert size == 8
        curve.observe(size, cost)
        policy.record(make_step(1, 0, 0, cost, 0.0))
        kept += 1
    assert least <= kept <= most


def test_cost_policy_without_draft_uses_plain_decoding_if_none_recurs() -> None:
    assert CostPolicy().plan(NO_DRAFT, make_fixed_curve({1: 1.0, 64: 1.0}, 0.3), ALL) == (0, 1)
    policy, curve = CostPolicy(), make_fixed_curve({1: 1.0, 8: 1.0, 64: 8.0}, 0.3)
    settled(policy, curve)
    assert policy.plan(NO_DRAFT, curve, ALL, RestoreCost(0.1, 0.1)) == (0, 1)
