"""`Rounds`: settings timed in turns, and what their times say about which is faster.

A machine gets warm, and other programs come and go. So each round times every setting once, each round begins with
another one, and a setting is compared with the present one round by round: what slows a whole round down slows both.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ngramspec.tuning.measures import Bench, Measure, Times, score
from ngramspec.tuning.settings import Settings

LEAST_GAIN = 0.03
"""A setting must save this part of the time; less is not worth a setting that nobody else has."""

FALSE_ALARMS = 0.05
"""How often, at most, a machine on which all settings are equally fast is told that one is faster."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A setting that may be faster than the present one.

    Attributes:
        knob: what it turns: of candidates with the same knob one at most is recommended.
        settings: all settings, the turned one among them.
        measures: the times that it may change.
        advice: whether it is told of and never applied, since it changes more than the last bits of a text.
    """

    knob: str
    settings: Settings
    measures: Sequence[Measure]
    advice: bool = False


@dataclass(frozen=True, slots=True)
class Comparison:
    """A candidate beside the present settings.

    Attributes:
        rounds: how many were compared.
        ratio: the median, over the rounds, of its time for the typical request / the present settings'.
        spread: the distance between the quartiles of these ratios.
        each: the median ratio of every measure.
        chance: how likely, were both equally fast, it would be faster in so many rounds (sign test, one-sided).
        slower: the measures that it makes slower beyond noise.
        faster: those that it makes faster beyond noise.
    """

    rounds: int
    ratio: float
    spread: float
    each: Mapping[Measure, float]
    chance: float
    slower: tuple[Measure, ...]
    faster: tuple[Measure, ...]

    def gains(self, candidates: int) -> bool:
        """Whether it is faster beyond noise and slower in nothing, one of so many candidates being compared."""
        return self.ratio <= 1 - LEAST_GAIN and self.chance <= FALSE_ALARMS / candidates and not self.slower


def sign_chance(wins: int, rounds: int) -> float:
    """How likely a fair coin shows heads `wins` times or more in so many throws."""
    ways = sum(math.comb(rounds, k) for k in range(wins, rounds + 1))
    return ways / float(2**rounds)


def rounds_needed(candidates: int) -> int:
    """The fewest rounds in which one of so many candidates can be told from noise: if it wins all of them."""
    return math.ceil(math.log2(max(1, candidates) / FALSE_ALARMS))


def compare(present: Sequence[Times], other: Sequence[Times], candidates: int = 1) -> Comparison:
    """Compare the times of two settings, taken in the same rounds.

    Args:
        present, other: the times of each round, at least one; of `present` more measures may be there.
        candidates: how many are compared in all, any of which may look faster by chance.
    """
    ratios = [score(b) / score({m: a[m] for m in b}) for a, b in zip(present, other, strict=True)]
    by_measure = {m: [b[m] / a[m] for a, b in zip(present, other, strict=True)] for m in sorted(other[0])}
    level = FALSE_ALARMS / candidates
    return Comparison(
        len(ratios),
        statistics.median(ratios),
        quartile_distance(ratios),
        {m: statistics.median(found) for m, found in by_measure.items()},
        _chance(ratios),
        tuple(m for m, found in by_measure.items() if _beyond([1 / r for r in found], level)),
        tuple(m for m, found in by_measure.items() if _beyond(found, level)),
    )


def quartile_distance(values: Sequence[float]) -> float:
    """The distance between the quartiles; 0 of a single value."""
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return high - low


def _chance(ratios: Sequence[float]) -> float:
    return sign_chance(sum(r < 1 for r in ratios), len(ratios))


def _beyond(ratios: Sequence[float], level: float) -> bool:
    return statistics.median(ratios) <= 1 - LEAST_GAIN and _chance(ratios) <= level


@dataclass(slots=True)
class Rounds:
    """Times of the present settings and of candidates, round by round.

    Attributes:
        bench: what they are taken on.
        present: the settings that candidates are compared with.
        candidates: by the names that they have in a report.
        of_present, of_candidates: the times of each whole round. A round that was broken off counts for nothing.
    """

    bench: Bench
    present: Settings
    candidates: Mapping[str, Candidate]
    of_present: list[Times] = field(default_factory=list)
    of_candidates: dict[str, list[Times]] = field(default_factory=dict)

    def run(self) -> Iterator[str]:
        """Make one more round; yields the name of each setting before it is timed, "" for the present one."""
        names = ["", *self.candidates]
        done = len(self.of_present)
        turn = done // 2 % len(names)
        measures = sorted({m for c in self.candidates.values() for m in c.measures})
        found: dict[str, Times] = {}
        # Every other round goes backwards, so that nobody always has the same one before it.
        for name in (names[turn:] + names[:turn])[:: -1 if done % 2 else 1]:
            yield name
            candidate = self.candidates.get(name)
            settings, wanted = (candidate.settings, candidate.measures) if candidate else (self.present, measures)
            found[name] = {m: self.bench.seconds(settings, m) for m in wanted}
        self.of_present.append(found.pop(""))
        for name, times in found.items():
            self.of_candidates.setdefault(name, []).append(times)

    def compared(self) -> dict[str, Comparison]:
        """Each candidate beside the present settings; empty before the first whole round."""
        count = len(self.candidates)
        return {name: compare(self.of_present, times, count) for name, times in self.of_candidates.items()}
