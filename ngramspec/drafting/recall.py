"""`Recall`: texts that a drafter looks things up in beside the context, kept by this process."""

from __future__ import annotations

from collections.abc import Sequence

from ngramspec.drafting.token_index import SEAM, TokenIndex

MOST = 1 << 22
"""Tokens of answers to remember, at some 12 bytes each: when there are more, the older half is forgotten."""


class Recall:
    """Texts to draft from. `ngramspec.memory.Memory` adds those that are kept on disk.

    Args:
        stored: indexes of texts that were there before, which never change.

    Attributes:
        indexes: what to look up, the oldest first; all but the last never change. A negative token in one is a
            seam between two texts. Always the same list.
    """

    def __init__(self, stored: Sequence[TokenIndex] = ()) -> None:
        self._heard = [TokenIndex()]
        self.indexes: list[TokenIndex] = [*stored, *self._heard]

    def hear(self, tokens: Sequence[int]) -> None:
        """Remember an answer in this process. One that stays in the context need not be heard: it is there already.

        Args:
            tokens: token ids, none of them negative.
        """
        if self._heard[-1].size > MOST // 2:
            del self.indexes[-len(self._heard) :]
            self._heard = [self._heard[-1], TokenIndex()]
            self.indexes += self._heard
        if tokens:
            self._heard[-1].extend(tokens)
            self._heard[-1].append(SEAM)

    def refresh(self) -> None:
        """Take up what other processes added; for texts that none does, nothing."""
