"""Tests of adaptive policies: the entropy of known distributions, the approach to gamma, and an adaptive threshold."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray
from support.passes import draft, make_step

from ngramspec.drafting.draft import Draft
from ngramspec.policies import POLICIES, make_policy
from ngramspec.policies.baselines import EntropyPolicy, ThresholdPolicy
from ngramspec.policies.policy import Policy
from ngramspec.sampling.distribution import entropy_ratio
from ngramspec.steps import Step

ALL = range(1, 65)


def even(choices: int, n_vocab: int = 1000) -> NDArray[np.float32]:
    """Return logits with this number of equally likely tokens."""
    row = np.full(n_vocab, -np.inf, np.float32)
    row[:choices] = 3.5
    return row


def model_draft(length: int, entropy: Callable[[], float] | None) -> Draft:
    return Draft((1,) * length, acceptance_probs=(0.9,) * length, entropy=entropy)


def details(policy: Policy) -> Mapping[str, float]:
    """Return the numbers that a policy records with its next decision."""
    policy.limit()
    done = Step((1,))
    policy.record(done)
    return done.policy_details


# --------------------------------------------------------------------------- entropy


def test_normalised_entropy_of_known_distributions_equals_formula() -> None:
    assert entropy_ratio(even(1)) == pytest.approx(0, abs=1e-9)
    assert entropy_ratio(even(1000)) == pytest.approx(1, abs=1e-6)
    assert entropy_ratio(even(10)) == pytest.approx(1 / 3, abs=1e-6)
    assert entropy_ratio(even(10, 100)) == pytest.approx(1 / 2, abs=1e-6)
    three = np.log(np.array([0.5, 0.25, 0.25], np.float32)) + 40
    assert entropy_ratio(three) == pytest.approx(1.5 * math.log(2) / math.log(3), abs=1e-6)
    far = np.array([0, -90, -1e30], np.float32)
    assert entropy_ratio(far) == pytest.approx(0, abs=1e-9)
    for scale in (0.1, 1.0, 3.0, 30.0):  # compared with a sum in double precision
        row = (scale * np.random.default_rng(1).standard_normal(150_001)).astype(np.float32)
        before = row.copy()
        p = np.exp(row.astype(np.float64) - row.max())
        p /= p.sum()
        expected = -float((p[p > 0] * np.log(p[p > 0])).sum()) / math.log(p.size)
        assert entropy_ratio(row) == pytest.approx(expected, abs=1e-6)
        assert np.array_equal(row, before)  # The row is the target's buffer.


def test_normalised_entropy_of_invalid_row_is_nan_and_policy_ignores_it() -> None:
    policy = EntropyPolicy(16)
    for before in ({}, {"entropy": pytest.approx(math.log(2, 1000), abs=1e-6), "gamma": 8}):
        for wrong in (math.nan, math.inf, -math.inf):
            row = even(10)
            row[5] = wrong
            row = np.full(5, wrong, np.float32) if wrong == -math.inf else row
            assert math.isnan(entropy_ratio(row))
            policy.observe_logits(row)
            assert details(policy) == before
        policy.observe_logits(even(2))


def test_entropy_policy_limit_decreases_with_perplexity() -> None:
    for choices, gamma in ((1, 17), (2, 9), (4, 5), (16, 2), (1000, 1)):
        policy = EntropyPolicy(17)
        assert policy.limit() == 1  # no data yet
        policy.observe_logits(even(choices))
        assert policy.limit() == gamma == round(1 + 16 / choices)
        assert details(policy) == {"entropy": pytest.approx(math.log(choices, 1000), abs=1e-6), "gamma": gamma}
    sure = EntropyPolicy(1)
    sure.observe_logits(even(1))
    assert sure.limit() == 1


def test_entropy_policy_with_draft_model_uses_entropy_of_its_draft() -> None:
    """A draft's first distribution limits its length, and counts as much as a distribution of the target."""
    policy = EntropyPolicy(16)
    policy.observe_logits(even(1))
    assert policy.limit() == 16
    undecided = model_draft(16, lambda: 2 / 3)
    assert policy.plan(undecided, None, ALL) == (2, 3)  # 1 + 15 / 10
    assert details(policy)["entropy"] == pytest.approx(1 / 3)
    policy.observe_logits(even(1))
    assert details(policy)["entropy"] == pytest.approx(1 / 6)
    before = details(policy)
    for broken in (None, lambda: math.nan):
        policy.plan(model_draft(16, broken), None, ALL)
        assert details(policy) == before


def test_entropy_policy_alone_requests_logits_and_records_details() -> None:
    policies = {name: make_policy(name) for name in POLICIES}
    assert {name for name, policy in policies.items() if policy.wants_logits} == {"entropy"}
    for policy in policies.values():
        policy.observe_logits(even(4))
    assert {name for name, policy in policies.items() if details(policy)} == {"entropy"}


# --------------------------------------------------------------------------- threshold


def refused(drafted: int) -> Step:
    return make_step(1, drafted, 0, 1.0, 0.0)


def accepted(drafted: int, correct_guesses: int) -> Step:
    return make_step(drafted + 1, drafted, correct_guesses, 1.0, 0.0)


def at(threshold: float, draft_max: int = 16) -> ThresholdPolicy:
    policy = ThresholdPolicy(draft_max)
    policy.threshold = threshold
    return policy


@pytest.mark.parametrize(
    ("threshold", "most", "chances", "sizes", "planned"),
    [
        *((threshold, 16, [0.5] * 5, ALL, (k, k + 1)) for threshold, k in ((0.6, 0), (0.5, 1), (0.25, 2), (0.01, 5))),
        # The first estimate below the threshold ends the draft, whatever follows.
        (0.3, 16, [0.9, 0.1, 1.0, 1.0], ALL, (1, 2)),
        # The draft respects the limit.
        (0.3, 16, [0.99] * 20, ALL, (16, 17)),
        (0.3, 5, [0.99] * 20, ALL, (5, 6)),
        (0.3, 16, [0.99] * 20, (1, 2, 3), (2, 3)),
        (0.3, 16, [0.99] * 20, (2, 32), (16, 32)),
        (0.6, 16, [0.5] * 4, (2, 8), (0, 2)),
        (0.3, 16, [], ALL, (0, 1)),
    ],
)
def test_threshold_policy_plan_stops_when_confidence_falls_below_it(
    threshold: float, most: int, chances: list[float], sizes: Sequence[int], planned: tuple[int, int]
) -> None:
    assert at(threshold, most).plan(draft(chances), None, sizes) == planned


def test_threshold_policy_plan_accepts_more_or_fewer_estimates_than_tokens() -> None:
    policy = at(0.2)
    assert policy.plan(draft([0.5] * 8, 4), None, ALL) == (2, 3)
    assert policy.plan(draft([0.9] * 8, 4), None, ALL) == (4, 5)  # at most the whole draft
    # Without estimates, the policy sends as many tokens as allowed.
    assert at(0.9, 6).plan(draft([], 4), None, ALL) == (4, 5)
    assert at(0.9, 6).plan(draft([], 9), None, ALL) == (6, 7)


def test_threshold_policy_threshold_rises_and_falls_with_outcomes() -> None:
    policy = ThresholdPolicy()
    before = policy.threshold
    policy.record(refused(3))
    assert policy.threshold == pytest.approx(before * math.exp(policy.STEP * policy.EDGE))
    policy.record(accepted(3, correct_guesses=4))
    assert policy.threshold == pytest.approx(before * math.exp(policy.STEP * (2 * policy.EDGE - 1)))
    before = policy.threshold
    policy.record(accepted(3, correct_guesses=3))  # The next guess was wrong, or there was none.
    policy.record(accepted(0, correct_guesses=0))
    assert policy.threshold == before
    policy.record(accepted(0, correct_guesses=1))  # The policy sent nothing, although the guess was correct.
    assert policy.threshold < before
    for _ in range(500):
        policy.record(refused(1))
    assert policy.threshold == policy.HIGH < 1
    for _ in range(500):
        policy.record(accepted(0, correct_guesses=1))
    assert policy.threshold == policy.LOW > 0


def run(policy: ThresholdPolicy, true: float, claimed: float, passes: int) -> tuple[float, float]:
    """Return (mean draft length, share of correct last tokens) with a drafter that proposes 20 tokens."""
    rng = random.Random(1)
    lengths, right = [], []
    for number in range(passes):
        correct = next((i for i in range(20) if rng.random() >= true), 20)
        k, _ = policy.plan(draft([claimed] * 20), None, ALL)
        policy.record(make_step(1 + min(k, correct), k, min(correct, k + 1), 1.0, 0.0))
        if number >= passes // 4:
            lengths.append(k)
            right.append(correct >= k)
    return sum(lengths) / len(lengths), sum(right) / len(right)


@pytest.mark.parametrize("claimed", [0.95, *(pytest.param(p, marks=pytest.mark.exhaustive) for p in (0.75, 0.85))])
def test_threshold_policy_with_biased_drafter_converges_to_target_edge(claimed: float) -> None:
    # With a true probability of 0.85, the seventh token is correct with probability 0.32, whatever the estimate is.
    policy = ThresholdPolicy(20)
    length, edge = run(policy, 0.85, claimed, 8000)
    assert length == pytest.approx(math.log(policy.EDGE, 0.85), abs=0.7)
    assert edge == pytest.approx(policy.EDGE, abs=0.06)
    assert policy.threshold == pytest.approx(claimed**length, rel=0.5)


def test_threshold_policy_price_does_not_shorten_planned_draft() -> None:
    policy = at(0.3, 8)
    price = policy.price(None, ALL)
    assert price is not None
    assert len(price.slopes) == policy.limit() + 1
    # A drafter that ends with the first position below the price still proposes one token more than the policy sends.
    cut, reach = 0, 1.0
    for p in [0.6] * 8:
        cut += 1
        reach *= p
        if reach < price.rate * price.slopes[cut]:
            break
    whole = policy.plan(draft([0.6] * 8), None, ALL)
    assert whole == (2, 3)
    assert cut == 3
    assert policy.plan(draft([0.6] * cut), None, ALL) == whole
