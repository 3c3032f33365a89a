"""theory.py against the paper's tables 1 and 5, values worked out by hand, and simulations."""

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


@pytest.mark.parametrize(("alpha", "gamma", "operations", "speed"), TABLE_1)
def test_table_1_of_the_paper(alpha: float, gamma: int, operations: float, speed: float) -> None:
    assert operations_factor(alpha, gamma) == pytest.approx(operations, abs=0.005)
    assert improvement_factor(alpha, gamma) == pytest.approx(speed, abs=0.005)


def test_expected_tokens_by_hand() -> None:
    assert expected_tokens(0.5, 2) == pytest.approx(1.75)
    assert expected_tokens(0.0, 7) == 1  # the target's own token
    assert expected_tokens(1.0, 7) == 8
    assert expected_tokens(0.3, 0) == 1


def test_expected_tokens_is_the_closed_form_and_stays_accurate_near_one() -> None:
    for alpha in (0.1, 0.5, 0.9, 0.99):
        assert expected_tokens(alpha, 12) == pytest.approx((1 - alpha**13) / (1 - alpha))
    # Here the closed form divides two differences that have one digit left.
    assert expected_tokens(1 - 1e-15, 4) == pytest.approx(5, abs=1e-12)


def test_costs_enter_as_in_theorems_3_8_and_3_11() -> None:
    assert improvement_factor(0.5, 2, 0.25) == pytest.approx(1.75 / 1.5)
    assert operations_factor(0.5, 2, 0.25) == pytest.approx(3.5 / 1.75)
    assert improvement_factor(1.0, 3, 0.1) == pytest.approx(4 / 1.3)


def test_flat_curve_gives_theorem_3_8_and_a_proportional_one_never_gains() -> None:
    assert improvement_on_curve(0.7, 3, lambda n: 0.02) == improvement_factor(0.7, 3)
    assert improvement_on_curve(1.0, 3, lambda n: 0.02 * n) == pytest.approx(1)
    assert improvement_on_curve(0.7, 3, lambda n: 0.02 * n) < 1
    measured = {1: 0.1, 4: 0.16}
    assert improvement_on_curve(0.5, 3, measured.__getitem__) == pytest.approx(1.875 * 0.1 / 0.16)


def test_corollary_3_9_where_gain_begins_and_how_much_it_is_at_least() -> None:
    for alpha in (0.2, 0.5, 0.8):
        for c in (0.0, 0.1, 0.3, 0.6):
            gamma = optimal_gamma(alpha, c, 40)
            assert (gamma > 0) == (alpha > c)
            if gamma:
                assert improvement_factor(alpha, gamma, c) >= (1 + alpha) / (1 + c) - 1e-12


def test_optimal_gamma_is_the_best_of_its_neighbours() -> None:
    alpha, c = 0.8, 0.05
    gamma = optimal_gamma(alpha, c, 40)
    assert 0 < gamma < 40
    best = improvement_factor(alpha, gamma, c)
    assert best > improvement_factor(alpha, gamma - 1, c)
    assert best >= improvement_factor(alpha, gamma + 1, c)
    assert optimal_gamma(1.0, 0.0, 9) == 9
    assert optimal_gamma(0.5, 0.5, 9) == 0
    assert optimal_gamma(0.9, 0.0, 0) == 0


def test_alpha_by_hand() -> None:
    # Ten drafts of three: 8 passed position 0, 4 of these position 1, 1 of these position 2.
    assert alpha_from_acceptance([8, 4, 1], [10, 10, 10]) == pytest.approx(13 / (10 + 8 + 4))
    assert alpha_from_acceptance([0, 0], [5, 5]) == 0
    assert alpha_from_acceptance([5, 5], [5, 5]) == 1
    # Half of the drafts have one token only: 8 * 5/10 are taken to have reached position 1.
    assert alpha_from_acceptance([8, 3], [10, 5]) == pytest.approx(11 / (10 + 4))
    # At least as many as were accepted there.
    assert alpha_from_acceptance([8, 5], [10, 5]) == pytest.approx(13 / (10 + 5))


def test_a_simulation_agrees_with_the_formulas() -> None:
    # 20,000 passes. The standard errors are below 0.004 for alpha and 0.012 for the tokens per
    # pass, so a tolerance of four of them.
    alpha, rng, rounds = 0.7, random.Random(1), 20_000
    accepted, drafted, emitted = [0] * 4, [0] * 4, 0
    for _ in range(rounds):
        emitted += 1
        for i in range(4):
            drafted[i] += 1
        for i in range(4):
            if rng.random() >= alpha:
                break
            accepted[i] += 1
            emitted += 1
    assert emitted / rounds == pytest.approx(expected_tokens(alpha, 4), abs=0.048)
    assert alpha_from_acceptance(accepted, drafted) == pytest.approx(alpha, abs=0.016)
    assert sum(accepted) / sum(drafted) < alpha - 0.1  # what the naive ratio would say


def test_drafts_of_random_length_give_the_same_alpha() -> None:
    alpha, rng = 0.7, random.Random(2)  # standard error below 0.004, tolerance four of them
    accepted, drafted = [0] * 6, [0] * 6
    for _ in range(20_000):
        length = rng.randint(1, 6)
        for i in range(length):
            drafted[i] += 1
        for i in range(length):
            if rng.random() >= alpha:
                break
            accepted[i] += 1
    assert alpha_from_acceptance(accepted, drafted) == pytest.approx(alpha, abs=0.016)


@pytest.mark.parametrize("alpha", [-0.1, 1.1, math.nan])
def test_alpha_out_of_range(alpha: float) -> None:
    for call in (
        lambda: expected_tokens(alpha, 2),
        lambda: improvement_factor(alpha, 2),
        lambda: operations_factor(alpha, 2),
        lambda: improvement_on_curve(alpha, 2, lambda n: 1.0),
        lambda: optimal_gamma(alpha, 0.1, 2),
    ):
        with pytest.raises(ValueError, match="alpha must be 0 to 1"):
            call()


def test_other_arguments_out_of_range() -> None:
    with pytest.raises(ValueError, match="gamma must be 0 or more"):
        expected_tokens(0.5, -1)
    for c in (-0.1, math.inf, math.nan):
        with pytest.raises(ValueError, match="relative cost"):
            improvement_factor(0.5, 2, c)
        with pytest.raises(ValueError, match="relative cost"):
            operations_factor(0.5, 2, c)
        with pytest.raises(ValueError, match="relative cost"):
            optimal_gamma(0.5, c, 2)
    with pytest.raises(ValueError, match="cost must be above 0"):
        improvement_on_curve(0.5, 2, lambda n: 0.0)


@pytest.mark.parametrize(
    ("accepted", "drafted", "message"),
    [
        ([1], [2, 2], "1 accepted positions, but 2"),
        ([], [], "nothing was drafted"),
        ([0], [0], "nothing was drafted"),
        ([3], [2], "accepted must be 0 to drafted"),
        ([-1], [2], "accepted must be 0 to drafted"),
        ([1, 2], [3, 3], "must not rise"),
        ([1, 1], [3, 4], "must not rise"),
    ],
)
def test_counts_that_cannot_be(accepted: list[int], drafted: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        alpha_from_acceptance(accepted, drafted)


# --------------------------------------------------------------------------- alpha of two laws, and of lossy modes


LENIENCES = (1.0, 0.5, 0.3, 0.1)

# Leviathan et al. 2023, table 5: alpha of approximations of T5-XXL at the leniences above, standard sampling.
TABLE_5 = {
    "unigram": (0.07, 0.1, 0.11, 0.16),
    "bigram": (0.19, 0.23, 0.25, 0.32),
    "T5-small": (0.62, 0.71, 0.76, 0.84),
    "T5-base": (0.68, 0.8, 0.83, 0.90),
}


def law(*values: float) -> NDArray[np.float64]:
    return np.array(values)


def laws(count: int, size: int, seed: int) -> list[NDArray[np.float64]]:
    """Random laws, few of them flat."""
    return list(np.random.default_rng(seed).dirichlet([0.3] * size, count))


def test_overlap_by_hand() -> None:
    p = law(0.5, 0.3, 0.2, 0.0)
    assert overlap_alpha(p, law(0.2, 0.3, 0.4, 0.1)) == pytest.approx(0.2 + 0.3 + 0.2)
    assert overlap_alpha(p, p) == pytest.approx(1)
    assert overlap_alpha(p, law(0, 0, 0, 1)) == 0
    assert overlap_alpha(p, law(0, 1, 0, 0)) == pytest.approx(0.3)  # a drafter that does not draw


def test_lenience_by_hand() -> None:
    p, q = law(0.5, 0.3, 0.2, 0.0), law(0.1, 0.1, 0.5, 0.3)
    assert lenient_alpha(p, q, 1) == pytest.approx(0.1 + 0.1 + 0.2)
    assert lenient_alpha(p, q, 0.5) == pytest.approx(0.1 + 0.1 + 0.4)
    assert lenient_alpha(p, q, 0.1) == pytest.approx(0.1 + 0.1 + 0.5)  # what p rules out stays out
    # Greedily: 0.3 / 0.5 and 0.2 / 0.5 of the largest.
    assert [lenient_argmax_alpha(p, q, at) for at in (1, 0.61, 0.59, 0.41, 0.39)] == pytest.approx(
        [0.1, 0.1, 0.2, 0.2, 0.7]
    )


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


def test_alpha_has_the_shape_of_table_5_of_the_paper() -> None:
    # A target with 200 contexts, and four approximations: the mean of all, the mean of ten, and two that are close.
    target = laws(200, 50, seed=2)
    groups = [np.mean(target[i : i + 10], axis=0) for i in range(0, 200, 10)]
    other = laws(200, 50, seed=3)
    drafters = {
        "unigram": [np.mean(target, axis=0)] * 200,
        "bigram": [groups[i // 10] for i in range(200)],
        "T5-small": [0.6 * p + 0.4 * q for p, q in zip(target, other, strict=True)],
        "T5-base": [0.7 * p + 0.3 * q for p, q in zip(target, other, strict=True)],
    }
    ours = {
        name: [float(np.mean([lenient_alpha(p, q, at) for p, q in zip(target, rows, strict=True)])) for at in LENIENCES]
        for name, rows in drafters.items()
    }

    def check(table: dict[str, Sequence[float]]) -> None:
        rows = list(table.values())
        assert all(a < b for row in rows for a, b in pairwise(row))  # the more lenient the more is accepted,
        assert all(a < b for column in zip(*rows, strict=True) for a, b in pairwise(column))  # the closer too,
        gains = [row[-1] / row[0] for row in rows]
        assert all(a > b for a, b in pairwise(gains))  # and lenience helps most who is far off
        assert all(at * alpha <= row[0] + 0.005 for row in rows for at, alpha in zip(LENIENCES, row, strict=True))

    check({name: tuple(row) for name, row in TABLE_5.items()})
    check({name: tuple(row) for name, row in ours.items()})


def test_speed_of_lenience_at_temperature_0_as_in_the_paper() -> None:
    # Appendix A.5, T5-small for T5-XXL: alpha at each lenience, gamma = 8, c = 0.015.
    for alpha, speed in ((0.75, 3.3), (0.8, 3.9), (0.87, 4.9)):
        assert improvement_factor(alpha, 8, 0.015) == pytest.approx(speed, abs=0.05)


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


def test_typical_acceptance_by_hand() -> None:
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


def test_typical_acceptance_keeps_more_as_its_thresholds_fall() -> None:
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
