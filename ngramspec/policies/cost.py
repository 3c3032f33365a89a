# cython: language_level=3
"""`CostPolicy`, the default: draft the length that pays on this machine, by what a pass costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from operator import mul

import cython

if cython.compiled:
    from cython.cimports.ngramspec.cost.curve import CostCurve
    from cython.cimports.ngramspec.policies.draft_value import DraftValue
else:
    from ngramspec.cost.curve import CostCurve
    from ngramspec.policies.draft_value import DraftValue

from ngramspec.cost.measure import RestoreCost
from ngramspec.drafting.draft import Draft, MarginalCost
from ngramspec.policies.loss_budget import LossBudget
from ngramspec.policies.policy import Policy, smallest
from ngramspec.policies.recurring_sizes import Candidate, RecurringSizes
from ngramspec.steps import Step

Batches = Callable[[Sequence[int]], Sequence[int]]  # see `ngramspec.shared_model.SharedModel.batches`


class CostPolicy(Policy):
    """Draft the length that pays on this machine, and nothing when nothing does.

    With p_i the estimated acceptance of position i, a draft of k tokens yields

        E[tokens(k)] = 1 + sum over j <= k of p_1 * ... * p_j        (Leviathan et al. 2023, section 3.1)

    tokens in T(1 + k) seconds. The length maximises E[tokens(k)] - lambda * T(1 + k), and what the passes after it can
    make of the rest (`DraftValue`); lambda is the recent throughput in tokens per second, and T the cost of the
    cheapest allowed batch that holds the draft. Where a change of batch size costs something, it is charged, and a size
    that recurs is credited (`RecurringSizes`).

    Never slower, by construction:

    - Gains and losses are booked in a `LossBudget`. When it is used up, drafting stops until time has diluted the loss.
    - The pass of a draft may cost at most STAKE of what is left more than a plain one (fractional Kelly betting; Thorp
      2006, "The Kelly criterion in blackjack, sports betting, and the stock market"). The cheapest draft that takes at
      most SURE of the time of its tokens one by one is always allowed; otherwise nothing would ever be won.
    - After PLAIN_EVERY passes none of which showed how fast plain decoding is, PLAIN_RUN passes go without a draft.
      They show when a curve is wrong, and what the context's length costs.

    Args:
        draft_max: most tokens in a draft.
        texts: how many texts share a pass. Plain decoding is then `texts` tokens in T(texts) seconds.
    """

    name = "cost"

    STAKE = 1 / 2
    SURE = 0.8
    DECAY = 0.93
    PLAIN_EVERY, PLAIN_RUN = 64, 3

    def __init__(self, draft_max: int = 63, texts: int = 1) -> None:
        self._draft_max = draft_max
        self._texts = texts
        self._tokens = self._seconds = 0.0
        self._budget = LossBudget(texts)
        self._since_plain = self._plain_due = 0
        self._last_was_plain = False
        self._measured = False
        self._recurring = RecurringSizes()
        self._value = DraftValue()
        self._shared: dict[int, CostPolicy] = {}

    def begin(self) -> None:
        self._budget.begin()
        for policy in self._shared.values():
            policy.begin()

    def shared(self, texts: int) -> CostPolicy:
        """A policy with a loss budget of its own: drafting must pay against what *that* many texts take without."""
        if texts == self._texts:
            return self
        if texts not in self._shared:
            self._shared[texts] = CostPolicy(self._draft_max, texts)
        return self._shared[texts]

    def limit(self) -> int:
        return self._draft_max if not self._plain_due and self._budget.can_ask() else 0

    def price(self, curve: CostCurve | None, sizes: Sequence[int]) -> MarginalCost | None:
        if curve is None:
            return None
        costs = curve.padded(sizes)
        plain, level = costs[self._texts][1], curve.level
        # Every text has a drafter of its own, and what all of them take may be lost.
        stake = self.STAKE * max(0.0, self._budget.left(plain, level)) / self._texts
        rate, slopes = self._rate(curve, sizes), curve.slopes(sizes)[self._texts - 1 :]
        return MarginalCost(
            rate, slopes, level, stake, lambda: [cost - plain for _, cost in costs[self._texts :]], self._texts
        )

    def _rate(self, curve: CostCurve, sizes: Sequence[int]) -> float:
        """Recent throughput, in tokens per time of a one-token pass; never less than that of plain decoding."""
        return max(self._texts / curve.padded(sizes)[self._texts][1], self._recent * curve.level)

    @property
    def _recent(self) -> float:
        """Recent throughput, in tokens per second."""
        return self._tokens / self._seconds if self._seconds else 0.0

    def plan(
        self, draft: Draft, curve: CostCurve | None, sizes: Sequence[int], restore: RestoreCost | None = None
    ) -> tuple[int, int]:
        if curve is None:
            return 0, smallest(1, sizes)
        k: cython.Py_ssize_t
        size: cython.Py_ssize_t
        plain: cython.Py_ssize_t
        best: cython.Py_ssize_t = 0
        longest: cython.Py_ssize_t
        cost: cython.double
        value: cython.double
        self._measured = curve.measured
        costs = curve.padded(sizes)
        plain, plain_cost = costs[1]
        if not draft.tokens and (restore is not None or not curve.switch):
            return 0, plain
        if draft.repeats:
            self._budget.forget_inherited_loss()
        left = self._budget.left(plain_cost, curve.level)
        if left < 0:
            return 0, plain
        stake = self.STAKE * left
        rate: cython.double = self._rate(curve, sizes)
        if restore is not None:
            return self._plan_with_restore(draft, curve, sizes, rate, restore, stake)
        ahead: DraftValue = self._value
        dearest: cython.double = max(plain_cost + stake, self._least(draft, costs))
        longest = ahead.read(draft.acceptance_probs, costs, rate, dearest)
        candidates = [Candidate(0, ahead.tokens[0], plain, plain_cost)] if curve.switch else None
        last: cython.Py_ssize_t = curve.last
        pads: cython.bint = last != plain and last in sizes
        best_size: cython.Py_ssize_t = plain
        best_value: cython.double = ahead.tokens[0] - rate * plain_cost
        for k in range(1, longest + 1):
            size, cost = costs[1 + k]
            if cost > dearest:
                continue
            if candidates is not None:
                candidates.append(Candidate(k, ahead.tokens[k], size, cost))
                continue
            # What was padded to before may have become a little cheaper.
            if pads and last > k + 1 and curve.ratio(last) < cost:
                size, cost = last, curve.ratio(last)
            value = ahead.tokens[k] - rate * cost
            if value > best_value:
                best, best_size, best_value = k, size, value
        if candidates is not None:
            best, _, best_size, _ = self._recurring.choose(candidates, curve, sizes, rate, dearest)
        # `acceptance_probs` may be longer than the draft: see `fixed_length` in `Drafter.propose`.
        if best > len(draft.tokens):
            best = len(draft.tokens)
            best_size = costs[1 + best][0]
        return best, best_size

    def _least(self, draft: Draft, costs: Sequence[tuple[int, float]]) -> float:
        """Cost of the cheapest draft that takes at most SURE of the time of its tokens one by one; 0: there is none."""
        most = min(len(draft.acceptance_probs), len(costs) - 2)
        return min((costs[n][1] for n in range(2, most + 2) if costs[n][1] <= self.SURE * n), default=0.0)

    def plan_together(
        self, drafts: Sequence[Draft], curve: CostCurve, sizes: Sequence[int], batches: Batches
    ) -> list[tuple[int, int]]:
        """Return the plan of each sequence, (draft tokens, batch size), if all share a decode call."""
        # A token that is accepted with probability r (it and all before it in its draft) adds r tokens, whichever text
        # it is of. So the best K of all drafts are the K with the largest r, and K maximises
        # sum of r - lambda * T(texts + K). Where the pass falls into batches of its own for texts with longer drafts,
        # drafts padded to one length are looked at too.
        n = self._texts
        self._measured = curve.measured
        plain_cost = sum([curve.ratio(size) for size in batches([1] * n)])
        if any(draft.repeats for draft in drafts):
            self._budget.forget_inherited_loss()
        left = self._budget.left(plain_cost, curve.level)
        best = [(0, 1)] * n
        if left < 0:
            return best
        rate, most = max(n / plain_cost, self._recent * curve.level), sizes[-1]
        best_value, least = n - rate * plain_cost, math.inf
        reaches = [list(accumulate(draft.acceptance_probs[: len(draft)], mul)) for draft in drafts]
        for lengths, shape in (*_by_reach(reaches, most - n), *_by_depth(reaches, most - n)):
            parts = batches(shape)
            if any(part not in sizes for part in parts):
                continue
            cost = sum([curve.ratio(part) for part in parts])
            if cost <= self.SURE * plain_cost * (1 + sum(lengths) / n):
                least = min(least, cost)
            if cost > max(plain_cost + self.STAKE * left, least):
                continue
            expected = n + sum(sum(of[:length]) for of, length in zip(reaches, lengths, strict=True))
            value = expected - rate * (cost + curve.switching(parts[0], n))
            if value > best_value:
                best, best_value = list(zip(lengths, shape, strict=True)), value
        return best

    def record(self, done: Step) -> None:
        drafting = self._recurring.passed() or bool(done.drafted)
        self._tokens = self._tokens * self.DECAY + len(done.tokens)
        self._seconds = self._seconds * self.DECAY + (done.seconds - done.interruption_seconds + done.draft_seconds)
        self._budget.book(done, drafting)
        self._since_plain = 0 if self._last_was_plain and not drafting else self._since_plain + 1
        self._last_was_plain = not drafting
        if not drafting:
            self._plain_due = max(0, self._plain_due - 1)
        if self._measured and self._since_plain and self._since_plain % self.PLAIN_EVERY == 0:
            self._plain_due = self.PLAIN_RUN

    def _plan_with_restore(
        self, draft: Draft, curve: CostCurve, sizes: Sequence[int], rate: float, restore: RestoreCost, stake: float
    ) -> tuple[int, int]:
        """The length that pays where a refusal means going back to the state before the pass.

        The pass and all it kept are then evaluated again, in front of the next pass: with `again` tokens to recompute
        and j accepted, that pass is again + 1 + j tokens longer than a plain one. So the value of k draft tokens is

            E[tokens(k)] - lambda (T(again + 1 + k) + save + sum over j < k of P(j) (load + T(again + 2 + j) - T(1)))

        with P(j) = p_1 * ... * p_j * (1 - p_{j+1}), the probability that exactly j are accepted. At stake is what a
        draft costs that is refused at its first token: the longer pass, going back, and the longer pass after it.
        """
        again = restore.recompute
        save, load = restore.save / curve.level, restore.load / curve.level
        plain = curve.ratio(again + 1)
        best, best_value = 0, 1.0 - rate * plain
        refused = save + load + curve.ratio(again + 2) - 1.0 - plain
        least = math.inf
        reach = expected = 1.0
        spent = save
        for k, p in enumerate(draft.acceptance_probs[: min(len(draft), sizes[-1] - 1 - again)], 1):
            cost = curve.ratio(again + 1 + k)
            spent += reach * (1.0 - p) * (load + cost - 1.0)
            reach *= p
            expected += reach
            if cost - plain + 1.0 + save <= self.SURE * (1 + k):
                least = min(least, cost)
            if cost > max(stake - refused, least):
                continue
            value = expected - rate * (cost + spent)
            if value > best_value:
                best, best_value = k, value
        return best, 1 + best


def _by_reach(reaches: Sequence[Sequence[float]], room: int) -> Iterator[tuple[list[int], list[int]]]:
    """(draft tokens, batch size) of each text: the best K tokens of all, for every K up to `room`.

    `reaches`: for each text and draft token, the probability that it and all before it are accepted.
    """
    lengths = [0] * len(reaches)
    # Sorting is stable, so that no token comes before one that it follows.
    for _, text in sorted(((r, i) for i, of in enumerate(reaches) for r in of), key=lambda x: -x[0])[:room]:
        lengths[text] += 1
        yield lengths[:], [1 + length for length in lengths]


def _by_depth(reaches: Sequence[Sequence[float]], room: int) -> Iterator[tuple[list[int], list[int]]]:
    """The same with all texts padded to one size, for every size: in caches of their own they then share a batch."""
    n = len(reaches)
    for depth in range(1, min(room // n, max(map(len, reaches))) + 1):
        yield [min(depth, len(of)) for of in reaches], [1 + depth] * n
