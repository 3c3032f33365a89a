"""`RecurringSizes`: which size of batch to choose where a change of size costs something (see `CostCurve.switch`).

The size of a pass then has a cost for the next one too, and one that will be wanted again saves more than one that will
not. Of sizes that are nearly as good as each other a few therefore recur.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from heapq import nlargest
from typing import NamedTuple

from ngramspec.cost.curve import CostCurve


class Candidate(NamedTuple):
    """A pass that may be made."""

    length: int  # draft tokens in it
    expected: float  # tokens that it is expected to emit
    size: int  # of its batch
    cost: float  # its time, in units of T(1), the change of size aside


class RecurringSizes:
    """Chooses among passes by their value, and by what their sizes save the passes after them.

    Let w(n) be the value of the best pass over n tokens, and w* that of the best of all, in time. Had the pass before
    been over n tokens too, that would save max(0, switch - (w* - w(n))) now: the change of size, unless a change is the
    lesser evil. Every size is credited with the mean of this over recent passes, which is part of its w(n).

    This is relative value iteration for the average reward of a Markov decision process whose state is the size of the
    last pass (Puterman 1994, "Markov Decision Processes", section 8.5), learnt from the drafts as they come. At first
    nothing but the size of plain passes is taken to recur: a draft is charged for the change there and for that back.

    A pass without a draft may keep the last size too, padded, until such passes in a row have cost as much more than
    plain ones as a change costs. Going back then has cost twice the best that hindsight knows, at most (ski rental:
    Karlin, Manasse, Rudolph, Sleator 1988, "Competitive snoopy caching").
    """

    RATE = 0.02
    LEAST = RATE / 10
    FEW = 3

    def __init__(self) -> None:
        self._plain = 0  # the size of a pass without a draft
        self._shares: dict[int, float] = {}  # credit of a size, as a part of what a change costs
        self._overpaid = 0.0  # for padded passes without drafts in a row, in units of T(1)
        self._chosen = self._stayed = False

    def choose(
        self, candidates: Sequence[Candidate], curve: CostCurve, sizes: Sequence[int], rate: float, dearest: float
    ) -> Candidate:
        """The best pass.

        Args:
            candidates: what may be chosen, by length, the first without a draft; each in its cheapest batch.
            curve, sizes: a curve whose `switch` is positive, and the sizes that may be used.
            rate: tokens that the time T(1) bought lately.
            dearest: what a draft may cost that is padded to a recurring size, in units of T(1).
        """
        switch, last = curve.switch / curve.level, curve.last
        self._plain = plain = candidates[0].size
        self._shares.setdefault(plain, 1.0)
        credit = self._shares.get
        best: dict[int, tuple[float, Candidate]] = {}
        for candidate in (*candidates, *self._padded(candidates, curve, sizes, dearest)):
            size = candidate.size
            value = candidate.expected / rate - candidate.cost + switch * credit(size, 0.0)
            if size not in best or value > best[size][0]:
                best[size] = value, candidate
        top = max(best.values())[0]
        saved = {size: 1.0 - (top - value) / switch for size, (value, _) in best.items() if top - value < switch}
        self._learn(saved)
        _, chosen = max(best.values(), key=lambda found: found[0] - (0.0 if found[1].size == last else switch))
        self._chosen, self._stayed = True, not chosen.length and chosen.size != plain
        self._overpaid = self._overpaid + chosen.cost - candidates[0].cost if self._stayed else 0.0
        return chosen

    def _padded(
        self, candidates: Sequence[Candidate], curve: CostCurve, sizes: Sequence[int], dearest: float
    ) -> Iterator[Candidate]:
        """The longest draft that fits into a batch of the last size, and of the few that recur most."""
        rent = candidates[0].cost + curve.switch / curve.level - self._overpaid
        for size in {curve.last, *nlargest(self.FEW, self._shares, key=self._shares.__getitem__)} - {self._plain}:
            if size not in sizes:
                continue
            cost = curve.ratio(size)
            longest = candidates[bisect_left(candidates, size, key=lambda candidate: candidate.length) - 1]
            if cost <= (dearest if longest.length else rent) and (longest.length or size == curve.last):
                yield longest._replace(size=size, cost=cost)

    def passed(self) -> bool:
        """Take note of a pass, a plain one where nothing was chosen; whether it kept the last size without a draft."""
        if self._shares and not self._chosen:
            self._learn({self._plain: 1.0})
            self._overpaid = 0.0
        stayed, self._chosen, self._stayed = self._stayed, False, False
        return stayed

    def _learn(self, saved: Mapping[int, float]) -> None:
        """Take in which part of a change each size would have saved; those that are not named, none."""
        shares = self._shares
        for size in {*shares, *saved}:
            share = shares.get(size, 0.0)
            share += self.RATE * (saved.get(size, 0.0) - share)
            if share > self.LEAST or size == self._plain:
                shares[size] = share
            else:
                shares.pop(size, None)
