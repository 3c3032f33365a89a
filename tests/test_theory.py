"""theory.py against the paper's table 1, values worked out by hand, and simulations."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

from ngramspec.theory import (
    alpha_from_acceptance,
    expected_tokens,
    improvement_factor,
    improvement_on_curve,
    lenient_alpha,
    lenient_argmax_alpha,
    operations_factor,
    optimal_gamma,
    overlap_alpha,
    typical_alpha,
    typical_threshold,
)

# Leviathan et al. 2023, table 1 (c = c_hat = 0): alpha, gamma, operations, speed.
TABLE_1 = [
    (0.6, 2, 1.53, 1.96),
    (0.7, 3, 1.58, 2.53),
    (0.8, 2, 1.23, 2.44),
    (0.8, 5, 1.63, 3.69),
    (0.9, 2, 1.11, 2.71),
    (0.9, 10, 1.60, 6.86),
]


def test_table_1_of_the_paper() -> None:
    for alpha, gamma, operations, speed in TABLE_1:
        assert operations_factor(alpha, gamma) == pytest.approx(operations, abs=0.005)
        assert improvement_factor(alpha, gamma) == pytest.approx(speed, abs=0.005)


def test_expected_tokens_by_hand_and_by_the_closed_form() -> None:
    assert expected_tokens(0.5, 2) == pytest.approx(1.75)
    assert expected_tokens(0.0, 7) == 1  # the target's own token
    assert expected_tokens(1.0, 7) == 8
    assert expected_tokens(0.3, 0) == 1
    for alpha in (0.1, 0.5, 0.9, 0.99):
        assert expected_tokens(alpha, 12) == pytest.approx((1 - alpha**13) / (1 - alpha))
    # Here the closed form divides two differences that have one digit left.
    assert expected_tokens(1 - 1e-15, 4) == pytest.approx(5, abs=1e-12)


def test_costs_enter_as_in_theorems_3_8_and_3_11() -> None:
    assert improvement_factor(0.5, 2, 0.25) == pytest.approx(1.75 / 1.5)
    assert operations_factor(0.5, 2, 0.25) == pytest.approx(3.5 / 1.75)
    assert improvement_factor(1.0, 3, 0.1) == pytest.approx(4 / 1.3)
    # On a flat curve theorem 3.8; where cost is proportional to the batch nothing is ever gained.
    assert improvement_on_curve(0.7, 3, lambda n: 0.02) == improvement_factor(0.7, 3)
    assert improvement_on_curve(1.0, 3, lambda n: 0.02 * n) == pytest.approx(1)
    assert improvement_on_curve(0.7, 3, lambda n: 0.02 * n) < 1
    measured = {1: 0.1, 4: 0.16}
    assert improvement_on_curve(0.5, 3, measured.__getitem__) == pytest.approx(1.875 * 0.1 / 0.16)


def test_corollary_3_9_and_that_the_optimal_gamma_is_the_best_of_its_neighbours() -> None:
    for alpha in (0.2, 0.5, 0.8):
        for c in (0.0, 0.1, 0.3, 0.6):
            gamma = optimal_gamma(alpha, c, 40)
            assert (gamma > 0) == (alpha > c)
            if gamma:
                assert improvement_factor(alpha, gamma, c) >= (1 + alpha) / (1 + c) - 1e-12
    gamma = optimal_gamma(0.8, 0.05, 40)
    assert 0 < gamma < 40
    best = improvement_factor(0.8, gamma, 0.05)
    assert best > improvement_factor(0.8, gamma - 1, 0.05)
    assert best >= improvement_factor(0.8, gamma + 1, 0.05)
    assert (optimal_gamma(1.0, 0.0, 9), optimal_gamma(0.5, 0.5, 9), optimal_gamma(0.9, 0.0, 0)) == (9, 0, 0)


def test_alpha_by_hand() -> None:
    # Ten drafts of three: 8 passed position 0, 4 of these position 1, 1 of these position 2.
    assert alpha_from_acceptance([8, 4, 1], [10, 10, 10]) == pytest.approx(13 / (10 + 8 + 4))
    assert alpha_from_acceptance([0, 0], [5, 5]) == 0
    assert alpha_from_acceptance([5, 5], [5, 5]) == 1
    # Half of the drafts have one token only: 8 * 5/10 are taken to have reached position 1.
    assert alpha_from_acceptance([8, 3], [10, 5]) == pytest.approx(11 / (10 + 4))
    # At least as many as were accepted there.
    assert alpha_from_acceptance([8, 5], [10, 5]) == pytest.approx(13 / (10 + 5))


def simulated(alpha: float, lengths: Sequence[int], seed: int) -> tuple[list[int], list[int]]:
    """Counts by position (accepted, drafted) of drafts of these lengths, each token of which is kept with `alpha`."""
    rng = random.Random(seed)
    accepted, drafted = [0] * max(lengths), [0] * max(lengths)
    for length in lengths:
        right = next((i for i in range(length) if rng.random() >= alpha), length)
        for i in range(length):
            drafted[i] += 1
            accepted[i] += i < right
    return accepted, drafted


def test_simulations_agree_with_the_formulas() -> None:
    # 20,000 passes. The standard errors are below 0.004 for alpha and 0.012 for the tokens per
    # pass, so a tolerance of four of them.
    accepted, drafted = simulated(0.7, [4] * 20_000, seed=1)
    assert 1 + sum(accepted) / 20_000 == pytest.approx(expected_tokens(0.7, 4), abs=0.048)
    assert alpha_from_acceptance(accepted, drafted) == pytest.approx(0.7, abs=0.016)
    assert sum(accepted) / sum(drafted) < 0.7 - 0.1  # what the naive ratio would say
    # Drafts of random length give the same alpha.
    accepted, drafted = simulated(0.7, random.Random(2).choices(range(1, 7), k=20_000), seed=2)
    assert alpha_from_acceptance(accepted, drafted) == pytest.approx(0.7, abs=0.016)


def test_arguments_out_of_range() -> None:
    for alpha in (-0.1, 1.1, math.nan):
        for call in (
            lambda alpha: expected_tokens(alpha, 2),
            lambda alpha: improvement_factor(alpha, 2),
            lambda alpha: operations_factor(alpha, 2),
            lambda alpha: improvement_on_curve(alpha, 2, lambda n: 1.0),
            lambda alpha: optimal_gamma(alpha, 0.1, 2),
        ):
            with pytest.raises(ValueError, match="alpha must be 0 to 1"):
                call(alpha)
    with pytest.raises(ValueError, match="gamma must be 0 or more"):
        expected_tokens(0.5, -1)
    for c in (-0.1, math.inf, math.nan):
        for formula in (improvement_factor, operations_factor):
            with pytest.raises(ValueError, match="relative cost"):
                formula(0.5, 2, c)
        with pytest.raises(ValueError, match="relative cost"):
            optimal_gamma(0.5, c, 2)
    with pytest.raises(ValueError, match="cost must be above 0"):
        improvement_on_curve(0.5, 2, lambda n: 0.0)
    for accepted, drafted, message in (
        ([1], [2, 2], "1 accepted positions, but 2"),
        ([], [], "nothing was drafted"),
        ([0], [0], "nothing was drafted"),
        ([3], [2], "accepted must be 0 to drafted"),
        ([-1], [2], "accepted must be 0 to drafted"),
        ([1, 2], [3, 3], "must not rise"),
        ([1, 1], [3, 4], "must not rise"),
    ):
        with pytest.raises(ValueError, match=message):
            alpha_from_acceptance(accepted, drafted)


# --------------------------------------------------------------------------- alpha of two laws, and of lossy modes

LENIENCES = (1.0, 0.5, 0.3, 0.1)


def law(*values: float) -> NDArray[np.float64]:
    return np.array(values)


def laws(count: int, size: int, seed: int) -> list[NDArray[np.float64]]:
    """Random laws, few of them flat."""
    return list(np.random.default_rng(seed).dirichlet([0.3] * size, count))


def test_overlap_and_lenience_by_hand() -> None:
    p = law(0.5, 0.3, 0.2, 0.0)
    assert overlap_alpha(p, law(0.2, 0.3, 0.4, 0.1)) == pytest.approx(0.2 + 0.3 + 0.2)
    assert overlap_alpha(p, p) == pytest.approx(1)
    assert overlap_alpha(p, law(0, 0, 0, 1)) == 0
    assert overlap_alpha(p, law(0, 1, 0, 0)) == pytest.approx(0.3)  # a drafter that does not draw
    q = law(0.1, 0.1, 0.5, 0.3)
    assert lenient_alpha(p, q, 1) == pytest.approx(0.1 + 0.1 + 0.2)
    assert lenient_alpha(p, q, 0.5) == pytest.approx(0.1 + 0.1 + 0.4)
    assert lenient_alpha(p, q, 0.1) == pytest.approx(0.1 + 0.1 + 0.5)  # what p rules out stays out
    # Greedily: 0.3 / 0.5 and 0.2 / 0.5 of the largest.
    found = [lenient_argmax_alpha(p, q, at) for at in (1, 0.61, 0.59, 0.41, 0.39)]
    assert found == pytest.approx([0.1, 0.1, 0.2, 0.2, 0.7])


def test_without_lenience_alpha_is_the_overlap_and_it_rises_as_lenience_falls() -> None:
    rows = laws(40, 12, seed=1)
    for p, q in pairwise(rows):
        assert lenient_alpha(p, q, 1) == pytest.approx(float(sum(min(a, b) for a, b in zip(p, q, strict=True))))
        assert lenient_argmax_alpha(p, q, 1) == pytest.approx(q[int(np.argmax(p))])
        for alpha in (lenient_alpha, lenient_argmax_alpha):
            values = [alpha(p, q, at) for at in np.linspace(1, 0.01, 40)]
            assert values[0] < values[-1] <= 1 + 1e-9
            assert all(a <= b for a, b in pairwise(values))
        # By no more than the factor 1/L: L alpha is the sum of min(p, L q).
        scaled = [at * lenient_alpha(p, q, at) for at in LENIENCES]
        assert all(a >= b for a, b in pairwise(scaled))


def test_a_simulation_of_lenient_acceptance_agrees() -> None:
    # 40,000 draws: a standard error below 0.0025, and a tolerance of four of them.
    rng = np.random.default_rng(4)
    p, q = laws(2, 8, seed=5)
    drawn = rng.choice(8, 40_000, p=q)
    for lenience in LENIENCES:
        kept = rng.random(40_000) < p[drawn] / (lenience * q[drawn])
        assert kept.mean() == pytest.approx(lenient_alpha(p, q, lenience), abs=0.01)
        kept = p[drawn] >= lenience * p.max()
        assert kept.mean() == pytest.approx(lenient_argmax_alpha(p, q, lenience), abs=0.01)
    assert lenient_alpha(p, q, 0.1) > lenient_alpha(p, q, 1) + 0.1  # or the test would see nothing


def test_typical_acceptance() -> None:
    # Four equal tokens: H = ln 4.
    flat = law(0.25, 0.25, 0.25, 0.25, 0.0)
    assert typical_threshold(flat, 1.0, 0.3) == pytest.approx(0.3 / 4)
    assert typical_threshold(flat) == pytest.approx(0.075)
    assert typical_threshold(flat, 0.05, 0.3) == 0.05
    assert typical_threshold(flat[:4]) == typical_threshold(flat)
    sure = law(1.0, 0.0)
    assert typical_threshold(sure) == 0.09  # exp(-0) = 1
    p, q = law(0.6, 0.25, 0.08, 0.07), law(0.1, 0.2, 0.3, 0.4)
    threshold = 0.3 * 0.6**0.6 * 0.25**0.25 * 0.08**0.08 * 0.07**0.07  # about 0.106
    assert typical_threshold(p, 1.0) == pytest.approx(threshold)
    assert typical_alpha(p, q) == pytest.approx(0.1 + 0.2)
    assert typical_alpha(p, q, 0.075) == pytest.approx(0.1 + 0.2 + 0.3)
    assert typical_alpha(p, q, 0.075, 0.1) == pytest.approx(1)
    assert typical_alpha(p, q, 0.25, 3) == pytest.approx(0.1)  # above it, not at it
    # It keeps more as its thresholds fall.
    for p, q in pairwise(laws(30, 12, seed=6)):
        for values in (
            [typical_alpha(p, q, epsilon, 10.0) for epsilon in (0.5, 0.25, 0.09, 0.01, 0.0)],
            [typical_alpha(p, q, 1.0, delta) for delta in (3.0, 1.0, 0.3, 0.1, 1e-9)],
        ):
            assert all(a <= b for a, b in pairwise(values))
            assert values[0] < values[-1] == pytest.approx(1)


def test_laws_and_settings_out_of_range() -> None:
    p = law(0.5, 0.5)
    for wrong in (law(1.0), law(0.5, 0.4), law(1.5, -0.5), law(math.nan, 1.0), np.array([p])):
        for alpha in (overlap_alpha, typical_alpha):
            with pytest.raises(ValueError, match="must"):
                alpha(p, wrong)
            with pytest.raises(ValueError, match="must"):
                alpha(wrong, p)
    for lenience in (0.0, -0.1, 1.1, math.nan):
        for lenient in (lenient_alpha, lenient_argmax_alpha):
            with pytest.raises(ValueError, match="lenience must be above 0"):
                lenient(p, p, lenience)
    for epsilon in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="epsilon must be 0 to 1"):
            typical_threshold(p, epsilon)
    for delta in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="delta must be above 0"):
            typical_threshold(p, 0.1, delta)
