"""theory.py against the paper's table 1, values worked out by hand, and a simulation."""

from __future__ import annotations

import math
import random

import pytest

from ngramspec.theory import (
    alpha_from_acceptance,
    expected_tokens,
    improvement_factor,
    improvement_on_curve,
    operations_factor,
    optimal_gamma,
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
