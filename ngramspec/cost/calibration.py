"""`Calibration`: what was measured of a target on this machine.

It is kept in one small JSON file per model, build, machine and settings. The batch sizes that exact mode uses must not
change from one run to the next. The file's name begins with that of its model file, so that `kept_steepness` finds it.
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
from ngramspec.storage import cache_folder, keep_json, recall

VERSION = 3  # of a curve in a file; one of another version is measured again. 3: with the number of threads.

EXACT_TOLERANCE = 1.25
"""Exact mode takes the largest kernel class whose cheapest pass costs at most this many one-token passes."""


@dataclass(slots=True)
class Calibration:
    """Measurements of one target; each is None until it was made."""

    path: Path | None = None  # the file they are kept in; None keeps them in memory only
    curve: CostCurve | None = None  # seconds per pass by batch size
    probe: ProbeReport | None = None  # kernel classes of batch sizes
    exact_sizes: tuple[int, ...] | None = None  # the kernel class that exact mode uses
    # Whether a text leaves the same bits behind however it came into the cache; see `measure`.
    reads_alike: bool | None = None
    uses: int = 0  # how often the curve was taken up again by a new process
    # What taking tokens back costs, where that means recomputing some; never kept on disk.
    restore: RestoreCost | None = None
    # Whether other programs ran while the curve was measured, so that it is measured again on an idle machine.
    is_provisional: bool = False
    _fresh: bool = False

    @classmethod
    def load(cls, target: Model, folder: Path | None = None) -> Calibration:
        """What is known about `target`; a missing or damaged file, or no fingerprint, counts as nothing known."""
        if not target.fingerprint:
            return cls()
        known = cls((folder or cache_folder("calibration")) / f"{target.fingerprint}.json")
        known._read()
        return known

    @classmethod
    def given(cls, curve: CostCurve) -> Calibration:
        """A calibration with a known curve, which is not measured again; nothing is kept on disk."""
        return cls(curve=curve, _fresh=True)

    def _read(self) -> None:
        """Fill gaps from the file. Its exact-mode sizes replace ours, so that all processes agree."""
        if self.path is None:
            return
        try:
            data = json.loads(recall(self.path) or "")
            curve = CostCurve.from_json(data["curve"]) if data["curve"] and data.get("version") == VERSION else None
            probe = decode(ProbeReport, data["probe"]) if data["probe"] else None
            exact_sizes = tuple(data["exact_sizes"]) if data["exact_sizes"] else None
            uses = int(data["uses"])
            reads_alike = data.get("reads_alike")
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
        if isinstance(reads_alike, bool):
            self.reads_alike = reads_alike

    def save(self) -> None:
        """Keep what is known; see `storage.keep`."""
        if self.path is None:
            return
        # Another process may have settled on the sizes of exact mode in the meantime.
        self._read()
        data = {
            "version": VERSION,
            "curve": self.curve.to_json() if self.curve else None,
            "probe": encode(self.probe),
            "exact_sizes": self.exact_sizes,
            "reads_alike": self.reads_alike,
            "uses": self.uses,
            "provisional": self.is_provisional,
        }
        keep_json(self.path, data)

    def forget(self) -> None:
        """Drop what is known, in the file too; what exact mode then settles on may be another class of sizes."""
        self.curve = self.probe = self.exact_sizes = self.reads_alike = None
        self.uses = 0
        if self.path is not None:
            with suppress(OSError):
                self.path.unlink(missing_ok=True)

    def ensure_curve(self, target: Model, tokens: int = 0, sizes: Sequence[int] = MEASURE_ORDER) -> CostCurve:
        """The cost curve, measured if nothing is known; the cache stays as it is.

        A curve from an earlier process gets one size in turn timed again: the machine may have been busy when it was
        measured, or the model too slow for all sizes.
        """
        if target.replays and self.restore is None:
            self.restore = measure.time_restore(target)
        if self.curve is None or (self.is_provisional and target.conditions.is_quiet):
            self._measure(target, tokens, sizes)
        elif not self._fresh and not self.is_provisional:
            self._retime(target, self.curve, tokens, sizes)
        self._fresh = True
        assert self.curve is not None
        return self.curve

    def _measure(self, target: Model, tokens: int, sizes: Sequence[int]) -> None:
        """Measure the curve. It is provisional if other programs ran meanwhile."""
        before = target.conditions
        curve = measure.measure(target, tokens, sizes=sizes)
        after = target.conditions
        self.is_provisional = not (before.is_quiet and after.is_quiet) or before.period != after.period
        if self.curve is None:
            self.curve = curve
        else:
            self.curve.replace(curve)

    def _retime(self, target: Model, curve: CostCurve, tokens: int, sizes: Sequence[int]) -> None:
        sizes = measure.telling(curve, sizes, target.max_batch)
        size = sizes[self.uses % len(sizes)]
        repeats = 3 if curve.level < 0.05 else 1
        expected = (repeats + 1) * curve.level + repeats * curve.seconds(size)
        if expected > max(0.5, 0.05 * tokens * curve.level) or len(target.tokens) + size > target.n_ctx:
            return
        measure.time_pass(target, 1)
        single = min(measure.time_pass(target, 1) for _ in range(repeats))
        curve.retime(size, single, min(measure.time_pass(target, size) for _ in range(repeats)))
        self.uses += 1

    def ensure_exact(self, target: Model, *, together: bool = False) -> tuple[int, ...]:
        """The batch sizes of exact mode, probed and chosen if nothing is known. Clears the cache then.

        `together`: texts share passes, any number of them, so that `choose_from_one` is asked first.
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

    def ensure_reading(self, target: Model) -> bool:
        """Whether a text leaves the same bits behind however it came into the cache, which a probe clears."""
        if self.reads_alike is None:
            self._read()
        if self.reads_alike is None:
            self.reads_alike = measure.reads_alike(target, self.ensure_exact(target))
            self.save()
        return self.reads_alike


def kept_steepness(model: str, folder: Path | None = None) -> float | None:
    """T(4) / T(1) as kept last on this machine for a model, with which fingerprints begin; None where nothing is."""
    found: list[tuple[float, float]] = []
    for path in (folder or cache_folder("calibration")).glob(f"{model}*.json"):
        kept = Calibration(path)
        kept._read()
        if kept.curve is not None:
            with suppress(OSError):
                found.append((path.stat().st_mtime, kept.curve.ratio(4)))
    return max(found)[1] if found else None


def choose_from_one(report: ProbeReport) -> tuple[int, ...]:
    """The sizes 1, 2, 3, ... as far as they agree; none if 1 and 2 do not."""
    agreeing = report.class_of(1)
    sizes = tuple(size for i, size in enumerate(agreeing, 1) if size == i)
    return sizes if len(sizes) > 1 else ()


def choose_class(report: ProbeReport, curve: CostCurve) -> tuple[int, ...]:
    """The kernel class for exact mode: the largest among those that cost next to nothing without a draft.

    Without drafts every pass is padded to the cheapest size of the class, so that size's cost is the price of
    exactness on text where nothing can be guessed. The class of size 1 costs nothing and is always a choice.
    """
    affordable = [c for c in report.classes if min(map(curve.ratio, c)) <= EXACT_TOLERANCE]
    return max(affordable, key=lambda c: (len(c), -c[0]))
