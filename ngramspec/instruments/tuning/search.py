"""Search for faster settings within a time limit (`Tuning`); README.md describes the method.

The search has three stages. It times every setting once, which also warms it up. Then rounds compare all candidates
with the present settings. Finally all winners together are compared with them again, with new measurements.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ngramspec.errors import ModelError, TargetError
from ngramspec.instruments.tuning.candidates import Candidate
from ngramspec.machine import MIN_PREFILL, Measure, Settings

MIN_GAIN = 0.03
"""Minimum part of the time that a setting must save. A smaller gain does not justify an unusual setting."""

FALSE_ALARMS = 0.05
"""Maximum probability of reporting a faster setting if all settings are equally fast."""

TRYING, COMPARING = 0.5, 0.8
"""Parts of the time limit after which no further candidate is tried, and no further round of candidates begins."""

MAX_ROUNDS = 30
"""Maximum number of rounds; more would not change the result."""

NO_TIME = "no time left"  # reason for skipping a candidate that a longer limit would include
TOGETHER = "together"  # name of the combined winners in the last comparison

WEIGHTS: Mapping[int, float] = {1: 128, 4: 64, 8: 32, MIN_PREFILL: 1000, 1024: 1000}
"""Weights of the measures: a request with a prompt of 1,000 tokens, then 128 passes over one token, 64 over four and 32
over eight. They matter only if a setting makes one measure faster and another one slower."""

Times = Mapping[Measure, float]
"""Seconds of each measure; for a prefill, seconds per token."""

Timer = Callable[[Settings, Measure], float]
"""Function that measures one time; it raises TargetError or ModelError if the settings do not work on this machine."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of comparing a candidate with the present settings, round by round."""

    rounds: int  # number of rounds
    ratio: float  # median over rounds of the candidate's time / the present time, for the request of `WEIGHTS`
    spread: float  # interquartile range of these ratios
    each: Mapping[Measure, float]  # median ratio of every measure
    chance: float  # p-value of a one-sided sign test that the candidate is faster
    slower: tuple[Measure, ...]  # measures that the candidate makes slower beyond noise
    faster: tuple[Measure, ...]  # measures that the candidate makes faster beyond noise
    gains: bool  # whether the candidate is faster beyond noise, and no measure is slower beyond noise


def sign_chance(ratios: Sequence[float]) -> float:
    """Return the p-value of a one-sided sign test: that at least as many of the ratios are below 1 by chance."""
    wins, count = sum(ratio < 1 for ratio in ratios), len(ratios)
    return sum(math.comb(count, k) for k in range(wins, count + 1)) / float(2**count)


def rounds_needed(candidates: int) -> int:
    """Return the minimum number of rounds after which a candidate that won every round differs from noise."""
    return math.ceil(math.log2(max(1, candidates) / FALSE_ALARMS))


def compare(present: Sequence[Times], candidate_times: Sequence[Times], candidates: int = 1) -> Comparison:
    """Compare the times of two settings in the same rounds, of which there is at least one.

    Any of `candidates` settings may be faster by chance.
    """

    def score(times: Times) -> float:
        return sum(WEIGHTS[m.size] * times[m] for m in candidate_times[0])

    def beyond_noise(ratios: Sequence[float]) -> bool:
        return statistics.median(ratios) <= 1 - MIN_GAIN and sign_chance(ratios) <= FALSE_ALARMS / candidates

    rounds = list(zip(present, candidate_times, strict=True))
    ratios = [score(b) / score(a) for a, b in rounds]
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else (0.0, 0.0, 0.0)
    each = {m: [b[m] / a[m] for a, b in rounds] for m in sorted(candidate_times[0])}
    faster = tuple(m for m, measure_ratios in each.items() if beyond_noise(measure_ratios))
    slower = tuple(m for m, measure_ratios in each.items() if beyond_noise([1 / ratio for ratio in measure_ratios]))
    medians = {m: statistics.median(measure_ratios) for m, measure_ratios in each.items()}
    gains = beyond_noise(ratios) and not slower
    chance, spread = sign_chance(ratios), high - low
    return Comparison(len(ratios), statistics.median(ratios), spread, medians, chance, slower, faster, gains)


@dataclass(slots=True)
class Rounds:
    """Times of the present settings and of candidates, round by round."""

    timer: Timer  # function that measures the times
    present: Settings  # settings that candidates are compared with
    candidates: Mapping[str, Candidate]  # candidates by their names in a report
    # Times by that name, "" for the present settings. A round that was interrupted is not added.
    times: dict[str, list[Times]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.times.get("", ()))

    def run(self) -> Iterator[str]:
        """Run one more round, and yield the name of each setting before it is timed."""
        names, done = ["", *self.candidates], len(self)
        turn = done // 2 % len(names)
        measures = sorted({m for c in self.candidates.values() for m in c.measures})
        round_times: dict[str, Times] = {}
        # Every other round runs in reverse, so that a setting does not always follow the same one.
        for name in (names[turn:] + names[:turn])[:: -1 if done % 2 else 1]:
            yield name
            settings = replace(self.present, **self.candidates[name].change) if name else self.present
            round_times[name] = {
                m: self.timer(settings, m) for m in (self.candidates[name].measures if name else measures)
            }
        for name, times in round_times.items():
            self.times.setdefault(name, []).append(times)

    def compare_all(self) -> dict[str, Comparison]:
        """Return the comparison of each candidate with the present settings; empty before the first whole round."""
        count = len(self.candidates)
        return {name: compare(self.times[""], times, count) for name, times in self.times.items() if name}


@dataclass(slots=True)
class Tuning:
    """A search for faster settings. After an interruption it contains the results so far."""

    timer: Timer  # function that measures the time of settings
    present: Settings  # present settings, with which the candidates are compared
    candidates: Mapping[str, Candidate]  # candidates by name, the most promising first
    seconds: float = 60.0  # approximate time limit of the search
    clock: Callable[[], float] = time.monotonic  # function that returns the time in seconds
    left_out: dict[str, str] = field(default_factory=dict)  # candidates that were not compared, with the reason
    rounds: Rounds = field(init=False)  # rounds that compare all other candidates
    last: Rounds = field(init=False)  # rounds that compare the combined winners; empty without winners
    complete: bool = False  # whether the search is finished
    _start: float = 0.0

    def __post_init__(self) -> None:
        self.rounds = self.last = Rounds(self.timer, self.present, {})

    def run(self) -> Iterator[str]:
        """Run the search, and yield the name of each setting before it is timed."""
        self._start = self.clock()
        timed_candidates: dict[str, Candidate] = {}
        yield from self._try(timed_candidates)
        if timed_candidates:
            self.rounds = Rounds(self.timer, self.present, timed_candidates)
            yield from self._run_rounds(self.rounds, COMPARING)
            if self.winners:
                yield from self._confirm([self.candidates[name] for name in self.winners.values()])
        self.complete = True

    def _try(self, timed_candidates: dict[str, Candidate]) -> Iterator[str]:
        """Time each candidate and the present settings, and add candidates with enough time to `timed_candidates`."""
        known_measures: set[Measure] = set()
        elapsed = 0.0
        for name, candidate in self.candidates.items():
            rounds = rounds_needed(len(timed_candidates) + 1)
            if self._remaining(TRYING) < 0 or elapsed * rounds > self._remaining(COMPARING):
                self.left_out[name] = NO_TIME
                continue
            yield name
            trials = [(self.present, m) for m in candidate.measures if m not in known_measures]
            trials += [(replace(self.present, **candidate.change), m) for m in candidate.measures]
            try:
                for _ in range(2):  # the first times include loading the model with the setting
                    start = self.clock()
                    for each in trials:
                        self.timer(*each)
            except (ModelError, TargetError) as error:
                self.left_out[name] = str(error)
                continue
            duration = self.clock() - start
            if timed_candidates and (elapsed + duration) * rounds > self._remaining(COMPARING):
                self.left_out[name] = NO_TIME
                continue
            known_measures |= set(candidate.measures)
            elapsed += duration
            timed_candidates[name] = candidate

    def _run_rounds(self, rounds: Rounds, share: float) -> Iterator[str]:
        """Run rounds until this part of the time is over, but at least as many as a decision requires."""
        min_rounds, duration = rounds_needed(len(rounds.candidates)), 0.0
        while len(rounds) < min_rounds or (len(rounds) < MAX_ROUNDS and duration < self._remaining(share)):
            start = self.clock()
            yield from rounds.run()
            duration = self.clock() - start

    def _confirm(self, winners: Sequence[Candidate]) -> Iterator[str]:
        changes = {name: value for winner in winners for name, value in winner.change.items()}
        if changes.get("flash_attn") == "off":
            changes.pop("micro_batch", None)  # without flash attention its buffers would grow with the context
        together = Candidate(TOGETHER, changes, sorted({m for winner in winners for m in winner.measures}))
        try:
            yield TOGETHER
            for measure in together.measures:
                self.timer(replace(self.present, **changes), measure)
        except (ModelError, TargetError) as error:
            self.left_out[TOGETHER] = str(error)
            return
        self.last = Rounds(self.timer, self.present, {TOGETHER: together})
        yield from self._run_rounds(self.last, 1.0)

    def _remaining(self, share: float) -> float:
        """Return the seconds until this part of the time limit is over."""
        return share * self.seconds - (self.clock() - self._start)

    @property
    def comparisons(self) -> dict[str, Comparison]:
        """Comparison of each candidate with the present settings; empty before the first whole round."""
        return self.rounds.compare_all()

    @property
    def winners(self) -> dict[str, str]:
        """Candidate that gains most for each parameter, if one gains; without candidates that are only advice."""
        result: dict[str, str] = {}
        for name in self._gaining(advice=False):
            result.setdefault(self.candidates[name].parameter, name)
        return result

    @property
    def advice_names(self) -> list[str]:
        """Candidates that gain, but are only advice: they change too much to be applied."""
        return self._gaining(advice=True)

    def _gaining(self, *, advice: bool) -> list[str]:
        gaining = {name: comparison.ratio for name, comparison in self.comparisons.items() if comparison.gains}
        return sorted((name for name in gaining if self.candidates[name].advice == advice), key=gaining.__getitem__)

    @property
    def trades(self) -> list[str]:
        """Candidates that make one measure faster and another one slower, both beyond noise."""
        return [name for name, comparison in self.comparisons.items() if comparison.faster and comparison.slower]

    @property
    def gain(self) -> Comparison | None:
        """Comparison of the combined winners with the present settings; `None` without winners."""
        return self.last.compare_all().get(TOGETHER)

    @property
    def best_settings(self) -> Settings | None:
        """The faster settings; `None` if nothing is faster, or the search is not finished."""
        if not self.complete or (gain := self.gain) is None or not gain.gains:
            return None
        return replace(self.present, **self.last.candidates[TOGETHER].change)

    @property
    def times(self) -> Times:
        """Median times of the present settings."""
        rounds = self.rounds.times.get("", [])
        return {m: statistics.median(times[m] for times in rounds) for m in sorted(rounds[0])} if rounds else {}
