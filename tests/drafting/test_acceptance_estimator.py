"""Tests of the cost of a token, the estimates of acceptance, and their calibration."""

from __future__ import annotations

import random
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ngramspec.drafting.acceptance_estimator import (
    AcceptanceEstimator,
    DecayingRate,
    cell,
    length_class,
)
from ngramspec.drafting.draft import NO_DRAFT, Draft, MarginalCost


def test_marginal_cost_worth_extending_compares_gain_with_cost() -> None:
    for slopes in ([0.2, 0.4, 0.1], array("d", [0.2, 0.4, 0.1])):
        made = MarginalCost(1.5, slopes)
        assert (made.rate, list(made.slopes)) == (1.5, [0.2, 0.4, 0.1])
        # At 1.5 tokens per pass, the next token must add 0.3, 0.6 and 0.15 tokens.
        assert [made.worth_extending(0.35, length) for length in range(3)] == [True, False, True]
        assert [made.worth_extending(0.1, length) for length in range(3)] == [False, False, False]
        assert made.worth_extending(1.5 * 0.4, 1)
        with pytest.raises(IndexError):
            made.worth_extending(0.5, 3)


def test_marginal_cost_costs_sum_slopes_or_call_function_once() -> None:
    assert list(MarginalCost(1.5, [0.5, 0.25, 0.25]).costs) == [0.0, 0.5, 0.75]
    made: list[list[float]] = []

    def better() -> list[float]:
        made.append([0.0, 2.0, 2.0])
        return made[-1]

    price = MarginalCost(1.5, [0.5, 0.25, 0.25], costs=better)
    assert not made
    assert [list(price.costs), list(price.costs)] == [[0.0, 2.0, 2.0]] * 2
    assert len(made) == 1


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20), st.floats(0.1, 1), st.floats(0, 1), st.floats(0.1, 9))
def test_fading_rate_equals_weighted_mean_of_prior_and_outcomes(
    hits: list[float], fade: float, prior: float, strength: float
) -> None:
    rate = DecayingRate(prior * strength, strength, fade=fade)
    for hit in hits:
        rate.add(hit)
    weights = [fade ** (len(hits) - i) for i in range(len(hits) + 1)]
    counted = [strength * weights[0], *weights[1:]]
    summed = sum(weight * hit for weight, hit in zip(counted, [prior, *hits], strict=True))
    assert rate.value == pytest.approx(summed / sum(counted))
    assert rate.shrunk_to(0.9, 5.0) == pytest.approx((summed + 4.5) / (sum(counted) + 5))


KEY = cell(3, 1.0, 4, 2)


def test_chance_estimator_of_unknown_cell_uses_group_and_prior() -> None:
    model = AcceptanceEstimator()
    priors = [model.estimate(cell(m, 1.0, 2, 0)) for m in range(8)]
    assert priors == sorted(priors)
    assert priors[-1] <= 0.6  # low until outcomes are known
    other, stranger = cell(3, 0.4, 4, 0), cell(2, 0.4, 4, 0)
    cold, apart = model.estimate(other), model.estimate(stranger)
    for _ in range(100):
        model.learn(KEY, True)
    assert model.estimate(other) > cold  # the same match length
    assert model.estimate(stranger) == apart  # another match length


def test_cell_separates_match_share_support_and_streak() -> None:
    model = AcceptanceEstimator()
    for _ in range(300):
        model.learn(cell(3, 1.0, 5, 8), True)
        model.learn(cell(3, 0.3, 5, 0), False)
    assert model.estimate(cell(3, 1.0, 5, 8)) > 0.9
    assert model.estimate(cell(3, 0.3, 5, 0)) < 0.1
    assert len({cell(3, s, 5, 0) for s in (1.0, 0.8, 0.4, 0.1)}) == 4
    assert cell(3, 1.0, 1, 0) != cell(3, 1.0, 2, 0)
    assert len({cell(3, 1.0, 2, streak) for streak in range(1000)}) < 10
    classes = [length_class(match) for match in range(1, 100_000)]
    assert classes == sorted(classes)
    assert (classes[:8], classes[-1]) == ([1, 2, 3, 4, 5, 6, 7, 9], 11)


def test_chance_estimator_settle_counts_hits_up_to_first_miss() -> None:
    judge = AcceptanceEstimator()

    def chances(*matches: int) -> list[float]:
        judge.open(None)
        for match in matches:
            judge.add_guess(match, 4, 4)
        return judge.acceptance_probs

    (before,) = chances(3)
    for _ in range(50):
        chances(20)
        judge.close([7])
        assert judge.record_outcome([8, 7]) == 0
        assert judge.record_outcome([7]) == 0  # Its outcome is already known.
    assert chances(30)[0] < 0.1
    assert chances(3) == [before]
    for _ in range(50):
        chances(3, 3, 3)
        judge.close([5, 6, 7])
        assert judge.record_outcome([5, 6, 9]) == 2
    first, *_, last = chances(3, 3, 3)
    assert first > 0.8
    assert last < 0.3
    for number in range(400):  # Every fourth guess is wrong.
        after = chances(4)[0]
        judge.close([5])
        judge.record_outcome([5 + (number % 4 == 3)])
        assert number < 300 or (after > 0.6) == (number % 4 != 3)


def test_chance_estimator_separates_positions_and_match_lengths() -> None:
    record, rng = AcceptanceEstimator(), random.Random(1)
    rates = 0.9, 0.1, 0.7
    for _ in range(3000):
        draft = record.add_estimates(Draft((1, 1, 1)), 3)
        record.record_outcome([1 if rng.random() < rate else 2 for rate in rates])
    assert draft.acceptance_probs == pytest.approx(rates, abs=0.15)
    record = AcceptanceEstimator()
    for number in range(3000):
        match, rate = ((1,), 0.2) if number % 2 else ((9,), 0.9)
        draft = record.add_estimates(Draft((1,), match_lengths=match), 1)
        if number > 2900:
            assert draft.acceptance_probs[0] == pytest.approx(rate, abs=0.2)
        record.record_outcome([1 if rng.random() < rate else 2])


def test_chance_estimator_keeps_estimates_of_drafter() -> None:
    record = AcceptanceEstimator()
    own = Draft((1, 2), acceptance_probs=(0.3, 0.9))
    assert record.add_estimates(own, 2) is own
    assert record.add_estimates(NO_DRAFT, 2) is NO_DRAFT
    record.record_outcome([1, 2, 3])
    assert record.add_estimates(Draft((1,)), 1) == AcceptanceEstimator().add_estimates(Draft((1,)), 1)


def test_chance_estimator_with_fixed_length_ignores_drawn_tokens() -> None:
    record = AcceptanceEstimator()
    for tokens in ((5, 6), (5, 7), (4, 6)):
        record.add_estimates(Draft(tokens), 6, fixed_length=True)
        record.record_outcome((5, 6, 9))
    drawn = [Draft((1,), match_lengths=(7,)), Draft((2, 3), match_lengths=(1, 2)), Draft((1,) * 6)]
    estimates = {record.add_estimates(draft, 6, fixed_length=True).acceptance_probs for draft in drawn}
    assert len(estimates) == 1
    assert len(next(iter(estimates))) == 6
