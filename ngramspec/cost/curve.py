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

NOISY = 0.25
"""Factor for the weight of a pass in the ratio of its size while other programs run, because its time varies more."""

RARE = 0.3  # maximum weight of a pass for the level
RESTART = 3  # passes after a restart, of which the fastest shows the level
SPIKE = 1.1  # a pass looks interrupted when it takes more than this many times what is expected

REBUILD_EVERY = 16
"""Passes between two rebuilds of the tables from the refreshed ratios; a rebuild costs some 30 microseconds."""


class CostCurve:
    """Seconds per pass at measured sizes; between them linear, past the last one linear with the mean slope.

    A pass of another size than the one before costs `switch` seconds more: llama.cpp then builds its graph anew (a GPU
    captures it anew). On small models that is as much as half a pass.

    Real passes refresh it in three parts. The *level* is the time of a one-token pass in sustained plain decoding. It
    follows one-token passes that come after another one, and slowly all others, because a longer context or a
    throttled processor slows all sizes together. A one-token pass after a larger one shows the cost of a *change* of
    size. The *ratio* T(n) / T(1) of a size follows passes of that size.

    Args:
        seconds: Seconds of a pass by batch size, in a run of that size; must contain size 1; all positive.
        switch: Seconds that a change of size adds, at least 0.
        threads: CPU threads of a pass over one token, and over more, that the times were measured with; `None` means
            unknown.
        measured: Whether the times came from a clock, and so may be wrong; otherwise they stay as they are.

    Raises:
        ValueError: A time is missing or out of range.
    """

    def __init__(
        self,
        seconds: Mapping[int, float],
        switch: float = 0.0,
        *,
        threads: tuple[int, int] | None = None,
        measured: bool = True,
    ) -> None:
        if 1 not in seconds or not all(0 < s < math.inf for s in seconds.values()):
            raise ValueError("a cost curve requires positive seconds, including those of batch size 1")
        if not 0 <= switch < math.inf:
            raise ValueError(f"switch must be at least 0, got {switch}")
        self.level = float(seconds[1])  # seconds of a one-token pass now
        self.switch = switch
        self.threads = threads
        self.measured = measured
        # Most that a batch may cost, as a multiple of its tokens one by one.
        self.worst = WORST if measured else math.inf
        self.last = 1  # size of the last pass observed
        self._since_plain = 0  # passes since the last one that showed the level
        self._restarting = 0  # passes until the level is known again after a restart
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

    def observe(self, size: cython.Py_ssize_t, seconds: cython.double, is_quiet: bool = True) -> None:
        """Learn from a real pass over `size` tokens, if the curve was measured.

        Args:
            size: Tokens of the pass.
            seconds: Time of the pass.
            is_quiet: Whether other programs were idle. If not, the cost of a change is kept: noise could raise it so
                far that no draft pays, and without drafts no later pass would correct it.
        """
        if not self.measured:
            self.last = size
            return
        ratio: cython.double = 1.0 if size == 1 else self.ratio(size)
        is_change: cython.bint = size != self.last
        switch: cython.double = self.switch if is_change else 0.0
        self.last = size
        if self._restarting:
            scale = max(seconds - switch, 0.5 * seconds) / (self.level * ratio)
            if scale < 1.0 or self._restarting == RESTART:
                self.level *= scale
                self.switch *= scale
            self._restarting -= 1
            return
        # A pass that the system interrupted says nothing about the machine's speed.
        seconds = min(seconds, 3.0 * (self.level * ratio + switch))
        if size == 1 and not is_change:
            # The rarer such passes are, the more each counts.
            self.level += min(RARE, REFRESH * (1 + self._since_plain)) * (seconds - self.level)
            self._since_plain = 0
            return
        self._since_plain += 1
        if size == 1:
            error = seconds - self.level - switch
            if switch:
                # Half of the difference is put down to the change, and half to the level.
                self.level += REFRESH / 2 * error
                if is_quiet:
                    self.switch = max(0.0, switch + REFRESH / 2 * error)
            else:
                self.level += min(RARE, REFRESH * self._since_plain) * error
                self._since_plain = 0
            return
        seconds = max(seconds - switch, 0.1 * seconds)
        self.level += REFRESH / 8 * (seconds / ratio - self.level)
        beyond = size > max(self._ratios)
        known = self._ratios.get(size, ratio)
        weight = (BEYOND if beyond else REFRESH) * (1.0 if is_quiet else NOISY)
        self._ratios[size] = min(known + weight * (seconds / self.level - known), self.worst * size)
        self._unseen += 1
        if beyond or self._unseen >= REBUILD_EVERY:
            self._rebuild()

    def restart(self) -> None:
        """Take the level from the next passes: the load of the machine or the number of threads changed."""
        self._restarting = RESTART if self.measured else 0

    def copy(self, threads: tuple[int, int] | None) -> CostCurve:
        """Return a curve of the same shape for another number of threads, whose level is not known yet."""
        curve = CostCurve.from_json(self.to_json())
        curve.threads = threads
        curve.restart()
        return curve

    def replace(self, other: CostCurve) -> None:
        """Take over the times of a new measurement."""
        self.level, self.switch, self.threads = other.level, other.switch, other.threads
        self._ratios, self._restarting = dict(other._ratios), 0
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
        """Return seconds by batch size (as text) and of a change of size, and the numbers of threads."""
        seconds = {str(n): self.level * r for n, r in sorted(self._ratios.items())}
        return {"seconds": seconds, "switch": self.switch, "threads": self.threads}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CostCurve:
        """The inverse of `to_json`; raises ValueError, TypeError, KeyError or AttributeError on anything else."""
        threads = None if data["threads"] is None else (int(data["threads"][0]), int(data["threads"][1]))
        seconds = {int(n): float(s) for n, s in data["seconds"].items()}
        return cls(seconds, float(data["switch"]), threads=threads)


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
