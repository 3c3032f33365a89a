"""`RecurringSizes`: the choice of the batch size if a change of size has a cost (see `PassTimes.change`).

The size of a decode call (a pass) then affects the cost of the next one. A size that will be used again saves more than
one that will not. So among sizes of similar value, a few recur.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from heapq import nlargest
from typing import NamedTuple

from ngramspec.cost.times import PassTimes


class Candidate(NamedTuple):
    """A possible pass."""

    length: int  # number of draft tokens
    gross: float  # value in tokens, before the cost is subtracted; see `DraftValue`
    size: int  # size of the batch
    cost: float  # time in plain passes, without the change of size


class RecurringSizes:
    """Chooses among passes by their value, and by the time that their sizes save in later passes.

    Let w(n) be the value of the best pass over n tokens in time, and w* the value of the best pass of any size.
    If the previous pass had also had n tokens, this would now save max(0, switch - (w* - w(n))): the change of size,
    minus the loss from choosing n. Every size is credited with the mean of this saving over recent passes, which is
    part of w(n).

    This is relative value iteration for the average reward of a Markov decision process (Puterman 1994, "Markov
    Decision Processes", section 8.5). Its state is the size of the last pass, and it is learnt online from the drafts.
    At first only the size of plain passes is assumed to recur: a draft is charged for the change to its size and for
    the change back.

    A pass without a draft may keep the last size too, by padding. This ends when such passes in a row have cost as much
    more than plain ones as a change of size costs. The total is then at most twice the optimum in hindsight (ski
    rental: Karlin, Manasse, Rudolph, Sleator 1988, "Competitive snoopy caching").
    """

    RATE = 0.02
    MIN_SHARE = RATE / 10
    FEW = 3

    def __init__(self) -> None:
        self._plain = 0  # size of a pass without a draft
        self._shares: dict[int, float] = {}  # credit of each size, as a part of the cost of a change
        self._overpaid = 0.0  # additional cost of the latest padded passes without drafts, in plain passes
        self._has_choice = self._is_padded = False

    def choose(
        self,
        candidates: Sequence[Candidate],
        times: PassTimes,
        sizes: Sequence[int],
        rate: float,
        max_cost: float,
        first_prob: float,
    ) -> Candidate:
        """Return the best of the candidates, which may be padded to a recurring size; `times` has a positive `change`.

        The candidates are sorted by length, the first without a draft; each has its cheapest batch. `max_cost` limits a
        padded draft. With `first_prob`, a pass without a draft emits the first draft token too.
        """
        switch, last = times.change, times.last
        bare, *drafts = candidates
        self._plain = plain = bare.size
        self._shares.setdefault(plain, 1.0)
        credit = self._shares.get

        def rate_candidate(candidate: Candidate) -> tuple[float, Candidate]:
            return candidate.gross / rate - candidate.cost + switch * credit(candidate.size, 0.0), candidate

        entries = [rate_candidate(draft) for draft in drafts]
        if entries:
            _, later = max(entries)
            # A draft in the next pass, whose value `bare` contains, changes the size of the batch then. If that were
            # not charged, it would always seem better to wait, and nothing would ever be drafted.
            change = switch * (1.0 + credit(plain, 0.0) - credit(later.size, 0.0))
            waiting = bare.gross - 1.0
            bare = bare._replace(gross=1.0 + max(min(waiting, 0.0), waiting - rate * first_prob * change))
        padded = self._pad_candidates((bare, *drafts), times, sizes, max_cost)
        entries += map(rate_candidate, (bare, *padded))
        best: dict[int, tuple[float, Candidate]] = {}
        for value, candidate in entries:
            size = candidate.size
            if size not in best or value > best[size][0]:
                best[size] = value, candidate
        top = max(best.values())[0]
        savings = {size: 1.0 - (top - value) / switch for size, (value, _) in best.items() if top - value < switch}
        self._learn(savings)
        _, choice = max(best.values(), key=lambda entry: entry[0] - (0.0 if entry[1].size == last else switch))
        self._has_choice, self._is_padded = True, not choice.length and choice.size != plain
        self._overpaid = self._overpaid + choice.cost - bare.cost if self._is_padded else 0.0
        return choice

    def _pad_candidates(
        self, candidates: Sequence[Candidate], times: PassTimes, sizes: Sequence[int], max_cost: float
    ) -> Iterator[Candidate]:
        """Yield the longest draft that fits into a batch of the last size, and of each of the most recurring sizes."""
        rent = candidates[0].cost + times.change - self._overpaid
        for size in {times.last, *nlargest(self.FEW, self._shares, key=self._shares.__getitem__)} - {self._plain}:
            if size not in sizes:
                continue
            cost = times.ratio(size)
            longest = candidates[bisect_left(candidates, size, key=lambda candidate: candidate.length) - 1]
            if cost <= (max_cost if longest.length else rent) and (longest.length or size == times.last):
                yield longest._replace(size=size, cost=cost)

    def record_pass(self) -> bool:
        """Record a pass, plain without a choice before; return True if it kept the last size without having a draft."""
        if self._shares and not self._has_choice:
            self._learn({self._plain: 1.0})
            self._overpaid = 0.0
        is_padded, self._has_choice, self._is_padded = self._is_padded, False, False
        return is_padded

    def _learn(self, savings: Mapping[int, float]) -> None:
        """Update the credits by the part of a change that each size would have saved; missing sizes saved nothing."""
        shares = self._shares
        for size in {*shares, *savings}:
            share = shares.get(size, 0.0)
            share += self.RATE * (savings.get(size, 0.0) - share)
            if share > self.MIN_SHARE or size == self._plain:
                shares[size] = share
            else:
                shares.pop(size, None)
