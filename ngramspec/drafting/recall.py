"""`Recall`: texts that a drafter looks things up in beside the context, kept by this process."""

from __future__ import annotations

from collections.abc import Sequence

from ngramspec.drafting.token_index import SEAM, TokenIndex

MOST = 1 << 22
"""Tokens of answers to remember, at some 12 bytes each: when there are more, remembering begins anew."""


class Recall:
    """Texts to draft from. `ngramspec.memory.Memory` adds those that are kept on disk.

    Args:
        older: indexes of texts that were there before, which never change.

    Attributes:
        indexes: what to look up, the oldest first; all but the last never change. A negative token in one is a
            seam between two texts.
    """

    def __init__(self, older: Sequence[TokenIndex] = ()) -> None:
        self._live = TokenIndex()
        self.indexes: list[TokenIndex] = [*older, self._live]

    def hear(self, tokens: Sequence[int]) -> None:
        """Remember an answer in this process. One that stays in the context need not be heard: it is there already.

        Args:
            tokens: token ids, none of them negative.
        """
        if self._live.size > MOST:
            self.indexes[-1] = self._live = TokenIndex()
        if tokens:
            self._live.extend(tokens)
            self._live.append(SEAM)
