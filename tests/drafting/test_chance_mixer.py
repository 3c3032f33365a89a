"""Tests of the mixture's learning: `ChanceMixer`, and `Correction` and `ProbabilityCalibrator` for biased estimates.

Both are compared with their definitions, and learn from synthetic guesses with fixed seeds.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ngramspec.drafting.acceptance_estimator import REACH, ProbabilityCalibrator
from ngramspec.drafting.mixture.chance_mixer import ChanceMixer, Correction

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
