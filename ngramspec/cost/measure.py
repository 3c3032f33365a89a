"""Measuring a target's passes: what they cost by their size, and which sizes give bit-identical logits.

`probe` finds kernel classes: llama.cpp picks its kernels by batch size, so the logits of one position may differ in the
last bits between a batch of one token and a batch of five. Sizes that agree to the last bit form a *kernel class*; a
generation whose every pass uses sizes of one class gives a text that cannot depend on what was drafted (exact mode).
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

# numpy imports it when it is first used, which is in the middle of an answer, and a signal in that import can be lost.
from numpy.random import default_rng

from ngramspec.backend import Logits, Model
from ngramspec.cost.curve import LEAST, CostCurve

MEASURE_ORDER = (1, 2, 4, 3, 8, 5, 6, 16, 12, 9)
"""Batch sizes that are measured, most telling first, in case the time budget ends before the list does: small ones,
powers of two, and 9, where CUDA changes its kernel."""

SIZES = tuple(sorted(MEASURE_ORDER))  # those that are probed
SHARED_SIZES = tuple(range(1, 17))  # those where texts share passes: any number of them may be in one

LONG_ORDER = (32, 64, 24, 48)
"""Sizes of long drafts. A slope drawn out from 16 hides where a GPU's kernels step, and what they have room for."""

CHEAP = 0.25  # a pass over 16 tokens is cheap if it costs at most this part of 16 passes: then longer drafts may pay
SHARED_ORDER = (*MEASURE_ORDER, *LONG_ORDER)  # the sizes where texts share passes, which are larger then

RUN = 3
"""Passes of one size in a row: the first pays for the change of size, and the last, in which CUDA replays the graph
that it captured in the one before, does not."""

FIRST = 0.8
"""A size's first pass pays for more than itself, as over RPC, if the next one takes at most this part of it. Slow
passes, of which each size has one alone, are then made twice."""

CHANGE = 4  # size of the passes whose change from and to one token is timed
CHANGE_ROUNDS = 8  # each with two changes of size
FEWEST_ROUNDS = 4  # with fewer, the cost of a change cannot be told from noise
CHANGE_SHARE = 0.3  # maximum share of the budget for timing changes


BUDGET = 2.0  # seconds that measuring may take, or 5 % of the generation if that is more
LONGEST = 8.0  # seconds that measuring may take in any case
ROUNDS = 4  # most runs per size


def measure(target: Model, tokens: int, sizes: Sequence[int] = MEASURE_ORDER) -> CostCurve:
    """Time passes of each size on top of what the cache holds, and take everything back.

    Each size is timed in a run of its own, and the fastest pass of all rounds counts: whatever else the machine does
    only adds time. A slow model has fewer points. What a change of size costs is timed afterwards.

    Args:
        target: with room for at least one token; else ValueError.
        tokens: how many are about to be generated.
        sizes: the most telling ones first; those of `telling` are added.
    """
    began = time.perf_counter()
    single = time_pass(target, 1)
    # The first pass of a process pays for allocations; on a slow model that is no matter, and neither is a switch.
    fast = single < BUDGET / 10
    best = {1: time_pass(target, 1) if fast else single}
    run, tried = RUN if fast else 1, fast
    deadline = began + min(max(BUDGET, 0.05 * tokens * best[1]), LONGEST)
    switch = 0.0
    # Round by round, so that a disturbance of some milliseconds does not hit all passes of one size.
    for number in range(ROUNDS):
        if number == 1 and CHANGE in best:
            rounds = int(CHANGE_SHARE * BUDGET / (3 * (best[1] + best[CHANGE])))
            if rounds >= FEWEST_ROUNDS:
                switch = time_change(target, min(CHANGE_ROUNDS, rounds))
        for size in telling(CostCurve(best), sizes, target.max_batch) if number else sizes:
            left = deadline - time.perf_counter()
            expected = best.get(size, CostCurve(best).seconds(size))
            passes = 2 if not tried and size > 1 and 2 * expected <= left else run
            if passes * expected > left or len(target.tokens) + size > target.n_ctx:
                continue
            times = [time_pass(target, size) for _ in range(passes)]
            if not tried and passes > 1:
                tried, run = True, 2 if times[1] <= FIRST * times[0] else 1
            best[size] = min(best.get(size, math.inf), *times)
    best[1] = min(best[1], min(best.values()) / LEAST)
    threads = target.conditions.threads, target.conditions.threads_batch
    return CostCurve(best, switch, threads=threads)


def time_change(target: Model, rounds: int) -> float:
    """Return the seconds that a change of batch size adds to a pass; 0 if it cannot be told from noise.

    Passes after another size are compared with passes after the same size, taking turns. The median counts if three
    differences of four are positive: 16 differences show that by chance once in 90 times.
    """
    differences = []
    for _ in range(rounds):
        for size in (1, CHANGE):
            changed, _, same = (time_pass(target, size) for _ in range(3))
            differences.append(changed - same)
    is_certain = statistics.quantiles(differences, n=4)[0] > 0
    return statistics.median(differences) if is_certain else 0.0


def telling(curve: CostCurve, sizes: Sequence[int], most: int) -> Sequence[int]:
    """These sizes, and those of long drafts up to `most` tokens where 16 are cheap."""
    if 16 not in sizes or curve.ratio(16) > CHEAP * 16:
        return sizes
    return (*sizes, *(n for n in LONG_ORDER if n not in sizes and n <= most))


class RestoreCost(NamedTuple):
    """What a refused draft costs in addition to its pass, where it cannot be cut off the cache."""

    save: float  # seconds of the checkpoint that a draft needs; 0 where there is one already
    load: float  # seconds of going back to it
    recompute: int = 0  # tokens that the next pass evaluates again, whether it holds a draft or not


def time_restore(target: Model) -> RestoreCost:
    """Time a checkpoint of what the cache holds, and going back to it."""
    start = len(target.tokens)
    began = time.perf_counter()
    target.checkpoint()
    saved = time.perf_counter()
    target.evaluate([0])
    evaluated = time.perf_counter()
    target.rollback(start)
    return RestoreCost(saved - began, time.perf_counter() - evaluated)


def time_pass(target: Model, size: int) -> float:
    """Seconds of one pass over `size` tokens, which are taken back afterwards."""
    if len(target.tokens) + size > target.n_ctx:
        raise ValueError(f"the context to measure in has no room for {size} tokens")
    # Different tokens: a mixture of experts pays for the experts that a batch touches.
    tokens = [int(t) for t in default_rng(size).integers(0, target.n_vocab, size)]
    start = len(target.tokens)
    target.checkpoint()
    began = time.perf_counter()
    target.evaluate(tokens)
    seconds = time.perf_counter() - began
    target.rollback(start)
    return seconds


# --------------------------------------------------------------------------- kernel classes

POSITIONS = 16
SHORT, LONG = 96, 640  # default depths in tokens; CPU kernels were seen to change class at 256


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """Result of a probe."""

    depths: tuple[int, ...]  # tokens of context at which it was made
    # Partition of the probed sizes; the sizes of one class agreed bit for bit at every position and every depth.
    classes: tuple[tuple[int, ...], ...]
    max_difference: float  # largest absolute difference of one logit between any size and single tokens

    @property
    def sizes(self) -> tuple[int, ...]:
        """The probed sizes, ascending."""
        return tuple(sorted(n for c in self.classes for n in c))

    def class_of(self, size: int) -> tuple[int, ...]:
        """The class that holds `size`."""
        return next(c for c in self.classes if size in c)


READ = 300
"""Tokens that are read to see whether prompts may be read in any pieces: more than two chunks of a CPU's prefill."""

PIECES = 50  # a size of such pieces, between those of passes and those of chunks


def reads_alike(target: Model, sizes: Sequence[int]) -> bool:
    """Whether a text leaves the same bits behind however it came into the cache: in chunks, in pieces, or in passes.

    Then what the cache holds of a prompt may be reused to the last token in exact mode. The cache is empty afterwards.
    """
    rng = default_rng(1)
    tail = max(sizes)
    text = [int(t) for t in rng.integers(0, target.n_vocab, min(READ, target.n_ctx - tail) + tail)]
    found = set()
    for pieces in (None, (PIECES,), tuple(sizes)):
        target.clear()
        done = len(text) - tail if pieces is None else 1
        target.prefill(text[:done])
        for size in cycle(pieces or (1,)):
            if done == len(text) - tail:
                break
            done = min(done + size, len(text) - tail)
            target.evaluate(text[len(target.tokens) : done])
        found.add(target.evaluate(text[-tail:]).tobytes())
    target.clear()
    return len(found) == 1


def probe(target: Model, depths: Sequence[int] = (SHORT, LONG), sizes: Sequence[int] = SIZES) -> ProbeReport:
    """Find the kernel classes at each of `depths` tokens of context.

    Costs about len(sizes) * POSITIONS tokens of decoding per depth besides the prefill; the cache is empty
    afterwards. The tokens are random ids: kernels are chosen by shape, not by content.
    """
    tail_length = max(-(-POSITIONS // size) * size for size in sizes)
    room = max(1, target.n_ctx - tail_length)
    chosen = tuple(sorted({min(d, room) for d in depths}))
    rng = default_rng(0)
    text = [int(t) for t in rng.integers(0, target.n_vocab, chosen[-1] + tail_length)]
    digests: dict[int, list[bytes]] = {size: [] for size in sizes}
    largest = 0.0
    for depth in chosen:
        target.clear()
        target.prefill(text[:depth])
        target.checkpoint()
        tail = text[depth:]
        single: Logits | None = None
        for size in sizes:
            # Full batches only, so that every compared position was computed at exactly this size.
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
    return ProbeReport(chosen, tuple(tuple(group) for group in groups.values()), largest)
