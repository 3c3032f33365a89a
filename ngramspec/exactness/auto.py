"""`ExactAuto` carries out `exact="auto"` on one target: it measures for a bounded time, chooses, and switches.

Measurements are kept beside the calibration and never repeated: a choice that changed with the noise of a measurement
would change the text. They are made in steps, each of which takes some fifty passes at most (that of rounding 170, but
no choice depends on it). A step that does not fit into the time allowed (8 seconds, or a quarter of the request) is
left to the next request, or to a caller that allows all the time there is; until then requests are decoded the fastest
way.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from ngramspec.backend import Switching
from ngramspec.errors import ModelError, TargetError
from ngramspec.exactness import trial
from ngramspec.exactness.choice import DEPTHS, TYPICAL, WAYS, Measured, Way
from ngramspec.storage import cache_folder, keep_json, recall

BUDGET, SHARE = 8.0, 0.25
"""Time to measure in before a request: so many seconds, or that part of its expected time if that is more."""

_COSTS = {
    "fast": trial.IDENTITY_COST,
    "exact": trial.IDENTITY_COST,
    "speed": trial.TIMES_COST,
    "rounding": trial.ROUNDING_COST,
}


@dataclass(frozen=True, slots=True)
class Footing:
    """How one request is decoded.

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


class ExactAuto:
    """The choices for one target.

    Args:
        target: whose settings are switched.
        folder: where measurements are kept; None for the user's cache folder.
        usable: the ways to decode that may be chosen, "fast" among them.
    """

    def __init__(self, target: Switching, folder: Path | None = None, usable: Sequence[Way] = WAYS) -> None:
        self.target = target
        self.known = Measured()
        self._path = (folder or cache_folder("calibration")) / f"{target.identity}-exact.json"
        self._usable = tuple(way for way in usable if way != "exact" or way in target.settings)
        self._read()

    def begin(self, prompt: Sequence[int], tokens: int, *, drafts: bool = True) -> Footing:
        """Measure what there is time for, choose, and open the target's context for that.

        Args:
            prompt, tokens: the request, and the most tokens that it may get.
            drafts: whether there will be any; the choice does not depend on it.
        """
        self.measure(len(prompt), tokens, text=prompt if drafts else ())
        way = self.known.choose(len(prompt), tokens, self._usable)
        setting = "exact" if way == "exact" else "fast"
        if setting != self.target.setting and not self._holds_most(prompt):
            self._switch(setting)
        # A conversation keeps the setting it began with, as long as that saves reading it again.
        if setting != self.target.setting:
            way = "exact" if self.target.setting == "exact" else "fast"
        sizes = self.known.sizes(way)
        if sizes is not None:
            return Footing(tuple(n for n in sizes if n <= self.target.max_batch) or sizes[:1], same=True)
        known = self.known.identity.get(self.target.setting)
        return Footing(bound=self.known.bound, harmless=known.agreeing if known else (1,))

    def _holds_most(self, prompt: Sequence[int]) -> bool:
        half = len(prompt) // 2 + 1
        return len(self.target.tokens) >= half and list(self.target.tokens[:half]) == list(prompt[:half])

    def _switch(self, setting: str) -> None:
        try:
            self.target.use(setting)
        except ModelError:  # too little memory of the machine for these settings; there was enough for the others
            self._usable = tuple(way for way in self._usable if way != "exact")
            self.target.use("fast")

    def measure(self, prompt: int, tokens: int, *, text: Sequence[int] = (), budget: float | None = None) -> None:
        """Measure what still decides on a request, as far as the time allows.

        Args:
            prompt, tokens: lengths of the prompt and of the text.
            text: what rounding is measured on, should the request be decoded the fastest way; empty: it is not.
            budget: seconds; None: 8, or a quarter of what the request is expected to take.
        """
        if not (self.target.can_rollback and self.target.exact_rollback):
            return
        if self._missing(prompt, tokens, text) is not None:
            self._read()
        began = time.perf_counter()
        while (missing := self._missing(prompt, tokens, text)) is not None:
            # A busy machine may have made the estimate too high; only one of over twice the budget is believed.
            single = self.known.wanted / _COSTS[missing]
            if budget is None and self.known.wanted > 2 * self._budget(prompt, tokens, single):
                return
            try:
                done = self._measure(missing, prompt, tokens, text, began, budget)
            except TargetError:
                return
            self._save()
            if not done:
                return

    def _missing(self, prompt: int, tokens: int, text: Sequence[int]) -> str | None:
        """What is to be measured next to decide on a request; None if all is known that can decide."""
        known = self.known
        fast = known.identity.get("fast")
        if fast is None:
            return "fast"
        pads = fast.pads and "padded" in self._usable
        if fast.whole or not (pads or "exact" in self._usable):
            return None
        if "fast" not in known.speed:
            return "speed"
        if pads and known.worth("padded", prompt, tokens):
            return None
        if "exact" in self._usable and known.worth("exact", prompt, tokens):
            exact = known.identity.get("exact")
            if exact is None or exact.whole:
                return None if exact else "exact"
        return "rounding" if text and known.rounding is None else None

    def _budget(self, prompt: int, tokens: int, single: float = 0.0) -> float:
        fast = self.known.speed.get("fast")
        tokens = min(tokens, TYPICAL)
        expected = fast.seconds(prompt, tokens) if fast else single * tokens
        return max(BUDGET, SHARE * expected)

    def _measure(
        self, what: str, prompt: int, tokens: int, text: Sequence[int], began: float, budget: float | None
    ) -> bool:
        """Measure it if the first pass shows that there is time; returns whether it was measured."""
        settings = self.target.settings if what == "speed" else ("exact" if what == "exact" else "fast",)
        with ExitStack() as stack:
            trials = {name: stack.enter_context(self.target.trial(name)) for name in settings}
            one = trial.single(trials[settings[0]])
            expected = one * _COSTS[what]
            # A slow model's request is long, and so may the measurement be.
            allowed = self._budget(prompt, tokens, one) if budget is None else budget
            if expected > began + allowed - time.perf_counter():
                self.known.wanted = expected
                return False
            if what == "speed":
                self.known.add_times(trial.times(trials, DEPTHS[bool(self.known.shallow_times)]))
            elif what == "rounding":
                self.known.rounding = trial.rounding(trials["fast"], text)
            else:
                depth = DEPTHS[what in self.known.shallow_identity]
                self.known.add_identity(what, trial.identity(trials[what], depth))
        self.known.wanted = 0.0
        return True

    # ------------------------------------------------------------------ what is kept

    def _read(self) -> None:
        """Take over what the file says: what was settled first, by whatever process, counts."""
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, IndexError):
            kept = Measured.from_json(json.loads(recall(self._path) or ""))
            self.known.identity |= kept.identity
            self.known.speed |= kept.speed
            self.known.shallow_identity |= kept.shallow_identity
            self.known.shallow_times |= kept.shallow_times
            if kept.rounding is not None:
                self.known.rounding = kept.rounding
            self.known.wanted = self.known.wanted or kept.wanted

    def _save(self) -> None:
        wanted = self.known.wanted
        self._read()
        self.known.wanted = wanted
        keep_json(self._path, self.known.to_json())

    def forget(self) -> None:
        """Drop what is known, in the file too; other texts may then be decoded another way."""
        self.known = Measured()
        with suppress(OSError):
            self._path.unlink(missing_ok=True)
