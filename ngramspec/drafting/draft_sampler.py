"""`DraftSampler`: what a draft model guesses, by its logits: the likeliest token, or one drawn.

>>> sampler = DraftSampler(3, Sampling(temperature=0.5))
>>> row = np.log(np.array([0.25, 0.5, 0.25, 9.0]))  # the last one means nothing to the target
>>> sampler.guess(row, 0, None)  # greedy
ModelGuess(token=1, m=0.5, q={})
>>> drawn = sampler.guess(row, 0, lambda offset, law: max(law))
>>> drawn.token, {token: round(q, 3) for token, q in drawn.q.items()}
(2, {0: 0.167, 1: 0.667, 2: 0.167})
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from ngramspec.backend import Logits
from ngramspec.drafting.chances import pick
from ngramspec.drafting.draft import Chooser
from ngramspec.sampling.distribution import largest
from ngramspec.sampling.settings import Sampling

RARE = 0.01
"""Tokens less likely than this part of the likeliest are not drafted when a draft is drawn."""

WIDEST = 32
"""Most tokens that one is drawn from."""


class ModelGuess(NamedTuple):
    """What the model would put at a position.

    Attributes:
        token: its guess.
        m: the model's probability of it.
        q: the law that it was drawn from; empty in greedy decoding.
    """

    token: int
    m: float
    q: Mapping[int, float]


class DraftSampler:
    """Guesses by rows of logits.

    Args:
        n_vocab: so many tokens, from 0 on, may be guessed.
        sampling: of the target. A guess is drawn at its temperature.
    """

    def __init__(self, n_vocab: int, sampling: Sampling) -> None:
        self._n_vocab = n_vocab
        self._temperature = sampling.temperature or 1.0
        rare = self._temperature * math.log(RARE)
        self._deepest = max(rare, math.log(sampling.min_p)) if sampling.min_p > 0 else rare

    def guess(self, row: Logits, offset: int, choose: Chooser | None) -> ModelGuess | None:
        """The guess by a row of logits; None where it holds none. O(n_vocab).

        Args:
            row: the logits.
            offset: its place in the draft.
            choose: as in `Drafter.propose`.
        """
        row = row[: self._n_vocab]
        best = int(row.argmax())
        if not math.isfinite(row[best]):
            return None
        if choose is None:
            return ModelGuess(best, 1.0 / float(np.exp(row - row[best]).sum()), {})
        law = self._law(row - row[best])
        token = pick(choose, offset, law)
        return ModelGuess(token, law[token], law)

    def _law(self, gaps: Logits) -> dict[int, float]:
        """What is held likely: the likeliest tokens, with their probabilities, of logits less the largest one."""
        ids = np.flatnonzero(gaps >= self._deepest)
        if ids.size > WIDEST:
            ids = ids[largest(gaps[ids], WIDEST)]
        weights = np.exp(gaps[ids].astype(np.float64) / self._temperature)
        return dict(zip(ids.tolist(), (weights / weights.sum()).tolist(), strict=True))
