# cython: language_level=3
"""`CostCurve`: seconds of a decode call (a pass) by batch size, measured on this machine and updated during decoding.

On a CPU the time grows with the number of tokens. On a GPU it changes in steps when other kernels are used. The curve
is not even monotonic.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

import cython

REFRESH = 0.05  # weight of one real pass in the running averages, so that about the last twenty passes of a size count
PADDING_GAIN = 0.97  # maximum cost of a padded batch, as a part of the cost of the size that fits

BEYOND = 0.5
"""Weight of the first pass that is larger than all measured sizes. Its expected time was only extrapolated, and the
slope rises with the context if the tokens of a batch do not share attention."""

WORST = 1.5  # maximum cost of a batch over that of its tokens one by one; a higher measurement was disturbed

MIN_RATIO = 0.8
"""Minimum T(n) / T(1). A batch does more work than a pass over one token; if it seems to cost less than this, the
one-token pass was disturbed. If the curve accepted such a ratio, all later one-token passes would be padded to that
size, and no real one would correct the curve."""

NOISY = 0.25
"""Factor for the weight of a pass in the ratio of its size while other programs run, because times then vary more."""

REFUTED = 3.0
"""Factor by which one-token passes are faster than when the curve was measured, if that measurement was disturbed by
other programs. A shorter context explains less."""

RARE = 0.3  # maximum weight of a pass in the level
RESTART = 3  # number of passes after a restart, of which the fastest sets the level
SPIKE = 1.1  # a pass counts as interrupted if it takes more than this many times the expected time

REBUILD_EVERY = 16
"""Passes between two rebuilds of the tables from the updated ratios; a rebuild takes about 30 microseconds."""


class CostCurve:
    """Seconds per pass by batch size: interpolated between the measured sizes, and extrapolated with the mean slope.

    A pass of another size than the previous one costs `switch` seconds more, because llama.cpp then rebuilds its graph.
    On CUDA it also launches each kernel separately, and the pass after it costs `capture` seconds more, because CUDA
    then captures the graph, which later passes replay. On small models, both together can take as long as ten passes.

    Real passes update three parts of the curve:

    - The *level* is the time of a one-token pass in sustained plain decoding. It follows one-token passes that come
      after another one-token pass. It slowly follows all other passes too, because a longer context or a throttled
      processor slows all sizes together.
    - The cost of a *change* of size follows one-token passes that come after a larger pass.
    - The *ratio* T(n) / T(1) of a size follows passes of that size.

    Args:
        seconds: Seconds of a pass by batch size, after a pass of that size; must contain size 1; all positive.
        switch: Seconds that a change of size adds to the first pass of the new size, at least 0.
        capture: Seconds that it adds to the second one, at least 0.
        threads: CPU threads of the measured passes: over one token, and over more; `None` means unknown.
        measured: True if the times came from a clock, and so may be wrong; otherwise they are never changed.

    Raises:
        ValueError: A time is missing or out of range.
    """

    def __init__(
        self,
        seconds: Mapping[int, float],
        switch: float = 0.0,
        capture: float = 0.0,
        *,
        threads: tuple[int, int] | None = None,
        measured: bool = True,
    ) -> None:
        if 1 not in seconds or not all(0 < s < math.inf for s in seconds.values()):
            raise ValueError("a cost curve requires positive seconds, including those of batch size 1")
        if not (0 <= switch < math.inf and 0 <= capture < math.inf):
            raise ValueError(f"switch and capture must be at least 0, got {switch} and {capture}")
        self.level = float(seconds[1])  # current seconds of a one-token pass
        self.measured_level = self.level  # the same when the curve was measured
        self.switch, self.capture = switch, capture
        self.threads = threads
        self.measured = measured
        # Maximum cost of a batch, as a multiple of the cost of its tokens one by one.
        self.worst = WORST if measured else math.inf
        self.last = 1  # size of the last pass
        self.last_is_first = False  # whether the pass before that had another size
        self._since_plain = 0  # number of passes since the last one that showed the level
        self._restarting = 0  # number of passes until the level is known again after a restart
        # Time of the last pass / its expected time, separately for passes over one token and over more.
        self._excess_single = self._excess_more = 1.0
        self._ratios = {n: min(s / self.level, self.worst * n) for n, s in sorted(seconds.items())}
        self._rebuild()

    def _rebuild(self) -> None:
        self._table = [1.0]
        self._plans: dict[Sequence[int], Sequence[tuple[int, float]]] = {}
        self._slopes: dict[Sequence[int], array[float]] = {}
        self._unseen = 0

    def seconds(self, size: cython.Py_ssize_t) -> float:
        """Return the expected seconds of a pass over `size` tokens."""
        return self.level * self.ratio(size)

    def ratio(self, size: cython.Py_ssize_t) -> float:
        """Return T(size) / T(1)."""
        if size >= len(self._table):
            self._extend(size)
        return self._table[size]

    def _extend(self, size: cython.Py_ssize_t) -> None:
        """Fill the table of ratios up to `size`."""
        ratios, table = self._ratios, self._table
        sizes = sorted(ratios)
        for n in range(len(table), size + 1):
            i = bisect_right(sizes, n)
            below = sizes[i - 1]
            low = ratios[below]
            if below == n:
                table.append(low)
            elif i < len(sizes):
                above = sizes[i]
                share = (n - below) / (above - below)
                table.append(low + (ratios[above] - low) * share)
            else:
                # One point does not determine a slope, so a batch is assumed to cost as much as its tokens one by one.
                slope = max(0.0, (low - 1.0) / (below - 1)) if below > 1 else 1.0
                table.append(low + slope * (n - below))

    def optimal_batches(self, sizes: Sequence[int]) -> Sequence[tuple[int, float]]:
        """Return a table whose entry n is (size, T(size) / T(1)) of the cheapest batch for n tokens.

        A batch is padded beyond the next allowed size only to a measured size, and only if the saving exceeds noise.

        Args:
            sizes: Allowed batch sizes, ascending.
        """
        table = self._plans.get(sizes)
        if table is not None:
            return table
        fitting = best_size = 0
        cost = best_cost = math.inf
        largest = sizes[-1]
        size_set = set(sizes)
        plan = [(0, 0.0)] * (largest + 1)
        for n in range(largest, 0, -1):
            if n in size_set:
                fitting, cost = n, self.ratio(n)
                if n in self._ratios and cost <= best_cost:
                    best_size, best_cost = n, cost
            plan[n] = (best_size, best_cost) if best_cost < PADDING_GAIN * cost else (fitting, cost)
        self._plans[sizes] = plan
        return plan

    def slopes(self, sizes: Sequence[int]) -> Sequence[float]:
        """Return a table whose entry k is the minimum cost of one more token in a draft of k tokens, in units of T(1).

        It is the lowest (T(1 + m) - T(1 + k)) / (m - k) over all longer drafts m, with each batch padded to its
        cheapest size; infinite for the longest draft. O(largest size): the lower convex hull, built from its end.
        """
        slopes = self._slopes.get(sizes)
        if slopes is None:
            slopes = self._slopes[sizes] = _slopes([cost for _, cost in self.optimal_batches(sizes)[1:]])
        return slopes

    def switch_cost(self, size: cython.Py_ssize_t, plain: cython.Py_ssize_t) -> float:
        """Return the cost that a batch of `size` now adds to T(size) by changes of size, in units of T(1).

        Each change of size is charged. A pass that leaves the size `plain` is charged for the change back too, which is
        then free.
        """
        if size == plain:
            return 0.0
        way_back: cython.double = self.change if self.last == plain else 0.0
        return (self.change_seconds(size) + way_back) / self.level

    @property
    def change(self) -> float:
        """Seconds that a change of size adds to the passes after it."""
        return self.switch + self.capture

    def change_seconds(self, size: cython.Py_ssize_t) -> float:
        """Return the seconds that the last change of size adds to the next pass, which has this size."""
        if size != self.last:
            return self.switch
        return self.capture if self.last_is_first else 0.0

    def without_interruption(self, size: cython.Py_ssize_t, seconds: cython.double, is_quiet: bool = True) -> float:
        """Return the estimated seconds of a pass without interruptions, at most `seconds`; call it before `observe`.

        A pass that takes far longer than expected was interrupted, or the curve is wrong. If the previous pass of its
        kind (one token, or more) took longer by the same factor, the curve is wrong, and the time is kept. O(1).

        Args:
            size: Tokens of the pass.
            seconds: Time of the pass.
            is_quiet: True if other programs were idle. If not, the estimate is at most the time that the curve expects.
        """
        if self.measured:
            normal: cython.double = self.seconds(size) + self.change_seconds(size)
            if size > 1:
                before, self._excess_more = self._excess_more, seconds / normal
            else:
                before, self._excess_single = self._excess_single, seconds / normal
            seconds = min(seconds, max(SPIKE, before) * normal)
        return seconds if is_quiet else min(seconds, self.seconds(size))

    def begin_pass(self, size: int) -> tuple[int, bool]:
        """Set the size of the last pass, without its time; return the values of `last` and `last_is_first` before."""
        before = self.last, self.last_is_first
        self.last_is_first, self.last = size != self.last, size
        return before

    def observe(self, size: cython.Py_ssize_t, seconds: cython.double, is_quiet: bool = True) -> None:
        """Learn from a real pass over `size` tokens, if the curve was measured.

        Args:
            size: Tokens of the pass.
            seconds: Time of the pass.
            is_quiet: True if other programs were idle. If not, the cost of a change is kept: noise could raise it so
                far that no draft pays, and without drafts no later pass would correct it.
        """
        if not self.measured:
            self.begin_pass(size)
            return
        ratio: cython.double = 1.0 if size == 1 else self.ratio(size)
        is_change: cython.bint = size != self.last
        switch: cython.double = self.change_seconds(size)
        is_capture: cython.bint = self.last_is_first and not is_change and self.capture > 0
        self.begin_pass(size)
        if self._restarting:
            scale = max(seconds - switch, 0.5 * seconds) / (self.level * ratio)
            if scale < 1.0 or self._restarting == RESTART:
                self.level *= scale
                self.switch *= scale
                self.capture *= scale
            self._restarting -= 1
            return
        if is_capture:
            return  # its time varies too much to show the machine's speed
        # A pass that the system interrupted does not show the machine's speed.
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
                # Half of the difference is attributed to the change, and half to the level.
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
        old_ratio = self._ratios.get(size, ratio)
        weight = (BEYOND if beyond else REFRESH) * (1.0 if is_quiet else NOISY)
        self._ratios[size] = min(old_ratio + weight * (seconds / self.level - old_ratio), self.worst * size)
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
        """Replace the times with those of a new measurement."""
        self.level, self.threads = other.level, other.threads
        self.switch, self.capture = other.switch, other.capture
        self.measured_level = other.measured_level
        self._ratios, self._restarting = dict(other._ratios), 0
        self._rebuild()

    def retime(self, size: int, single: float, seconds: float) -> None:
        """Correct the curve by a new measurement.

        A cached ratio that is too low is corrected by `observe` as soon as it is used. A ratio that is too high is not
        corrected there, because no pass of that size is then made. So a new measurement may only lower the ratio. An
        impossible measurement (see `MIN_RATIO`) is ignored.

        Args:
            size: Tokens of the measured pass.
            single: Seconds of a pass over one token.
            seconds: Seconds of a pass over `size` tokens.
        """
        if seconds < MIN_RATIO * single:
            return
        self.level = self.measured_level = single
        if size > 1:
            self._ratios[size] = min(self.ratio(size), seconds / single)
        self._rebuild()

    @property
    def is_refuted(self) -> bool:
        """True if passes are now so fast that other programs must have disturbed the measurement of the curve."""
        return self.measured and self.level * REFUTED < self.measured_level

    @property
    def plausible(self) -> bool:
        """True if the curve is possible: no batch costs much less than a single token (see `MIN_RATIO`)."""
        return min(self._ratios.values()) >= MIN_RATIO

    def to_json(self) -> dict[str, Any]:
        """Return the curve as JSON data; keys of the seconds are batch sizes as strings."""
        seconds = {str(n): self.level * r for n, r in sorted(self._ratios.items())}
        return {
            "seconds": seconds,
            "measured_level": self.measured_level,
            "switch": self.switch,
            "capture": self.capture,
            "threads": self.threads,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CostCurve:
        """Return the curve that `to_json` saved.

        Raises:
            ValueError, TypeError, KeyError, AttributeError: The data has another format.
        """
        threads = None if data["threads"] is None else (int(data["threads"][0]), int(data["threads"][1]))
        seconds = {int(n): float(s) for n, s in data["seconds"].items()}
        curve = cls(seconds, float(data["switch"]), float(data["capture"]), threads=threads)
        curve.measured_level = float(data.get("measured_level", curve.level))
        return curve


def _slopes(costs: list[float]) -> array[float]:
    """Return for every entry the lowest slope of a straight line to a later entry; infinite for the last one."""
    k: cython.Py_ssize_t
    best: cython.double
    slope: cython.double
    cost: cython.double
    slopes = array("d", [math.inf]) * (len(costs) + 1)
    hull: list[int] = []
    for k in range(len(costs) - 1, -1, -1):
        cost = costs[k]
        best = math.inf
        if hull:
            best = (costs[hull[-1]] - cost) / (hull[-1] - k)
        while len(hull) > 1:
            slope = (costs[hull[-2]] - cost) / (hull[-2] - k)
            if best < slope:
                break
            best = slope
            hull.pop()
        slopes[k] = best
        hull.append(k)
    return slopes
