"""Search for faster settings within a time limit (`Tuning`), and the report on it; README.md describes the method.

The search has three stages. It times every setting twice, which also warms it up. Then candidates and the present
settings are timed in pairs. Finally all winners together are compared with the present settings, in new pairs.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

from ngramspec.cost.paired import CHANCE, NO_DIFFERENCE, Paired, compare_pairs, pairs_needed
from ngramspec.data import ModelError, NGramSpecError, TargetError
from ngramspec.instruments.reports.report import Section, Table
from ngramspec.llama.trial import DEEP, DRAFTS, LONG_READING, MIN_PREFILL, READING, SINGLE, Measure
from ngramspec.model_settings import ModelSettings, flags

MIN_GAIN = 1.03  # minimum speed of a candidate; less does not justify an unusual setting
MAX_LOSSES = 1  # lost pairs after which a candidate is still compared; otherwise one interruption would hide a gain
STEADY, MIN_TIMES = 1.4, 10
"""Maximum ratio between times of the present settings, without a tenth at each end, and their minimum number. Above it,
pairs of the same settings disagree. Processors that become hot slow down by less, and affect both sides of a pair."""

CONFIRMING = pairs_needed() + 2  # pairs for which time is reserved to confirm the winners, with two that warm up

THREADS = frozenset({"threads", "threads_batch"})
"""Parameters whose best value depends on the load: next to a busy program, one thread can be many times as fast."""

BUSY = "other programs use cores, and the number of threads follows them"  # reason for skipping numbers of threads
NO_TIME = "no time left"  # reason for skipping a candidate that a longer limit would include
TOGETHER = "together"  # name of the combined winners in the last comparison

WEIGHTS: Mapping[int, float] = {1: 128, 4: 64, 8: 32, MIN_PREFILL: 1000, 1024: 1000}
"""Weights of the measures: a request with a prompt of 1,000 tokens, then 128 passes over one token, 64 over four and 32
over eight. They matter only if a setting makes one measure faster and another one slower."""

Times = Mapping[Measure, float]
"""Seconds of each measure; for a prefill, seconds per token."""

Timer = Callable[[ModelSettings, Measure], float]
"""Function that measures one time; it raises TargetError or ModelError if the settings do not work on this machine."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A setting that may be faster than the present one."""

    parameter: str  # name of the setting that changes; at most one candidate per parameter is recommended
    change: Mapping[str, Any]  # values of the changed settings, by name
    measures: Sequence[Measure]  # measures that may change
    advice: bool = False  # whether it is reported but never applied, because it changes logits by more than rounding


def candidates(
    present: ModelSettings, *, physical: int, logical: int, on_cpu: bool, flash_free: bool, quantised_cache: bool
) -> dict[str, Candidate]:
    """Return the candidates to compare with the present settings, by their command line options."""
    whole = (SINGLE, *DRAFTS, READING)
    attention = (SINGLE, DRAFTS[0], READING, *DEEP)  # more affected in longer contexts
    result: dict[str, Candidate] = {}

    def add(parameter: str, measures: Sequence[Measure], advice: bool = False, **change: Any) -> None:
        settings = replace(present, **change)
        if settings != present:
            result[flags(settings.changes(present))] = Candidate(parameter, change, measures, advice)

    if on_cpu:
        # On a machine with many cores a few threads saturate the memory.
        counts = {physical, logical, max(1, physical // 2), max(1, 3 * physical // 4)}
        for count in sorted(counts | ({physical // 4} if physical >= 16 else set()), reverse=True):
            add("threads", (SINGLE,), threads=count)
        for count in dict.fromkeys((logical, physical)):
            add("threads_batch", (*DRAFTS, READING), threads_batch=count)
    if flash_free:
        add("flash_attn", attention, flash_attn="on" if present.flash_attn == "off" else "off")
    if on_cpu:
        add("weights", whole, no_mmap=True)
        add("weights", whole, no_repack=True)
    if quantised_cache:
        add("cache_types", attention, advice=True, cache_type_k="q8_0", cache_type_v="q8_0")
    if present.flash_attn != "off" and present.ubatch_size is None:
        for size in (256, 1024):
            add("ubatch_size", (LONG_READING,), ubatch_size=size)
    return result


class _OutOfTime(Exception):  # noqa: N818, because it is not an error
    """A measurement would exceed the time limit."""


@dataclass(slots=True)
class Comparison:
    """The comparison of a candidate with the present settings. Ratios are speeds: more than 1 is faster."""

    candidate: Candidate
    chance: float  # maximum probability that noise makes this candidate a winner
    pairs: list[tuple[Times, Times]] = field(default_factory=list)  # times of the present settings and the candidate's

    @property
    def _ratios(self) -> list[float]:
        """Ratio of the speeds for the request of `WEIGHTS` in each pair."""
        return [sum(WEIGHTS[m.size] * a[m] for m in a) / sum(WEIGHTS[m.size] * b[m] for m in b) for a, b in self.pairs]

    @property
    def speed(self) -> Paired | None:
        """Speed for the request of `WEIGHTS`; `None` before the first pair."""
        return compare_pairs(self._ratios, self.chance)

    @property
    def each(self) -> dict[Measure, Paired]:
        """Speed by measure; empty before the first pair."""
        found = {m: compare_pairs([a[m] / b[m] for a, b in self.pairs], self.chance) for m in self.candidate.measures}
        return {m: paired for m, paired in sorted(found.items()) if paired is not None}

    @property
    def gains(self) -> bool:
        """True if the candidate is clearly faster by `MIN_GAIN` or more, and clearly slower in nothing by as much."""
        speed = self.speed
        slower = any(paired.is_slower and paired.median <= 1 / MIN_GAIN for paired in self.each.values())
        return speed is not None and speed.is_faster and speed.median >= MIN_GAIN and not slower

    @property
    def can_win(self) -> bool:
        """True if more pairs could show a gain, or are needed to show it."""
        lost = sum(ratio <= 1 for ratio in self._ratios)
        return lost <= MAX_LOSSES and len(self.pairs) < pairs_needed(MAX_LOSSES, self.chance)

    def to_json(self, depth: int) -> dict[str, Any]:
        speed, each = self.speed, {m.label(depth): asdict(paired) for m, paired in self.each.items()}
        return {"speed": asdict(speed) if speed else None, "each": each, "gains": self.gains}


@dataclass(slots=True)
class Tuning:
    """A search for faster settings. After an interruption it contains the results so far."""

    timer: Timer  # function that measures the time of settings
    present: ModelSettings  # present settings, with which the candidates are compared
    candidates: Mapping[str, Candidate]  # candidates by name, the most promising first
    seconds: float = 60.0  # time limit of the search
    load_seconds: float = 0.0  # duration of loading the weights, which some candidates repeat
    clock: Callable[[], float] = time.monotonic  # function that returns the time in seconds
    is_quiet: Callable[[], bool] = lambda: True  # function that returns whether no other program uses the cores
    left_out: dict[str, str] = field(default_factory=dict)  # candidates without a result, with the reason
    comparisons: dict[str, Comparison] = field(default_factory=dict)  # comparisons by the name of the candidate
    together: Comparison | None = None  # comparison of the combined winners; `None` without winners
    complete: bool = False  # whether the search is finished
    _end: float = 0.0  # end of the search, by `clock`
    _was_busy: bool = False  # whether other programs used cores during the search
    _durations: dict[tuple[ModelSettings, Measure], float] = field(default_factory=dict)  # seconds of each last call
    # A coin decides the order in each pair, so that no load, not even a periodic one, can favour one side.
    _coin: random.Random = field(default_factory=lambda: random.Random(0))

    def run(self) -> Iterator[str]:
        """Run the search, and yield the name of each setting before it is timed."""
        self._end, self._was_busy = self.clock() + self.seconds, not self.is_quiet()
        yield from self._try()
        yield from self._compare(self.comparisons, CONFIRMING)
        self._drop_threads()
        if winners := [self.candidates[name] for name in self.winners.values()]:
            changes = {name: value for winner in winners for name, value in winner.change.items()}
            if changes.get("flash_attn") == "off":
                changes.pop("ubatch_size", None)  # without flash attention its buffers would grow with the context
            together = Candidate(TOGETHER, changes, sorted({m for winner in winners for m in winner.measures}))
            yield TOGETHER
            if self._warm_up(TOGETHER, together, self._end) is not None:
                self.together = Comparison(together, CHANCE)
                yield from self._compare({TOGETHER: self.together}, 0)
        self.complete = True

    def _drop_threads(self) -> None:
        """Leave out numbers of threads if other programs used cores."""
        names = [name for name in self.comparisons if self.candidates[name].parameter in THREADS]
        for name in names if self._was_busy else ():
            del self.comparisons[name]
            self.left_out[name] = BUSY

    def _try(self) -> Iterator[str]:
        """Time each candidate and the present settings, and begin a comparison of those with enough time."""
        planned = 0.0  # seconds that comparing the candidates so far will probably take
        for name, candidate in self.candidates.items():
            yield name
            if self._was_busy and candidate.parameter in THREADS:
                self.left_out[name] = BUSY
                continue
            # The second half of the time is for comparisons.
            if (seconds := self._warm_up(name, candidate, self._end - self.seconds / 2 - planned)) is None:
                continue
            needed = pairs_needed(chance=CHANCE / (len(self.comparisons) + 1)) + CONFIRMING
            if needed * seconds > self._end - planned - self.clock():
                self.left_out[name] = NO_TIME
                continue
            planned += 2 * (MAX_LOSSES + 1) * seconds  # until an equally fast candidate has lost too often
            self.comparisons[name] = Comparison(candidate, CHANCE)
        self._drop_threads()
        for comparison in self.comparisons.values():
            comparison.chance = CHANCE / len(self.comparisons)

    def _warm_up(self, name: str, candidate: Candidate, end: float) -> float | None:
        """Return the seconds of one pair of a candidate after a warm-up; `None` if it does not work or has no time."""
        calls = [(side, measure) for measure in candidate.measures for side in self._sides(candidate)]
        try:
            # The first call includes loading the model with the settings.
            for settings, measure in [call for call in calls if call not in self._durations] * 2:
                self._time(settings, measure, end)
        except (ModelError, TargetError, _OutOfTime) as error:
            self.left_out[name] = str(error) or NO_TIME
            return None
        return self._pair_seconds(candidate)

    def _sides(self, candidate: Candidate) -> tuple[ModelSettings, ModelSettings]:
        return self.present, replace(self.present, **candidate.change)

    def _pair_seconds(self, candidate: Candidate) -> float:
        return sum(self._durations[side, m] for side in self._sides(candidate) for m in candidate.measures)

    def _compare(self, comparisons: Mapping[str, Comparison], reserve: int) -> Iterator[str]:
        """Time pairs of all candidates in turns until each has won or lost, but leave time for `reserve` pairs."""
        late: set[str] = set()
        while remaining := {name: one for name, one in comparisons.items() if one.can_win and name not in late}:
            end = self._end - reserve * max(self._pair_seconds(one.candidate) for one in remaining.values())
            for name, comparison in remaining.items():
                yield name
                sides = self._sides(comparison.candidate)
                order = self._coin.choice([(0, 1), (1, 0)])
                times: tuple[dict[Measure, float], dict[Measure, float]] = {}, {}
                try:
                    for measure in comparison.candidate.measures:
                        for side in order:
                            times[side][measure] = self._time(sides[side], measure, end)
                except _OutOfTime:
                    late.add(name)
                    continue
                comparison.pairs.append(times)
                self._check_steady()
        self.left_out |= {name: NO_TIME for name in late if not comparisons[name].gains}

    def _time(self, settings: ModelSettings, measure: Measure, end: float) -> float:
        """Measure one time, unless it would probably not end by `end`."""
        known = self._durations
        nearest = max((m.size for _, m in known if m.size <= measure.size), default=1)
        expected = max((s * measure.size / nearest for (_, m), s in known.items() if m.size == nearest), default=0.0)
        weights = {(s.no_mmap, s.no_repack) for s in (self.present, *(settings for settings, _ in known))}
        if (settings.no_mmap, settings.no_repack) not in weights:
            expected += self.load_seconds
        start = self.clock()
        if known.get((settings, measure), expected) > end - start:
            raise _OutOfTime
        seconds = self.timer(settings, measure)
        known[settings, measure] = self.clock() - start
        self._was_busy = self._was_busy or not self.is_quiet()
        return seconds

    def _check_steady(self) -> None:
        """Raise NGramSpecError if the times of the present settings disagree."""
        present, middle = self._present_times(), self.times
        ratios = sorted(seconds / middle[m] for m, times in present.items() for seconds in times)
        tenth = len(ratios) // 10
        if len(ratios) >= MIN_TIMES and (spread := ratios[-1 - tenth] / ratios[tenth]) > STEADY:
            raise NGramSpecError(
                "nothing can be compared on this machine now: passes with the current settings lasted up to"
                f" {spread:.1f} times as long from one run to the next; run tune again when no other program runs"
            )

    def _present_times(self) -> dict[Measure, list[float]]:
        result: dict[Measure, list[float]] = {}
        for comparison in (*self.comparisons.values(), *([self.together] if self.together else [])):
            for present, _ in comparison.pairs:
                for measure, seconds in present.items():
                    result.setdefault(measure, []).append(seconds)
        return dict(sorted(result.items(), key=lambda item: (item[0].deep, item[0])))

    @property
    def times(self) -> Times:
        """Median times of the present settings."""
        return {measure: median(times) for measure, times in self._present_times().items()}

    @property
    def winners(self) -> dict[str, str]:
        """Candidate that gains most for each parameter, if one gains; without candidates that are only advice."""
        result: dict[str, str] = {}
        for name in self.find_gaining(advice=False):
            result.setdefault(self.candidates[name].parameter, name)
        return result

    def find_gaining(self, *, advice: bool) -> list[str]:
        """Return the candidates that gain, those that are only advice or the others."""
        gaining = {name: one.speed.median for name, one in self.comparisons.items() if one.gains and one.speed}
        names = [name for name in gaining if self.candidates[name].advice == advice]
        return sorted(names, key=gaining.__getitem__, reverse=True)

    @property
    def best_settings(self) -> ModelSettings | None:
        """The faster settings; `None` if nothing is faster, or the search is not finished."""
        if not self.complete or self.together is None or not self.together.gains:
            return None
        change = self.together.candidate.change
        return None if self._was_busy and THREADS & change.keys() else replace(self.present, **change)


def table_section(tuning: Tuning, depth: int) -> Section:
    """Return the section with the times of the present settings and all ratios; `depth` is that of the long context."""
    compared = tuning.comparisons | ({f"{TOGETHER}, new pairs": tuning.together} if tuning.together else {})
    rows = [["current settings, ms", *(f"{seconds * 1e3:.2f}" for seconds in tuning.times.values()), "", "", ""]]
    for name, comparison in compared.items():
        if (speed := comparison.speed) is not None:
            each = comparison.each
            ratios = [f"{each[measure].median:.2f}" if measure in each else "" for measure in tuning.times]
            ends = "-" if speed.interval is None else "{:.2f}-{:.2f}".format(*speed.interval)
            rows.append([name, *ratios, f"{speed.median:.2f}", ends, str(speed.pairs)])
    labels = [measure.label(depth) for measure in tuning.times]
    headings = ["speed (current = 1)", *labels, "overall", "from-to", "pairs"]
    about = "medians of pairs; prefill is per token; from-to is the interval for the median of many more pairs."
    return Section("Speed of settings", about, [Table(headings, rows)])


def conclusions(tuning: Tuning, advice: Sequence[str], *, applied: bool) -> Iterator[str]:
    """Yield lines on what was left out, the advice, and at the end the recommendation."""
    for name, reason in tuning.left_out.items():
        if reason != NO_TIME:
            yield f"Not compared: {name}: {reason}."
    if late := [name for name, reason in tuning.left_out.items() if reason == NO_TIME]:
        yield f"Not compared for lack of time (raise --time-limit): {', '.join(late)}."
    yield from advice
    best = tuning.best_settings
    if not tuning.complete:
        yield "Interrupted: these are the results so far; there is no recommendation."
    elif best is not None and tuning.together is not None:
        yield "The recommendation may change the rounding of logits, and so texts at near-ties of two tokens."
        yield f"Recommended: {flags(best.changes(tuning.present))}, {tuning.together.speed} where it matters."
        yield (
            "Saved: other commands use it for this model; ngramspec tune --reset deletes it."
            if applied
            else "Not saved: --apply saves it for this model and machine."
        )
    elif tuning.comparisons:
        yield f"{NO_DIFFERENCE.capitalize()}, so nothing is recommended or saved."
    else:
        yield "No settings could be compared."
