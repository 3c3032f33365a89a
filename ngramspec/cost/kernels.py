"""`KernelClasses`: the batch sizes of a model whose logits agree bit for bit, for `exact="on"`.

llama.cpp picks its kernels by batch size. So the logits of one position may differ in the last bits between a batch of
one token and a batch of five. Sizes that agree to the last bit form a *kernel class*. If all passes of a generation use
sizes of one class, its text cannot depend on the drafts.

Classes are a property of model, build, processor and settings. They are stored in one small JSON file for each of
these, because the sizes of exact mode must not change from one run to the next.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import numpy as np

# By default numpy imports this module at its first use, which is during an answer; that import can lose a signal.
from numpy.random import default_rng

from ngramspec.backend import Logits, Model
from ngramspec.json_data import decode, encode
from ngramspec.storage import cache_folder, read_cache, write_cache_json

SIZES = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16)  # sizes that are probed; CUDA changes its kernel at 9
SHARED_SIZES = tuple(range(1, 17))  # the same if sequences share passes: a pass may contain any number of tokens

SMALLEST = 2
"""Maximum smallest size of the class that exact mode uses: passes without a draft are padded to it."""

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


@dataclass(slots=True)
class KernelClasses:
    """Results on the kernel classes of one target; each part is `None` until it is compared."""

    path: Path | None = None  # file of the results; `None` means that they stay in memory
    probe: ProbeReport | None = None
    exact_sizes: tuple[int, ...] | None = None  # kernel class that exact mode uses
    is_chunk_invariant: bool | None = None  # result of `prefill_is_chunk_invariant`

    @classmethod
    def load(cls, target: Model, folder: Path | None = None) -> KernelClasses:
        """Load what is known about `target`; nothing without a fingerprint or a readable file."""
        if not target.fingerprint:
            return cls()
        classes = cls((folder or cache_folder("calibration")) / f"{target.fingerprint}-kernels.json")
        classes._read()
        return classes

    def _read(self) -> None:
        """Load missing results from the file; its sizes always count, so that all processes agree."""
        if self.path is None:
            return
        try:
            data = json.loads(read_cache(self.path) or "")
            probe = decode(ProbeReport, data["probe"]) if data["probe"] else None
            exact_sizes = tuple(data["exact_sizes"]) if data["exact_sizes"] else None
            is_chunk_invariant = data["reads_alike"]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
            return
        if probe is not None and probe.sizes not in (SIZES, SHARED_SIZES):
            return
        if probe is not None and exact_sizes and exact_sizes in (*probe.classes, choose_from_one(probe)):
            self.probe, self.exact_sizes = probe, exact_sizes
        if isinstance(is_chunk_invariant, bool):
            self.is_chunk_invariant = is_chunk_invariant

    def _save(self) -> None:
        if self.path is None:
            return
        self._read()  # another process may have chosen the sizes in the meantime
        data = {
            "probe": encode(self.probe),
            "exact_sizes": self.exact_sizes,
            "reads_alike": self.is_chunk_invariant,
        }
        write_cache_json(self.path, data)

    def forget(self) -> None:
        """Delete the results, including the file."""
        self.probe = self.exact_sizes = self.is_chunk_invariant = None
        if self.path is not None:
            with suppress(OSError):
                self.path.unlink(missing_ok=True)

    def ensure_exact(self, target: Model, *, together: bool = False) -> tuple[int, ...]:
        """Return the batch sizes of exact mode; if they are missing, probe and choose them, which clears the cache.

        Args:
            target: Model to probe.
            together: True if any number of sequences shares passes; `choose_from_one` is then preferred.
        """
        if self.exact_sizes is None:
            self._read()
        if self.exact_sizes is None:
            self.probe = self.probe or probe(target, sizes=SHARED_SIZES if together else SIZES)
            self.exact_sizes = (choose_from_one(self.probe) if together else ()) or choose_class(self.probe)
            self._save()
        return self.exact_sizes

    def ensure_chunk_invariance(self, target: Model) -> bool:
        """Return the result of `prefill_is_chunk_invariant`; comparing clears the cache."""
        if self.is_chunk_invariant is None:
            self._read()
        if self.is_chunk_invariant is None:
            self.is_chunk_invariant = prefill_is_chunk_invariant(target, self.ensure_exact(target))
            self._save()
        return self.is_chunk_invariant


def choose_from_one(report: ProbeReport) -> tuple[int, ...]:
    """Return the sizes 1, 2, 3, ... up to the last that agrees with all before it; empty if 1 and 2 disagree."""
    agreeing = report.class_of(1)
    sizes = tuple(size for i, size in enumerate(agreeing, 1) if size == i)
    return sizes if len(sizes) > 1 else ()


def choose_class(report: ProbeReport) -> tuple[int, ...]:
    """Return the kernel class for exact mode: the largest of those that begin at `SMALLEST` or below.

    Without a draft, every pass is padded to the smallest size of the class, and two tokens cost little more than one
    if drafts pay. No time is measured, because the choice, and so the text, must be the same at every start.
    """
    small = [c for c in report.classes if min(c) <= SMALLEST]
    return max(small, key=lambda c: (len(c), -c[0]))
