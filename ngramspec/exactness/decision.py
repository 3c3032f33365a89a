"""Whether a text can be the same bit for bit with and without drafts, and what that costs: how `exact="auto"` chooses.

Three ways to decode are compared, by what was measured of each (`ngramspec.llama.trial_context`):

    fast     the fastest settings; batches of different sizes may differ in the last bits
    padded   the same settings, single tokens padded to two, where all sizes from two on agree
    exact    settings under which single tokens agree with the other sizes: on a CPU no flash attention, whose
             kernel splits a single token's context over the threads

A usual request is decoded with drafts, so its time follows from passes over one token and over more, and from how
often drafts of a typical text are accepted. The first way is taken that agrees and takes at most `TOLERANCE` times as
long as the fastest: a tie goes to the same text. Measurements are kept and never repeated: a choice that changed with
their noise would change the text. They are made while a model is loaded, in steps. A step that does not fit into the
time, or times that were taken while other programs ran, are left to the next load or to `ngramspec info`; until then
the fastest way is chosen.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ngramspec.cpu.cores import CpuLoad, shared_load
from ngramspec.errors import TargetError
from ngramspec.json_data import decode, encode
from ngramspec.machine import LEAST_READ
from ngramspec.storage import cache_folder, keep_json, recall

Exact = Literal["auto", "on", "off"]
EXACT: tuple[Exact, ...] = ("auto", "on", "off")

Way = Literal["fast", "padded", "exact"]
WAYS: tuple[Way, ...] = ("fast", "padded", "exact")

SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 16)  # batch sizes that are compared
DEPTHS = (0, 1024)
"""Tokens of context after which sizes are compared; CPU kernels were seen to change at 256 and 512. Passes are timed
after the last one."""

MOST = 7  # all sizes up to this one must agree, and only sizes that do are used: K-quants change their kernel at 8

NEW, ANSWER = 128, 256
"""Tokens of the usual request: those of its prompt that are not in the KV cache from earlier turns, and the answer."""

TOLERANCE = 1.05  # the most that bit-identical text may cost: time of the request / its time under the fastest settings

PASSES = (1, 4, 8)  # sizes of passes that are timed

TYPICAL = ((0.5, 0.0), (0.3, 0.7), (0.2, 0.95))
"""A typical text: shares of its tokens, and the probability that a draft token is accepted there if all before it are.
On the batch costs of a 1.5B Q4_0 model on 2 CPU cores it gains 1.27, and 1,047 recorded conversations gain 1.24."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Which batch sizes agree under one setting."""

    agreeing: tuple[int, ...]  # the compared sizes that agree bit for bit with single tokens, 1 among them, ascending
    padded: tuple[int, ...]  # those, from two on, that agree with the largest that drafts would use

    @property
    def whole(self) -> bool:
        """Whether single tokens agree with every size that drafts would use."""
        return set(self.agreeing) >= {n for n in SIZES if n <= MOST}

    @property
    def pads(self) -> bool:
        """Whether all sizes from two on agree with each other."""
        return set(self.padded) >= {n for n in SIZES if 2 <= n <= MOST}

    def merge(self, other: Identity) -> Identity:
        """What holds at both of two depths."""
        return Identity(
            tuple(n for n in self.agreeing if n in other.agreeing),
            tuple(n for n in self.padded if n in other.padded),
        )


class Times(NamedTuple):
    """Seconds of one way to decode, after a context of one depth."""

    passes: tuple[float, ...]  # of a pass by the sizes of `PASSES`, the first without a draft
    reading: float  # per token of a prompt

    @property
    def per_token(self) -> float:
        """Expected seconds per token of a typical text, with drafts of the length that pays.

        Leviathan et al. 2023, section 3.1: `size` - 1 draft tokens yield 1 + p + ... + p^(size - 1) tokens.
        """
        total = 0.0
        for share, p in TYPICAL:
            timed = zip(PASSES, self.passes, strict=True)
            total += share * min(seconds / sum(p**i for i in range(size)) for size, seconds in timed)
        return total


@dataclass(slots=True)
class Measured:
    """What was found at each of `DEPTHS`, as far as it was measured, of one model, build, machine and settings."""

    identities: Mapping[str, tuple[Identity, ...]] = field(default_factory=dict)  # by setting, "fast" or "exact"
    times: Mapping[str, Times] = field(default_factory=dict)  # of every way, after DEPTHS[-1] tokens; empty: unmeasured
    # largest difference of one logit between batches and single tokens under the fastest settings; None: not measured
    rounding: float | None = None

    def __post_init__(self) -> None:
        if any(len(found) > len(DEPTHS) for found in self.identities.values()):
            raise ValueError(f"more sizes than were measured at the depths {DEPTHS}")

    def join(self, other: Measured) -> None:
        """Take over what another one knows: as to what both know, it is right."""
        mine = self.identities
        self.identities = {
            **mine,
            **{name: one + mine.get(name, ())[len(one) :] for name, one in other.identities.items()},
        }
        self.times = other.times or self.times
        self.rounding = self.rounding if other.rounding is None else other.rounding

    def identity(self, setting: str) -> Identity | None:
        """Which sizes agree at all depths; None where that is not known of each."""
        found = self.identities.get(setting, ())
        return found[0].merge(found[1]) if len(found) == len(DEPTHS) else None

    def seconds(self, way: Way) -> float | None:
        """Expected time of a usual request; `None` if unmeasured."""
        times = self.times.get(way)
        return None if times is None else NEW * times.reading + ANSWER * times.per_token

    def relative_time(self, way: Way) -> float | None:
        """Expected time of a usual request decoded that way / that of the fastest way; None if unmeasured."""
        known = [seconds for other in WAYS if (seconds := self.seconds(other)) is not None]
        mine = self.seconds(way)
        return None if mine is None else mine / min(known)

    def _affordable(self, way: Way) -> bool:
        relative = self.relative_time(way)
        return relative is not None and relative <= TOLERANCE

    def missing(self, ways: Sequence[Way]) -> str | None:
        """What is to be measured next to choose: "times", or how sizes agree under a setting; None: nothing."""
        fast = self.identity("fast")
        if fast is None:
            return "fast"
        pads, other = fast.pads and "padded" in ways, "exact" in ways
        if fast.whole or not (pads or other):
            return None
        if not self.times:
            return "times"
        decided = not (other and self._affordable("exact")) or (pads and self._affordable("padded"))
        return None if decided or self.identity("exact") is not None else "exact"

    def choose(self, ways: Sequence[Way]) -> Way:
        """How requests are decoded, of the ways that may be chosen; "fast" also where nothing better is known."""
        fast, exact = self.identity("fast"), self.identity("exact")
        if fast is None or fast.whole:
            return "fast"
        if fast.pads and "padded" in ways and self._affordable("padded"):
            return "padded"
        if exact is not None and exact.whole and "exact" in ways and self._affordable("exact"):
            return "exact"
        return "fast"


# --------------------------------------------------------------------------- measuring

BUDGET = 7.0  # seconds to measure in while a model is loaded
GRACE = 2.0  # seconds after which a step is abandoned that takes longer than expected, as when other programs start
COST, ROUNDING_COST = 150, 170  # passes over one token, roughly, that a step takes at most, and that of rounding
ROUNDS = 2
UNMEASURED = 1.0  # how far batch sizes are taken to move a logit where there was no time to measure it


@dataclass(frozen=True, slots=True)
class ExactnessMode:
    """Which batch sizes a request may use, and whether its text is bit-identical to plain decoding."""

    sizes: tuple[int, ...] | None = None  # that may be used; None: all of them
    aligned: bool = False  # see `Target.prefill`
    same: bool = False  # whether the text is the same bit for bit with and without drafts
    bound: float = 0.0  # how far batch sizes move a logit; 0 if `same`, or where nobody asks
    agreeing: tuple[int, ...] = (1,)  # batch sizes that agree with a pass without a draft


class ExactAuto:
    """What is known of a model, and what that decides.

    Args:
        model: a `Target`, or what has the names of its `settings` ("fast" first), an `identity`, the key of all that
            measurements depend on ("": do not keep them), and opens a context to measure in by `trial(setting)`, as
            `ngramspec.llama.trial_context.TrialContext` is.
        ways: to decode that may be chosen, "fast" among them.
        text: what rounding is measured on, where drafts may move last bits; empty: it is not.
        folder: where measurements are kept; None for the user's cache folder.
        load: What other programs use of the machine; times are taken only while that is little.
    """

    def __init__(
        self,
        model: Any,
        ways: Sequence[Way] = WAYS,
        text: Sequence[int] = (),
        folder: Path | None = None,
        load: CpuLoad | None = None,
    ) -> None:
        self.known = Measured()
        self._load = load or shared_load()
        self._model, self._text = model, text
        self._path = (folder or cache_folder("calibration")) / f"{model.identity}-exact.json"
        self._ways = tuple(way for way in ways if way != "exact" or way in model.settings)
        self._read()

    @property
    def way(self) -> Way:
        """How requests are decoded."""
        return self.known.choose(self._ways)

    @property
    def price(self) -> float | None:
        """Time of a usual request with the same text with and without drafts, over its time under the fastest settings.

        `None` if that is unknown, or if it is the same text anyway.
        """
        if self.exactness.same:
            return None
        prices = [self.known.relative_time(way) for way in self._ways if way != "fast"]
        return min((price for price in prices if price is not None), default=None)

    @property
    def exactness(self) -> ExactnessMode:
        """What that means for requests."""
        way = self.way
        found = self.known.identity("exact" if way == "exact" else "fast")
        if found is not None and (way == "padded" or found.whole):
            return ExactnessMode(found.padded if way == "padded" else found.agreeing, same=True)
        bound = UNMEASURED if self.known.rounding is None else self.known.rounding
        return ExactnessMode(bound=bound, agreeing=(1,) if found is None else found.agreeing)

    def measure(self, budget: float | None = None) -> None:
        """Measure what still decides, as far as so many seconds allow; None: BUDGET."""
        ends = time.perf_counter() + (BUDGET if budget is None else budget)
        with suppress(TargetError):
            while (missing := self._missing()) is not None and self._measure(missing, ends):
                self._read()
                if self._model.identity:
                    keep_json(self._path, encode(self.known))

    def _missing(self) -> str | None:
        """What is to be measured next; None if nothing is."""
        wanted = self._text and self.known.rounding is None and not self.exactness.same
        return self.known.missing(self._ways) or ("rounding" if wanted else None)

    def _measure(self, what: str, ends: float) -> bool:
        """Measure it at the next depth if a first pass shows that there is time; returns whether it was measured."""
        known = self.known
        if time.perf_counter() >= ends:
            return False
        settings = self._model.settings if what == "times" else ("exact" if what == "exact" else "fast",)
        with ExitStack() as stack:
            trials = {name: stack.enter_context(self._model.trial(name)) for name in settings}
            for trial in trials.values():
                trial.deadline = ends + GRACE
            expected = trials[settings[0]].single() * (ROUNDING_COST if what == "rounding" else COST)
            if time.perf_counter() + expected > ends:
                return False
            if what == "times":
                self._load.sample()
                if not self._load.is_quiet:
                    return False
                measured = times(trials)
                self._load.call_ended = self._load.clock()  # so that the sample is the average over these calls
                self._load.sample()
                if not self._load.is_quiet:
                    return False
                known.times = measured
            elif what == "rounding":
                known.rounding = trials["fast"].rounding(self._text)
            else:
                before = known.identities.get(what, ())
                found = (*before, trials[what].identity(DEPTHS[len(before)]))
                known.identities = {**known.identities, what: found}
        return True

    def _read(self) -> None:
        """Take over what the file says: what was settled first, by whatever process, counts."""
        if self._model.identity:
            with suppress(OSError, ValueError):
                self.known.join(decode(Measured, json.loads(recall(self._path) or "")))

    def forget(self) -> None:
        """Drop what is known, in the file too; other texts may then be decoded another way."""
        self.known = Measured()
        with suppress(OSError):
            self._path.unlink(missing_ok=True)


def times(trials: Mapping[str, Any]) -> dict[str, Times]:
    """Seconds of each way to decode a usual request, by setting; of "fast" also padded to two tokens.

    The settings take turns, and the fastest of some rounds counts: whatever else the machine does only adds time.
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
        note(name, LEAST_READ)
    found = {
        name: Times(tuple(best[name, size] for size in PASSES), best[name, LEAST_READ] / LEAST_READ) for name in trials
    }
    fast = found["fast"]
    found["padded"] = fast._replace(passes=(best["fast", 2], *fast.passes[1:]))
    return found
