"""Kernel classes: which batch sizes give bit-identical logits on this model, build and machine.

llama.cpp picks its kernels by batch size, so the logits of one position may differ in the last bits between a
batch of one token and a batch of five. Sizes that agree to the last bit form a *kernel class*; a generation
whose every pass uses sizes of one class gives a text that cannot depend on what was drafted (exact mode).

The probe evaluates the same tokens after the same context, once in batches of each size, and compares the
logits of every position.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import cycle
from typing import Any

import numpy as np

from ngramspec.backend import Logits, Model

SIZES = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16)
"""Batch sizes that are measured and probed: small ones, powers of two, and 9, where CUDA changes its kernel."""

SHARED_SIZES = tuple(range(1, 17))
"""The same where texts share passes: any number of them may be in one, so no size may be missing."""

POSITIONS = 16
SHORT, LONG = 96, 640
"""Default depths in tokens; CPU kernels were seen to change class at 256."""


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """Result of a probe.

    Attributes:
        depths: context lengths at which it was made, in tokens.
        classes: partition of the probed sizes; the sizes of one class agreed bit for bit at every position and
            every depth.
        max_difference: largest absolute difference of one logit between any size and single tokens.
    """

    depths: tuple[int, ...]
    classes: tuple[tuple[int, ...], ...]
    max_difference: float

    @property
    def sizes(self) -> list[int]:
        """The probed sizes, ascending."""
        return sorted(n for c in self.classes for n in c)

    def class_of(self, size: int) -> tuple[int, ...]:
        """The class that holds `size`."""
        return next(c for c in self.classes if size in c)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ProbeReport:
        """The inverse of `to_json`; raises KeyError, TypeError or ValueError on anything else."""
        report = cls(
            tuple(int(d) for d in data["depths"]),
            tuple(tuple(int(n) for n in c) for c in data["classes"]),
            float(data["max_difference"]),
        )
        if report.sizes not in (list(SIZES), list(SHARED_SIZES)):
            raise ValueError(f"a probe of the sizes {report.sizes}, not {list(SIZES)}")
        return report


READ = 300
"""Tokens that are read to see whether prompts may be read in any pieces: more than two chunks of a CPU's prefill."""

PIECES = 50
"""A size of such pieces, between those of passes and those of chunks."""


def reads_alike(target: Model, sizes: Sequence[int]) -> bool:
    """Whether a text leaves the same bits behind however it came into the cache: in chunks, in pieces, or in passes.

    Then what the cache holds of a prompt may be reused to the last token in exact mode. Reads READ tokens three times;
    the cache is empty afterwards.

    Args:
        target: to probe.
        sizes: of passes; they take turns.
    """
    rng = np.random.default_rng(1)
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


def probe(target: Model, depths: Sequence[int] | None = None, sizes: Sequence[int] = SIZES) -> ProbeReport:
    """Find the kernel classes at each of `depths` tokens of context (default: a short and a long one).

    Costs about len(sizes) * POSITIONS tokens of decoding per depth besides the prefill; the cache is empty
    afterwards. The tokens are random ids: kernels are chosen by shape, not by content.
    """
    tail_length = max(-(-POSITIONS // size) * size for size in sizes)
    room = max(1, target.n_ctx - tail_length)
    chosen = tuple(sorted({min(d, room) for d in (depths or (SHORT, LONG))}))
    rng = np.random.default_rng(0)
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
