# cython: language_level=3
"""`PassTimes`: what a decode call (a pass) over n tokens costs now, in units of a plain pass, which has no draft.

Only ratios T(n) / T(1) are believed, and only ratios are kept between processes. Nothing asks whether the machine is
quiet, because each of these rules holds on a busy machine too:

1. The *level*, the seconds of a plain pass now, follows all passes: it is the median of the last `RECENT` times, each
   divided by the ratio of its size. It only books gains and losses. Load, threads and the context change all sizes
   alike, and so hardly change a cost.
2. A *ratio* is learned only from pairs: a pass with a draft and a plain one at most `REACH` passes apart, so that what
   slows the machine down hits both. If the plain pass after it is slower than the one before, the later one counts,
   because the machine may have slowed down in between. The median of the last `WINDOW` pairs counts. Old values stay
   believed until there are new ones. Five in a row beyond `JUMP` replace all others.
3. One pass proves little, because it may have been interrupted: a plain one that takes twice the level is no partner,
   a single value only lowers a ratio, and a pass is charged at most `JUMP` of its expected time until a second one of
   its size confirms what it took. A call of the drafter is charged at most `JUMP` of the third longest recently.
4. A size without values is corrected as far as its nearest neighbours were; beyond what an earlier process knew, only
   by neighbours with `FEW` values.
5. The cost of a change of size is learned from three plain passes in a row: the first two are compared with the third.
   It is at most what two passes that follow a change took beyond a plain one.

Example: the last plain pass took 10 ms and the next one, over 4 tokens, 15 ms, so T(4) / T(1) = 1.5. Then a compiler
starts, and the next two take 30 ms and 45 ms: again 1.5. The level is 30 ms after three such passes.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import cython

SIZES = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 24, 32, 48, 64)  # sizes with separate values; CUDA's kernels change at 9
LARGEST = SIZES[-1]
PRIOR = {n: 1 + 0.25 * (n - 1) for n in SIZES}  # ratios of a model that never ran

WINDOW = 24  # values whose median counts
RUN = 5  # values in a row that replace a window
FEW = 3  # values from which on the median counts
JUMP = 1.3  # factor beyond which a value is surprising
INTERRUPTED = 2.0  # a plain pass that takes this many times longer than usual is not paired
RECENT = 5  # passes that show the level
REACH = 4  # maximum number of passes between the two of a pair
CHECK = 16  # minimum number of passes between two plain ones that a change of the level requests
STALE = 256  # passes after which values are replaced by the first new one
NEVER = 1 << 40
SHORTEST = 1e-9  # minimum seconds of a pass, for clocks that stand still
MOVED = 0.02  # change of a ratio from which on the tables are rebuilt
PADDED = 0.97  # maximum cost of a padded batch, as a part of that of the size that fits
CHANGE = 1.05  # a change of size costs something only if the median pass after it takes longer than this
SPLIT = 2.0  # maximum cost of a batch that was not seen for long, over that of smaller ones in its place
WORST = 1.5  # maximum cost of a batch over that of its tokens one by one
LOWEST = 0.8  # minimum T(n) / T(1): a batch does more work than a single token
HOPE = 3.0  # factor by which the additional cost of a size may be overestimated
STEEP = 2.0  # T(4) / T(1) from which drafts are expensive: one of three tokens costs as much as a second pass


class Charge(NamedTuple):
    """Cost of a pass, in plain passes."""

    cost: float  # cost of this pass
    correction: float = 0.0  # additional cost of earlier passes, which this one confirmed
    is_surprising: bool = False  # whether the pass took another time than is known, or no pair is known yet


class RestoreCost(NamedTuple):
    """Additional cost of a rejected draft if its tokens cannot simply be removed from the cache, in plain passes."""

    save: float  # cost of the checkpoint that a draft requires; 0 if one exists already
    load: float  # cost of restoring the checkpoint
    recompute: int = 0  # number of tokens that the next pass evaluates again, with or without a draft


class Window:
    """The last values of one quantity."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self.value = self.before = 0.0  # their median, and that of the values that became too old; 0 without one
        self.seen = [-NEVER] * FEW  # passes at which the last values were added

    def add(self, value: cython.double, now: cython.Py_ssize_t) -> cython.bint:
        """Add a value; return True if the last five replaced all others."""
        values, is_new = self.values, False
        if values and now - self.seen[FEW - 1] > STALE:
            self.before = self.value
            values.clear()
        values.append(value)
        self.seen = [*self.seen[1:], now]
        if len(values) > RUN:
            middle, new = median(values[:-RUN]), values[-RUN:]
            if min(new) > JUMP * middle or JUMP * max(new) < middle:
                del values[:-RUN]
                is_new = True
        if len(values) > WINDOW:
            del values[0]
        self.value = median(values)
        return is_new

    def replace(self, value: float, new: float) -> None:
        """Replace a value, unless it is gone."""
        if value in self.values:
            self.values[self.values.index(value)] = new
            self.value = median(self.values)

    @property
    def cautious_value(self) -> float:
        """The median, or the lowest of few values, because some may have been interrupted; 0 without one."""
        if len(self.values) >= FEW:
            return self.value
        return min([*self.values, self.before] if self.before else self.values, default=0.0)


class PassTimes:
    """Costs of the passes of one model, for one number of texts in a pass.

    `prior` is T(n) / T(1) by n, from an earlier process that saw `pairs`, and `change` the cost of a change of size to
    the first and to the second pass after it. A plain pass has `offset` tokens more than one: a pass of several texts
    without drafts has a token of each, and exact sizes may begin above one. `root` are the times of one text, which
    count the passes for all.
    """

    def __init__(
        self,
        prior: Mapping[int, float] | None = None,
        change: tuple[float, float] = (0.0, 0.0),
        *,
        offset: int = 0,
        root: PassTimes | None = None,
        is_fixed: bool = False,
        pairs: int = 0,
    ) -> None:
        self.is_fixed, self.offset = is_fixed, offset
        points = dict(prior or PRIOR)
        if is_fixed:
            self._prior = {n: max(1.0, cost) for n, cost in points.items()}  # a batch does more work than one token
        else:
            self._prior = {n: max(1.0, min(extrapolate(points, n), WORST * n)) for n in SIZES}
        self._ratios = {n: Window() for n in self._prior}
        self._changes = Window(), Window()
        self._copies = Window(), Window()  # cost of a checkpoint, and of the way back to it
        self._calls: list[float] = []  # costs of the last calls of the drafter
        self._extra = [float(change[0]), float(change[1])]
        for window, extra in zip(self._changes, change, strict=True):
            window.values, window.value = [1.0 + extra] * FEW if extra else [], 1.0 + extra
        self._recent: list[float] = []  # seconds of the last passes / the ratio of their size
        self.level = 1.0 if is_fixed else 0.0  # seconds of a plain pass now; 0 if unknown
        self._plain = self._plain_level = 0.0  # seconds of the last plain pass, and the level then
        self._plain_at = -NEVER
        self._bounds = [0.0, 0.0]  # costs of the last passes first and second after a change, if they refute its cost
        self._run = [0.0, 0.0]  # seconds of the last plain passes that came first and second after a change of size
        # Size, seconds, cost of the change, and number of the last passes, and whether each was paired.
        self._recent_drafts: list[tuple[int, float, float, int, bool]] = []
        self.pairs, self._has_past = pairs, pairs > 0
        self.largest = 1  # largest size whose cost was seen, beyond `offset`
        self._root = self if root is None else root
        self._others: dict[int, PassTimes] = {}  # by number of texts
        self._now = 0
        self._last, self._position = 1 + offset, 9  # size of the last pass, and passes of this size before it
        if is_fixed:
            self._fill(self._prior, set(self._prior))
        else:
            self._rebuild()

    def copy(self) -> PassTimes:
        """Return times that begin with the costs of these, and learn on their own."""
        ratios = {n: self._own[n] for n in self._prior}
        return PassTimes(ratios, (self._extra[0], self._extra[1]), is_fixed=self.is_fixed, pairs=self.pairs)

    def for_plain(self, size: int) -> PassTimes:
        """Return the times of passes of which a plain one has `size` tokens; they begin as parts of these times.

        As many texts share these passes, or `size` is the smallest one that exact mode allows.
        """
        if size == 1:
            return self
        if size not in self._others:
            plain = self.ratio(size)
            change = self._extra[0] / plain, self._extra[1] / plain
            prior = {n: max(1.0, self.ratio(size + n - 1) / plain) for n in (*SIZES, *self._prior)}
            other = self._others[size] = PassTimes(prior, change, offset=size - 1, root=self, is_fixed=self.is_fixed)
            other.level = self.level * plain
        return self._others[size]

    # ------------------------------------------------------------------ what a pass costs

    def ratio(self, size: cython.Py_ssize_t) -> float:
        """Return the cost of a pass over `size` tokens, in plain passes."""
        size = max(1, size - self.offset)
        ratio: float = self._own[size] if size < len(self._own) else extrapolate(self._points, size)
        return ratio

    @property
    def now(self) -> int:
        """Number of passes of the model."""
        return self._root._now

    @property
    def last(self) -> int:
        """Size of the last pass."""
        return self._root._last

    @property
    def change(self) -> float:
        """Cost that a change of size adds to both passes after it, in plain passes."""
        return self._extra[0] + self._extra[1]

    def change_now(self, size: cython.Py_ssize_t) -> float:
        """Return what the last change of size adds to the next pass, which has this size, in plain passes."""
        root = self._root
        if size != root._last:
            return self._extra[0]
        return self._extra[1] if root._position == 0 else 0.0

    def optimal_batches(self, sizes: Sequence[int]) -> Sequence[tuple[int, float]]:
        """Return a table whose entry n is (size, cost in plain passes) of the cheapest batch for n tokens.

        A batch is padded beyond the next of the allowed `sizes` only to a size that was seen, and only if that clearly
        saves.
        """
        table = self._batches.get(sizes)
        if table is None:
            table = self._batches[sizes] = self._make_batches(sizes)
        return table

    def cost_of(self, parts: Sequence[int], plain: Sequence[int]) -> float:
        """Return the cost of a pass that llama.cpp divides into these parts, and a plain one into `plain`."""
        if len(parts) == 1 == len(plain):
            return self.ratio(parts[0])
        return sum(map(self._root.ratio, parts)) / sum(map(self._root.ratio, plain))

    def restore(self, recompute: int) -> RestoreCost:
        """Return the cost of going back to a checkpoint; with tokens to `recompute`, one exists already."""
        save, load = (copy.cautious_value for copy in self._copies)
        return RestoreCost(0.0 if recompute else save, load, recompute)

    def slopes(self, sizes: Sequence[int], texts: int = 1, hope: float = 1.0) -> Sequence[float]:
        """Return a table whose entry k is the minimum cost of one more token in drafts of k tokens together.

        It is the lowest (T(texts + m) - T(texts + k)) / (m - k) over all longer drafts m, with each batch padded to its
        cheapest size; infinite for the longest draft. All additional costs may be overestimated by the factor `hope`.
        """
        key = sizes, texts, hope
        if key not in self._slopes:
            costs = [1.0 + (cost - 1.0) / hope for _, cost in self.optimal_batches(sizes)[texts:]]
            self._slopes[key] = find_slopes(costs)
        return self._slopes[key]

    def seen(self, size: int) -> int:
        """Return the pass since which this size was seen `FEW` times; `-NEVER` if it was not."""
        return self._ratios[nearest(max(1, size - self.offset))].seen[0]

    def to_json(self) -> dict[str, Any]:
        """Return the ratios as JSON, for the prior of a later process."""
        ratios = {str(n): round(self._own[n], 4) for n in self._prior}
        return {"ratios": ratios, "change": [round(extra, 4) for extra in self._extra], "pairs": self.pairs}

    @property
    def evidence(self) -> dict[str, Any]:
        """Present beliefs as JSON: T(2), T(4), T(8), T(16), the number of pairs, and seconds of a plain pass now."""
        ratios = {str(n): round(self._own[n], 3) for n in (2, 4, 8, 16)}
        return {"ratios": ratios, "pairs": self.pairs, "plain_seconds": self.level or None}

    # ------------------------------------------------------------------ learning

    @property
    def wants_plain(self) -> bool:
        """True if the next pass should be plain: a pass of a little-known size waits for it, or the speed changed."""
        passes = self._root._now - self._plain_at
        if self.is_fixed or passes < REACH:
            return False
        if passes >= CHECK and (not self._plain or not 1 / JUMP < self.level / self._plain_level < JUMP):
            return True
        drafts = self._recent_drafts
        return bool(drafts) and not drafts[-1][4] and len(self._ratios[nearest(drafts[-1][0])].values) < FEW

    def begin_pass(self, size: cython.Py_ssize_t) -> tuple[int, int]:
        """Set the size of the last pass, without its time; return the values of `last` and `_position` before."""
        root = self._root
        before = root._last, root._position
        root._position = 0 if size != root._last else root._position + 1
        root._last = size
        return before

    def end_pass(self, before: tuple[int, int]) -> None:
        """Set the size of the last pass to what `begin_pass` returned."""
        self._root._last, self._root._position = before

    def observe(self, size: cython.Py_ssize_t, seconds: cython.double, is_timed: cython.bint = True) -> Charge:
        """Learn from the time of a pass over `size` tokens, or only count it."""
        extra: cython.double = self.change_now(size)
        own: cython.double = self.ratio(size)
        root = self._root
        root._now += 1
        now = root._now
        self.begin_pass(size)
        if not is_timed:
            return Charge(own + extra)
        if self.is_fixed:
            return Charge(seconds / self.level)
        seconds = max(seconds, SHORTEST)
        position: cython.Py_ssize_t = root._position
        size = max(1, size - self.offset)
        if extra:
            extra = self._bound_change(position, seconds / (self.level or seconds / (own + extra)))
        expected: cython.double = own + extra
        correction: cython.double = 0.0
        level: cython.double = self._follow(seconds / expected)
        is_known: cython.bint = size == 1
        if size > 1:
            is_known = len(self._ratios[nearest(size)].values) > 1
            is_paired: cython.bint = now - self._plain_at <= REACH
            if is_paired:
                correction = self._learn(size, seconds / self._plain - extra)
            self._recent_drafts.append((size, seconds, extra, now, is_paired))
            del self._recent_drafts[:-REACH]  # earlier ones are too far from any plain pass to come
        else:
            correction = self._observe_plain(position, seconds)
        cost: cython.double = seconds / level
        is_surprising = not (self.pairs or size == 1) or (
            is_known and not expected < JUMP * cost < JUMP * JUMP * expected
        )
        return Charge(min(cost, JUMP * expected), correction, is_surprising)

    def _follow(self, seconds: cython.double) -> cython.double:
        """Return the level after a pass that shows one of `seconds`."""
        recent = self._recent
        recent.append(seconds)
        del recent[:-RECENT]
        self.level = median(recent)
        return self.level

    def _observe_plain(self, position: cython.Py_ssize_t, seconds: cython.double) -> cython.double:
        """Learn from a plain pass, and pair it with those before it; return the correction."""
        correction, now, level = 0.0, self._root._now, self.level
        if position < 2:
            self._run[position] = seconds
        elif position == 2 and seconds <= INTERRUPTED * level:
            self._learn_change(seconds)
        is_clean = position >= 2 or not self.change
        if is_clean and (not self._plain or seconds <= INTERRUPTED * level):
            before, is_slower = self._plain, seconds > JUMP * self._plain > 0
            self._plain, self._plain_at, self._plain_level = seconds, now, level
            for n, other, change, at, is_paired in self._recent_drafts:
                if not is_paired and now - at <= REACH:
                    correction += self._learn(n, other / seconds - change)
                elif is_paired and is_slower:
                    old, new = (to_value(n, other / plain - change) for plain in (before, seconds))
                    self._ratios[nearest(n)].replace(old, new)
            if is_slower and self._recent_drafts:
                self._rebuild()
            self._recent_drafts.clear()
        return correction

    def book(self, cost: float, parts: Sequence[int], seconds: float) -> Charge:
        """Learn only the level from a pass that llama.cpp divides into several batches."""
        if not self.is_fixed:
            self.largest = max(self.largest, sum(parts) - self.offset)
            self._root._now += 1
            self._follow(max(seconds, SHORTEST) / cost)
        self.begin_pass(parts[0])
        return Charge(min(seconds / self.level, JUMP * cost))

    def observe_copy(self, seconds: float, *, is_load: bool) -> None:
        """Learn the time of a checkpoint, or of the way back to it."""
        if self.level and not self.is_fixed:
            self._copies[is_load].add(seconds / self.level, self._root._now)

    def charge_drafting(self, seconds: cython.double) -> cython.double:
        """Return the cost of a call of the drafter, in plain passes; 0 before the first pass."""
        cost: cython.double = seconds / self.level if self.level else 0.0
        if self.is_fixed or not cost:
            return cost
        longest = sorted(self._calls)[-FEW:]
        self._calls.append(cost)
        del self._calls[:-WINDOW]
        return min(cost, JUMP * longest[0]) if len(longest) == FEW else cost

    def _learn(self, size: cython.Py_ssize_t, cost: cython.double) -> cython.double:
        """Learn a ratio. Return what its new value adds to what the passes that showed it were charged."""
        key = nearest(size)
        window, before = self._ratios[key], self.ratio(key + self.offset)
        is_new = window.add(to_value(size, cost), self._root._now)
        self.pairs += 1
        self.largest = max(self.largest, size)
        values = window.values
        if len(values) <= FEW or abs(window.value - before) > MOVED * before:
            self._rebuild()
        if is_new or 1 < len(values) <= FEW:
            return len(values) * max(0.0, (window.value if len(values) >= FEW else min(values)) - JUMP * before)
        return 0.0

    def _learn_change(self, seconds: float) -> None:
        """Learn the cost of a change of size from three plain passes in a row, of which the last took `seconds`.

        The median counts once nearly all of several values are above 1, and until it falls below `CHANGE`.
        """
        for position, window in enumerate(self._changes):
            window.add(self._run[position] / seconds, 0)  # rare, so that none is ever too old
            order = sorted(window.values)
            is_certain = self._extra[position] > 0.0 or (
                order[len(order) // 8] > 1.0 if len(order) >= 8 else len(order) >= RUN and order[0] > JUMP
            )
            cost = window.cautious_value
            before, self._extra[position] = self._extra[position], cost - 1.0 if is_certain and cost > CHANGE else 0.0
            if not before and self._extra[position] > JUMP - 1.0:  # what was learned without it contains it
                self._ratios = {n: Window() for n in self._prior}
                self._recent_drafts.clear()
                self._rebuild()

    def _bound_change(self, position: int, cost: float) -> float:
        """Lower the cost of a change if two passes after one cost less: no batch costs less than a plain pass."""
        extra, before = self._extra[position], self._bounds[position]
        self._bounds[position] = cost if JUMP * cost < 1.0 + extra else 0.0
        if before and self._bounds[position]:
            window, cost = self._changes[position], max(1.0, before, cost)
            window.values = [min(value, cost) for value in window.values]
            window.value = median(window.values)
            extra = self._extra[position] = cost - 1.0 if cost > CHANGE else 0.0
        return extra

    # ------------------------------------------------------------------ tables

    def _rebuild(self) -> None:
        """Rebuild the tables: windows, priors corrected by their neighbours, and lines between them."""
        prior, ratios = self._prior, {1: 1.0}
        for n, window in self._ratios.items():
            values = window.values
            if len(values) >= FEW:
                ratios[n] = window.value
            elif values:  # a single value may only lower what was believed, because it may have been interrupted
                ratios[n] = min(values) if len(values) > 1 else min(window.before or prior[n], *values)
        factors = {
            n: max(0.0, ratio - 1.0) / max(0.01, prior[n] - 1.0)
            for n, ratio in ratios.items()
            if n > 1 and (ratio <= prior[n] or not self._has_past or len(self._ratios[n].values) >= FEW)
        } or {1: 1.0}
        known, seen = 1, dict(ratios)
        for n in SIZES:
            if n in ratios:
                known = n
            else:  # a larger batch costs no less, unless it does in the prior
                factor = interpolate(factors, n)
                corrected = 1.0 + (prior[n] - 1.0) * factor
                if factor > JUMP:  # the shape of the prior was wrong here: not more than between the neighbours
                    corrected = min(corrected, max(prior[n], chord(seen, n)))
                ratios[n] = max(corrected, ratios[known] * min(1.0, prior[n] / prior[known]))
        now = self._root._now
        fresh = {n: ratios[n] for n in SIZES if n == 1 or now - self._ratios[n].seen[FEW - 1] <= STALE}
        for n in SIZES:
            if n not in fresh and len(fresh) > 1:  # an old belief must not contradict what its neighbours show now
                ratios[n] = min(ratios[n], SPLIT * chord(fresh, n))
        known_sizes = {n for n in SIZES if len(self._ratios[n].values) >= FEW}
        self._fill({n: min(max(1.0, ratios[n]), WORST * n) for n in SIZES}, known_sizes)

    def _fill(self, points: dict[int, float], known: set[int]) -> None:
        """Fill the table of ratios: lines between the points, then the mean slope from size 1."""
        self._batches: dict[Sequence[int], Sequence[tuple[int, float]]] = {}
        self._slopes: dict[tuple[Sequence[int], int, float], array[float]] = {}
        self._known, self._points, self._own = known, points, [0.0]
        for low, high in pairwise(sorted(points)):
            for n in range(low, high):
                self._own.append(points[low] + (points[high] - points[low]) * (n - low) / (high - low))
        self._own += [extrapolate(points, n) for n in range(len(self._own), LARGEST + 1)]

    def _make_batches(self, sizes: Sequence[int]) -> Sequence[tuple[int, float]]:
        offset, fitting, best, size_set = self.offset, 0, 0, set(sizes)
        cost = best_cost = math.inf
        plan = [(0, 0.0)] * (sizes[-1] + 1)
        for n in range(sizes[-1], 0, -1):
            if n in size_set:
                fitting, cost = n, self.ratio(n)
                if max(1, n - offset) in self._known and cost <= best_cost:
                    best, best_cost = n, cost
            plan[n] = (best, best_cost) if best_cost < PADDED * cost else (fitting, cost)
        return plan


def median(values: list[float]) -> float:
    """Return the median of at least one value."""
    order, middle = sorted(values), len(values) // 2
    return order[middle] if len(order) % 2 else (order[middle - 1] + order[middle]) / 2


def nearest(size: int) -> int:
    """Return the smallest of `SIZES` that holds `size` tokens."""
    for n in SIZES:
        if n >= size:
            return n
    return LARGEST


def to_value(size: int, cost: float) -> float:
    """Return the value of `nearest(size)` that a pass over `size` tokens shows by its cost."""
    key = nearest(size)
    return max(LOWEST, min(1.0 + (cost - 1.0) * (key - 1) / (size - 1), WORST * key))


def interpolate(points: Mapping[int, float], n: int) -> float:
    """Return the value at n between the points; constant before the first and after the last one."""
    sizes = sorted(points)
    if n <= sizes[0]:
        return points[sizes[0]]
    for low, high in pairwise(sizes):
        if n <= high:
            return points[low] + (points[high] - points[low]) * (n - low) / (high - low)
    return points[sizes[-1]]


def extrapolate(points: Mapping[int, float], n: int) -> float:
    """Return `interpolate`, but after the last point the mean slope from size 1 to it continues."""
    last = max(points)
    slope = max(0.0, points[last] - 1.0) / (last - 1) if last > 1 else 1.0
    return interpolate(points, n) + slope * max(0, n - last)


def chord(points: Mapping[int, float], n: int) -> float:
    """Return `interpolate`, but in proportion to n after the last point: several batches could take its place."""
    last = max(points)
    return points[last] * n / last if n > last else interpolate(points, n)


def find_slopes(costs: list[float]) -> array[float]:
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
