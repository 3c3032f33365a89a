"""Tests of the policies by name, and of those for comparison: `fixed`, `heuristic`, `entropy` and `threshold`."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from support.passes import draft, known, make_step, propose

from ngramspec.drafting.draft import NO_DRAFT, Draft
from ngramspec.policies import POLICIES, make_policy
from ngramspec.policies.baselines import EntropyPolicy, ThresholdPolicy
from ngramspec.policies.policy import FixedPolicy, Policy
from ngramspec.sampling.distribution import entropy_ratio
from ngramspec.steps import Step

ALL = range(1, 65)


def test_make_policy_returns_policy_by_name_and_rejects_invalid() -> None:
    assert set(POLICIES) == {"fixed", "heuristic", "entropy", "threshold", "cost"}
    for name in POLICIES:
        policy = make_policy(name)
        assert (policy.name, policy.wants_logits) == (name, name == "entropy")
        assert policy.limit() >= make_policy(name, 1).limit() == 1
        has_price = [policy.price(times, ALL) is not None for times in (None, known({1: 1.0}))]
        assert has_price == {"threshold": [True, True], "cost": [False, True]}.get(name, [False, False])
        with pytest.raises(ValueError, match="draft_max"):
            make_policy(name, 0)
    with pytest.raises(ValueError, match="cost"):
        make_policy("bold")


def at(threshold: float, draft_max: int = 16) -> ThresholdPolicy:
    policy = ThresholdPolicy(draft_max)
    policy.threshold = threshold
    return policy


SURE = draft([0.99] * 20)


@pytest.mark.parametrize(
    ("policy", "proposal", "sizes", "planned"),
    [
        *((make_policy(name, 4), SURE, ALL, (4, 5)) for name in ("fixed", "heuristic")),
        (FixedPolicy(4), draft([0.01] * 2), ALL, (2, 3)),
        (FixedPolicy(4), NO_DRAFT, ALL, (0, 1)),
        (FixedPolicy(4), SURE, (1, 2, 3), (2, 3)),
        (FixedPolicy(4), draft([0.01] * 3), (2, 8), (3, 8)),
        (FixedPolicy(4), NO_DRAFT, (2, 8), (0, 2)),
        *((at(threshold), draft([0.5] * 5), ALL, (k, k + 1)) for threshold, k in ((0.6, 0), (0.5, 1), (0.25, 2))),
        # The first estimate below the threshold ends the draft, whatever follows.
        (at(0.3), draft([0.9, 0.1, 1.0, 1.0]), ALL, (1, 2)),
        # The draft respects the limit.
        *((at(0.3, limit), SURE, ALL, (limit, limit + 1)) for limit in (5, 16)),
        (at(0.3), SURE, (1, 2, 3), (2, 3)),
        (at(0.3), SURE, (2, 32), (16, 32)),
        (at(0.6), draft([0.5] * 4), (2, 8), (0, 2)),
        # There may be more or fewer estimates than tokens. Without estimates, as many tokens as allowed are sent.
        (at(0.2), draft([0.5] * 8, length=4), ALL, (2, 3)),
        (at(0.2), draft([0.9] * 8, length=4), ALL, (4, 5)),
        (at(0.9, 6), draft([], length=4), ALL, (4, 5)),
        (at(0.9, 6), draft([], length=9), ALL, (6, 7)),
    ],
)
def test_policy_plan_sends_draft_up_to_limit_and_threshold(
    policy: Policy, proposal: Draft, sizes: Sequence[int], planned: tuple[int, int]
) -> None:
    assert policy.plan(proposal, None, sizes) == planned


def test_heuristic_policy_adapts_limit_and_fixed_policy_keeps_it() -> None:
    policy, fixed = make_policy("heuristic", 8), make_policy("fixed", 6)
    length, rng = policy.limit(), random.Random(0)
    for _ in range(200):
        drafted = rng.randrange(length + 1)
        emitted = rng.choice([1, drafted + 1])
        for each in (policy, fixed):
            each.record(make_step(emitted, drafted, emitted - 1, 1.0, 0.0))
        if drafted:
            length = max(1, min(8, length + 2 if emitted == drafted + 1 else length - 1))
        assert (policy.limit(), fixed.limit()) == (length, 6)


# --------------------------------------------------------------------------- entropy


def even(choices: int, n_vocab: int = 1000) -> NDArray[np.float32]:
    """Return logits with this number of equally likely tokens."""
    row = np.full(n_vocab, -np.inf, np.float32)
    row[:choices] = 3.5
    return row


def details(policy: Policy) -> Mapping[str, float]:
    """Return the numbers that a policy records with its next decision."""
    policy.limit()
    done = Step((1,))
    policy.record(done)
    return done.policy_details


def test_entropy_ratio_equals_formula_in_double_precision() -> None:
    noise = np.random.default_rng(1).standard_normal(150_001)
    rows = [even(1), even(1000), even(10), even(10, 100), np.log([0.5, 0.25, 0.25]) + 40, np.array([0, -90, -1e30])]
    for row in [*rows, *(scale * noise for scale in (0.1, 1.0, 3.0, 30.0))]:
        logits = row.astype(np.float32)
        before = logits.copy()
        p = np.exp(logits.astype(np.float64) - logits.max())
        p = p[p > 0] / p.sum()
        assert entropy_ratio(logits) == pytest.approx(-(p * np.log(p)).sum() / math.log(row.size), abs=1e-6)
        assert np.array_equal(logits, before)  # The row is the target's buffer.


def test_entropy_policy_ignores_invalid_rows() -> None:
    policy = EntropyPolicy(16)
    for before in ({}, {"entropy": pytest.approx(math.log(2, 1000), abs=1e-6), "gamma": 8}):
        for wrong in (math.nan, math.inf, -math.inf):
            row = np.full(5, wrong, np.float32) if wrong == -math.inf else even(10)
            row[4] = wrong
            assert math.isnan(entropy_ratio(row))
            policy.observe_logits(row)
            assert details(policy) == before
        policy.observe_logits(even(2))


@pytest.mark.parametrize(("choices", "gamma"), [(1, 17), (2, 9), (4, 5), (16, 2), (1000, 1)])
def test_entropy_policy_limit_decreases_with_perplexity(choices: int, gamma: int) -> None:
    policy = EntropyPolicy(17)
    assert policy.limit() == 1  # no data yet
    policy.observe_logits(even(choices))
    assert policy.limit() == gamma == round(1 + 16 / choices)
    assert details(policy) == {"entropy": pytest.approx(math.log(choices, 1000), abs=1e-6), "gamma": gamma}


def test_entropy_policy_with_draft_model_uses_entropy_of_its_draft() -> None:
    """A draft's first distribution limits its length, and counts as much as a distribution of the target."""
    policy = EntropyPolicy(16)
    policy.observe_logits(even(1))
    assert policy.plan(replace(SURE, entropy=lambda: 2 / 3), None, ALL) == (2, 3)  # 1 + 15 / 10
    assert details(policy)["entropy"] == pytest.approx(1 / 3)
    policy.observe_logits(even(1))
    for broken in (None, lambda: math.nan):
        policy.plan(replace(SURE, entropy=broken), None, ALL)
        assert details(policy)["entropy"] == pytest.approx(1 / 6)


# --------------------------------------------------------------------------- threshold


@pytest.mark.parametrize(
    ("emitted", "drafted", "guessed", "change"),
    [
        (1, 3, 0, ThresholdPolicy.EDGE),  # a rejection
        (4, 3, 4, ThresholdPolicy.EDGE - 1),  # a longer draft would have been right
        (4, 3, 3, 0.0),  # The next guess was wrong, or there was none.
        (1, 0, 0, 0.0),
        (1, 0, 1, ThresholdPolicy.EDGE - 1),  # The policy sent nothing, although the guess was correct.
    ],
)
def test_threshold_policy_threshold_follows_outcomes_within_limits(
    emitted: int, drafted: int, guessed: int, change: float
) -> None:
    policy, done = ThresholdPolicy(), make_step(emitted, drafted, guessed, 1.0, 0.0)
    policy.record(done)
    assert policy.threshold == pytest.approx(policy.START * math.exp(policy.STEP * change))
    for _ in range(500 if change else 0):
        policy.record(done)
    assert policy.threshold == (policy.START if not change else policy.HIGH if change > 0 else policy.LOW)


def test_threshold_policy_price_does_not_shorten_planned_draft() -> None:
    # The drafter still proposes one token more than the policy sends, because `record` learns from its outcome.
    policy = at(0.3, 8)
    proposed = propose(draft([0.6] * 8), policy.limit(), policy.price(None, ALL))
    assert (len(proposed), policy.plan(proposed, None, ALL)) == (3, (2, 3))
