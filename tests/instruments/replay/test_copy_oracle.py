"""Tests of the copy-oracle against an exhaustive search."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from support.recordings import make_recordings

from ngramspec.cost.curve import CostCurve
from ngramspec.cost.fixed_curves import CURVES, LARGEST, make_fixed_curve
from ngramspec.instruments.replay.comparison import copy_lengths, find_min_cost


def naive_lengths(prompt: list[int], response: list[int]) -> list[int]:
    text, start = [*prompt, *response], len(prompt)
    lengths = [0] * len(response)
    for i in range(start + 1, len(text)):
        for j in range(1, i):
            k = 0
            while text[j - 1] == text[i - 1] and i + k < len(text) and text[j + k] == text[i + k]:
                k += 1
            lengths[i - start] = max(lengths[i - start], min(k, LARGEST - 1))
    return lengths


def naive_cost(lengths: list[int], curve: CostCurve) -> float:
    end = len(lengths)

    @cache
    def cost(i: int) -> float:
        if i >= end:
            return 0.0
        return min(curve.ratio(1 + k) + cost(i + k + 1) for k in range(min(lengths[i], end - 1 - i) + 1))

    return cost(1)


def test_copy_oracle_equals_manual_examples() -> None:
    assert copy_lengths([1, 2, 3, 4], [1, 2, 3, 9]).tolist() == [0, 2, 1, 0]
    # A copy may overlap itself, and has a limit.
    assert copy_lengths([5, 5], [5] * 100)[1:].tolist() == [min(63, 99 - i) for i in range(99)]
    # The prefill's token is free.
    for response in ([], [3]):
        assert find_min_cost(copy_lengths([1, 2], response), [make_fixed_curve({1: 1.0})]).tolist() == [0.0]


@pytest.mark.parametrize("vocabulary", [2, 5, 60])
def test_copy_lengths_equal_naive_search(vocabulary: int) -> None:
    rng = np.random.default_rng(vocabulary)
    for _ in range(60):
        prompt, response = (rng.integers(0, vocabulary, rng.integers(0, n)).tolist() for n in (20, 40))
        assert copy_lengths(prompt, response).tolist() == naive_lengths(prompt, response)


def test_least_cost_equals_naive_search() -> None:
    curves = {name: make_fixed_curve(points) for name, (points, _) in CURVES.items()}
    for recording in make_recordings(12):
        lengths = copy_lengths(recording.prompt, recording.response)
        costs = find_min_cost(lengths, list(curves.values()))
        assert costs.tolist() == pytest.approx([naive_cost(lengths.tolist(), c) for c in curves.values()])
