# cython: language_level=3
"""`CostCurve`: seconds of one target pass by batch size, measured on this machine and refreshed as passes run.

CPUs multiply, GPUs change kernels, and the curve is not even monotonic.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

import cython

REFRESH = 0.05  # weight of one real pass in the running averages: about the last twenty passes of a size count
PADDING_GAIN = 0.97  # a batch is padded to a larger size only if that costs less than this part of the fitting one

BEYOND = 0.5
"""Weight of the first pass that is larger than all before it: what was expected of it is no more than a slope drawn
out, which rises with the context where attention is not shared by the tokens of a batch."""

WORST = 1.5  # no batch costs more than this many times its tokens one by one; a curve that says so was disturbed

LEAST = 0.8
"""No batch costs less than this part of a pass over one token, which does less; where one seems to, that pass was
disturbed. Believed, it would be padded to from then on, and no pass over one token would ever tell."""

RARE = 0.3  # weight of a one-token pass that comes after many larger ones
SPIKE = 1.1  # a pass looks interrupted when it takes more than this many times what is expected

REBUILD_EVERY = 16
"""Passes between two rebuilds of the tables from the refreshed ratios; a rebuild costs some 30 microseconds."""


class CostCurve:
    """Seconds per pass at measured sizes; between them linear, past the last one linear with the mean slope.

    A pass of another size than the one before costs `switch` seconds more: llama.cpp then builds its graph anew (a GPU
    captures it anew). On small models that is as much as half a pass.

    Real passes refresh it in two parts. The *level* (seconds of a one-token pass now) follows every pass, since
    a longer context or a throttled machine slows all sizes together; the *ratio* T(n) / T(1) of a size follows
    passes of that size only.

    Args:
        seconds: batch size -> seconds in a run of that size; must hold size 1; all positive; else ValueError.
        switch: seconds that a change of size adds, at least 0.
        measured: whether they came from a clock, and so may be wrong; else they stay as they are.
    """

    def __init__(self, seconds: Mapping[int, float], switch: float = 0.0, *, measured: bool = True) -> None:
        if 1 not in seconds or not all(0 < s < math.inf for s in seconds.values()):
            raise ValueError("a cost curve needs positive seconds, those of batch size 1 among them")
        if not 0 <= switch < math.inf:
            raise ValueError(f"switch is {switch}, but must be at least 0")
        self.level = float(seconds[1])  # seconds of a one-token pass now
        self.switch = switch
        self.measured = measured
        # Most that a batch may cost, as a multiple of its tokens one by one.
        self.worst = WORST if measured else math.inf
        self.last = 1  # size of the last pass observed
        self._since_single = 0
        # What the last pass took / what was expected: of one token, and of more.
        self._excess_single = self._excess_more = 1.0
        self._ratios = {n: min(s / self.level, self.worst * n) for n, s in sorted(seconds.items())}
        self._rebuild()

    def _rebuild(self) -> None:
        self._table = [1.0]
        self._plans: dict[Sequence[int], Sequence[tuple[int, float]]] = {}
        self._slopes: dict[Sequence[int], array[float]] = {}
        self._unseen = 0

    def seconds(self, size: cython.Py_ssize_t) -> float:
        """Expected seconds of a pass over `size` tokens."""
        return self.level * self.ratio(size)

    def ratio(self, size: cython.Py_ssize_t) -> float:
        """T(size) / T(1)."""
        if size >= len(self._table):
            self._extend(size)
        return self._table[size]

    def _extend(self, size: cython.Py_ssize_t) -> None:
        """Fill the table of ratios up to `size`."""
        known, table = self._ratios, self._table
        sizes = sorted(known)
        for n in range(len(table), size + 1):
            i = bisect_right(sizes, n)
            below = sizes[i - 1]
            low = known[below]
            if below == n:
                table.append(low)
            elif i < len(sizes):
                above = sizes[i]
                share = (n - below) / (above - below)
                table.append(low + (known[above] - low) * share)
            else:
                # One point says nothing about a slope: take a batch to cost what its tokens cost.
                slope = max(0.0, (low - 1.0) / (below - 1)) if below > 1 else 1.0
                table.append(low + slope * (n - below))

    def padded(self, sizes: Sequence[int]) -> Sequence[tuple[int, float]]:
        """Entry n: (size, T(size) / T(1)) of the cheapest of `sizes`, which ascend, that holds n tokens.

        A batch is padded further than it must be only to a measured size, and only for a saving that is no noise.
        """
        known = self._plans.get(sizes)
        if known is not None:
            return known
        fitting = cheapest = 0
        cost = least = math.inf
        most = sizes[-1]
        allowed = set(sizes)
        plan = [(0, 0.0)] * (most + 1)
        for n in range(most, 0, -1):
            if n in allowed:
                fitting, cost = n, self.ratio(n)
                if n in self._ratios and cost <= least:
                    cheapest, least = n, cost
            plan[n] = (cheapest, least) if least < PADDING_GAIN * cost else (fitting, cost)
        self._plans[sizes] = plan
        return plan

    def slopes(self, sizes: Sequence[int]) -> Sequence[float]:
        """Entry k: the least that one more token costs a draft of k tokens, in units of T(1).

        That is the lowest of (T(1 + m) - T(1 + k)) / (m - k) over all longer drafts m, batches padded as they
        best are; infinite for the longest. O(largest size), from the lower convex hull, read from its end.
        """
        slopes = self._slopes.get(sizes)
        if slopes is None:
            slopes = self._slopes[sizes] = _slopes([cost for _, cost in self.padded(sizes)[1:]])
        return slopes

    def switching(self, size: cython.Py_ssize_t, plain: cython.Py_ssize_t) -> float:
        """What a batch of `size` costs now beyond T(size), in units of T(1).

        Each change of size is paid for. A pass that leaves the size `plain` also pays for the way back, which is
        then free.
        """
        if size == self.last or size == plain:  # noqa: PLR1714 - compiled, a tuple is made
            return 0.0
        return self.switch * (2 if self.last == plain else 1) / self.level

    def undisturbed(self, size: cython.Py_ssize_t, seconds: cython.double) -> float:
        """Seconds that a pass would have taken uninterrupted, as far as can be told; never more than it took.

        A pass that takes far longer than expected was interrupted, or the curve is wrong. The pass of its kind before
        it tells which: twice in a row is no accident. To be asked before `observe`. O(1).
        """
        if not self.measured:
            return seconds
        expected: cython.double = self.seconds(size) + (0.0 if size == self.last else self.switch)
        if size > 1:
            before, self._excess_more = self._excess_more, seconds / expected
        else:
            before, self._excess_single = self._excess_single, seconds / expected
        return min(seconds, max(SPIKE, before) * expected)

    def observe(self, size: cython.Py_ssize_t, seconds: cython.double) -> None:
        """Learn from a real pass over `size` tokens, if the curve was measured."""
        if not self.measured:
            self.last = size
            return
        ratio: cython.double = 1.0 if size == 1 else self.ratio(size)
        switch: cython.double = 0.0 if size == self.last else self.switch
        self.last = size
        # A pass that the system interrupted says nothing about the machine's speed.
        seconds = min(seconds, 3.0 * (self.level * ratio + switch))
        if size == 1:
            # A one-token pass counts more for the level than a larger batch, which depends on that size's ratio being
            # right; and the rarer such passes are, the more each counts.
            scale = 1.0 + min(RARE, REFRESH * (1 + self._since_single)) * (seconds / (self.level + switch) - 1.0)
            self.level *= scale
            if switch:
                self.switch *= scale
            self._since_single = 0
            return
        seconds = max(seconds - switch, 0.1 * seconds)
        self._since_single += 1
        self.level += REFRESH / 8 * (seconds / ratio - self.level)
        beyond = size > max(self._ratios)
        known = self._ratios.get(size, ratio)
        weight = BEYOND if beyond else REFRESH
        self._ratios[size] = min(known + weight * (seconds / self.level - known), self.worst * size)
        self._unseen += 1
        if beyond or self._unseen >= REBUILD_EVERY:
            self._rebuild()

    def retime(self, size: int, single: float, seconds: float) -> None:
        """Take in a fresh measurement: `seconds` of a pass over `size` tokens, `single` of one over one.

        A cached ratio that is too low is corrected by `observe` as soon as it is used. One that is too high
        never is, since nothing of that size is then sent; so a fresh measurement may only lower it. One that cannot be
        (see LEAST) is left aside.
        """
        if seconds < LEAST * single:
            return
        self.level = single
        if size > 1:
            self._ratios[size] = min(self.ratio(size), seconds / single)
        self._rebuild()

    @property
    def plausible(self) -> bool:
        """Whether the curve can be: no batch costs much less than a single token (see LEAST)."""
        return min(self._ratios.values()) >= LEAST

    def to_json(self) -> dict[str, Any]:
        """Seconds by batch size (as text), and of a change of size."""
        seconds = {str(n): self.level * r for n, r in sorted(self._ratios.items())}
        return {"seconds": seconds, "switch": self.switch}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CostCurve:
        """The inverse of `to_json`; raises ValueError, TypeError, KeyError or AttributeError on anything else."""
        return cls({int(n): float(s) for n, s in data["seconds"].items()}, float(data["switch"]))


def _slopes(costs: list[float]) -> array[float]:
    """For every entry the lowest slope of a straight line from it to a later one; infinite for the last."""
    k: cython.Py_ssize_t
    best: cython.double
    slope: cython.double
    here: cython.double
    slopes = array("d", [math.inf]) * (len(costs) + 1)
    hull: list[int] = []
    for k in range(len(costs) - 1, -1, -1):
        here = costs[k]
        best = math.inf
        if hull:
            best = (costs[hull[-1]] - here) / (hull[-1] - k)
        while len(hull) > 1:
            slope = (costs[hull[-2]] - here) / (hull[-2] - k)
            if best < slope:
                break
            best = slope
            hull.pop()
        slopes[k] = best
        hull.append(k)
    return slopes
