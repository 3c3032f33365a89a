"""`Scheduler`: decides whether a chunk of a prompt or a pass over the texts comes next.

If prompts and texts wait, prompts are evaluated first for half a second, so that their texts can join the others: a
pass costs little more with them. After that, prompts get `SHARE` times as much time as texts. Prompts take turns, so
that a short one does not wait for a long one. Embeddings and other work without a slot get at most as much time as
texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

SHARE = 3.0
"""Time of prompts, divided by that of texts, while both wait.

The sooner a prompt ends, the sooner its text shares the passes of the others. README.md has a simulation.
"""

PAUSE = 0.5
"""Seconds that a chunk of a prompt may delay texts, if its size can be chosen. Smaller chunks take longer per token."""

AHEAD = 0.5  # seconds by which prompts may exceed their share while texts wait
LONGEST = 1.0  # maximum seconds that a text waits for chunks of prompts, unless a single chunk takes longer
FORGET = 0.98  # weight of the expected time of a chunk after a faster chunk: chunks late in a prompt are slower
MIN_CHUNK = 32  # minimum number of tokens of such a chunk: smaller ones take nearly as long


class Scheduler:
    """Shares time between prompts and answers."""

    def __init__(self) -> None:
        self._lead_seconds = self._task_seconds = 0.0
        self._chunk_seconds = 0.0  # expected maximum time of a chunk while texts wait
        self._texts_wait = False
        self._order: list[object] = []  # prompts that had a turn, the last turn last
        self.read_seconds = 0.0  # time of a token in a chunk; 0 if it is not known

    def reads(self, readers: Sequence[T], writers: Sequence[object]) -> T | None:
        """Return the prompt of which a chunk comes next; `None` means that it is the turn of the texts.

        Args:
            readers: Prompts that are not evaluated completely, in order of arrival.
            writers: Texts that are being decoded.
        """
        self._texts_wait = bool(writers)
        if not readers or not writers:
            self._lead_seconds = 0.0
        if not readers or self._lead_seconds > AHEAD or 0 < self._lead_seconds > LONGEST - self._chunk_seconds:
            return None
        self._order = [reader for reader in self._order if reader in readers]
        next_reader = min(readers, key=lambda reader: self._order.index(reader) if reader in self._order else -1)
        self._order = [reader for reader in self._order if reader is not next_reader] + [next_reader]
        return next_reader

    def read(self, tokens: int, seconds: float) -> None:
        """Note that a chunk of `tokens` tokens was evaluated in `seconds`."""
        self._lead_seconds += seconds
        if self._texts_wait:
            self._chunk_seconds = max(seconds, FORGET * self._chunk_seconds)
        if tokens >= MIN_CHUNK or (tokens and not self.read_seconds):
            self.read_seconds = seconds / tokens

    def record_pass(self, seconds: float, *, are_alone: bool = False) -> None:
        """Note a pass over the texts; `are_alone`: no prompt waits."""
        self._lead_seconds = 0.0 if are_alone else max(0.0, self._lead_seconds - SHARE * seconds)
        self._task_seconds -= seconds

    def is_turn_of_task(self, writers: Sequence[object]) -> bool:
        """Return True if it is the turn of work that needs no slot, while texts are being decoded."""
        if not writers:
            self._task_seconds = 0.0
        return self._task_seconds <= 0

    def record_task(self, seconds: float) -> None:
        """Note a step of such work."""
        self._task_seconds = max(0.0, self._task_seconds) + seconds

    def chunk(self, max_tokens: int) -> int:
        """Return the size of a chunk that texts wait for, at most `max_tokens`."""
        if not self.read_seconds:
            return min(max_tokens, MIN_CHUNK)
        return max(1, min(max_tokens, max(MIN_CHUNK, int(PAUSE / self.read_seconds))))
