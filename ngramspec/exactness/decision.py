"""The choice made by `exact="auto"`: settings and batch sizes whose logits agree bit for bit.

llama.cpp picks its kernels by batch size. So the logits of one position may differ in the last bits between a batch of
one token and a batch of five. Drafts change the batch sizes, and so they may change the text. Two settings are compared
(`ngramspec.llama.trial_context`):

    fast     the fastest settings; chosen if their sizes agree as far as drafts need them
    exact    on a CPU without flash attention, whose kernel splits a single token's context over the threads; chosen if
             their sizes agree and those of "fast" do not

If the sizes agree in neither, "fast" is chosen, and drafts may change the text.

Invariant: the choice, and so the text, is a function of the model, the build, the processor and the settings. No clock
and no load takes part: all comparisons that decide are made before the first text, however long they take, and stored.
If one fails for lack of memory, "exact" decodes single tokens, and the next load repeats the comparison.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from ngramspec.errors import TargetError
from ngramspec.json_data import decode, encode
from ngramspec.storage import cache_folder, read_cache, write_cache_json

Exact = Literal["auto", "on", "off"]
EXACT: tuple[Exact, ...] = ("auto", "on", "off")

SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 16)  # batch sizes that are compared
DEPTHS = (1024, 0)
"""Tokens of context after which sizes are compared, the one at which more differ first; CPU kernels were seen to change
at 256 and 512."""

MAX_DRAFT_SIZE = 7
"""Largest size that must agree; larger ones are used only if they agree. K-quants change their kernel at 8."""

DEFAULT_LOGIT_SHIFT = 1.0  # assumed change of a logit by batch size if it was not measured


@dataclass(frozen=True, slots=True)
class ExactnessMode:
    """Allowed batch sizes of a request, and the guarantee for its text."""

    sizes: tuple[int, ...] | None = None  # allowed batch sizes; `None` means all
    aligned: bool = False  # alignment of the prefill; see `Target.prefill`
    bit_identical: bool = False  # True if the text is the same bit for bit with and without drafts
    # Maximum change of a logit by batch size; 0 if `bit_identical` is set or the maximum is not needed.
    max_logit_shift: float = 0.0
    agreeing: tuple[int, ...] = (1,)  # batch sizes that agree with a decode call without a draft


@dataclass(slots=True)
class Comparisons:
    """Results so far for one model, build, processor and settings."""

    # For each setting the largest agreeing size (see `TrialContext.largest_agreeing`) at the first of `DEPTHS`.
    sizes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    threads: dict[str, bool] = field(default_factory=dict)  # for each setting: True if bits do not depend on threads
    rounding: float | None = None  # largest difference of one logit between batches and single tokens under "fast"

    def __post_init__(self) -> None:
        if any(len(sizes) > len(DEPTHS) or not {*sizes} <= {*SIZES} for sizes in self.sizes.values()):
            raise ValueError(f"sizes must be among {SIZES} at the depths {DEPTHS}")

    def largest(self, setting: str) -> int | None:
        """Return the size up to which all compared ones agree at all depths; `None` if a depth must be compared."""
        sizes = self.sizes.get(setting, ())
        return min(sizes) if len(sizes) == len(DEPTHS) or 1 in sizes else None

    def agree(self, setting: str) -> bool:
        """Return True if single tokens are known to agree with every size that drafts need."""
        return (self.largest(setting) or 1) >= MAX_DRAFT_SIZE

    def choose(self, settings: Sequence[str]) -> str:
        """Return the setting for requests, one of `settings`."""
        can_be_exact = "exact" in settings and (self.largest("exact") is None or self.agree("exact"))
        return "exact" if can_be_exact and not self.agree("fast") else "fast"


class ComparedSettings(Protocol):
    """The settings of a model between which `exact="auto"` chooses."""

    @property
    def settings(self) -> Sequence[str]:
        """Their names, "fast" first."""

    @property
    def identity(self) -> str:
        """Key of all that comparisons depend on; "" means that they are not stored."""

    def trial(self, setting: str) -> Any:
        """Open a context for comparisons; see `ngramspec.llama.trial_context.TrialContext`."""


class ExactnessSelector:
    """The stored comparisons of a model, and the choice that follows from them.

    Args:
        model: The settings of the model, such as `Target.trials`.
        text: Token ids on which rounding is measured if drafts may change the last bits; empty means that rounding is
            not measured.
        folder: Folder of the stored comparisons; `None` means the user's cache folder.
    """

    def __init__(self, model: ComparedSettings, text: Sequence[int] = (), folder: Path | None = None) -> None:
        self.comparisons = Comparisons()
        self._model, self._text = model, text
        self._path = (folder or cache_folder("calibration")) / f"{model.identity}-bits.json"
        if model.identity:
            with suppress(OSError, ValueError):
                self.comparisons = decode(Comparisons, json.loads(read_cache(self._path) or ""))

    @property
    def setting(self) -> str:
        """The chosen setting, "fast" or "exact"."""
        return self.comparisons.choose(self._model.settings)

    def exactness(self, setting: str) -> ExactnessMode:
        """Return the batch sizes and the guarantee for requests under a setting."""
        known = self.comparisons
        largest = known.largest(setting)
        agreeing = tuple(n for n in SIZES if n <= (largest or 1))
        if known.agree(setting) or (setting == "exact" and largest is None):
            return ExactnessMode(agreeing, bit_identical=True)
        max_shift = DEFAULT_LOGIT_SHIFT if known.rounding is None else known.rounding
        return ExactnessMode(max_logit_shift=max_shift, agreeing=agreeing)

    def compare(self, on_note: Callable[[str], object] = lambda _: None) -> None:
        """Make the comparisons that the choice still requires, after a note for the user if nothing is known yet."""
        known = self.comparisons
        if not known.sizes:
            on_note("comparing logits for --exact auto; this happens once per model and machine")
        with suppress(TargetError):
            for setting in self._model.settings:
                if known.largest(setting) is None:
                    with self._model.trial(setting) as trial:
                        self._compare_sizes(setting, trial)
                if known.agree(setting):
                    return
            if self._text and known.rounding is None:
                with self._model.trial("fast") as trial:
                    known.rounding = trial.rounding(self._text)
                self._save()

    def _compare_sizes(self, setting: str, trial: Any) -> None:
        """Compare sizes at the depths that are missing, and under "exact" first threads, which then follow the load."""
        known = self.comparisons
        if setting == "exact" and setting not in known.threads:
            known.threads[setting] = trial.threads_agree(DEPTHS[0])
            self._save()
        if known.threads.get(setting):
            trial.follow_load()
        while known.largest(setting) is None:
            before = known.sizes.get(setting, ())
            known.sizes[setting] = (*before, trial.largest_agreeing(DEPTHS[len(before)]))
            self._save()

    def threads_agree(self, setting: str) -> bool:
        """Return True if the bits do not depend on the number of threads; compare them if that is not known."""
        known = self.comparisons.threads
        with suppress(TargetError):
            if setting not in known:
                with self._model.trial(setting) as trial:
                    known[setting] = trial.threads_agree(DEPTHS[0])
                self._save()
        return known.get(setting, False)

    def _save(self) -> None:
        if self._model.identity:
            write_cache_json(self._path, encode(self.comparisons))

    def forget(self) -> None:
        """Delete the comparisons, including the file."""
        self.comparisons = Comparisons()
        with suppress(OSError):
            self._path.unlink(missing_ok=True)
