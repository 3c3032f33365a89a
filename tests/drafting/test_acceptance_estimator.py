"""Tests of the cost of a token, and of the estimates of acceptance and what corrects them by their definitions."""

from __future__ import annotations

import math
import random
from array import array
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ngramspec.drafting.acceptance_estimator import (
    REACH,
    AcceptanceEstimator,
    DecayingRate,
    ProbabilityCalibrator,
    cell,
    length_class,
)
from ngramspec.drafting.draft import NO_DRAFT, Draft, MarginalCost
from ngramspec.drafting.mixture.chance_mixer import ChanceMixer, Correction


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


SOURCES, EXPERTS, TOKENS, BIASES, STATES, ABSENT = 8, 4, 2, 13, 128, -1
FREE_ROOM = 1 << 12
ROOM = FREE_ROOM + (1 << 17) + (1 << 18)
SETS = (3, 2, 4, 2, 2)  # numbers of weight sets
FACTS, CURVES, FREE_CURVES, POINTS = 6, 1 << 13, 512, 9
PROBABILITY = st.floats(1e-5, 1 - 1e-5)

# --------------------------------------------------------------------------- ChanceMixer


def logistic(z: float, limit: float = 12.0) -> float:
    return 1 / (1 + math.exp(-min(max(z, -limit), limit)))


class DefinedMixer:
    """The mixer by its definition, with a table for each kind of number."""

    def __init__(self) -> None:
        self.rates = defaultdict[Any, float](lambda: 0.5)
        self.odds, self.counts, self.biases = (defaultdict[Any, float](float) for _ in range(3))
        self.weights = defaultdict[Any, list[float]](lambda: [0.25] * (SOURCES + 1))
        self.blends = defaultdict[Any, list[float]](lambda: [1 / EXPERTS] * EXPERTS)
        self.slopes = defaultdict[Any, float](lambda: 1.5)

    def estimate(self, states: list[int], views: list[int], facts: list[int]) -> float:
        self.states, self.facts, self.blend = states, facts, self.blends[views[EXPERTS]]
        self.inputs = [0.0 if state == ABSENT else self.odds[pair] for pair in enumerate(states) for state in pair[1:]]
        self.inputs.append(0.3)
        self.sets = [self.weights[pair] for pair in enumerate(views[:EXPERTS])]
        sums = [sum(w * x for w, x in zip(row, self.inputs, strict=True)) for row in self.sets]
        self.outputs = [min(max(z, -8.0), 8.0) for z in sums]
        blended = sum(w * x for w, x in zip(self.blend, self.outputs, strict=True))
        self.p = logistic(blended + sum(self.biases[fact] for fact in facts))
        return self.p

    def learn(self, right: bool) -> None:
        if not right and self.p < 0.01:
            return
        error = right - self.p
        for k, (row, output) in enumerate(zip(self.sets, self.outputs, strict=True)):
            for i, x in enumerate(self.inputs):
                row[i] += 0.02 * (right - logistic(output)) * x
            self.blend[k] += 0.001 * error * output
        for pair in enumerate(self.states):
            if pair[1] != ABSENT:
                rate = self.rates[pair] + (right - self.rates[pair]) / (self.counts[pair] + 3)
                self.rates[pair] = rate = min(max(rate, 0.002), 0.998)
                self.counts[pair] = min(self.counts[pair] + 1, 250)
                self.odds[pair] = math.log(rate / (1 - rate))
        for fact in self.facts:
            self.slopes[fact] += error * error
            self.biases[fact] += 0.3 * error / math.sqrt(self.slopes[fact])


def set_inputs(o: Any, cell: int, states: list[int], views: list[int], facts: list[int]) -> None:
    for name, values in (("states", states), ("views", views), ("facts", facts)):
        for i, value in enumerate(values):
            getattr(o, name)[cell * len(values) + i] = value


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(1, 10))])
def test_chance_mixer_equals_its_definition(seed: int) -> None:
    """Several cells wait for their outcomes. States, facts and weight sets are few, so most were seen before."""
    rng, o, defined = random.Random(seed), ChanceMixer(3, SETS), DefinedMixer()
    places = [0, 1, FREE_ROOM - 1, FREE_ROOM, ROOM - 2, ROOM - 1]
    for step in range(1500):
        cell = rng.randrange(3)
        inputs = (
            [rng.choice((ABSENT, 0, 5, STATES - 1)) for _ in range(SOURCES)],
            [rng.randrange(n) for n in SETS],
            [rng.choice(places) for _ in range(BIASES)],
        )
        set_inputs(o, cell, *inputs)
        assert o.estimate(cell) == o.p[cell] == pytest.approx(defined.estimate(*inputs), rel=1e-9)
        right = rng.random() < (0.9 if inputs[0][2] == 5 else 0.002 if step > 1000 else 0.2)
        o.learn(cell, right)
        defined.learn(right)
    assert len(defined.odds) > 20
    row = SOURCES + 1
    shared, last = (o.global_weights[name] for name in ("first_weights", "last_weights"))
    for (k, n), weights in defined.weights.items():
        held = o.token_weights["weights"] if k == TOKENS else shared if k < TOKENS else last
        start = (n + (SETS[0] if k == 1 else 0)) * row
        assert list(held[start : start + row]) == pytest.approx(weights)
    assert list(o.token_weights["bias"][:1]) == pytest.approx([defined.biases[FREE_ROOM]])


# --------------------------------------------------------------------------- Correction


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(1, 10))])
def test_correction_equals_its_definition(seed: int) -> None:
    rng, o = random.Random(seed), Correction(2)
    heights, slopes = defaultdict[Any, float](float), defaultdict[Any, float](lambda: 1.0)
    for _ in range(2000):
        cell, p = rng.randrange(2), rng.choice((1e-6, 0.03, 0.5, rng.random() or 0.5, 1 - 1e-6))
        facts = [rng.choice((0, 1, FREE_CURVES - 1, FREE_CURVES, CURVES - 1)) for _ in range(FACTS)]
        for i, fact in enumerate(facts):
            o.facts[cell * FACTS + i] = fact
        z = math.log(p / (1 - p))
        point, share = divmod((min(max(z, -7.99), 7.99) + 8) / 2, 1)
        near = [((fact, int(point)), 1 - share) for fact in facts]
        far = [((fact, int(point) + 1), share) for fact in facts]
        expected = logistic(z + sum(heights[place] * weight for place, weight in (*near, *far)))
        assert o.estimate(cell, p) == o.p[cell] == pytest.approx(expected, rel=1e-9)
        right = rng.random() < 0.3
        o.learn(cell, right)
        for pair in zip(near, far, strict=True):
            for place, weight in pair:
                slopes[place] += ((right - expected) * weight) ** 2
                heights[place] += 0.1 * (right - expected) * weight / math.sqrt(slopes[place])
    assert len(heights) > 40
    for (fact, at), height in heights.items():
        held, curve = (o.token_weights, fact - FREE_CURVES) if fact >= FREE_CURVES else (o.global_weights, fact)
        assert held["height"][curve * POINTS + at] == pytest.approx(height)
        assert held["slope"][curve * POINTS + at] == pytest.approx(slopes[fact, at])


# --------------------------------------------------------------------------- ProbabilityCalibrator


@given(outcomes=st.lists(st.tuples(PROBABILITY, st.booleans()), max_size=60), p=PROBABILITY)
def test_outcome_map_starts_as_identity_and_follows_outcomes(outcomes: list[tuple[float, bool]], p: float) -> None:
    secondary, end = ProbabilityCalibrator(), 1 / (1 + math.exp(-REACH))
    assert secondary.estimate(p) == pytest.approx(min(max(p, 1 - end), end), abs=0.01)
    for given_, right in outcomes:
        before = secondary.estimate(given_)
        secondary.learn(given_, right)
        assert (secondary.estimate(given_) > before) == right
    assert 0 < secondary.estimate(p) < 1


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_outcome_map_learns_power_distortion(power: float) -> None:
    rng = random.Random(0)
    secondary = ProbabilityCalibrator()
    for _ in range(40_000):
        p = rng.uniform(0.02, 0.98)
        secondary.learn(p, rng.random() < p**power)
    for p in (0.1, 0.3, 0.5, 0.7, 0.9):
        # Each outcome of a point has weight 0.02, so the deviation is at most about sqrt(0.01 * 0.25) = 0.05.
        assert secondary.estimate(p) == pytest.approx(p**power, abs=0.15)
    errors = [secondary.estimate(i / 100) - (i / 100) ** power for i in range(5, 96)]
    assert abs(sum(errors)) / len(errors) < 0.03
