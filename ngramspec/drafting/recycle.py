"""`RecycleDrafter`: what the target itself held likeliest after each token, the last time that it was asked.

Token Recycling (Luo et al. 2024, "Turning trash into treasure", arXiv 2408.08696): every pass computes logits at all
drafted positions, and those behind a refused token are thrown away, though they tell what the target expects after
that token. The paper keeps the 8 best successors and drafts a tree of 80 tokens; here it is a chain.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ngramspec.drafting.successors import Guess, SuccessorDrafter, top_two


class RecycleDrafter(SuccessorDrafter):
    """Drafts the chain of best successors of single tokens.

    For each token it knows the two best successors by the last logits computed after it, in whatever context, and
    drafts from the last token on: the best, the best after that, and so on. Without logits it drafts nothing.

    Complexity: O(n_vocab) per position verified, O(1) per token drafted. Memory: one entry per token of the vocabulary
    that was ever evaluated in a draft or before one.
    """

    name = "recycle"

    def begin(self, prompt: Sequence[int]) -> None:
        self._last = prompt[-1:]
        self._judge.begin()

    def see(self, tokens: Sequence[int], rows: NDArray[np.float32], accepted: int = 0) -> None:
        super().see(tokens, rows)
        for token, row in zip(tokens, rows, strict=True):
            best, law = top_two(row)
            if law:
                self._learn((token,), best, law)

    def _guess(self, tokens: Sequence[int]) -> Guess | None:
        known = self._pool.get(tuple(tokens[-1:] or self._last))
        return None if known is None else Guess(known, 1, known.run)

    def accept(self, tokens: Sequence[int]) -> int:
        self._last = tokens[-1:] or self._last
        return self._judge.settle(tokens)
