"""`Calibration`: the measurements of a target on this machine.

They are stored in one small JSON file per model, build, machine and settings. The batch sizes of exact mode must not
change from one run to the next. The name of the file begins with the name of the model file, so that
`load_batch_cost_ratio` finds it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ngramspec.backend import Model
from ngramspec.cost import measure
from ngramspec.cost.curve import CostCurve
from ngramspec.cost.measure import MEASURE_ORDER, ProbeReport, RestoreCost
from ngramspec.json_data import decode, encode
from ngramspec.storage import cache_folder, read_cache, write_cache_json

VERSION = 3  # version of curves in files, 3 since they contain the threads; a curve of another version is not used

RETIME_SHARE = 0.01
"""Maximum time of measuring one size again, as a part of the text's: this time is lost for the user."""

RETIME_SECONDS = 0.5  # the same in seconds, if no text waits

EXACT_TOLERANCE = 1.25
"""Maximum cost of the cheapest pass of a kernel class, in one-token passes; exact mode uses the largest such class."""


@dataclass(slots=True)
class Calibration:
    """Measurements of one target; each is `None` until it is made."""

    path: Path | None = None  # file of the measurements; `None` means that they stay in memory
    curve: CostCurve | None = None  # seconds per pass by batch size
    probe: ProbeReport | None = None  # kernel classes of batch sizes
    exact_sizes: tuple[int, ...] | None = None  # kernel class that exact mode uses
    is_chunk_invariant: bool | None = None  # result of `measure.prefill_is_chunk_invariant`
    uses: int = 0  # number of new processes that measured one size of the curve again
    restore: RestoreCost | None = None  # cost of a rollback that recomputes tokens; never stored on disk
    # True if other programs ran while the curve was measured; it is then measured again on an idle machine.
    is_provisional: bool = False
    _fresh: bool = False
    _is_given: bool = False

    @classmethod
    def load(cls, target: Model, folder: Path | None = None) -> Calibration:
        """Load the measurements of `target`; they are empty without a fingerprint or a readable file."""
        if not target.fingerprint:
            return cls()
        calibration = cls((folder or cache_folder("calibration")) / f"{target.fingerprint}.json")
        calibration._read()
        return calibration

    @classmethod
    def from_curve(cls, curve: CostCurve) -> Calibration:
        """Return a calibration with a known curve, which is neither measured again nor stored on disk."""
        return cls(curve=curve, _fresh=True, _is_given=True)

    def _read(self) -> None:
        """Load missing measurements from the file; its exact-mode sizes always count, so that all processes agree."""
        if self.path is None:
            return
        try:
            data = json.loads(read_cache(self.path) or "")
            curve = CostCurve.from_json(data["curve"]) if data["curve"] and data.get("version") == VERSION else None
            probe = decode(ProbeReport, data["probe"]) if data["probe"] else None
            exact_sizes = tuple(data["exact_sizes"]) if data["exact_sizes"] else None
            uses = int(data["uses"])
            is_chunk_invariant = data.get("reads_alike")
            is_provisional = bool(data.get("provisional"))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
            return
        if probe is not None and probe.sizes not in (measure.SIZES, measure.SHARED_SIZES):
            return
        if self.curve is None and curve is not None and curve.plausible:
            self.curve, self.is_provisional = curve, is_provisional
        self.uses = max(self.uses, uses)
        if probe is not None and exact_sizes and exact_sizes in (*probe.classes, choose_from_one(probe)):
            self.probe, self.exact_sizes = probe, exact_sizes
        if isinstance(is_chunk_invariant, bool):
            self.is_chunk_invariant = is_chunk_invariant

    def save(self) -> None:
        """Store the measurements; see `storage.write_cache`."""
        if self.path is None:
            return
        # Another process may have chosen the sizes of exact mode in the meantime.
        self._read()
        data = {
            "version": VERSION,
            "curve": self.curve.to_json() if self.curve else None,
            "probe": encode(self.probe),
            "exact_sizes": self.exact_sizes,
            "reads_alike": self.is_chunk_invariant,
            "uses": self.uses,
            "provisional": self.is_provisional,
        }
        write_cache_json(self.path, data)

    def forget(self) -> None:
        """Delete the measurements, including the file; exact mode may then choose another class of sizes."""
        self.curve = self.probe = self.exact_sizes = self.is_chunk_invariant = None
        self.uses = 0
        if self.path is not None:
            with suppress(OSError):
                self.path.unlink(missing_ok=True)

    def ensure_curve(self, target: Model, tokens: int = 0, sizes: Sequence[int] = MEASURE_ORDER) -> CostCurve:
        """Return the cost curve, measured if it is missing; the cache is not changed.

        Each process times one size of a stored curve again, in turn: the machine may have been busy when the curve was
        measured, or the model too slow for all sizes. If a text waits, this is done only if `RETIME_SHARE` allows it.

        Args:
            target: Model to measure.
            tokens: Maximum number of tokens to be generated, which limits the time of measuring; 0 if no text waits.
            sizes: Batch sizes to measure.
        """
        if target.replays and self.restore is None:
            self.restore = measure.time_restore(target)
        is_quiet = target.conditions.is_quiet
        if self.curve is not None and not self._fresh and not self.is_provisional and is_quiet:
            self._retime(target, self.curve, tokens, sizes)
        if self.curve is None or (self.needs_measuring and is_quiet):
            self._measure(target, tokens, sizes)
        self._fresh = True
        assert self.curve is not None
        return self.curve

    @property
    def needs_measuring(self) -> bool:
        """True if the curve must be measured again on an idle machine, because other programs disturbed it."""
        return self.is_provisional or (self.curve is not None and self.curve.is_refuted and not self._is_given)

    def _measure(self, target: Model, tokens: int, sizes: Sequence[int]) -> None:
        """Measure the curve; it is provisional if other programs ran at the same time."""
        before = target.conditions
        curve = measure.measure(target, tokens, sizes=sizes)
        after = target.conditions
        self.is_provisional = not (before.is_quiet and after.is_quiet) or before.period != after.period
        if self.curve is None:
            self.curve = curve
        else:
            self.curve.replace(curve)

    def _retime(self, target: Model, curve: CostCurve, tokens: int, sizes: Sequence[int]) -> None:
        """Time one size again, and those that cost more than larger ones, as far as the time allows.

        If one token is far faster than before, only the level is updated, so that `is_refuted` is True.
        """
        sizes = measure.sizes_to_time(curve, sizes, target.max_batch)
        next_size = sizes[self.uses % len(sizes)]
        repeats = 3 if curve.level < 0.05 else 1
        max_seconds = RETIME_SHARE * tokens * curve.level if tokens else RETIME_SECONDS
        max_seconds -= curve.level
        # If a text waits, the level alone is not worth measuring, because the passes of the text will show it.
        needed_seconds = repeats * (curve.level + curve.seconds(next_size)) if tokens else 0.0
        if needed_seconds > max_seconds or len(target.tokens) + next_size > target.n_ctx:
            return
        curve.level = min(curve.level, measure.time_pass(target, 1))
        for size in dict.fromkeys((next_size, *measure.doubtful_sizes(curve, sizes))):
            max_seconds -= repeats * (curve.level + curve.seconds(size))
            if curve.is_refuted or max_seconds < 0 or len(target.tokens) + size > target.n_ctx:
                return
            single = min(measure.time_pass(target, 1) for _ in range(repeats))
            curve.retime(size, single, min(measure.time_pass(target, size) for _ in range(repeats)))
        self.uses += 1

    def ensure_exact(self, target: Model, *, together: bool = False) -> tuple[int, ...]:
        """Return the batch sizes of exact mode; if they are missing, probe and choose them, which clears the cache.

        Args:
            target: Model to probe.
            together: True if any number of sequences shares passes; `choose_from_one` is then preferred.
        """
        if self.exact_sizes is None:
            self._read()
        if self.exact_sizes is None:
            self.probe = self.probe or measure.probe(target, sizes=measure.SHARED_SIZES if together else measure.SIZES)
            target.clear()
            target.prefill([0])
            curve = self.ensure_curve(target)
            self.exact_sizes = (choose_from_one(self.probe) if together else ()) or choose_class(self.probe, curve)
            target.clear()
            self.save()
        return self.exact_sizes

    def ensure_chunk_invariance(self, target: Model) -> bool:
        """Return the result of `measure.prefill_is_chunk_invariant`; measuring it clears the cache."""
        if self.is_chunk_invariant is None:
            self._read()
        if self.is_chunk_invariant is None:
            self.is_chunk_invariant = measure.prefill_is_chunk_invariant(target, self.ensure_exact(target))
            self.save()
        return self.is_chunk_invariant


def load_batch_cost_ratio(model: str, folder: Path | None = None) -> float | None:
    """Return the last stored T(4) / T(1) of a model on this machine; `None` if no curve is stored.

    Args:
        model: Beginning of the model's fingerprints, and so of the names of its files.
        folder: Folder of the files; `None` means the user's cache folder.
    """
    ratios: list[tuple[float, float]] = []
    for path in (folder or cache_folder("calibration")).glob(f"{model}*.json"):
        calibration = Calibration(path)
        calibration._read()
        if calibration.curve is not None:
            with suppress(OSError):
                ratios.append((path.stat().st_mtime, calibration.curve.ratio(4)))
    return max(ratios)[1] if ratios else None


def choose_from_one(report: ProbeReport) -> tuple[int, ...]:
    """Return the sizes 1, 2, 3, ... up to the last that agrees with all before it; empty if 1 and 2 disagree."""
    agreeing = report.class_of(1)
    sizes = tuple(size for i, size in enumerate(agreeing, 1) if size == i)
    return sizes if len(sizes) > 1 else ()


def choose_class(report: ProbeReport, curve: CostCurve) -> tuple[int, ...]:
    """Return the kernel class for exact mode: the largest of those that cost little without a draft.

    Without a draft, every pass is padded to the cheapest size of the class. The cost of that size is thus the cost of
    exactness on text that cannot be predicted. The class of size 1 has no such cost, so there is always a choice.
    """
    affordable = [c for c in report.classes if min(map(curve.ratio, c)) <= EXACT_TOLERANCE]
    return max(affordable, key=lambda c: (len(c), -c[0]))
