"""`NasdDrafter`: n-grams of the text, and of what the target held likely beside it.

NASD, "n-gram assisted speculative decoding" (romsto/Speculative-Decoding on GitHub): the counts behind a context are
those of the tokens that followed, and, as filler, those of the three likeliest tokens of the target at each position.
Acceptance here is this package's, so that sampling stays exact; there a refused position is sampled twice.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ngramspec.drafting.ngram import NGramDrafter
from ngramspec.sampling.distribution import largest

FILLER = 3
"""Likeliest tokens that are counted at each position."""


class NasdDrafter(NGramDrafter):
    """An `NGramDrafter` that also counts what the target would have said instead.

    It needs a model: without logits it is an `NGramDrafter`. Complexity: O(n_vocab) per position emitted.
    """

    name = "nasd"
    wants_logits = True

    def begin(self, prompt: Sequence[int]) -> None:
        super().begin(prompt)
        self._rows: list[NDArray[np.intp]] = []

    def see(self, tokens: Sequence[int], rows: NDArray[np.float32], accepted: int = 0) -> None:
        self._rows = [largest(row, FILLER) for row in rows]

    def accept(self, tokens: Sequence[int]) -> int:
        for token, likeliest in zip(tokens, self._rows, strict=False):
            for other in likeliest[:FILLER].tolist():
                self.predictor.suppose(other)
            self.predictor.update(token)
        counted, self._rows = len(self._rows), []
        hits = super().accept(tokens)
        del self._unread[: min(counted, len(tokens))]
        return hits
