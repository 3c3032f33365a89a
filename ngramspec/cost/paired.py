"""Paired comparison of two speeds: `compare_pairs`, the only place that decides whether a difference is noise.

Both sides of a pair do the same work, one directly after the other, and their order changes from pair to pair. Other
programs then slow both down. A ratio is the speed of the new side divided by the speed of the old side.

Sign test: if the new side is not faster, a ratio is above 1 with a probability of at most 1/2, whatever the
distribution of the times. At least w of n ratios are then above 1 with a probability of at most

    p(w, n) = sum of C(n, i) / 2^n for i = w ... n

(Conover, Practical Nonparametric Statistics, 3rd edition, 1999, section 3.4). The same sum gives an interval for the
median ratio: from the (k + 1)th smallest to the (k + 1)th largest, with the largest k for which p(n - k, n) <= chance
(section 3.2). So it is above 1 exactly if the sign test is clear at `chance`, and each of its ends errs at most so
often. Example: of 9 ratios, one may contradict the others, because p(8, 9) = 10 / 512 = 0.0195.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

CHANCE = 0.02
"""Maximum probability that noise is reported as a gain."""

NO_DIFFERENCE = "no difference that these runs can show"


@dataclass(frozen=True, slots=True)
class Paired:
    """The result of comparing two speeds in pairs."""

    pairs: int  # number of pairs
    median: float  # median ratio
    interval: tuple[float, float] | None  # interval for the median ratio; `None` if there are too few pairs

    @property
    def is_faster(self) -> bool:
        """True if the new side is faster beyond noise."""
        return self.interval is not None and self.interval[0] > 1

    @property
    def is_slower(self) -> bool:
        """True if the new side is slower beyond noise."""
        return self.interval is not None and self.interval[1] < 1

    def __str__(self) -> str:
        if self.interval is None:
            return f"{NO_DIFFERENCE}: {self.pairs} of at least {pairs_needed()} pairs"
        if not (self.is_faster or self.is_slower):
            return NO_DIFFERENCE
        return f"{' to '.join(dict.fromkeys(f'{end:.2f}' for end in self.interval))} times as fast"


def sign_chance(wins: int, pairs: int) -> float:
    """Return p(wins, pairs) of the sign test above."""
    return sum(math.comb(pairs, i) for i in range(wins, pairs + 1)) / float(2**pairs)


def pairs_needed(losses: int = 0, chance: float = CHANCE) -> int:
    """Return the smallest number of pairs that are clear although some ratios contradict the others."""
    pairs = losses + 1
    while sign_chance(pairs - losses, pairs) > chance:
        pairs += 1
    return pairs


def compare_pairs(ratios: Sequence[float], chance: float = CHANCE) -> Paired | None:
    """Return the comparison of two sides by the ratios of their speeds, one per pair; `None` without pairs.

    If several comparisons could each be reported as a gain, `chance` must be divided by their number (Bonferroni).
    """
    if not ratios:
        return None
    n, order = len(ratios), sorted(ratios)
    k = sum(sign_chance(n - i, n) <= chance for i in range(n))
    return Paired(n, median(order), (order[k - 1], order[n - k]) if k else None)
