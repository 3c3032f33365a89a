"""`Tuning`: from settings that may be faster to those that are, within a time.

First every setting is timed once: that warms it up, and shows what it takes. Then come rounds (see `rounds`). What won
is put together and compared with the present settings once more, on fresh times: of several things that look faster the
luckiest looks best, and two that help alone need not help together.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from ngramspec.errors import ModelError, TargetError
from ngramspec.tuning.candidates import combined
from ngramspec.tuning.measures import Bench, Measure, Times
from ngramspec.tuning.rounds import Candidate, Comparison, Rounds, rounds_needed
from ngramspec.tuning.settings import Settings

TRYING, COMPARING = 0.5, 0.8
"""Parts of the time after which no further candidate is tried, and no round begun before the last comparison."""

ENOUGH = 30
"""More rounds would say nothing that these do not."""

NO_TIME = "there was no time for it"
"""Why a candidate was left out that more time would let in."""

TOGETHER = "together"
"""The name of the winners in the last comparison."""


@dataclass(slots=True)
class Tuning:
    """A search for faster settings. After an interruption it holds what was found so far.

    Args:
        bench: what settings are timed on.
        present: the settings that are to be beaten.
        candidates: what may beat them, by name, the likeliest first.
        seconds: for all of it, about.
        clock: tells the time in seconds.

    Attributes:
        left_out: candidates that were not compared, and why.
        rounds: the comparison of all others; None before it begins.
        last: the comparison of the winners together; None where nothing won.
        complete: whether it came to its end.
    """

    bench: Bench
    present: Settings
    candidates: Mapping[str, Candidate]
    seconds: float = 60.0
    clock: Callable[[], float] = time.monotonic
    left_out: dict[str, str] = field(default_factory=dict)
    rounds: Rounds | None = None
    last: Rounds | None = None
    complete: bool = False
    _began: float = 0.0

    def run(self) -> Iterator[str]:
        """Measure; yields what is timed next."""
        self._began = self.clock()
        kept: dict[str, Candidate] = {}
        yield from self._try(kept)
        if kept:
            rounds = self.rounds = Rounds(self.bench, self.present, kept)
            yield from self._turns(rounds, COMPARING)
            winners = self.winners
            if winners:
                yield from self._confirm(winners)
        self.complete = True

    def _try(self, kept: dict[str, Candidate]) -> Iterator[str]:
        """Time each candidate once, beside the present settings, and keep those for which there is time."""
        known: set[Measure] = set()
        spent = 0.0
        for name, candidate in self.candidates.items():
            least = spent * rounds_needed(len(kept) + 1)
            if self._elapsed() > TRYING * self.seconds or least > COMPARING * self.seconds - self._elapsed():
                self.left_out[name] = NO_TIME
                continue
            yield name
            try:
                took = self._cost(candidate, known)
            except (ModelError, TargetError) as error:
                self.left_out[name] = str(error)
                continue
            rounds = rounds_needed(len(kept) + 1)
            if kept and (spent + took) * rounds > COMPARING * self.seconds - self._elapsed():
                self.left_out[name] = NO_TIME
                continue
            known |= set(candidate.measures)
            spent += took
            kept[name] = candidate

    def _cost(self, candidate: Candidate, known: set[Measure]) -> float:
        """What it adds to a round, in seconds; what `known` lacks is timed of the present settings too."""
        wanted = [(self.present, m) for m in candidate.measures if m not in known]
        wanted += [(candidate.settings, m) for m in candidate.measures]
        # The first time that is taken of a setting includes loading what it needs.
        for settings, measure in wanted:
            self.bench.seconds(settings, measure)
        began = self.clock()
        for settings, measure in wanted:
            self.bench.seconds(settings, measure)
        return self.clock() - began

    def _turns(self, rounds: Rounds, share: float) -> Iterator[str]:
        """Rounds until that part of the time is over, and as many as it takes to tell anything."""
        needed = rounds_needed(len(rounds.candidates))
        took = 0.0
        while (done := len(rounds.of_present)) < needed or (
            done < ENOUGH and self._elapsed() + took < share * self.seconds
        ):
            began = self.clock()
            yield from rounds.run()
            took = self.clock() - began

    def _confirm(self, winners: Mapping[str, str]) -> Iterator[str]:
        chosen = [self.candidates[name] for name in winners.values()]
        settings = combined(self.present, {c.knob: c.settings for c in chosen})
        measures = tuple(sorted({m for c in chosen for m in c.measures}))
        last = Rounds(self.bench, self.present, {TOGETHER: Candidate(TOGETHER, settings, measures)})
        try:
            yield TOGETHER
            for measure in measures:
                self.bench.seconds(settings, measure)
        except (ModelError, TargetError) as error:
            self.left_out[TOGETHER] = str(error)
            return
        self.last = last
        yield from self._turns(last, 1.0)

    def _elapsed(self) -> float:
        return self.clock() - self._began

    # ------------------------------------------------------------------ what was found

    @property
    def compared(self) -> dict[str, Comparison]:
        """Every candidate beside the present settings, as far as there is a whole round."""
        return self.rounds.compared() if self.rounds else {}

    @property
    def winners(self) -> dict[str, str]:
        """Of each knob the candidate that gains most, if any gains; advice aside."""
        found: dict[str, str] = {}
        compared = self.compared
        for name, comparison in sorted(compared.items(), key=lambda item: item[1].ratio):
            candidate = self.candidates[name]
            if comparison.gains(len(compared)) and not candidate.advice:
                found.setdefault(candidate.knob, name)
        return found

    @property
    def advised(self) -> list[str]:
        """The candidates that gain, and change too much to be applied."""
        compared = self.compared
        return [n for n, c in compared.items() if self.candidates[n].advice and c.gains(len(compared))]

    @property
    def trades(self) -> list[str]:
        """The candidates that make something faster beyond noise, and something else slower."""
        return [name for name, comparison in self.compared.items() if comparison.faster and comparison.slower]

    @property
    def gain(self) -> Comparison | None:
        """The winners together beside the present settings, on fresh times; None where nothing won."""
        return self.last.compared().get(TOGETHER) if self.last else None

    @property
    def found(self) -> Settings | None:
        """The settings that are faster; None where none is, or too little was measured."""
        if not self.complete or self.last is None or (gain := self.gain) is None or not gain.gains(1):
            return None
        return self.last.candidates[TOGETHER].settings

    @property
    def times(self) -> Times:
        """The median times of the present settings."""
        taken = self.rounds.of_present if self.rounds else []
        return {m: statistics.median(times[m] for times in taken) for m in sorted(taken[0])} if taken else {}
