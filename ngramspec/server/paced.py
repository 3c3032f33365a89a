"""`Paced`: how far an answer is, measured while its steps come."""

from __future__ import annotations

import copy
import time

from ngramspec.decoding.step import Stats, Step
from ngramspec.server.dialogue import Progress


class Paced:
    """Counts the steps of an answer, and the time they take to come.

    Args:
        prompt_tokens: of its prompt.
    """

    def __init__(self, prompt_tokens: int) -> None:
        self._prompt_tokens, self._cached, self._stats = prompt_tokens, 0, Stats()
        self._started = time.monotonic()
        self._first: float | None = None

    def start(self, cached: int) -> None:
        """It left the queue."""
        self._started, self._cached = time.monotonic(), cached

    def push(self, step: Step) -> Progress:
        """How far it is, a further step included."""
        now = time.monotonic()
        if self._first is None:
            self._first = now
        self._stats.add(step)
        stats = copy.copy(self._stats)
        return Progress(self._prompt_tokens, self._cached, stats, self._first - self._started, now - self._first)
