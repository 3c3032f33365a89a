"""`Tuning`: from settings that may be faster to those that are, within a time; README.md says how it decides.

Every setting is timed once, which warms it up; then rounds compare all with the present one; then what won, together,
is compared once more on fresh times.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ngramspec.errors import ModelError, TargetError
from ngramspec.instruments.tuning.candidates import Candidate
from ngramspec.machine import LEAST_READ, Measure, Settings

LEAST_GAIN = 0.03
"""A setting must save this part of the time; less is not worth a setting that nobody else has."""

FALSE_ALARMS = 0.05
"""How often, at most, a machine on which all settings are equally fast is told that one is faster."""

TRYING, COMPARING = 0.5, 0.8
"""Parts of the time after which no further candidate is tried, and no round begun before the last comparison."""

ENOUGH = 30
"""More rounds would say nothing that these do not."""

NO_TIME = "no time left"  # why a candidate was left out that more time would let in
TOGETHER = "together"  # the name of the winners in the last comparison

WEIGHTS: Mapping[int, float] = {1: 128, 4: 64, 8: 32, LEAST_READ: 1000, 1024: 1000}
"""A request that reads 1,000 tokens and then has 128 passes over one token, 64 over four and 32 over eight. It decides
only where a setting makes one of these faster and another slower."""

Times = Mapping[Measure, float]
"""Seconds of each; of reading, per token."""

Timer = Callable[[Settings, Measure], float]
"""Takes one time; TargetError or ModelError where these settings cannot be had on this machine."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A candidate beside the present settings, round by round."""

    rounds: int  # how many were compared
    ratio: float  # the median of its time for the request of `WEIGHTS` / the present settings'
    spread: float  # the distance between the quartiles of these ratios
    each: Mapping[Measure, float]  # the median ratio of every measure
    chance: float  # how likely, were both equally fast, it would be faster in so many rounds (sign test, one-sided)
    # slower, faster: the measures that it makes so beyond noise.
    slower: tuple[Measure, ...]
    faster: tuple[Measure, ...]
    gains: bool  # whether it is faster beyond noise and slower in nothing


def sign_chance(ratios: Sequence[float]) -> float:
    """How likely a fair coin is to show heads as often as these ratios are below 1, or more often."""
    wins, count = sum(ratio < 1 for ratio in ratios), len(ratios)
    return sum(math.comb(count, k) for k in range(wins, count + 1)) / float(2**count)


def rounds_needed(candidates: int) -> int:
    """The fewest rounds in which one of so many candidates can be told from noise: if it wins all of them."""
    return math.ceil(math.log2(max(1, candidates) / FALSE_ALARMS))


def compare(present: Sequence[Times], other: Sequence[Times], candidates: int = 1) -> Comparison:
    """Compare the times of two settings in the same rounds, at least one; of `present` more measures may be there.

    `candidates` are compared in all, any of which may look faster by chance.
    """

    def score(times: Times) -> float:
        return sum(WEIGHTS[m.size] * times[m] for m in other[0])

    def beyond_noise(found: Sequence[float]) -> bool:
        return statistics.median(found) <= 1 - LEAST_GAIN and sign_chance(found) <= FALSE_ALARMS / candidates

    rounds = list(zip(present, other, strict=True))
    ratios = [score(b) / score(a) for a, b in rounds]
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else (0.0, 0.0, 0.0)
    each = {m: [b[m] / a[m] for a, b in rounds] for m in sorted(other[0])}
    faster = tuple(m for m, found in each.items() if beyond_noise(found))
    slower = tuple(m for m, found in each.items() if beyond_noise([1 / ratio for ratio in found]))
    medians = {m: statistics.median(found) for m, found in each.items()}
    gains = beyond_noise(ratios) and not slower
    chance, spread = sign_chance(ratios), high - low
    return Comparison(len(ratios), statistics.median(ratios), spread, medians, chance, slower, faster, gains)


@dataclass(slots=True)
class Rounds:
    """Times of the present settings and of candidates, round by round."""

    timer: Timer  # takes them
    present: Settings  # the settings that candidates are compared with
    candidates: Mapping[str, Candidate]  # by the names that they have in a report
    # By that name, "" for the present settings. A round that was broken off counts for nothing.
    times: dict[str, list[Times]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.times.get("", ()))

    def run(self) -> Iterator[str]:
        """Make one more round; yields the name of each setting before it is timed."""
        names, done = ["", *self.candidates], len(self)
        turn = done // 2 % len(names)
        measures = sorted({m for c in self.candidates.values() for m in c.measures})
        found: dict[str, Times] = {}
        # Every other round goes backwards, so that nobody always has the same one before it.
        for name in (names[turn:] + names[:turn])[:: -1 if done % 2 else 1]:
            yield name
            settings = replace(self.present, **self.candidates[name].change) if name else self.present
            found[name] = {m: self.timer(settings, m) for m in (self.candidates[name].measures if name else measures)}
        for name, times in found.items():
            self.times.setdefault(name, []).append(times)

    def compared(self) -> dict[str, Comparison]:
        """Each candidate beside the present settings; empty before the first whole round."""
        count = len(self.candidates)
        return {name: compare(self.times[""], times, count) for name, times in self.times.items() if name}


@dataclass(slots=True)
class Tuning:
    """A search for faster settings. After an interruption it holds what was found so far."""

    timer: Timer  # takes the times of settings
    present: Settings  # the settings that are to be beaten
    candidates: Mapping[str, Candidate]  # what may beat them, by name, the most likely first
    seconds: float = 60.0  # for all of it, about
    clock: Callable[[], float] = time.monotonic  # tells the time in seconds
    left_out: dict[str, str] = field(default_factory=dict)  # candidates that were not compared, and why
    rounds: Rounds = field(init=False)  # the comparison of all others
    last: Rounds = field(init=False)  # the comparison of the winners together; empty where nothing won
    complete: bool = False  # whether it came to its end
    _began: float = 0.0

    def __post_init__(self) -> None:
        self.rounds = self.last = Rounds(self.timer, self.present, {})

    def run(self) -> Iterator[str]:
        """Measure; yields what is timed next."""
        self._began = self.clock()
        kept: dict[str, Candidate] = {}
        yield from self._try(kept)
        if kept:
            self.rounds = Rounds(self.timer, self.present, kept)
            yield from self._turns(self.rounds, COMPARING)
            if self.winners:
                yield from self._confirm([self.candidates[name] for name in self.winners.values()])
        self.complete = True

    def _try(self, kept: dict[str, Candidate]) -> Iterator[str]:
        """Time each candidate once, beside the present settings, and keep those for which there is time."""
        known: set[Measure] = set()
        spent = 0.0
        for name, candidate in self.candidates.items():
            rounds = rounds_needed(len(kept) + 1)
            if self._left(TRYING) < 0 or spent * rounds > self._left(COMPARING):
                self.left_out[name] = NO_TIME
                continue
            yield name
            wanted = [(self.present, m) for m in candidate.measures if m not in known]
            wanted += [(replace(self.present, **candidate.change), m) for m in candidate.measures]
            try:
                for _ in range(2):  # the first times include loading what a setting needs
                    began = self.clock()
                    for each in wanted:
                        self.timer(*each)
            except (ModelError, TargetError) as error:
                self.left_out[name] = str(error)
                continue
            took = self.clock() - began
            if kept and (spent + took) * rounds > self._left(COMPARING):
                self.left_out[name] = NO_TIME
                continue
            known |= set(candidate.measures)
            spent += took
            kept[name] = candidate

    def _turns(self, rounds: Rounds, share: float) -> Iterator[str]:
        """Rounds until that part of the time is over, and as many as it takes to tell anything."""
        needed, took = rounds_needed(len(rounds.candidates)), 0.0
        while len(rounds) < needed or (len(rounds) < ENOUGH and took < self._left(share)):
            began = self.clock()
            yield from rounds.run()
            took = self.clock() - began

    def _confirm(self, winners: Sequence[Candidate]) -> Iterator[str]:
        changes = {name: value for one in winners for name, value in one.change.items()}
        if changes.get("flash_attn") == "off":
            changes.pop("micro_batch", None)  # without flash attention it would hold scores for the whole context
        together = Candidate(TOGETHER, changes, sorted({m for one in winners for m in one.measures}))
        try:
            yield TOGETHER
            for measure in together.measures:
                self.timer(replace(self.present, **changes), measure)
        except (ModelError, TargetError) as error:
            self.left_out[TOGETHER] = str(error)
            return
        self.last = Rounds(self.timer, self.present, {TOGETHER: together})
        yield from self._turns(self.last, 1.0)

    def _left(self, share: float) -> float:
        """Seconds until this part of the time is over."""
        return share * self.seconds - (self.clock() - self._began)

    @property
    def compared(self) -> dict[str, Comparison]:
        """Every candidate beside the present settings, as far as there is a whole round."""
        return self.rounds.compared()

    @property
    def winners(self) -> dict[str, str]:
        """Of each knob the candidate that gains most, if any gains; advice aside."""
        found: dict[str, str] = {}
        for name in self._gaining(advice=False):
            found.setdefault(self.candidates[name].knob, name)
        return found

    @property
    def advised(self) -> list[str]:
        """The candidates that gain, and change too much to be applied."""
        return self._gaining(advice=True)

    def _gaining(self, *, advice: bool) -> list[str]:
        gaining = {name: comparison.ratio for name, comparison in self.compared.items() if comparison.gains}
        return sorted((name for name in gaining if self.candidates[name].advice == advice), key=gaining.__getitem__)

    @property
    def trades(self) -> list[str]:
        """The candidates that make something faster beyond noise, and something else slower."""
        return [name for name, comparison in self.compared.items() if comparison.faster and comparison.slower]

    @property
    def gain(self) -> Comparison | None:
        """The winners together beside the present settings, on fresh times; None where nothing won."""
        return self.last.compared().get(TOGETHER)

    @property
    def found(self) -> Settings | None:
        """The settings that are faster; None where none is, or too little was measured."""
        if not self.complete or (gain := self.gain) is None or not gain.gains:
            return None
        return replace(self.present, **self.last.candidates[TOGETHER].change)

    @property
    def times(self) -> Times:
        """The median times of the present settings."""
        taken = self.rounds.times.get("", [])
        return {m: statistics.median(times[m] for times in taken) for m in sorted(taken[0])} if taken else {}
