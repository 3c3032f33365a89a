"""`Logprobs`: how likely the model itself finds an emitted token, before any sampling setting."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ngramspec.sampling.distribution import largest


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Natural logarithms of probabilities at one position, by the softmax of the target's logits.

    Attributes:
        token: id of the emitted token.
        logprob: of that token.
        top: (token id, logprob) of the likeliest tokens, best first, the lowest id among equals.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def logprobs(row: NDArray[np.float32], token: int, count: int) -> Logprobs:
    """Logprobs of an emitted token and of the `count` likeliest ones, from logits of shape (n_vocab,)."""
    best = float(row.max())
    total = best + float(np.log(np.exp(row - np.float32(best)).sum(dtype=np.float64)))
    ids = largest(row, count) if count else np.empty(0, np.intp)
    ids = ids[np.argsort(-row[ids], kind="stable")]
    return Logprobs(token, float(row[token]) - total, tuple((int(i), float(row[i]) - total) for i in ids))
