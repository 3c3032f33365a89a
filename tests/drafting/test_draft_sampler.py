"""What a draft model guesses, by its logits."""

from __future__ import annotations

import doctest
import math
from collections.abc import Mapping

import numpy as np
import pytest

from ngramspec.backend import Logits
from ngramspec.drafting import draft_sampler
from ngramspec.drafting.draft_sampler import RARE, WIDEST, DraftSampler, ModelGuess
from ngramspec.sampling.settings import Sampling

SHARES = np.array([1.0, 0.5, 0.2, 0.02, 0.005])
"""Probabilities as parts of the largest one."""


def drawn(sampling: Sampling, row: Logits) -> ModelGuess:
    """The likeliest token, drawn."""

    def choose(offset: int, law: Mapping[int, float]) -> int:
        assert offset == 3
        return max(law, key=law.__getitem__)

    guess = DraftSampler(row.size, sampling).guess(row, 3, choose)
    assert guess is not None
    assert guess.m == guess.q[guess.token]
    return guess


def test_the_example() -> None:
    assert doctest.testmod(draft_sampler).failed == 0


@pytest.mark.parametrize(("min_p", "kept"), [(0.0, 4), (RARE / 2, 4), (0.1, 3), (0.4, 2)])
def test_what_is_rare_is_not_drawn(min_p: float, kept: int) -> None:
    law = drawn(Sampling(1.0, min_p=min_p), np.log(SHARES)).q
    assert list(law.values()) == pytest.approx(list(SHARES[:kept] / SHARES[:kept].sum()))


def test_one_is_drawn_from_a_few_at_most() -> None:
    row = np.linspace(0.0, -1.0, 3 * WIDEST)
    assert sorted(drawn(Sampling(1.0), row).q) == list(range(WIDEST))


def test_a_row_of_nothing_holds_no_guess() -> None:
    sampler = DraftSampler(4, Sampling())
    assert sampler.guess(np.full(4, -math.inf), 0, None) is None
    assert sampler.guess(np.array([0.0, math.nan, 0.0, 0.0]), 0, None) is None
