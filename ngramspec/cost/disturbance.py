"""`Disturbance`: whether another process keeps the cores from this one, seen by how long passes take.

The threads of a pass wait for each other by spinning. Where another process holds one of their cores, all of them
wait for a turn of the scheduler, many times in each pass, which may then take a hundred times as long and more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

FACTOR = 8.0
"""A pass that takes this many times its expected time counts as disturbed; on a core shared fairly it takes twice."""

LOST = 1.0
"""Seconds that disturbed passes must have lost in a row before it is worth a word."""

_RUN = 3


@dataclass(slots=True)
class Disturbance:
    """Watches the passes of one generation.

    Attributes:
        slowdown: how many times as long as expected the passes of the worst run took; None while all went well.
    """

    slowdown: float | None = None
    _usual: float = math.inf
    _passes: int = 0
    _taken: float = 0.0
    _expected: float = 0.0

    def see(self, seconds: float, batch: int, plain_seconds: float) -> None:
        """Take note of a pass.

        Args:
            seconds: that it took.
            batch: its tokens; no batch takes longer than its tokens one by one.
            plain_seconds: what the cost curve says of one token; 0: unknown. The curve learns from disturbed passes
                too, so the least that it said counts.
        """
        if plain_seconds <= 0 or batch < 1:
            return
        self._usual = min(self._usual, plain_seconds)
        expected = batch * self._usual
        if seconds < FACTOR * expected:
            self._passes, self._taken, self._expected = 0, 0.0, 0.0
            return
        self._passes += 1
        self._taken += seconds
        self._expected += expected
        if self._passes >= _RUN and self._taken - self._expected >= LOST:
            self.slowdown = max(self.slowdown or 0.0, self._taken / self._expected)

    @property
    def note(self) -> str | None:
        """What is to be told, and what to do; None while all went well."""
        if self.slowdown is None:
            return None
        return (
            f"passes took up to {self.slowdown:.0f} times as long as usual: another process holds this machine's"
            " cores; end it, take fewer threads (-t 1), or set OMP_WAIT_POLICY=passive"
        )
