"""`RefusedRows`: reads what the target held likeliest behind refused tokens, where that is worth the time.

What it said there makes drafts that few tokens of would be accepted a little better. Modelled on SmolLM2 it pays where
a drafted token costs next to nothing, so that drafts are long; elsewhere it gains nothing that could be measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ngramspec.drafting.price import TokenPrice

MOST = 8
"""Rows that are read of a pass: those behind them are seldom of use."""

CHEAP = 0.05
"""Cost of a drafted token, in one-token passes, up to which rows are read, and questions asked beside drafts."""

SHARE = 0.005
"""Part of the time of a one-token pass that reading may take."""

SLOWER = 1.1
"""How much longer a row is taken to need each time than the quickest one so far, so that a hiccup is soon forgotten."""


class RefusedRows:
    """Decides how many rows to read, and reads them.

    Args:
        clock: tells seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds = 0.0

    def worth_reading(self, price: TokenPrice) -> int:
        """How many rows of a pass to read at a price; where nobody knows what a second is worth, up to `MOST`."""
        if price.slopes[0] > CHEAP:
            return 0
        if not price.seconds or not self._seconds:
            return MOST
        return min(MOST, int(SHARE * price.seconds / self._seconds))

    def read(self, rows: NDArray[np.float32]) -> list[int]:
        """The likeliest token of each row, of which there is at least one."""
        began = self._clock()
        best: list[int] = [int(row.argmax()) for row in rows]
        seconds = (self._clock() - began) / len(rows)
        self._seconds = min(seconds, self._seconds * SLOWER) if self._seconds else seconds
        return best
