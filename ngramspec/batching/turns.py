"""`Turns`: whether prompts or answers come next, and which of them, so that none waits for the length of another.

Prompts are read chunk by chunk and texts written token by token. Where both wait, prompts are read first for some
seconds, so that their texts join those that are being written: a pass costs little more with them. After that reading
and writing get the same time: a long prompt slows the answers of others to half their speed, and does not stop them.
Prompts take turns among each other, so that a short one does not wait for the end of a long one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

PAUSE = 0.25
"""Seconds that a chunk of a prompt may keep answers waiting, where the chunks can be chosen, once both take turns."""

AHEAD = 4.0
"""Seconds of reading that answers may wait for, beyond the time that they had themselves."""

LEAST = 32
"""Fewest tokens of such a chunk: fewer cost nearly as much time."""


class Turns:
    """Shares time between prompts and answers."""

    def __init__(self) -> None:
        self._ahead = 0.0
        self._order: list[object] = []  # prompts that had a turn, the last turn last
        self._per_token = 0.0

    def reads(self, readers: Sequence[T], writers: Sequence[object]) -> T | None:
        """The prompt to read a chunk of now; None: it is the answers' turn.

        Args:
            readers: prompts that are not read to their end, in the order in which they came.
            writers: texts that are being written.
        """
        if not readers or not writers:
            self._ahead = 0.0
        if not readers or self._ahead > AHEAD:
            return None
        self._order = [reader for reader in self._order if reader in readers]
        chosen = min(readers, key=lambda reader: self._order.index(reader) if reader in self._order else -1)
        self._order = [reader for reader in self._order if reader is not chosen] + [chosen]
        return chosen

    def read(self, tokens: int, seconds: float) -> None:
        """A chunk of so many tokens was read."""
        self._ahead += seconds
        if tokens:
            self._per_token = seconds / tokens

    def wrote(self, seconds: float) -> None:
        """A pass was made for the answers."""
        self._ahead = max(0.0, self._ahead - seconds)

    def chunk(self, most: int) -> int:
        """Tokens of a chunk that answers wait for, at most `most`."""
        if not self._per_token:
            return min(most, LEAST)
        seconds = max(PAUSE, AHEAD - self._ahead)
        return max(1, min(most, max(LEAST, int(seconds / self._per_token))))
