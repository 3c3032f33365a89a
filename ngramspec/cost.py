"""`CostCurve`: seconds of one target pass by batch size, measured on this machine and refreshed as passes run.

A pass over n tokens does not cost what a pass over one costs: CPUs multiply, GPUs change kernels, and the curve
is not even monotonic. Everything that decides how much to draft reads it from here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence

import numpy as np

from ngramspec.probe import SIZES
from ngramspec.protocol import TargetProtocol

MEASURE_ORDER = (1, 2, 4, 3, 8, 5, 6, 16, 12, 9)
"""Most telling sizes first, in case the time budget ends before the list does."""

REFRESH = 0.05
"""Weight of one real pass in the running averages: about the last twenty passes of a size count."""

PADDING_GAIN = 0.97
"""A batch is padded to a larger size only if that costs less than this part of the fitting one."""

WORST = 1.5
"""No batch costs more than this many times its tokens one by one; a curve that says so was disturbed."""

RARE = 0.3
"""Weight of a one-token pass that comes after many larger ones."""

REBUILD_EVERY = 16
"""Passes between two looks of the tables at the refreshed ratios; a look costs some 50 microseconds."""

assert sorted(MEASURE_ORDER) == list(SIZES)


class CostCurve:
    """Seconds per pass at measured sizes; between them linear, past the last one linear with the mean slope.

    Real passes refresh it in two parts. The *level* (seconds of a one-token pass now) follows every pass,
    whatever its size, since a longer context or a throttled machine slows all sizes together; the *ratio*
    T(n) / T(1) of a size follows passes of that size only.

    Args:
        seconds: batch size -> seconds; must hold size 1; all positive.

    Raises:
        ValueError: size 1 is missing or a value is not positive.
    """

    def __init__(self, seconds: Mapping[int, float]) -> None:
        if 1 not in seconds or not all(0 < s < math.inf for s in seconds.values()):
            raise ValueError("a cost curve needs positive seconds, those of batch size 1 among them")
        self.level = float(seconds[1])
        self._since_single = 0
        self._ratios = {n: min(s / self.level, WORST * n) for n, s in sorted(seconds.items())}
        self._rebuild()

    def _rebuild(self) -> None:
        self._table = [1.0]
        self._plans: dict[Sequence[int], list[tuple[int, float]]] = {}
        self._unseen = 0

    def seconds(self, size: int) -> float:
        """Expected seconds of a pass over `size` tokens."""
        return self.level * self.ratio(size)

    def ratio(self, size: int) -> float:
        """T(size) / T(1)."""
        table = self._table
        while len(table) <= size:
            table.append(self._interpolate(len(table)))
        return table[size]

    def _interpolate(self, size: int) -> float:
        known = self._ratios
        if size in known:
            return known[size]
        below = max(n for n in known if n < size)
        above = min((n for n in known if n > size), default=None)
        if above is not None:
            share = (size - below) / (above - below)
            return known[below] + (known[above] - known[below]) * share
        # One point says nothing about a slope: take a batch to cost what its tokens cost.
        slope = max(0.0, (known[below] - 1.0) / (below - 1)) if below > 1 else 1.0
        return known[below] + slope * (size - below)

    def padded(self, sizes: Sequence[int]) -> list[tuple[int, float]]:
        """The cheapest way to evaluate n tokens in one pass, for every n up to the largest of `sizes`.

        Entry n is (size, T(size) / T(1)) of the cheapest of `sizes` that holds n tokens: the curve need not be
        monotonic, and a padded batch may cost less than the next fitting one. Only to a measured size, and for
        a saving that is no noise, is more padded than must be. `sizes` ascend.
        """
        plan = self._plans.get(sizes)
        if plan is None:
            plan = [(0, 0.0)] * (sizes[-1] + 1)
            allowed = set(sizes)
            fitting = cheapest = (sizes[-1], math.inf)
            for n in range(sizes[-1], 0, -1):
                if n in allowed:
                    fitting = (n, self.ratio(n))
                    if n in self._ratios and fitting[1] <= cheapest[1]:
                        cheapest = fitting
                plan[n] = cheapest if cheapest[1] < PADDING_GAIN * fitting[1] else fitting
            self._plans[sizes] = plan
        return plan

    def observe(self, size: int, seconds: float) -> None:
        """Learn from a real pass over `size` tokens. O(1), amortised."""
        ratio = self.ratio(size)
        # A pass that the system interrupted says nothing about the machine's speed.
        seconds = min(seconds, 3.0 * self.level * ratio)
        # What a larger batch says of the level depends on its ratio being right; a single token's word counts
        # more, and the more the rarer it is.
        weight = min(RARE, REFRESH * (1 + self._since_single)) if size == 1 else REFRESH / 8
        self._since_single = 0 if size == 1 else self._since_single + 1
        self.level += weight * (seconds / ratio - self.level)
        if size > 1:
            known = self._ratios.get(size, ratio)
            self._ratios[size] = min(known + REFRESH * (seconds / self.level - known), WORST * size)
            self._unseen += 1
            if self._unseen >= REBUILD_EVERY:
                self._rebuild()

    def retime(self, size: int, single: float, seconds: float) -> None:
        """Take in a fresh measurement: `seconds` of a pass over `size` tokens, `single` of one over one.

        A cached ratio that is too low is corrected by `observe` as soon as it is used. One that is too high
        never is, since nothing of that size is then sent; so a fresh measurement may only lower it.
        """
        self.level = single
        if size > 1:
            self._ratios[size] = min(self.ratio(size), seconds / single)
        self._rebuild()

    def to_json(self) -> dict[str, float]:
        """Batch size (as text) -> seconds."""
        return {str(n): self.level * r for n, r in sorted(self._ratios.items())}

    @classmethod
    def from_json(cls, data: Mapping[str, float]) -> CostCurve:
        """The inverse of `to_json`; raises ValueError, TypeError or AttributeError on anything else."""
        return cls({int(n): float(s) for n, s in data.items()})


def measure(target: TargetProtocol, tokens: int, budget: float = 2.0, repeats: int = 5) -> CostCurve:
    """Time passes of each size on top of what the cache holds, and take everything back.

    The fastest of up to `repeats` passes per size counts: whatever else the machine does only adds time. The
    first pass of a process pays for allocations and does not count, unless the model is so slow that this is
    no matter.

    Args:
        target: with room for at least one token.
        tokens: how many are about to be generated.
        budget: seconds it may take, or 5 % of the generation where that is more; a slow model then has fewer
            points.
        repeats: most passes per size.

    Raises:
        ValueError: the context has no room left for one token.
    """
    began = time.perf_counter()
    single = time_pass(target, 1)
    if single < budget / 10:
        single = time_pass(target, 1)
    best = {1: single}
    deadline = began + max(budget, 0.05 * tokens * single)
    # Round by round, so that a disturbance of some milliseconds does not hit all passes of one size.
    for _ in range(repeats):
        for size in MEASURE_ORDER:
            expected = best.get(size, CostCurve(best).seconds(size))
            if time.perf_counter() + expected < deadline and len(target.tokens) + size <= target.n_ctx:
                best[size] = min(best.get(size, math.inf), time_pass(target, size))
    return CostCurve(best)


def time_pass(target: TargetProtocol, size: int) -> float:
    """Seconds of one pass over `size` tokens, which are taken back afterwards."""
    start = len(target.tokens)
    if start + size > target.n_ctx:
        raise ValueError(f"no room for {size} tokens in the context to measure in")
    # Different tokens: a mixture of experts pays for the experts that a batch touches.
    tokens = [int(t) for t in np.random.default_rng(size).integers(0, target.n_vocab, size)]
    began = time.perf_counter()
    target.evaluate(tokens)
    seconds = time.perf_counter() - began
    target.rollback(start)
    return seconds
