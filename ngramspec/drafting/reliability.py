"""`Reliability`: how right a drafter's estimates were."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ngramspec.drafting.draft import Draft

BINS = 10
"""Number of bins in the reliability table."""


@dataclass(slots=True)
class Reliability:
    """Predicted against observed acceptance of every position of drafts whose outcome is known.

    That is every position up to and with the first that was wrong.

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

    def to_json(self) -> list[dict[str, float | None]]:
        """Each bin: its bounds, how many predictions, their mean, and the share that was right."""
        return [
            {
                "from": i / BINS,
                "to": (i + 1) / BINS,
                "count": seen,
                "predicted": self.predicted[i] / seen if seen else None,
                "observed": self.right[i] / seen if seen else None,
            }
            for i, seen in enumerate(self.seen)
        ]
