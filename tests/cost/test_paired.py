"""Tests of paired comparisons: the probability of false alarms is exact, and only clear results are called faster."""

from __future__ import annotations

from itertools import product

import pytest

from ngramspec.cost.paired import CHANCE, NO_DIFFERENCE, compare_pairs, pairs_needed, sign_chance


@pytest.mark.parametrize("n", range(1, 12))
def test_compare_pairs_of_equal_speeds_is_clear_as_rarely_as_promised(n: int) -> None:
    """All orders of wins and losses are equally probable if a coin decides each pair."""
    results = [compare_pairs([1.1 if won else 0.9 for won in wins]) for wins in product((True, False), repeat=n)]
    faster = sum(result is not None and result.is_faster for result in results)
    slower = sum(result is not None and result.is_slower for result in results)
    assert faster == slower <= CHANCE * 2**n
    assert (faster > 0) == (n >= pairs_needed())


@pytest.mark.parametrize(("losses", "pairs"), [(0, 6), (1, 9), (2, 12)])
def test_pairs_needed_is_the_smallest_clear_number(losses: int, pairs: int) -> None:
    assert pairs_needed(losses) == pairs
    assert sign_chance(pairs - losses, pairs) <= CHANCE < sign_chance(pairs - 1 - losses, pairs - 1)
    assert pairs_needed(losses, CHANCE / 10) > pairs


@pytest.mark.parametrize(
    ("ratios", "words"),
    [
        ([], "None"),
        ([1.3] * 5, f"{NO_DIFFERENCE}: 5 of at least 6 pairs"),
        ([1.12, 1.31, 1.2, 1.2, 1.2, 1.2], "1.12 to 1.31 times as fast"),
        ([0.5] * 6, "0.50 times as fast"),
        ([1.5] * 5 + [0.9], NO_DIFFERENCE),
        # One of nine may contradict, and is outside the interval.
        ([1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 40.0, 0.5], "1.10 to 1.70 times as fast"),
    ],
)
def test_compare_pairs_states_an_interval_only_if_it_is_clear(ratios: list[float], words: str) -> None:
    assert str(compare_pairs(ratios)) == words
