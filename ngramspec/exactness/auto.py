"""`ExactAuto` carries out `exact="auto"`: it measures a model while it is loaded, for a bounded time, and chooses.

Measurements are kept beside the calibration and never repeated: a choice that changed with the noise of a measurement
would change the text. They are made in steps, each of some fifty passes at most (that of
rounding 170, but no choice depends on it). A step that does not fit into the
time is left to the next time that the model is loaded, or to `ngramspec info`; until then the fastest way is chosen.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from ngramspec.errors import TargetError
from ngramspec.exactness import trial
from ngramspec.exactness.choice import DEPTHS, WAYS, Measured, Way
from ngramspec.storage import cache_folder, keep_json, recall

BUDGET = 8.0
"""Seconds to measure in while a model is loaded."""

UNMEASURED = 1.0
"""How far batch sizes are taken to move a logit where there was no time to measure it."""


@dataclass(frozen=True, slots=True)
class Footing:
    """How requests are decoded.

    Attributes:
        sizes: batch sizes that may be used; None: all of them.
        aligned: see `Target.prefill`.
        same: whether the text is the same bit for bit with and without drafts.
        bound: how far batch sizes move a logit; 0 if `same`, or where nobody asks.
        harmless: batch sizes that agree with a pass without a draft.
    """

    sizes: tuple[int, ...] | None = None
    aligned: bool = False
    same: bool = False
    bound: float = 0.0
    harmless: tuple[int, ...] = (1,)


@runtime_checkable
class Decided(Protocol):
    """A model whose footing was decided when it was loaded with `exact="auto"`."""

    footing: Footing


class ExactAuto:
    """What is known of a model, and what that decides.

    Args:
        model: to measure.
        ways: the ways to decode that may be chosen, "fast" among them.
        text: what rounding is measured on, where drafts may move last bits; empty: it is not.
        folder: where measurements are kept; None for the user's cache folder.
    """

    def __init__(
        self,
        model: trial.Measurable,
        ways: Sequence[Way] = WAYS,
        text: Sequence[int] = (),
        folder: Path | None = None,
    ) -> None:
        self.known = Measured()
        self._model, self._text = model, text
        self._path = (folder or cache_folder("calibration")) / f"{model.identity}-exact.json"
        self._ways = tuple(way for way in ways if way != "exact" or way in model.settings)
        self._read()

    @property
    def way(self) -> Way:
        """How requests are decoded."""
        return self.known.choose(self._ways)

    @property
    def footing(self) -> Footing:
        """What that means for requests."""
        way = self.way
        found = self.known.identity("exact" if way == "exact" else "fast")
        if found is not None and (way == "padded" or found.whole):
            return Footing(found.padded if way == "padded" else found.agreeing, same=True)
        bound = UNMEASURED if self.known.rounding is None else self.known.rounding
        return Footing(bound=bound, harmless=(1,) if found is None else found.agreeing)

    def measure(self, budget: float | None = None) -> None:
        """Measure what still decides, as far as the time allows.

        Args:
            budget: seconds; None: BUDGET.
        """
        ends = time.perf_counter() + (BUDGET if budget is None else budget)
        with suppress(TargetError):
            while (missing := self._missing()) is not None and self._measure(missing, ends):
                self._read()
                if self._model.identity:
                    keep_json(self._path, self.known.to_json())

    def _missing(self) -> str | None:
        """What is to be measured next; None if nothing is."""
        wanted = self._text and self.known.rounding is None and not self.footing.same
        return self.known.missing(self._ways) or ("rounding" if wanted else None)

    def _measure(self, what: str, ends: float) -> bool:
        """Measure it at the next depth if a first pass shows that there is time; returns whether it was measured."""
        known = self.known
        if time.perf_counter() >= ends:
            return False
        settings = self._model.settings if what == "times" else ("exact" if what == "exact" else "fast",)
        with ExitStack() as stack:
            trials = {name: stack.enter_context(self._model.trial(name)) for name in settings}
            cost = trial.ROUNDING_COST if what == "rounding" else trial.COST
            expected = trial.single(trials[settings[0]]) * cost
            if time.perf_counter() + expected > ends:
                return False
            if what == "times":
                known.times = *known.times, trial.times(trials, DEPTHS[len(known.times)])
            elif what == "rounding":
                known.rounding = trial.rounding(trials["fast"], self._text)
            else:
                before = known.identities.get(what, ())
                known.identities[what] = *before, trial.identity(trials[what], DEPTHS[len(before)])
        return True

    def _read(self) -> None:
        """Take over what the file says: what was settled first, by whatever process, counts."""
        if self._model.identity:
            with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, IndexError):
                self.known.join(Measured.from_json(json.loads(recall(self._path) or "")))

    def forget(self) -> None:
        """Drop what is known, in the file too; other texts may then be decoded another way."""
        self.known = Measured()
        with suppress(OSError):
            self._path.unlink(missing_ok=True)
