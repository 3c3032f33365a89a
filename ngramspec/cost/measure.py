"""Measurements of a target's decode calls, called passes: their time by size, and the sizes with bit-identical logits.

`probe` finds kernel classes. llama.cpp picks its kernels by batch size. So the logits of one position may differ in the
last bits between a batch of one token and a batch of five. Sizes that agree to the last bit form a *kernel class*. If
all passes of a generation use sizes of one class, its text cannot depend on the drafts (exact mode).
"""

from __future__ import annotations

import hashlib
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import NamedTuple

import numpy as np

# By default numpy imports this module at its first use, which is during an answer; that import can lose a signal.
from numpy.random import default_rng

from ngramspec.backend import Logits, Model
from ngramspec.cost.curve import MIN_RATIO, CostCurve

MEASURE_ORDER = (1, 2, 4, 3, 8, 5, 6, 16, 12, 9)
"""Measured batch sizes, the most informative first, because the time budget may end before the list. They are small
sizes, powers of two, and 9, at which CUDA changes its kernel."""

SIZES = tuple(sorted(MEASURE_ORDER))  # sizes that are probed
SHARED_SIZES = tuple(range(1, 17))  # sizes that are probed if sequences share passes: a pass may contain any number

LONG_ORDER = (32, 64, 24, 48)
"""Sizes of long drafts. An extrapolation from 16 misses the steps of a GPU's kernels and their unused capacity."""

DOUBTFUL = 1.1  # a size is timed again if it costs more than this many times as much as a larger one
CHEAP = 0.25  # maximum cost of a 16-token pass, as a part of 16 one-token passes, at which longer drafts may pay
SHARED_ORDER = (*MEASURE_ORDER, *LONG_ORDER)  # sizes that are measured if sequences share passes, which are then larger

RUN = 3
"""Number of passes of one size in a row. The first includes the change of size. The last does not: in it, CUDA replays
the graph that it captured in the pass before."""

FIRST = 0.8
"""Maximum time of a size's second pass, as a part of its first, if the first includes a one-time cost, as over RPC.
Slow passes, which are normally made once per size, are then made twice."""

CHANGE = 4  # size of the passes whose change from and to one token is timed
CHANGE_ROUNDS = 8  # number of rounds, each with two changes of size
FEWEST_ROUNDS = 4  # minimum number of rounds that separate the cost of a change from noise
CHANGE_SHARE = 0.3  # maximum share of the budget for timing changes

BUDGET = 2.0  # maximum seconds of measuring, or 5 % of the generation if that is more
LONGEST = 8.0  # maximum seconds of measuring in any case
ROUNDS = 4  # maximum number of rounds, each with one run per size


def measure(target: Model, tokens: int, sizes: Sequence[int] = MEASURE_ORDER) -> CostCurve:
    """Time passes of each size after the cached tokens, and roll back each of them.

    Each size is timed in a separate run, and the fastest pass of all rounds counts, because other load only adds time.
    A slow model has fewer points. The cost of a change of size is timed after the first round.

    Args:
        target: Model to measure.
        tokens: Number of tokens to be generated.
        sizes: Batch sizes, the most informative first; `sizes_to_time` adds those of long drafts.

    Raises:
        ValueError: The context has no room for a token.
    """
    start = time.perf_counter()
    single = time_pass(target, 1)
    # The first pass of a process includes allocations. On a slow model these do not matter, nor do changes of size.
    fast = single < BUDGET / 10
    best = {1: time_pass(target, 1) if fast else single}
    run, has_run = RUN if fast else 1, fast
    deadline = start + min(max(BUDGET, 0.05 * tokens * best[1]), LONGEST)
    switch = capture = 0.0
    # Each round covers all sizes, so that a disturbance of some milliseconds does not affect all passes of one size.
    for number in range(ROUNDS):
        if number == 1 and CHANGE in best:
            rounds = int(CHANGE_SHARE * BUDGET / (3 * (best[1] + best[CHANGE])))
            if rounds >= FEWEST_ROUNDS:
                switch, capture = time_change(target, min(CHANGE_ROUNDS, rounds))
        for size in sizes_to_time(CostCurve(best), sizes, target.max_batch) if number else sizes:
            remaining = deadline - time.perf_counter()
            duration = best.get(size, CostCurve(best).seconds(size))
            passes = 2 if not has_run and size > 1 and 2 * duration <= remaining else run
            if passes * duration > remaining or len(target.tokens) + size > target.n_ctx:
                continue
            times = [time_pass(target, size) for _ in range(passes)]
            if not has_run and passes > 1:
                has_run, run = True, 2 if times[1] <= FIRST * times[0] else 1
            best[size] = min(best.get(size, math.inf), *times)
    best[1] = min(best[1], min(best.values()) / MIN_RATIO)
    threads = target.conditions.threads, target.conditions.threads_batch
    return CostCurve(best, switch, capture, threads=threads)


def time_change(target: Model, rounds: int) -> tuple[float, float]:
    """Return the seconds that a change of batch size adds to the first and to the second pass of the new size.

    They are 0 if they cannot be separated from noise. Each run of passes of one size follows a run of another size. Its
    first and second pass are compared with the third. The median counts if three quarters of the differences are
    positive. With 16 differences that happens by chance 1 time in 90.
    """
    times = [[time_pass(target, size) for _ in range(RUN)] for _ in range(rounds) for size in (1, CHANGE)]
    return _certain_median([run[0] - run[2] for run in times]), _certain_median([run[1] - run[2] for run in times])


def _certain_median(differences: Sequence[float]) -> float:
    return statistics.median(differences) if statistics.quantiles(differences, n=4)[0] > 0 else 0.0


def sizes_to_time(curve: CostCurve, sizes: Sequence[int], max_tokens: int) -> Sequence[int]:
    """Return `sizes`, and if 16 tokens are cheap (see `CHEAP`) also the sizes of long drafts, up to `max_tokens`."""
    if 16 not in sizes or curve.ratio(16) > CHEAP * 16:
        return sizes
    return (*sizes, *(n for n in LONG_ORDER if n not in sizes and n <= max_tokens))


def doubtful_sizes(curve: CostCurve, sizes: Sequence[int]) -> list[int]:
    """Return the sizes that clearly cost more than a larger one, as after a measurement that was disturbed.

    On a GPU that is possible, because its kernels change with the size.
    """
    lowest, doubtful = math.inf, []
    for size in sorted(sizes, reverse=True):
        if curve.ratio(size) > DOUBTFUL * lowest:
            doubtful.append(size)
        lowest = min(lowest, curve.ratio(size))
    return doubtful[::-1]


class RestoreCost(NamedTuple):
    """Additional cost of a rejected draft if its tokens cannot simply be removed from the cache."""

    save: float  # seconds of the checkpoint that a draft requires; 0 if one exists already
    load: float  # seconds of restoring the checkpoint
    recompute: int = 0  # number of tokens that the next pass evaluates again, with or without a draft


def time_restore(target: Model) -> RestoreCost:
    """Time a checkpoint of the cache, and a rollback to it."""
    start = len(target.tokens)
    start_time = time.perf_counter()
    target.checkpoint()
    checkpoint_time = time.perf_counter()
    target.evaluate([0])
    evaluation_time = time.perf_counter()
    target.rollback(start)
    return RestoreCost(checkpoint_time - start_time, time.perf_counter() - evaluation_time)


def time_pass(target: Model, size: int) -> float:
    """Return the seconds of one pass over `size` tokens, which is then rolled back."""
    if len(target.tokens) + size > target.n_ctx:
        raise ValueError(f"the context to measure in has no room for {size} tokens")
    # The tokens differ, because the time of a mixture of experts depends on the number of experts that a batch uses.
    tokens = [int(t) for t in default_rng(size).integers(0, target.n_vocab, size)]
    start = len(target.tokens)
    target.checkpoint()
    start_time = time.perf_counter()
    target.evaluate(tokens)
    seconds = time.perf_counter() - start_time
    target.rollback(start)
    return seconds


# --------------------------------------------------------------------------- kernel classes

POSITIONS = 16
SHORT, LONG = 96, 640  # default depths in tokens; CPU kernels were seen to change class at 256


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """Result of a probe."""

    depths: tuple[int, ...]  # context lengths of the probe, in tokens
    # Partition of the probed sizes; the sizes of one class agreed bit for bit at every position and every depth.
    classes: tuple[tuple[int, ...], ...]
    max_difference: float  # largest absolute difference of one logit between any size and single tokens

    @property
    def sizes(self) -> tuple[int, ...]:
        """Probed sizes, ascending."""
        return tuple(sorted(n for c in self.classes for n in c))

    def class_of(self, size: int) -> tuple[int, ...]:
        """Return the class that contains `size`."""
        return next(c for c in self.classes if size in c)


READ = 300
"""Number of tokens in the test of reading a prompt in pieces: more than two chunks of a CPU's prefill."""

PIECES = 50  # size of these pieces, between the sizes of passes and of chunks


def prefill_is_chunk_invariant(target: Model, sizes: Sequence[int]) -> bool:
    """Return True if a text gives the same bits when it is read in chunks, in pieces, or in passes.

    If so, exact mode may reuse a cached prompt to its last token. The function leaves the cache empty.
    """
    rng = default_rng(1)
    tail = max(sizes)
    text = [int(t) for t in rng.integers(0, target.n_vocab, min(READ, target.n_ctx - tail) + tail)]
    results = set()
    for pieces in (None, (PIECES,), tuple(sizes)):
        target.clear()
        done = len(text) - tail if pieces is None else 1
        target.prefill(text[:done])
        for size in cycle(pieces or (1,)):
            if done == len(text) - tail:
                break
            done = min(done + size, len(text) - tail)
            target.evaluate(text[len(target.tokens) : done])
        results.add(target.evaluate(text[-tail:]).tobytes())
    target.clear()
    return len(results) == 1


def probe(target: Model, depths: Sequence[int] = (SHORT, LONG), sizes: Sequence[int] = SIZES) -> ProbeReport:
    """Find the kernel classes at each of `depths` tokens of context.

    In addition to the prefill, the probe decodes about len(sizes) * POSITIONS tokens per depth. It leaves the cache
    empty. The tokens are random ids, because kernels are chosen by shape, not by content.
    """
    tail_length = max(-(-POSITIONS // size) * size for size in sizes)
    room = max(1, target.n_ctx - tail_length)
    lengths = tuple(sorted({min(d, room) for d in depths}))
    rng = default_rng(0)
    text = [int(t) for t in rng.integers(0, target.n_vocab, lengths[-1] + tail_length)]
    digests: dict[int, list[bytes]] = {size: [] for size in sizes}
    largest = 0.0
    for depth in lengths:
        target.clear()
        target.prefill(text[:depth])
        target.checkpoint()
        tail = text[depth:]
        single: Logits | None = None
        for size in sizes:
            # Only full batches are used, so that every compared position was computed at exactly this size.
            starts = range(0, POSITIONS, size)
            logits = np.concatenate([target.evaluate(tail[i : i + size]).copy() for i in starts])
            target.rollback(depth)
            logits = logits[:POSITIONS]
            single = logits if single is None else single
            largest = max(largest, float(np.abs(logits - single).max()))
            digests[size].append(hashlib.blake2b(logits.tobytes()).digest())
    target.clear()
    groups: dict[tuple[bytes, ...], list[int]] = {}
    for size in sizes:
        groups.setdefault(tuple(digests[size]), []).append(size)
    return ProbeReport(lengths, tuple(tuple(group) for group in groups.values()), largest)
