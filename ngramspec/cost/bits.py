"""Batch sizes whose logits agree bit for bit: `KernelClasses` for `exact="on"`, `ExactnessSelector` for `"auto"`.

llama.cpp picks its kernels by batch size, so drafts may change the last bits of logits, and the text. Sizes that agree
form a *kernel class*. With "on", all passes use sizes of one class, padded if necessary. With "auto", two settings are
compared (`ngramspec.llama.trial`): "fast", and "exact", which has no flash attention on a CPU, because that
kernel splits a single token's context over the threads. "fast" is chosen if its sizes agree as far as drafts need them,
then "exact". If the sizes agree in neither, "fast" is chosen.

Invariant: the choice, and so the text, is a function of the model, the build, the processor and the settings. No clock
and no load takes part: all comparisons that decide are made before the first text, however long they take, and stored.
If one fails for lack of memory, "exact" decodes single tokens, and the next load repeats the comparison.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path
from typing import Any, Literal

import numpy as np

# By default numpy imports this module at its first use, which is during an answer; that import can lose a signal.
from numpy.random import default_rng

from ngramspec.backend import ExactnessMode, Logits, Model
from ngramspec.data import TargetError, decode, encode
from ngramspec.storage import FOLDERS, read_cache, write_cache

Exact = Literal["auto", "on", "off"]
EXACT: tuple[Exact, ...] = ("auto", "on", "off")

SIZES = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16)  # sizes that are probed for "on"; CUDA changes its kernel at 9
SHARED_SIZES = tuple(range(1, 17))  # the same if sequences share passes: a pass may contain any number of tokens
COMPARED = (1, 2, 3, 4, 5, 6, 7, 8, 16)  # sizes that are compared for "auto"
# Largest size that must agree for "auto"; larger ones are used if they agree. K-quants change their kernel at 8.
MAX_DRAFT_SIZE = 7
SMALLEST = 2  # maximum smallest size of the class that "on" uses: passes without a draft are padded to it
POSITIONS = 16  # positions at which a probe compares all sizes
SHORT, LONG = 96, 640  # default depths of a probe in tokens; CPU kernels were seen to change class at 256
DEPTHS = (1024, 0)  # depths that are compared for "auto", the one at which more sizes differ first
READ = 300  # tokens of the test of reading a prompt in pieces: more than two chunks of a CPU's prefill
PIECES = 50  # size of these pieces, between the sizes of passes and of chunks
DEFAULT_LOGIT_SHIFT = 1.0  # assumed change of a logit by batch size if it was not measured


@dataclass(frozen=True, slots=True)
class ProbeReport:
    depths: tuple[int, ...]  # context lengths of the probe, in tokens
    # Partition of the probed sizes; the sizes of one class agreed bit for bit at every position and every depth.
    classes: tuple[tuple[int, ...], ...]
    max_difference: float  # largest absolute difference of one logit between any size and single tokens

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(sorted(n for c in self.classes for n in c))

    def class_of(self, size: int) -> tuple[int, ...]:
        return next(c for c in self.classes if size in c)


def prefill_is_chunk_invariant(target: Model, sizes: Sequence[int]) -> bool:
    """Return True if a text gives the same bits when it is read in chunks, in pieces, or in passes; empty the cache.

    If so, exact mode may reuse a cached prompt to its last token.
    """
    tail = max(sizes)
    text = default_rng(1).integers(0, target.n_vocab, min(READ, target.n_ctx - tail) + tail).tolist()
    results = set()
    for pieces in ((), (PIECES,), tuple(sizes)):
        target.clear()
        target.prefill(text[: 1 if pieces else -tail])
        steps = cycle(pieces)
        while (done := len(target.tokens)) < len(text) - tail:
            target.evaluate(text[done : min(done + next(steps), len(text) - tail)])
        results.add(target.evaluate(text[-tail:]).tobytes())
    target.clear()
    return len(results) == 1


def probe(target: Model, depths: Sequence[int] = (SHORT, LONG), sizes: Sequence[int] = SIZES) -> ProbeReport:
    """Find the kernel classes at each of `depths` tokens of context; empty the cache.

    The decoded ids are random, because kernels are chosen by shape, not by content.
    """
    tail_length = max(-(-POSITIONS // size) * size for size in sizes)
    room = max(1, target.n_ctx - tail_length)
    lengths = tuple(sorted({min(d, room) for d in depths}))
    text = default_rng(0).integers(0, target.n_vocab, lengths[-1] + tail_length).tolist()
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
            rows = [target.evaluate(tail[i : i + size]).copy() for i in range(0, POSITIONS, size)]
            target.rollback(depth)
            logits = np.concatenate(rows)[:POSITIONS]
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
    """The kernel classes of one target; each part is `None` until it is compared."""

    probe: ProbeReport | None = None
    exact_sizes: tuple[int, ...] | None = None  # kernel class that exact mode uses
    is_chunk_invariant: bool | None = None  # result of `prefill_is_chunk_invariant`
    path: Path | None = None  # file of the results; `None` means that they stay in memory

    @classmethod
    def load(cls, target: Model, folder: Path | None = None) -> KernelClasses:
        """Load what is known about `target`; nothing without a fingerprint or a readable file."""
        folder = folder or FOLDERS.user_cache_path / "calibration"
        classes = cls(path=folder / f"{target.fingerprint}-kernels.json" if target.fingerprint else None)
        classes._read()
        return classes

    def _read(self) -> None:
        """Load the results in the file; its sizes always count, so that all processes agree."""
        if self.path is None:
            return
        with suppress(OSError, ValueError):
            stored = decode(KernelClasses, json.loads(read_cache(self.path) or ""))
            report, sizes = stored.probe, stored.exact_sizes
            is_valid = report is not None and report.sizes in (SIZES, SHARED_SIZES)
            if report and sizes and is_valid and sizes in (*report.classes, choose_from_one(report)):
                self.probe, self.exact_sizes = report, sizes
            if stored.is_chunk_invariant is not None:
                self.is_chunk_invariant = stored.is_chunk_invariant

    def _save(self) -> None:
        if self.path is not None:
            self._read()  # another process may have chosen the sizes in the meantime
            write_cache(self.path, json.dumps(encode(replace(self, path=None))))

    def forget(self) -> None:
        self.probe = self.exact_sizes = self.is_chunk_invariant = None
        if self.path is not None:
            with suppress(OSError):
                self.path.unlink(missing_ok=True)

    def ensure_exact(self, target: Model, *, together: bool = False) -> tuple[int, ...]:
        """Return the batch sizes of exact mode; if they are missing, probe and choose them, which clears the cache.

        If any number of sequences shares passes (`together`), `choose_from_one` is preferred.
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
    """Return the kernel class for exact mode: the largest of those that begin at `SMALLEST` or below."""
    return max((c for c in report.classes if min(c) <= SMALLEST), key=lambda c: (len(c), -c[0]))


@dataclass(slots=True)
class Comparisons:
    """Results so far for one model, build, processor and settings."""

    # For each setting the largest agreeing size (see `TrialContext.largest_agreeing`) at the first of `DEPTHS`.
    sizes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    threads: dict[str, bool] = field(default_factory=dict)  # for each setting: True if bits do not depend on threads
    rounding: float | None = None  # largest difference of one logit between batches and single tokens under "fast"

    def __post_init__(self) -> None:
        if any(len(sizes) > len(DEPTHS) or not {*sizes} <= {*COMPARED} for sizes in self.sizes.values()):
            raise ValueError(f"sizes must be among {COMPARED} at the depths {DEPTHS}")

    def largest(self, setting: str) -> int | None:
        """Return the size up to which all compared ones agree at all depths; `None` if a depth must be compared."""
        sizes = self.sizes.get(setting, ())
        return min(sizes) if len(sizes) == len(DEPTHS) or 1 in sizes else None

    def agree(self, setting: str) -> bool:
        """Return True if single tokens are known to agree with every size that drafts need."""
        return (self.largest(setting) or 1) >= MAX_DRAFT_SIZE


class ExactnessSelector:
    """The stored comparisons of a model, and the choice that follows from them.

    `model` is a `ngramspec.llama.trial.SettingTrials`, without whose identity nothing is stored. If drafts may change
    the last bits, rounding is measured on `text`, unless it is empty.
    """

    def __init__(self, model: Any, text: Sequence[int] = (), folder: Path | None = None) -> None:
        self.comparisons = Comparisons()
        self._model, self._text = model, text
        self._path = (folder or FOLDERS.user_cache_path / "calibration") / f"{model.identity}-bits.json"
        if model.identity:
            with suppress(OSError, ValueError):
                self.comparisons = decode(Comparisons, json.loads(read_cache(self._path) or ""))

    @property
    def setting(self) -> str:
        """The chosen setting, "fast" or "exact"."""
        known = self.comparisons
        can_be_exact = "exact" in self._model.settings and (known.largest("exact") is None or known.agree("exact"))
        return "exact" if can_be_exact and not known.agree("fast") else "fast"

    def exactness(self, setting: str) -> ExactnessMode:
        """Return the batch sizes and the guarantee for requests under a setting."""
        known, largest = self.comparisons, self.comparisons.largest(setting)
        agreeing = tuple(n for n in COMPARED if n <= (largest or 1))
        if known.agree(setting) or (setting == "exact" and largest is None):
            return ExactnessMode(agreeing, bit_identical=True)
        max_shift = DEFAULT_LOGIT_SHIFT if known.rounding is None else known.rounding
        return ExactnessMode(max_logit_shift=max_shift, agreeing=agreeing)

    def compare(self, on_note: Callable[[str], object] = lambda _: None) -> None:
        """Make the comparisons that the choice still requires, after a note for the user if nothing is known yet."""
        known = self.comparisons
        if not known.sizes:
            on_note("comparing logits for --exact auto; this happens once per model, machine and settings")
        with suppress(TargetError):
            for setting in self._model.settings:
                if known.largest(setting) is None:
                    with self._model.trial(setting) as trial:
                        # If threads change no bits, the comparison of sizes follows the load.
                        if setting == "exact" and self._compare_threads(setting, trial):
                            trial.follow_load()
                        while known.largest(setting) is None:
                            before = known.sizes.get(setting, ())
                            known.sizes[setting] = (*before, trial.largest_agreeing(DEPTHS[len(before)]))
                            self._save()
                if known.agree(setting):
                    return
            if self._text and known.rounding is None:
                with self._model.trial("fast") as trial:
                    known.rounding = trial.rounding(self._text)
                self._save()

    def _compare_threads(self, setting: str, trial: Any) -> bool:
        known = self.comparisons.threads
        if setting not in known:
            known[setting] = trial.threads_agree(DEPTHS[0])
            self._save()
        return known[setting]

    def threads_agree(self, setting: str) -> bool:
        """Return True if the bits do not depend on the number of threads; compare them if that is not known."""
        known = self.comparisons.threads
        with suppress(TargetError):
            if setting not in known:
                with self._model.trial(setting) as trial:
                    self._compare_threads(setting, trial)
        return known.get(setting, False)

    def _save(self) -> None:
        if self._model.identity:
            write_cache(self._path, json.dumps(encode(self.comparisons)))

    def forget(self) -> None:
        self.comparisons = Comparisons()
        with suppress(OSError):
            self._path.unlink(missing_ok=True)
