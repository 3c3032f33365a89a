"""`Tally`: what is counted in replays, and `Reliability`, how right the drafter's estimates were."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from ngramspec.cost.given import GivenCurve
from ngramspec.decoding.step import Stats
from ngramspec.drafting.draft import Draft

BINS = 10
"""Number of bins in the reliability table."""


@dataclass(slots=True)
class Reliability:
    """Predicted against observed acceptance of every proposed position whose outcome is known.

    That is every position of every proposal, sent or not, up to and with the first that was wrong.

    Attributes:
        seen, predicted, right: per bin of BINS, how many, the sum of their predictions, and how many were right.
    """

    seen: list[int] = field(default_factory=lambda: [0] * BINS)
    predicted: list[float] = field(default_factory=lambda: [0.0] * BINS)
    right: list[int] = field(default_factory=lambda: [0] * BINS)

    def add(self, proposal: Draft, truth: Sequence[int]) -> None:
        """Count a proposal; `truth` is what really followed."""
        for guess, p, token in zip(proposal.tokens, proposal.chances, truth, strict=False):
            number = min(BINS - 1, int(p * BINS))
            self.seen[number] += 1
            self.predicted[number] += p
            if guess != token:
                return
            self.right[number] += 1

    def merge(self, other: Reliability) -> None:
        """Add another's counts to these."""
        for i in range(BINS):
            self.seen[i] += other.seen[i]
            self.predicted[i] += other.predicted[i]
            self.right[i] += other.right[i]

    @property
    def calibration_error(self) -> float | None:
        """Expected calibration error: the mean of |predicted - observed| over bins, weighted by their counts.

        (Naeini, Cooper, Hauskrecht 2015, "Obtaining well calibrated probabilities using Bayesian binning".)
        None if nothing was proposed.
        """
        total = sum(self.seen)
        if not total:
            return None
        return sum(abs(p - r) for p, r in zip(self.predicted, self.right, strict=True)) / total


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
