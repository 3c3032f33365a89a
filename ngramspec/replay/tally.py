"""`Tally`: what is counted in replays."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from ngramspec.cost.given import GivenCurve
from ngramspec.decoding.step import Stats
from ngramspec.drafting.reliability import Reliability


@dataclass(slots=True)
class Tally:
    """The counts of some recordings.

    Attributes:
        transcripts: how many.
        prompt_tokens: of their prompts.
        stats: the counters of all their steps; its seconds are the target's (modelled ones: in units of T(1)).
        batches: target passes by batch size, padding included.
        changes: passes of another size than the one before.
        begin_seconds: CPU time that the drafter took to read the prompts.
        work_seconds: CPU time of drafting and learning, drafter and policy.
        reliability: of the acceptance that the drafter predicted.
    """

    transcripts: int = 0
    prompt_tokens: int = 0
    stats: Stats = field(default_factory=Stats)
    batches: Counter[int] = field(default_factory=Counter)
    changes: int = 0
    begin_seconds: float = 0.0
    work_seconds: float = 0.0
    reliability: Reliability = field(default_factory=Reliability)

    def merge(self, other: Tally) -> None:
        """Add another's counts to these."""
        self.transcripts += other.transcripts
        self.prompt_tokens += other.prompt_tokens
        self.stats.merge(other.stats)
        self.batches += other.batches
        self.changes += other.changes
        self.begin_seconds += other.begin_seconds
        self.work_seconds += other.work_seconds
        self.reliability.merge(other.reliability)

    def speedup(self, curve: GivenCurve) -> float:
        """Cost of emitting the same tokens in one-token passes / cost of these passes, both by `curve`."""
        cost = sum(count * curve.ratio(size) for size, count in self.batches.items()) + self.changes * curve.switch
        return self.stats.tokens / cost if cost else 1.0
