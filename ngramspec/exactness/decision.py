"""The choice made by `exact="auto"`: the decoding mode, by measured times and by batch sizes that agree bit for bit.

llama.cpp picks its kernels by batch size. So the logits of one position may differ in the last bits between a batch of
one token and a batch of five. Drafts change the batch sizes, and so they may change the text. Three modes of decoding
are measured (`ngramspec.llama.trial_context`):

    fast     the fastest settings; batches of different sizes may differ in the last bits
    padded   the same settings, but single tokens are padded to two; requires that all sizes from two on agree
    exact    settings under which single tokens agree with the other sizes: on a CPU no flash attention, whose
             kernel splits a single token's context over the threads

The choice depends on the batch sizes that agree and on the time of a usual request. This time is computed from decode
calls over one token and over more, and from the acceptance rate of drafts in a typical text. If the fastest settings
give the same text with and without drafts, "fast" is chosen without timing. Otherwise "padded" is chosen if its sizes
agree and its time is at most `TOLERANCE` times the fastest time, then "exact" under the same conditions, and at last
"fast". Example in which the sizes of "padded" and "exact" agree, in seconds for a usual request:

    fast 10.0, padded 10.3, exact 10.2    padded is chosen: it takes 1.03 times as long
    fast 10.0, padded 13.0, exact 10.2    exact is chosen: it takes 1.02 times as long
    fast 10.0, padded 13.0, exact 12.0    fast is chosen: drafts may change the text

Measurements are stored and never repeated: if the choice changed with their noise, the text would change too. They are
made in steps while a model is loaded. A step is postponed to the next load or to `ngramspec info` if the time is too
short. This also happens to times that were taken while other programs ran. Until then the fastest mode is used.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from ngramspec.cpu.cores import CpuLoad, process_load
from ngramspec.errors import TargetError
from ngramspec.json_data import decode, encode
from ngramspec.machine import MIN_PREFILL
from ngramspec.storage import cache_folder, read_cache, write_cache_json

Exact = Literal["auto", "on", "off"]
EXACT: tuple[Exact, ...] = ("auto", "on", "off")

DecodingMode = Literal["fast", "padded", "exact"]
DECODING_MODES: tuple[DecodingMode, ...] = ("fast", "padded", "exact")

SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 16)  # batch sizes that are compared
DEPTHS = (0, 1024)
"""Tokens of context after which sizes are compared; CPU kernels were seen to change at 256 and 512. Decode calls are
timed after the last depth."""

MAX_DRAFT_SIZE = 7
"""Largest size that must agree; larger ones are used only if they agree. K-quants change their kernel at 8."""

NEW, ANSWER = 128, 256
"""Tokens of the usual request: new prompt tokens, which are not in the KV cache from earlier turns, and the answer."""

TOLERANCE = 1.05  # maximum relative time of bit-identical text: time of a request / its time with the fastest settings

PASSES = (1, 4, 8)  # batch sizes that are timed

TYPICAL = ((0.5, 0.0), (0.3, 0.7), (0.2, 0.95))
"""A typical text: shares of its tokens, each with the probability that a draft token is accepted if all before it are.
With the batch costs of a 1.5B Q4_0 model on 2 CPU cores, it is decoded 1.27 times as fast as without drafts. The
speedup of 1,047 recorded conversations is 1.24."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Batch sizes that agree bit for bit under one setting."""

    agreeing: tuple[int, ...]  # compared sizes that agree with single tokens, including 1, ascending
    padded: tuple[int, ...]  # compared sizes from 2 on that agree with the largest size that drafts would use

    @property
    def all_sizes_agree(self) -> bool:
        """True if single tokens agree with every size that drafts would use."""
        return set(self.agreeing) >= {n for n in SIZES if n <= MAX_DRAFT_SIZE}

    @property
    def padding_is_exact(self) -> bool:
        """True if all sizes from two on that drafts would use agree with each other."""
        return set(self.padded) >= {n for n in SIZES if 2 <= n <= MAX_DRAFT_SIZE}

    def merge(self, other: Identity) -> Identity:
        """Return the sizes that agree in both, such as at two depths."""
        return Identity(
            tuple(n for n in self.agreeing if n in other.agreeing),
            tuple(n for n in self.padded if n in other.padded),
        )


class Times(NamedTuple):
    """Seconds of one decoding mode, measured at one context depth."""

    passes: tuple[float, ...]  # seconds of a decode call for each size in `PASSES`; the first is without a draft
    reading: float  # seconds per prompt token

    @property
    def per_token(self) -> float:
        """Expected seconds per token of a typical text, with the draft length that is fastest.

        Leviathan et al. 2023, section 3.1: `size` - 1 draft tokens yield 1 + p + ... + p^(size - 1) tokens.
        """
        total = 0.0
        for share, p in TYPICAL:
            pairs = zip(PASSES, self.passes, strict=True)
            total += share * min(seconds / sum(p**i for i in range(size)) for size, seconds in pairs)
        return total


@dataclass(slots=True)
class Measurements:
    """Measurements so far for one model, build, machine and settings."""

    # Identities at the first of `DEPTHS`, as far as they were measured, by setting ("fast" or "exact").
    identities: Mapping[str, tuple[Identity, ...]] = field(default_factory=dict)
    times: Mapping[str, Times] = field(default_factory=dict)  # times of every mode at DEPTHS[-1]; empty if not measured
    # Largest difference of one logit between batches and single tokens under the fastest settings. `None` means not
    # measured.
    rounding: float | None = None

    def __post_init__(self) -> None:
        if any(len(identities) > len(DEPTHS) for identities in self.identities.values()):
            raise ValueError(f"more sizes than were measured at the depths {DEPTHS}")

    def join(self, other: Measurements) -> None:
        """Add the measurements of another instance; they replace those that both have."""
        mine = self.identities
        self.identities = {
            **mine,
            **{name: identity + mine.get(name, ())[len(identity) :] for name, identity in other.identities.items()},
        }
        self.times = other.times or self.times
        self.rounding = self.rounding if other.rounding is None else other.rounding

    def identity(self, setting: str) -> Identity | None:
        """Return the sizes that agree at all depths; `None` if a depth was not measured yet."""
        by_depth = self.identities.get(setting, ())
        return by_depth[0].merge(by_depth[1]) if len(by_depth) == len(DEPTHS) else None

    def seconds(self, mode: DecodingMode) -> float | None:
        """Return the expected seconds of a usual request; `None` if not measured."""
        times = self.times.get(mode)
        return None if times is None else NEW * times.reading + ANSWER * times.per_token

    def relative_time(self, mode: DecodingMode) -> float | None:
        """Return the expected time of a usual request over its time with the fastest mode; `None` if not measured."""
        times = [seconds for other_mode in DECODING_MODES if (seconds := self.seconds(other_mode)) is not None]
        mine = self.seconds(mode)
        return None if mine is None else mine / min(times)

    def _is_affordable(self, mode: DecodingMode) -> bool:
        relative = self.relative_time(mode)
        return relative is not None and relative <= TOLERANCE

    def missing(self, modes: Sequence[DecodingMode]) -> str | None:
        """Return the next measurement that the choice among `modes` requires; `None` if it needs no further one.

        It is "times", or the setting ("fast" or "exact") whose batch sizes must be compared.
        """
        fast = self.identity("fast")
        if fast is None:
            return "fast"
        may_pad, may_be_exact = fast.padding_is_exact and "padded" in modes, "exact" in modes
        if fast.all_sizes_agree or not (may_pad or may_be_exact):
            return None
        if not self.times:
            return "times"
        is_known = not (may_be_exact and self._is_affordable("exact")) or (may_pad and self._is_affordable("padded"))
        return None if is_known or self.identity("exact") is not None else "exact"

    def choose(self, modes: Sequence[DecodingMode]) -> DecodingMode:
        """Return the decoding mode for requests, one of `modes`; "fast" if no better mode is known."""
        fast, exact = self.identity("fast"), self.identity("exact")
        if fast is None or fast.all_sizes_agree:
            return "fast"
        if fast.padding_is_exact and "padded" in modes and self._is_affordable("padded"):
            return "padded"
        if exact is not None and exact.all_sizes_agree and "exact" in modes and self._is_affordable("exact"):
            return "exact"
        return "fast"


# --------------------------------------------------------------------------- measuring

BUDGET = 7.0  # seconds for measuring while a model is loaded
GRACE = 2.0  # seconds beyond the budget after which a step is aborted, for example because other programs started
COST, ROUNDING_COST = 150, 170  # approximate maximum time of a step, and of rounding, in decode calls of one token
ROUNDS = 2
DEFAULT_LOGIT_SHIFT = 1.0  # assumed change of a logit by batch size if there was no time to measure it


@dataclass(frozen=True, slots=True)
class ExactnessMode:
    """Allowed batch sizes of a request, and the guarantee for its text."""

    sizes: tuple[int, ...] | None = None  # allowed batch sizes; `None` means all
    aligned: bool = False  # alignment of the prefill; see `Target.prefill`
    bit_identical: bool = False  # True if the text is the same bit for bit with and without drafts
    # Maximum change of a logit by batch size; 0 if `bit_identical` is set or the maximum is not needed.
    max_logit_shift: float = 0.0
    agreeing: tuple[int, ...] = (1,)  # batch sizes that agree with a decode call without a draft


class ComparedSettings(Protocol):
    """The settings of a model between which `exact="auto"` chooses."""

    @property
    def settings(self) -> Sequence[str]:
        """Their names, "fast" first."""

    @property
    def identity(self) -> str:
        """Key of all that measurements depend on; "" means that they are not stored."""

    def trial(self, setting: str) -> Any:
        """Open a context for measuring; see `ngramspec.llama.trial_context.TrialContext`."""


class ExactnessSelector:
    """The stored measurements of a model, and the choice that follows from them.

    Args:
        model: The settings of the model, such as `Target.trials`.
        modes: Decoding modes that may be chosen, including "fast".
        text: Token ids on which rounding is measured if drafts may change the last bits; empty means that rounding is
            not measured.
        folder: Folder of the stored measurements; `None` means the user's cache folder.
        load: CPU load of other programs; times are measured only while it is low.
    """

    def __init__(
        self,
        model: ComparedSettings,
        modes: Sequence[DecodingMode] = DECODING_MODES,
        text: Sequence[int] = (),
        folder: Path | None = None,
        load: CpuLoad | None = None,
    ) -> None:
        self.measurements = Measurements()
        self._load = load or process_load()
        self._model, self._text = model, text
        self._path = (folder or cache_folder("calibration")) / f"{model.identity}-exact.json"
        self._modes = tuple(mode for mode in modes if mode != "exact" or mode in model.settings)
        self._read()

    @property
    def mode(self) -> DecodingMode:
        """The decoding mode for requests, by the measurements so far."""
        return self.measurements.choose(self._modes)

    @property
    def relative_time(self) -> float | None:
        """Minimum `Measurements.relative_time` of bit-identical text; `None` if unknown, or if it is so already."""
        if self.exactness.bit_identical:
            return None
        times = [self.measurements.relative_time(mode) for mode in self._modes if mode != "fast"]
        return min((seconds for seconds in times if seconds is not None), default=None)

    @property
    def exactness(self) -> ExactnessMode:
        """The batch sizes and the guarantee for requests that follow from `mode`."""
        mode = self.mode
        identity = self.measurements.identity("exact" if mode == "exact" else "fast")
        if identity is not None and (mode == "padded" or identity.all_sizes_agree):
            return ExactnessMode(identity.padded if mode == "padded" else identity.agreeing, bit_identical=True)
        max_shift = DEFAULT_LOGIT_SHIFT if self.measurements.rounding is None else self.measurements.rounding
        return ExactnessMode(max_logit_shift=max_shift, agreeing=(1,) if identity is None else identity.agreeing)

    def measure(self, budget: float | None = None) -> None:
        """Run the measurements that are still missing, in at most `budget` seconds; `None` means `BUDGET`."""
        ends = time.perf_counter() + (BUDGET if budget is None else budget)
        with suppress(TargetError):
            while (missing := self._missing()) is not None and self._measure(missing, ends):
                self._read()
                if self._model.identity:
                    write_cache_json(self._path, encode(self.measurements))

    def _missing(self) -> str | None:
        """Return the name of the next measurement; `None` if nothing is missing."""
        needs_rounding = self._text and self.measurements.rounding is None and not self.exactness.bit_identical
        return self.measurements.missing(self._modes) or ("rounding" if needs_rounding else None)

    def _measure(self, measurement: str, ends: float) -> bool:
        """Run one measurement, at the next depth, if a first decode call shows that there is enough time for it."""
        if time.perf_counter() >= ends:
            return False
        settings = self._model.settings if measurement == "times" else ("exact" if measurement == "exact" else "fast",)
        with ExitStack() as stack:
            trials = {name: stack.enter_context(self._model.trial(name)) for name in settings}
            for trial in trials.values():
                trial.deadline = ends + GRACE
            duration = trials[settings[0]].single() * (ROUNDING_COST if measurement == "rounding" else COST)
            if time.perf_counter() + duration > ends:
                return False
            if measurement == "times":
                return self._measure_times(trials)
            if measurement == "rounding":
                self.measurements.rounding = trials["fast"].rounding(self._text)
            else:
                self._measure_identity(measurement, trials[measurement])
        return True

    def _measure_times(self, trials: Mapping[str, Any]) -> bool:
        """Measure the times of all modes; return False if other programs ran at the same time."""
        self._load.sample()
        if not self._load.is_quiet:
            return False
        result = times(trials)
        self._load.call_ended = self._load.clock()  # the sample is then the average over these calls
        self._load.sample()
        if not self._load.is_quiet:
            return False
        self.measurements.times = result
        return True

    def _measure_identity(self, setting: str, trial: Any) -> None:
        """Compare the batch sizes of a setting at the next depth."""
        known = self.measurements.identities
        before = known.get(setting, ())
        self.measurements.identities = {**known, setting: (*before, trial.identity(DEPTHS[len(before)]))}

    def _read(self) -> None:
        """Load the stored measurements; the first ones count, whichever process made them."""
        if self._model.identity:
            with suppress(OSError, ValueError):
                self.measurements.join(decode(Measurements, json.loads(read_cache(self._path) or "")))

    def forget(self) -> None:
        """Delete the measurements, including the file; the next measurements may lead to another mode."""
        self.measurements = Measurements()
        with suppress(OSError):
            self._path.unlink(missing_ok=True)


def times(trials: Mapping[str, Any]) -> dict[str, Times]:
    """Return the times of each decoding mode; "padded" is measured in the context of "fast".

    The settings take turns, and the fastest of all rounds counts, because other load of the machine only adds time.
    """
    best: dict[tuple[str, int], float] = {}

    def note(name: str, size: int) -> None:
        best[name, size] = min(best.get((name, size), math.inf), trials[name].seconds(size))

    for trial in trials.values():
        trial.begin(DEPTHS[-1])
    for name in [*trials] * ROUNDS:
        for size in (*PASSES, 2) if name == "fast" else PASSES:
            # The first pass of a new size rebuilds the graph, so each size is timed twice in a row.
            note(name, size)
            note(name, size)
        note(name, MIN_PREFILL)
    result = {
        name: Times(tuple(best[name, size] for size in PASSES), best[name, MIN_PREFILL] / MIN_PREFILL)
        for name in trials
    }
    fast = result["fast"]
    result["padded"] = fast._replace(passes=(best["fast", 2], *fast.passes[1:]))
    return result
