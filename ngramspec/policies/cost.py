# cython: language_level=3
"""`CostPolicy`, the default policy: choose the draft length by the cost of a decode call (a pass) on this machine.

A longer draft may emit more tokens, but its decode call takes longer. Both are known approximately: the drafter
estimates the acceptance of each token, and a `CostCurve` gives the time T(n) of a call over n tokens. Time is valued
at lambda, the recent throughput: a call is worth its expected tokens minus those that its time would have bought.

Example: the drafter proposes three tokens, each with an acceptance of 0.8. Times are in units of T(1).

    draft tokens k                     0      1      2      3
    expected tokens                 1.00   1.80   2.44   2.95
    time T(1 + k)                   1.00   1.10   1.20   1.60
    lambda = 1: later calls         0.99   0.45   0.00   0.00
                value V(k)          0.99   1.15   1.24   1.35
    lambda = 2: later calls         0.03  -0.26   0.00   0.00
                value V(k)         -0.97  -0.66   0.04  -0.25

V(k) is the expected tokens, minus lambda T(1 + k), plus the value of later calls that verify the rest of the proposal
(`DraftValue`). After a draft of two tokens nothing of it is left, because the call itself adds a third token.

At first the throughput is that of plain decoding, lambda = 1. Three tokens have the highest value, but their call takes
1.60. The estimates may be wrong, so the losses of drafting are limited by a `LossBudget`, and those of a single call by
half of it. The first generation may lose one plain call, so a call may take at most 1 + 1 / 2 = 1.50: two tokens are
drafted. When drafts have saved another 0.2 and more, three of such a proposal are.

If text is then decoded at two tokens per T(1), time is worth more, and two tokens are the best draft. The ratio of
tokens to time is highest at the same length: 2.44 / 1.20 = 2.0, against 2.95 / 1.60 = 1.8. For each decode call of a
recorded generation, `ngramspec trace FILE --numbers` shows lambda, the maximum time, T(1 + k) and V(k).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
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

# Function from the number of tokens of each sequence to the batch sizes; see `SharedModel.batches`.
Batches = Callable[[Sequence[int]], Sequence[int]]
Costs = Sequence[tuple[int, float]]  # result of `CostCurve.optimal_batches`


@dataclass(slots=True)
class PlanNumbers:
    """Numbers that `CostPolicy.plan` stores in `CostPolicy.numbers`; those that it did not reach are nan or empty."""

    budget: float = math.nan
    rate: float = math.nan
    max_cost: float = math.nan
    costs: list[float] = field(default_factory=list)  # T(1 + k) by k
    values: list[float] = field(default_factory=list)  # V(k) by k


class CostPolicy(Policy):
    """Chooses the draft length that is expected to be fastest on this machine, or no draft if none pays.

    With p_i the estimated acceptance of position i, a draft of k tokens yields

        E[tokens(k)] = 1 + sum over j <= k of p_1 * ... * p_j        (Leviathan et al. 2023, section 3.1)

    tokens in the time T(1 + k). The chosen length maximises E[tokens(k)] - lambda * T(1 + k), plus the value of later
    passes that continue the chain (`DraftValue`). Here T is the cost of the cheapest allowed batch that fits the draft,
    in units of T(1), and lambda the recent throughput in tokens per T(1). If a change of batch size has a cost, it is
    charged, and a size that recurs is credited (`RecurringSizes`).

    Three rules prevent drafting from being slower than plain decoding:

    - Gains and losses are booked in a `LossBudget`. When it is used up, drafting stops until time has diluted the loss.
    - The pass of a draft may cost at most `STAKE` of the remaining budget more than a plain pass (fractional Kelly
      betting; Thorp 2006, "The Kelly criterion in blackjack, sports betting, and the stock market"). A draft of k
      tokens whose pass takes at most `SURE` of the time of 1 + k plain passes gains if it is accepted. The cheapest
      such draft is always allowed; otherwise drafting could never gain anything.
    - If none of `PLAIN_EVERY` passes showed the speed of plain decoding, the next `PLAIN_RUN` passes have no draft.
      They show if the curve is wrong, and how the length of the context changes the time.

    Args:
        draft_max: Maximum number of tokens in a draft.
        texts: Number of sequences that share a pass. Plain decoding then emits `texts` tokens in T(texts) seconds.
    """

    name = "cost"

    STAKE = 1 / 2  # maximum part of the remaining loss budget that one pass may lose
    SURE = 0.8  # time of a pass, as a part of that of its tokens in plain passes, up to which a draft is always allowed
    DECAY = 0.93  # factor for the earlier passes at each new one, so that throughput is that of about the last 14
    PLAIN_EVERY, PLAIN_RUN = 64, 3  # number of passes without a plain one, and of plain passes that then follow

    def __init__(self, draft_max: int = 63, texts: int = 1) -> None:
        self._draft_max = draft_max
        self._texts = texts
        self._tokens = self._seconds = 0.0
        self._budget = LossBudget(texts)
        self._since_plain = self._plain_due = 0
        self._last_was_plain = False
        self._measured = False
        self._recurring = RecurringSizes()
        self._draft_value = DraftValue()
        self._shared: dict[int, CostPolicy] = {}
        self.numbers: PlanNumbers | None = None  # where `plan` stores its numbers, if `TracedCostPolicy` calls it

    def begin(self) -> None:
        self._budget.begin()
        for policy in self._shared.values():
            policy.begin()

    def for_n_sequences(self, texts: int) -> CostPolicy:
        """Return the policy for `texts` sequences; its separate loss budget compares with plain decoding of so many."""
        if texts == self._texts:
            return self
        if texts not in self._shared:
            self._shared[texts] = CostPolicy(self._draft_max, texts)
        return self._shared[texts]

    def limit(self) -> int:
        return self._draft_max if not self._plain_due and self._budget.can_draft() else 0

    @property
    def measures_plain(self) -> bool:
        """True if the next decode call has no draft, so that it shows the speed of plain decoding."""
        return self._plain_due > 0

    def price(self, curve: CostCurve | None, sizes: Sequence[int]) -> MarginalCost | None:
        if curve is None:
            return None
        costs = curve.optimal_batches(sizes)
        plain, level = costs[self._texts][1], curve.level
        # Each sequence has a separate drafter, and the time of all drafters may be lost, so they divide the stake.
        stake = self.STAKE * max(0.0, self._budget.remaining(plain, level)) / self._texts
        rate, slopes = self._rate(curve, sizes), curve.slopes(sizes)[self._texts - 1 :]
        return MarginalCost(
            rate, slopes, level, stake, lambda: [cost - plain for _, cost in costs[self._texts :]], self._texts
        )

    def _rate(self, curve: CostCurve, sizes: Sequence[int]) -> float:
        """Return the recent throughput in tokens per T(1), at least that of plain decoding."""
        return max(self._texts / curve.optimal_batches(sizes)[self._texts][1], self._recent * curve.level)

    @property
    def _recent(self) -> float:
        """Recent throughput, in tokens per second."""
        return self._tokens / self._seconds if self._seconds else 0.0

    def plan(
        self, draft: Draft, curve: CostCurve | None, sizes: Sequence[int], restore: RestoreCost | None = None
    ) -> tuple[int, int]:
        if curve is None:
            return 0, smallest(1, sizes)
        self._measured = curve.measured
        costs = curve.optimal_batches(sizes)
        plain, plain_cost = costs[1]
        # A padded batch would not show the speed of plain decoding.
        if not draft.tokens and (restore is not None or not curve.switch or self.measures_plain):
            return 0, plain
        if draft.repeats:
            self._budget.forget_inherited_loss()
        budget = self._budget.remaining(plain_cost, curve.level)
        numbers = self.numbers
        if numbers is not None:
            numbers.budget = budget
        if budget < 0:
            return 0, plain
        stake = self.STAKE * budget
        rate = self._rate(curve, sizes)
        if restore is not None:
            return self._plan_with_restore(draft, curve, sizes, rate, restore, stake)
        change = curve.switch_cost(0, plain)  # of any size but `plain` and the last one
        max_cost = max(plain_cost + stake, self._min_draft_cost(draft, costs, change))
        draft_value: DraftValue = self._draft_value
        longest = draft_value.read(draft.acceptance_probs, costs, rate, max_cost)
        if numbers is not None:
            numbers.rate, numbers.max_cost = rate, max_cost
            numbers.costs = [cost for _, cost in costs[1 : 2 + longest]]
            numbers.values = [draft_value.gross[k] - rate * cost for k, cost in enumerate(numbers.costs)]
        if curve.switch:
            candidates = [
                Candidate(k, draft_value.gross[k], size, cost)
                for k, (size, cost) in enumerate(costs[1 : 2 + longest])
                if k == 0 or cost <= max_cost
            ]
            first_prob = draft.acceptance_probs[0] if draft.acceptance_probs else 0.0
            best = self._recurring.choose(candidates, curve, sizes, rate, max_cost, first_prob)
            length, size = best.length, best.size
        else:
            length, size = self._plan_best_value(curve, sizes, costs, rate, max_cost, longest)
        # `acceptance_probs` may be longer than the draft; see `fixed_length` in `Drafter.propose`.
        if length > len(draft.tokens):
            length = len(draft.tokens)
            size = costs[1 + length][0]
        return length, size

    def _min_draft_cost(self, draft: Draft, costs: Costs, change: float) -> float:
        """Return the lowest cost of a draft that is always allowed (see `SURE`); 0 without one.

        `change` is the cost of changes of the batch size, in units of T(1), which the draft must make up for too.
        """
        longest = min(len(draft.acceptance_probs), len(costs) - 2)
        allowed = (costs[n][1] for n in range(2, longest + 2) if costs[n][1] + change <= self.SURE * n)
        return min(allowed, default=0.0)

    def _plan_best_value(
        self,
        curve: CostCurve,
        sizes: Sequence[int],
        costs: Costs,
        rate: cython.double,
        max_cost: cython.double,
        longest: cython.Py_ssize_t,
    ) -> tuple[int, int]:
        """Return the plan with the highest value in tokens: (draft tokens, batch size).

        `DraftValue` contains the value of each length up to `longest`. The batch of a draft costs at most `max_cost`.
        """
        k: cython.Py_ssize_t
        size: cython.Py_ssize_t
        plain: cython.Py_ssize_t
        cost: cython.double
        value: cython.double
        draft_value: DraftValue = self._draft_value
        plain, cost = costs[1]
        last: cython.Py_ssize_t = curve.last
        may_pad: cython.bint = last != plain and last in sizes
        best: cython.Py_ssize_t = 0
        best_size: cython.Py_ssize_t = plain
        best_value: cython.double = draft_value.gross[0] - rate * cost
        for k in range(1, longest + 1):
            size, cost = costs[1 + k]
            if cost > max_cost:
                continue
            # The size of the last pass, if it was padded, may have become slightly cheaper since the plan was made.
            if may_pad and last > k + 1 and curve.ratio(last) < cost:
                size, cost = last, curve.ratio(last)
            value = draft_value.gross[k] - rate * cost
            if value > best_value:
                best, best_size, best_value = k, size, value
        return best, best_size

    def plan_batch(
        self, drafts: Sequence[Draft], curve: CostCurve, sizes: Sequence[int], batches: Batches
    ) -> list[tuple[int, int]]:
        """Return the plan of each sequence, (draft tokens, batch size), if all share a decode call."""
        # A draft token that is accepted with probability r (together with all before it) adds r tokens, whichever
        # sequence it belongs to. So the best K tokens of all drafts are the K with the largest r, and K maximises
        # sum of r - lambda * T(n + K). If sequences with longer drafts continue in separate batches, drafts padded
        # to one length are considered too.
        n = self._texts
        self._measured = curve.measured
        plain_cost = sum([curve.ratio(size) for size in batches([1] * n)])
        if any(draft.repeats for draft in drafts):
            self._budget.forget_inherited_loss()
        budget = self._budget.remaining(plain_cost, curve.level)
        best = [(0, 1)] * n
        if budget < 0:
            return best
        rate, largest = max(n / plain_cost, self._recent * curve.level), sizes[-1]
        best_value, sure_cost = n - rate * plain_cost, math.inf
        reaches = [list(accumulate(draft.acceptance_probs[: len(draft)], mul)) for draft in drafts]
        for lengths, shape in (*_by_reach(reaches, largest - n), *_by_depth(reaches, largest - n)):
            parts = batches(shape)
            if any(part not in sizes for part in parts):
                continue
            cost = sum([curve.ratio(part) for part in parts])
            if cost <= self.SURE * plain_cost * (1 + sum(lengths) / n):
                sure_cost = min(sure_cost, cost)
            if cost > max(plain_cost + self.STAKE * budget, sure_cost):
                continue
            n_expected = n + sum(sum(reach[:length]) for reach, length in zip(reaches, lengths, strict=True))
            value = n_expected - rate * (cost + curve.switch_cost(parts[0], n))
            if value > best_value:
                best, best_value = list(zip(lengths, shape, strict=True)), value
        return best

    def record(self, done: Step) -> None:
        drafting = self._recurring.record_pass() or bool(done.drafted)
        self._tokens = self._tokens * self.DECAY + len(done.tokens)
        self._seconds = self._seconds * self.DECAY + (done.seconds - done.interruption_seconds + done.draft_seconds)
        self._budget.record(done, drafting)
        self._since_plain = 0 if self._last_was_plain and not drafting else self._since_plain + 1
        self._last_was_plain = not drafting
        if not drafting:
            self._plain_due = max(0, self._plain_due - 1)
        if self._measured and self._since_plain and self._since_plain % self.PLAIN_EVERY == 0:
            self._plain_due = self.PLAIN_RUN

    def _plan_with_restore(
        self, draft: Draft, curve: CostCurve, sizes: Sequence[int], rate: float, restore: RestoreCost, stake: float
    ) -> tuple[int, int]:
        """Return the best plan if a rejection requires restoring the state before the pass.

        The accepted tokens of the pass are then evaluated again at the start of the next pass. With a tokens to
        recompute (`n_again`) and j accepted tokens, that pass is a + 1 + j tokens longer than a plain one. So the value
        of k draft tokens is

            E[tokens(k)] - lambda (T(a + 1 + k) + save
                + sum over j < k of P(j) (1 - p_(j+1)) (load + T(a + 2 + j) - T(1)))

        with P(j) = p_1 * ... * p_j, the probability that the first j are accepted. The stake limits the cost of a draft
        that is rejected at its first token: the longer pass, the restore, and the longer pass after it.
        """
        n_again = restore.recompute
        save, load = restore.save / curve.level, restore.load / curve.level
        plain = curve.ratio(n_again + 1)
        best, best_value = 0, 1.0 - rate * plain
        rejection_cost = save + load + curve.ratio(n_again + 2) - 1.0 - plain
        sure_cost = math.inf
        reach = n_expected = 1.0
        extra_cost = save
        numbers = self.numbers
        if numbers is not None:
            numbers.rate, numbers.max_cost = rate, stake - rejection_cost
            numbers.costs, numbers.values = [plain], [best_value]
        for k, p in enumerate(draft.acceptance_probs[: min(len(draft), sizes[-1] - 1 - n_again)], 1):
            cost = curve.ratio(n_again + 1 + k)
            extra_cost += reach * (1.0 - p) * (load + cost - 1.0)
            reach *= p
            n_expected += reach
            if cost - plain + 1.0 + save <= self.SURE * (1 + k):
                sure_cost = min(sure_cost, cost)
            value = n_expected - rate * (cost + extra_cost)
            if numbers is not None:
                numbers.max_cost = max(stake - rejection_cost, sure_cost)
                numbers.costs.append(cost)
                numbers.values.append(value)
            if cost > max(stake - rejection_cost, sure_cost):
                continue
            if value > best_value:
                best, best_value = k, value
        return best, 1 + best


def _by_reach(reaches: Sequence[Sequence[float]], room: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the draft tokens and the batch size of each sequence: the best K tokens of all, for every K up to `room`.

    `reaches` contains the probability of each draft token of each sequence that it and all before it are accepted.
    """
    lengths = [0] * len(reaches)
    # Sorting is stable, so a token never comes before an earlier token of its draft.
    for _, text in sorted(((r, i) for i, of in enumerate(reaches) for r in of), key=lambda x: -x[0])[:room]:
        lengths[text] += 1
        yield lengths[:], [1 + length for length in lengths]


def _by_depth(reaches: Sequence[Sequence[float]], room: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the same with all sequences padded to one size, for every size; separate caches then share a batch."""
    n = len(reaches)
    for depth in range(1, min(room // n, max(map(len, reaches))) + 1):
        yield [min(depth, len(of)) for of in reaches], [1 + depth] * n
