"""The law that emitted tokens are held against has no doubtful edges, and alarms are as rare as they are said to be."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ngramspec.sampling.settings import Sampling
from ngramspec.selfcheck.law import false_alarm, reference_law


def test_a_token_on_a_filter_s_edge_leaves_the_law_undecided() -> None:
    row = np.array([2.0, 1.0, 1.0, 0.0], np.float32)
    assert reference_law(row, Sampling(temperature=1.0, top_k=2, top_p=1.0, min_p=0.0)) is None
    assert reference_law(row, Sampling(temperature=1.0, top_k=3, top_p=1.0, min_p=0.0)) is not None
    assert reference_law(row, Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=math.exp(-1))) is None
    best = float(np.exp(2.0) / np.exp(row).sum())
    assert reference_law(row, Sampling(temperature=1.0, top_k=0, top_p=best, min_p=0.0)) is None


@pytest.mark.parametrize(("n", "p"), [(20, 0.5), (50, 0.1), (400, 0.02), (400, 0.4)])
def test_false_alarms_are_as_rare_as_they_are_said_to_be(n: int, p: float) -> None:
    """Against the exact binomial law, at every distance that it can have."""
    chances = [math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(n + 1)]
    distances = [
        (k * math.log(k / n / p) if k else 0.0) + ((n - k) * math.log((n - k) / n / (1 - p)) if k < n else 0.0)
        for k in range(n + 1)
    ]
    for distance in distances:
        exact = sum(c for c, d in zip(chances, distances, strict=True) if d >= distance)
        assert exact <= false_alarm(distance, 2) * (1 + 1e-9)
    assert false_alarm(40.0, 2) < 1e-13
    assert false_alarm(40.0, 8) < 1e-6
    assert false_alarm(5.0, 8) == 1.0
    assert false_alarm(math.inf, 8) == 0.0
