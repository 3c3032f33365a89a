"""Tests of differences that the self-check attributes to rounding, with random rounding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from support.numpy_sampler import NumpySampler

from ngramspec.instruments.selfcheck.texts import movement
from ngramspec.sampling.distribution import gumbel_one
from ngramspec.sampling.settings import Sampling


def greedy(row: NDArray[np.float32]) -> int:
    return int(np.argmax(row))


def test_movement_with_greedy_returns_required_logit_change() -> None:
    row = np.array([1.0, 4.0, 3.0, -np.inf], np.float32)
    far = np.array([9.0, 4.0, 8.0, 20.0], np.float32)
    for token, bound, needed in ((2, 1.0, 0.5), (2, 0.51, 0.5), (2, 0.49, None), (0, 1.6, 1.5), (0, 1.4, None)):
        drafted = far.copy()
        drafted[token] = 30.0
        got = movement(greedy, row, drafted, 1, token, bound)
        assert got == (needed if needed is None else pytest.approx(needed, abs=1e-3))
    assert movement(greedy, row, far, 1, 3, 100.0) is None
    near = np.array([1.0, 3.4, 3.6, -np.inf], np.float32)
    assert movement(greedy, row, near, 1, 2, 0.6) == pytest.approx(0.5, abs=1e-3)
    assert movement(greedy, row, near, 1, 2, 0.0) is None
    assert movement(greedy, row, near, 1, 1, 0.6) is None  # The token does not follow from its logits.
    assert movement(greedy, row, near, 2, 2, 0.6) is None


def sampler_of(sampling: Sampling, seed: int, size: int) -> Callable[[NDArray[np.float32]], int]:
    sampler = NumpySampler(replace(sampling, seed=seed), size)
    sampler.begin([1, 2, 3])
    return lambda row: sampler.draw(row, 7)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.8),
        Sampling(temperature=1.3, repeat_penalty=1.2),
        pytest.param(Sampling(0.8, top_k=3, top_p=1.0, min_p=0.0), marks=pytest.mark.exhaustive),
        pytest.param(Sampling(0.8, top_k=0, top_p=0.7, min_p=0.0), marks=pytest.mark.exhaustive),
        pytest.param(Sampling(0.8, top_k=0, top_p=1.0, min_p=0.4), marks=pytest.mark.exhaustive),
    ],
)
def test_movement_explains_any_change_within_bound(sampling: Sampling) -> None:
    rng = np.random.default_rng(3)
    bound, others = 0.3, 0
    for trial in range(200):
        row = rng.normal(0, 1.0, 12).astype(np.float32)
        moved = row + rng.uniform(-bound, bound, row.size).astype(np.float32)
        draw = sampler_of(sampling, trial, row.size)
        plain, drafted = draw(row), draw(moved)
        if plain != drafted:
            others += 1
            needed = movement(draw, row, moved, plain, drafted, bound * 1.0001)
            assert 0 < needed <= bound * 1.0001
    assert others > 8


def test_movement_without_filters_explains_only_close_scores() -> None:
    """The two scores of argmax(log p + noise) differ by at most 2 * bound / temperature."""
    sampling = Sampling(temperature=0.5, top_k=0, top_p=1.0, min_p=0.0)
    rng = np.random.default_rng(4)
    bound, explained = 0.2, 0
    for trial in range(200):
        row, moved = (rng.normal(0, 1.0, 12).astype(np.float32) for _ in range(2))
        draw = sampler_of(sampling, trial, row.size)
        plain, drafted = draw(row), draw(moved)
        noise = [gumbel_one(trial, 7, token) for token in (plain, drafted)]
        apart = (row[plain] - row[drafted]) / sampling.temperature + noise[0] - noise[1]
        needed = movement(draw, row, moved, plain, drafted, bound)
        close = apart * sampling.temperature / 2 <= bound
        assert (needed is not None) == close, (trial, apart)
        explained += close and plain != drafted
    assert explained > 10
