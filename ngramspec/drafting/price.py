# cython: language_level=3, wraparound=False, initializedcheck=False
"""`TokenPrice`: whether one more drafted token is worth its time."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from itertools import accumulate

import cython


class TokenPrice:
    """The price of one more drafted token. A drafter that knows it ends a draft where no longer one can pay.

    Args:
        rate: recent throughput, in tokens per unit of time.
        slopes: entry k is the least time that one more token costs a draft of k tokens: the lowest slope of the cost
            curve from there on. At least as many entries as a draft can have tokens, and one more.
        seconds: of a unit of time, for drafters that take time themselves; 0: nobody knows.
        loss_budget: units of time that may be lost if the draft is refused.
        costs: makes the attribute `costs` when it is first read: drafters without a draft model never do. By default it
            is what the slopes add up to.
        texts: how many are drafted for at this price at a time.

    The unit of time is the caller's, by custom a one-token pass.
    """

    def __init__(
        self,
        rate: float,
        slopes: Sequence[float],
        seconds: float = 0.0,
        loss_budget: float = math.inf,
        costs: Callable[[], Sequence[float]] | None = None,
        texts: int = 1,
    ) -> None:
        self.rate = rate
        self.seconds = seconds
        self.loss_budget = loss_budget
        self.texts = texts
        self._make_costs = costs
        self._costs: Sequence[float] | None = None
        self.slopes = self._slopes = slopes if isinstance(slopes, array) else array("d", slopes)

    @property
    def costs(self) -> Sequence[float]:
        """Entry k is what a draft of k tokens takes longer than none."""
        if self._costs is None:
            make = self._make_costs
            self._costs = list(accumulate(self.slopes[:-1], initial=0.0)) if make is None else make()
        return self._costs

    def pays(self, reach: cython.double, length: cython.Py_ssize_t) -> cython.bint:
        """Whether a draft of `length` tokens, all accepted with probability `reach`, can gain by one token more."""
        return reach >= self.rate * self._slopes[length]
