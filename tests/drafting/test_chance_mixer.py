"""Tests of the mixture's learning: `ChanceMixer`, and `Correction` and `ProbabilityCalibrator` for biased estimates.

The guesses are synthetic and the seeds are fixed, so every number is the same in every run.
"""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ngramspec.drafting.acceptance_estimator import REACH, ProbabilityCalibrator
from ngramspec.drafting.mixture.chance_mixer import ChanceMixer, Correction

SOURCES, EXPERTS, BIASES, STATES, ABSENT = 8, 4, 13, 128, -1
FREE_ROOM = 1 << 12
ROOM = FREE_ROOM + (1 << 17) + (1 << 18)
FACTS, FREE_CURVES = 6, 512
PROBABILITY = st.floats(1e-5, 1 - 1e-5)

# --------------------------------------------------------------------------- ChanceMixer


def mixer(cells: int = 4, sets: tuple[int, ...] = (3, 2, 2, 2, 2)) -> Any:
    """Return a mixer whose sources are all absent and in which every fact of every cell has a separate weight."""
    made = ChanceMixer(cells, sets)
    for i in range(cells * SOURCES):
        made.states[i] = ABSENT
    for i in range(cells * BIASES):
        made.facts[i] = i
    return made


def expect(o: Any, source: int, state: int, p: float) -> None:
    """Set the initial probability of a state."""
    learnt = o.global_weights()
    learnt["rate"][source * STATES + state] = p
    learnt["odds"][source * STATES + state] = math.log(p / (1 - p))


@pytest.mark.parametrize("rate", [0.0, 0.03, 0.5, 0.9, 1.0])
def test_chance_mixer_learns_rate_of_state_and_follows_change(rate: float) -> None:
    rng = random.Random(0)
    o = mixer()
    o.states[2] = 17
    seen = []
    for _ in range(4000):
        seen.append(o.estimate(0))
        o.learn(0, rng.random() < rate)
    assert sum(seen[-1000:]) / 1000 == pytest.approx(rate, abs=0.03)
    for _ in range(300):
        o.estimate(0)
        o.learn(0, rate < 0.5)
    assert abs(o.estimate(0) - (rate < 0.5)) < 0.1


def test_chance_mixer_uses_initial_rates_and_ignores_absent_sources() -> None:
    o = mixer()
    o.states[3] = 5
    chances = []
    for p in (0.1, 0.5, 0.9):
        expect(o, 3, 5, p)
        chances.append(o.estimate(0))
    # A single source with a weight of a quarter gives a less extreme probability.
    assert chances[0] < chances[1] < chances[2]
    assert chances[1] == pytest.approx(0.5, abs=0.05)
    assert o.p[0] == chances[2]
    for i in range(SOURCES):
        for state in range(STATES):
            if i != 3:
                expect(o, i, state, 0.01)
    assert o.estimate(0) == chances[2]
    o.states[1] = 0
    assert o.estimate(0) < chances[2]


def test_chance_mixer_learn_leaves_other_cells_and_states_unchanged() -> None:
    o = mixer()
    o.states[0] = 1
    o.states[SOURCES] = 2
    for i in range(EXPERTS + 1):
        o.views[EXPERTS + 1 + i] = 1
    before = o.estimate(1)
    for _ in range(500):
        o.estimate(0)
        o.learn(0, False)
    assert o.estimate(1) == before  # different state, weights and facts
    assert o.estimate(0) < 0.05
    o.states[SOURCES] = 1
    assert o.estimate(1) < before


def test_chance_mixer_distinguishes_guesses_by_one_fact() -> None:
    rng = random.Random(2)
    o = mixer(cells=2)
    for i in range(BIASES):
        o.facts[BIASES + i] = o.facts[i]
    o.facts[4], o.facts[BIASES + 4] = ROOM - 2, ROOM - 1
    for cell in range(2):
        o.states[cell * SOURCES] = 1
    for _ in range(3000):
        for cell, rate in ((0, 0.9), (1, 0.1)):
            o.estimate(cell)
            o.learn(cell, rng.random() < rate)
    assert o.estimate(0) == pytest.approx(0.9, abs=0.06)
    assert o.estimate(1) == pytest.approx(0.1, abs=0.06)


def cost(chances: list[float], outcomes: list[bool]) -> float:
    """Return the cost of the predictions in bits per outcome."""
    return -sum(math.log2(p if y else 1 - p) for p, y in zip(chances, outcomes, strict=True)) / len(outcomes)


def test_chance_mixer_is_calibrated_and_beats_each_source() -> None:
    """Two sources predict each guess; its true odds are the product of the odds of its two states."""
    rng, count = random.Random(3), 20_000
    o = mixer(cells=1)
    first, second = [-2.0, -0.5, 0.7, 2.0], [-1.5, 0.0, 2.5]
    chances, outcomes = [], []
    by_source: list[list[int]] = [[], []]
    for _ in range(2 * count):
        a, b = rng.randrange(4), rng.randrange(3)
        o.states[0], o.states[6] = 10 + a, 100 + b
        o.views[0], o.views[1], o.views[4] = rng.randrange(3), rng.randrange(2), rng.randrange(2)
        chances.append(o.estimate(0))
        outcomes.append(rng.random() < 1 / (1 + math.exp(-first[a] - second[b])))
        o.learn(0, outcomes[-1])
        by_source[0].append(a)
        by_source[1].append(b)
    chances, outcomes = chances[count:], outcomes[count:]
    errors = [0.0] * 10
    for p, right in zip(chances, outcomes, strict=True):
        errors[int(p * 10)] += p - right
    assert sum(map(bool, errors)) > 7
    assert sum(map(abs, errors)) / count < 0.02
    for states in by_source:
        # Alone, each source predicts the true rates of its states.
        said = states[count:]
        rates = {state: sum(y for s, y in zip(said, outcomes, strict=True) if s == state) for state in set(said)}
        alone = [rates[state] / said.count(state) for state in sorted(rates)]
        assert cost(chances, outcomes) < cost([alone[state] for state in said], outcomes) - 0.05


def test_chance_mixer_expert_learns_from_its_own_error() -> None:
    """Weights keep learning even if facts already explain the outcomes, so guesses with other facts benefit."""
    o = mixer()
    o.states[0] = o.states[SOURCES] = 1
    for i in range(BIASES):
        o.facts[BIASES + i] = 100 + i
    for _ in range(2000):
        o.estimate(0)
        o.learn(0, True)
    # The state's rate has reached its maximum by then; with its weight of a quarter alone, the result would be 0.83.
    assert o.estimate(1) > 0.95


def test_chance_mixer_separates_token_weights_from_shared_weights() -> None:
    o = mixer(cells=1, sets=(3, 2, 4, 2, 2))
    o.states[0] = 1
    for i in range(EXPERTS):
        o.views[i] = 1
    expect(o, 0, 1, 0.9)
    o.estimate(0)
    o.learn(0, True)
    row = SOURCES + 1
    held = (o.global_weights()["first_weights"], o.token_weights()["weights"], o.global_weights()["last_weights"])
    assert [len(weights) for weights in held] == [5 * row, 4 * row, 2 * row]
    # The state and the constant moved, in the set that each expert's view selected.
    moved = [[at // row for at, weight in enumerate(weights) if weight != 0.25] for weights in held]
    assert moved == [[1, 1, 4, 4], [1, 1], [1, 1]]


def test_chance_mixer_with_extreme_input_keeps_valid_probabilities() -> None:
    rng = random.Random(4)
    o = mixer(cells=3)
    for step in range(4000):
        for cell in range(3):
            for i in range(SOURCES):
                o.states[cell * SOURCES + i] = rng.choice((ABSENT, 0, STATES - 1))
            for i in range(BIASES):
                o.facts[cell * BIASES + i] = rng.choice((0, ROOM - 1))  # All facts may be equal.
            for i in range(EXPERTS + 1):
                o.views[cell * (EXPERTS + 1) + i] = rng.randrange(2)
            assert 0 < o.estimate(cell) < 1
            o.learn(cell, step < 2000)


# --------------------------------------------------------------------------- Correction


def corrected(cells: int = 2) -> Any:
    """Return a correction in which every fact of every cell has a separate curve."""
    made = Correction(cells)
    for i in range(cells * FACTS):
        made.facts[i] = i
    return made


@given(p=PROBABILITY)
def test_correction_without_outcomes_returns_input(p: float) -> None:
    o = corrected()
    assert o.estimate(1, p) == pytest.approx(p, rel=1e-9)
    assert o.p[1] == o.estimate(1, p)


@pytest.mark.parametrize("shift", [-1.5, 0.0, 1.0])
def test_correction_learns_constant_shift_of_log_odds(shift: float) -> None:
    rng = random.Random(1)
    o = corrected()
    late = []
    for _ in range(20_000):
        p = rng.uniform(0.03, 0.97)
        truth = 1 / (1 + math.exp(-math.log(p / (1 - p)) - shift))
        late.append((o.estimate(0, p), truth))
        o.learn(0, rng.random() < truth)
    late = late[-5000:]
    assert abs(sum(p - truth for p, truth in late)) / 5000 < 0.02
    assert sum(abs(p - truth) for p, truth in late) / 5000 < 0.04


def test_correction_learns_separate_curve_per_fact() -> None:
    """The estimate is 0.5; the true probability is 0.1 with one fact and 0.9 with another."""
    rng = random.Random(2)
    o = corrected()
    for i in range(FACTS - 1):
        o.facts[FACTS + i] = o.facts[i]
    for _ in range(5000):
        for cell, rate in ((0, 0.1), (1, 0.9)):
            o.estimate(cell, 0.5)
            o.learn(cell, rng.random() < rate)
    assert o.estimate(0, 0.5) == pytest.approx(0.1, abs=0.05)
    assert o.estimate(1, 0.5) == pytest.approx(0.9, abs=0.05)
    # Far from this estimate, the curves have learned nothing.
    assert o.estimate(0, 0.99) == pytest.approx(0.99, abs=0.001)


def test_correction_separates_token_curves_from_shared_curves() -> None:
    o = corrected(cells=1)
    o.facts[FACTS - 1] = FREE_CURVES
    o.estimate(0, 0.5)
    o.learn(0, False)
    for held, curves in ((o.global_weights(), FACTS - 1), (o.token_weights(), 1)):
        assert held.keys() == {"height", "slope"}
        assert sum(height != 0 for height in held["height"]) == curves
        assert sum(slope != 1 for slope in held["slope"]) == curves
    assert o.token_weights()["height"][4] != 0  # the middle of its first curve


def test_correction_with_extreme_input_keeps_valid_probabilities() -> None:
    o = corrected()
    for i in range(FACTS):
        o.facts[i] = 7  # All facts may be equal.
    for right in (True, False):
        for p in (1e-6, 0.5, 1 - 1e-6):
            for _ in range(2000):
                assert 0 < o.estimate(0, p) < 1
                o.learn(0, right)


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
