"""`OutcomeMap`: from a probability to what it turned out to mean."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ngramspec.drafting.mixture.secondary import REACH, OutcomeMap

PROBABILITY = st.floats(1e-6, 1 - 1e-6)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(p=PROBABILITY)
def test_it_starts_as_the_identity_between_its_ends(p: float) -> None:
    end = 1 / (1 + math.exp(-REACH))
    assert OutcomeMap().estimate(p) == pytest.approx(min(max(p, 1 - end), end), abs=0.01)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(outcomes=st.lists(st.tuples(PROBABILITY, st.booleans()), max_size=60), p=PROBABILITY)
def test_it_gives_probabilities_whatever_comes(outcomes: list[tuple[float, bool]], p: float) -> None:
    secondary = OutcomeMap()
    for given_, right in outcomes:
        before = secondary.estimate(given_)
        secondary.learn(given_, right)
        assert (secondary.estimate(given_) > before) == right
    assert 0 < secondary.estimate(p) < 1


def test_only_what_is_near_moves() -> None:
    secondary = OutcomeMap()
    far = [0.05, 0.3, 0.8, 0.99]
    before = [secondary.estimate(p) for p in far]
    for _ in range(500):
        secondary.learn(0.55, False)
    assert [secondary.estimate(p) for p in far] == before
    assert secondary.estimate(0.55) < 0.1


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_it_finds_what_a_distorted_judge_means(power: float) -> None:
    rng = random.Random(0)
    secondary = OutcomeMap()
    for _ in range(40_000):
        p = rng.uniform(0.02, 0.98)
        secondary.learn(p, rng.random() < p**power)
    for p in (0.1, 0.3, 0.5, 0.7, 0.9):
        # A point's outcomes count with weight 0.02 each: a deviation of about sqrt(0.01 * 0.25) = 0.05 at most.
        assert secondary.estimate(p) == pytest.approx(p**power, abs=0.15)
    errors = [secondary.estimate(i / 100) - (i / 100) ** power for i in range(5, 96)]
    assert abs(sum(errors)) / len(errors) < 0.03
