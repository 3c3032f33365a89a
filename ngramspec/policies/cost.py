# cython: language_level=3
"""`CostPolicy`, the default policy: choose the draft length by the cost of a decode call (a pass) on this machine.

A longer draft may emit more tokens, but its decode call takes longer. Both are known approximately: the drafter
estimates the acceptance of each token, and `PassTimes` gives the time T(n) of a call over n tokens. Time is valued
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
from itertools import accumulate
from operator import mul

import cython

if cython.compiled:
    from cython.cimports.ngramspec.cost.times import PassTimes
    from cython.cimports.ngramspec.policies.budget import DraftValue
else:
    from ngramspec.cost.times import PassTimes
    from ngramspec.policies.budget import DraftValue

from ngramspec.cost.times import HOPE, STALE, RestoreCost
from ngramspec.drafting.draft import Draft, MarginalCost
from ngramspec.policies.budget import LossBudget
from ngramspec.policies.policy import Policy, smallest
from ngramspec.steps import Step

# Function from the number of tokens of each sequence to the batch sizes; see `SharedModel.batches`.
Batches = Callable[[Sequence[int]], Sequence[int]]

# The numbers that decide a plan: loss budget, lambda, maximum time, and lists of T(1 + k) and V(k) by k.
PlanNumbers = tuple[float, float, float, list[float], list[float]]
NO_NUMBERS: PlanNumbers = (math.nan, math.nan, math.nan, [], [])


class CostPolicy(Policy):
    """Chooses the draft length that is expected to be fastest on this machine, or no draft if none pays.

    With p_i the estimated acceptance of position i, a draft of k tokens yields

        E[tokens(k)] = 1 + sum over j <= k of p_1 * ... * p_j        (Leviathan et al. 2023, section 3.1)

    tokens. T is the cost of the cheapest allowed batch that fits the draft, and lambda at least the throughput of plain
    decoding. The estimates may be wrong, so the `LossBudget` guarantees, and they only suggest:

    - When the budget is used up, drafting stops until time has diluted the loss.
    - The pass of a draft may cost at most `STAKE` of the remaining budget more than a plain pass (fractional Kelly
      betting; Thorp 2006, "The Kelly criterion in blackjack, sports betting, and the stock market"). A draft of k
      tokens whose pass takes at most `SURE` of the time of 1 + k plain passes gains if it is accepted. The cheapest
      such draft is always allowed; otherwise drafting could never gain anything.
    - A belief that prevents the passes that would refute it is probed: one plain pass follows `PLAIN_EVERY` others,
      and the size that was not seen for longest is tried if it would be the best at a third of its additional cost.
      Probes may lose `PROBE_SHARE` of the time.

    If `texts` sequences share a pass, a plain pass emits as many tokens. A draft has at most `draft_max` tokens.
    """

    name = "cost"

    STAKE = 1 / 2  # maximum part of the remaining loss budget that one pass may lose
    SURE = 0.8  # time of a pass, as a part of that of its tokens in plain passes, up to which a draft is always allowed
    DECAY = 0.93  # factor for the earlier passes at each new one, so that throughput is that of about the last 14
    PLAIN_EVERY = 32  # passes with a draft before a plain one
    RUN_EVERY, RUN = 4, 3  # of so many requests, one is for so many plain passes; they show what a change of size costs
    PROBE_SHARE = 0.004  # maximum share of the time that probes lose
    PROBE_DEBT = 2.0  # maximum loss of probes that delays later ones, in plain passes, besides a change of size
    LIKELY = 0.5  # minimum probability of the first token of a probe
    LEAP = 2  # maximum size of a pass, as a multiple of the largest one that was seen
    RATE = 0.02  # weight of a pass in the credits of sizes

    def __init__(self, draft_max: int = 63, texts: int = 1) -> None:
        self._draft_max, self._texts = draft_max, texts
        self._tokens = self._units = 0.0  # of recent passes
        self._budget = LossBudget(texts)
        self._times: PassTimes | None = None  # of the last plan
        self._since_plain = self._plain_due = 0
        self._was_plain = False
        self._checks = 0  # number of requested plain passes
        self._shares: dict[int, float] = {}  # credit of each size, as a part of the cost of a change
        self._savings: dict[int, float] = {}  # part of a change that each size would save in the planned pass
        self._is_padded = False  # whether the planned pass has no draft, but the size of one
        self._overpaid = 0.0  # additional cost of the latest of such passes, in plain passes
        self.is_probe = False  # whether the planned pass was chosen to learn its cost
        self._after_probe = 2  # passes since the last probe, at most 2
        self._probe_loss = 0.0  # plain passes that probes lost and time has not diluted
        self._draft_value = DraftValue()
        self._shared: dict[int, CostPolicy] = {}
        self.numbers = NO_NUMBERS  # of the last plan

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
        return 0 if self.measures_plain or not self._budget.can_draft() else self._draft_max

    @property
    def measures_plain(self) -> bool:
        """True if the next decode call has no draft, so that it shows the speed of plain decoding."""
        return self._plain_due > 0 or (self._times is not None and self._times.wants_plain)

    def price(self, times: PassTimes | None, sizes: Sequence[int]) -> MarginalCost | None:
        if times is None:
            return None
        costs, texts = times.optimal_batches(sizes), self._texts
        # Each sequence has a separate drafter, and the time of all drafters may be lost, so they divide the stake.
        stake = self.STAKE * max(0.0, self._budget.remaining) / texts
        slopes = times.slopes(sizes, texts, HOPE if self._may_probe and not times.is_fixed else 1.0)
        return MarginalCost(self.rate, slopes, times.level, stake, lambda: [cost - 1.0 for _, cost in costs[texts:]])

    @property
    def rate(self) -> float:
        """Recent throughput in tokens per plain pass, at least that of plain decoding."""
        texts = float(self._texts)
        return max(texts, self._tokens / self._units) if self._units else texts

    @property
    def _may_probe(self) -> bool:
        return self._probe_loss <= 0.0 and self._budget.remaining > 0.5

    def plan(
        self, draft: Draft, times: PassTimes | None, sizes: Sequence[int], restore: RestoreCost | None = None
    ) -> tuple[int, int]:
        if times is None:
            return 0, smallest(1, sizes)
        self._times, self.is_probe, self.numbers = times, False, NO_NUMBERS
        batches = times.optimal_batches(sizes)
        plain = batches[1][0]
        change = times.change
        # A padded batch would not show the speed of plain decoding.
        if not draft.tokens and (restore is not None or not change or self.measures_plain):
            return 0, plain
        if draft.repeats:
            self._budget.forget_inherited_loss()
        budget = self._budget.remaining
        self.numbers = (budget, *NO_NUMBERS[1:])
        if budget < 0:
            return 0, plain
        rate: cython.double = self.rate
        if restore is not None:
            return self._plan_with_restore(draft, times, sizes, rate, restore, budget)
        reach: cython.Py_ssize_t = self._reachable(times) - 1
        longest: cython.Py_ssize_t = min(len(draft.tokens), len(batches) - 2, reach)
        # A draft must make up for changes of the batch size too.
        moves = change * (2.0 if times.last == plain else 1.0)
        costs = [cost for _, cost in batches[1 : 2 + longest]]
        sure_cost = min([cost for n, cost in enumerate(costs[1:], 2) if cost + moves <= self.SURE * n], default=0.0)
        max_cost: cython.double = max(1.0 + self.STAKE * budget, sure_cost)
        gross = self._draft_value.read(draft.acceptance_probs, batches, rate, max_cost, reach)
        values = [gross[k] - rate * cost for k, cost in enumerate(costs)]
        self.numbers = (budget, rate, max_cost, costs, values)
        if change:
            first_prob = draft.acceptance_probs[0] if longest else 0.0
            max_moved_cost = min(max_cost, max(1.0 + budget - moves, sure_cost))
            best, best_size, best_value = self._choose_size(
                times, batches, gross[: 1 + longest], first_prob, max_cost, max_moved_cost
            )
        else:
            best = 0
            for k, cost in enumerate(costs):
                if cost <= max_cost and values[k] > values[best]:
                    best = k
            best_size, best_value = batches[1 + best][0], values[best]
        if longest and not times.is_fixed and self._may_probe and draft.acceptance_probs[0] > self.LIKELY:
            return self._find_probe(draft, times, batches, best_value + rate, longest) or (best, best_size)
        return best, best_size

    def _choose_size(
        self,
        times: PassTimes,
        batches: Sequence[tuple[int, float]],
        gross: Sequence[float],
        first_prob: float,
        max_cost: float,
        max_moved_cost: float,
    ) -> tuple[int, int, float]:
        """Return the best draft length if a change of size costs something, the size of its batch, and its value.

        The size of a pass then affects the cost of the next one. Let w(n) be the value of the best pass over n tokens
        in time, and w* that of the best pass of any size. If the last pass had had n tokens too, this would now save
        max(0, change - (w* - w(n))). Every size is credited with the mean of this saving over recent passes, which is
        part of w(n). This is relative value iteration for the average reward of a Markov decision process (Puterman
        1994, "Markov Decision Processes", section 8.5), learned from the drafts. Its state is the size of the last
        pass. At first only plain passes are assumed to recur: a draft pays for the change to its size and back.

        Every pass may be padded to the last size, also one without a draft. This ends when such passes in a row have
        cost as much more than plain ones as a change costs. The total is then at most twice the optimum in hindsight
        (ski rental: Karlin, Manasse, Rudolph, Sleator 1988, "Competitive snoopy caching").
        """
        change, last, plain, rate = times.change, times.last, batches[1][0], self.rate
        shares = self._shares = self._shares or {plain: 1.0}
        # A draft in the next pass, whose value `gross` contains, changes the size then. If that were not charged, it
        # would always seem better to wait, and nothing would ever be drafted. Most drafts have the size that recurs.
        waiting = gross[0] - 1.0
        recurring = max([share for size, share in shares.items() if size != plain], default=0.0)
        later = change * (1.0 + shares[plain] - recurring)
        bare = 1.0 + max(min(waiting, 0.0), waiting - rate * first_prob * later)
        options = [(k, *batches[1 + k]) for k in range(len(gross))]
        if last != plain and last < len(batches) and batches[last][0] == last:
            options += [(k, last, times.ratio(last)) for k in {0, min(len(gross), last) - 1}]
        length, best_size, best_cost, best_value, top = 0, plain, batches[1][1], -math.inf, -math.inf
        values: dict[int, float] = {}  # w(n)
        for k, size, cost in options:
            limit = 1.0 + change - self._overpaid if k == 0 else max_cost if size == last else max_moved_cost
            if cost > limit and size != plain:
                continue
            value = (gross[k] if k else bare) / rate - cost + change * shares.get(size, 0.0)
            values[size] = max(value, values.get(size, value))
            top = max(top, value)
            if size != last:
                value -= change
            if value > best_value:
                length, best_size, best_cost, best_value = k, size, cost, value
        self._savings = {size: max(0.0, 1.0 - (top - value) / change) for size, value in values.items()}
        self._is_padded = length == 0 and best_size != plain
        self._overpaid = self._overpaid + best_cost - 1.0 if self._is_padded else 0.0
        return length, best_size, gross[length] - rate * best_cost

    def _credit_sizes(self) -> None:
        """Credit each size with the part of a change that it would have saved; a pass without a choice was plain."""
        if not self._savings:
            self._overpaid = 0.0
        shares, savings = self._shares, self._savings or {min(self._shares): 1.0}
        for size in {*shares, *savings}:
            share = shares.get(size, 0.0)
            shares[size] = share + self.RATE * (savings.get(size, 0.0) - share)
        self._savings = {}

    def _reachable(self, times: PassTimes) -> int:
        """Return the largest size that may be tried next: small steps, unless a change of size costs something."""
        return 1 << 30 if times.is_fixed or times.change else max(4, self.LEAP * times.largest)

    def _find_probe(
        self, draft: Draft, times: PassTimes, costs: Sequence[tuple[int, float]], value: float, longest: int
    ) -> tuple[int, int] | None:
        """Return the draft whose size was not seen for longest, if it were the best at a third of its extra cost.

        A draft of one token may always be probed: however wrong all estimates are, it shows a part of it.
        """
        expected = reach = least = 1.0
        choice, rate, left = None, self.rate, self._budget.remaining
        oldest = recent = times.now - STALE
        for k, p in enumerate(draft.acceptance_probs[:longest], 1):
            reach *= p
            expected += reach
            size = 1 + k  # not padded, which would hide that this size is unknown
            cost = min(times.ratio(size), costs[size][1])
            seen = times.seen(size)
            if seen > recent:
                least = max(least, cost)  # a larger batch costs no less
            elif seen < oldest:
                hope = max(least, 1.0 + (cost - 1.0) / HOPE)
                if k == 1 or (expected + rate - rate * hope > value and cost < 1.0 + left):
                    oldest, choice = seen, (k, size)
        self.is_probe = choice is not None
        return choice

    def plan_batch(
        self, drafts: Sequence[Draft], times: PassTimes, sizes: Sequence[int], batches: Batches
    ) -> list[tuple[int, int]]:
        """Return the plan of each sequence, (draft tokens, batch size), if all share a decode call.

        `times` are those of as many texts. A draft token that is accepted with probability r (together with all before
        it) adds r tokens, whichever sequence it belongs to. So the best K tokens of all drafts are the K with the
        largest r, and K maximises sum of r - lambda * T(n + K). If sequences with longer drafts continue in separate
        batches, drafts padded to one length are considered too.
        """
        n = self._texts
        self._times, self.is_probe = times, False
        if any(draft.repeats for draft in drafts):
            self._budget.forget_inherited_loss()
        budget = self._budget.remaining
        best = [(0, 1)] * n
        if budget < 0:
            return best
        rate, plain = self.rate, batches([1] * n)
        # With separate caches, a pass is one batch only if each text has a draft token.
        largest = min(sizes[-1], max(2 * n, n - 1 + self._reachable(times)))
        best_value, sure_cost = n - rate, 0.0
        may_probe, oldest = self._may_probe and not times.is_fixed, times.now - STALE
        moves = times.change * (2.0 if times.last == plain[0] else 1.0)
        probe: list[tuple[int, int]] | None = None
        reaches = [list(accumulate(draft.acceptance_probs[: len(draft)], mul)) for draft in drafts]
        for lengths, shape in (*_by_reach(reaches, largest - n), *_by_depth(reaches, largest - n)):
            parts = batches(shape)
            if any(part not in sizes for part in parts):
                continue
            cost = times.cost_of(parts, plain)
            if cost <= self.SURE * (1 + sum(lengths) / n):
                sure_cost = min(sure_cost or cost, cost)
            n_expected = n + sum(sum(reach[:length]) for reach, length in zip(reaches, lengths, strict=True))
            can_probe = may_probe and len(parts) == 1 and cost < 1.0 + budget and times.seen(parts[0]) < oldest
            if can_probe and n_expected - rate * (1.0 + (cost - 1.0) / HOPE) > max(best_value, n - rate):
                oldest, probe = times.seen(parts[0]), list(zip(lengths, shape, strict=True))
            value = n_expected - rate * (cost + moves)
            if cost <= max(1.0 + self.STAKE * budget, sure_cost) and value > best_value:
                best, best_value = list(zip(lengths, shape, strict=True)), value
        self.is_probe = probe is not None
        return probe or best

    def record(self, done: Step) -> None:
        times = self._times
        drafting, self._is_padded = self._is_padded or bool(done.drafted), False
        if self._shares:
            self._credit_sizes()
        cost = done.cost + done.draft_cost
        self._tokens = self._tokens * self.DECAY + len(done.tokens)
        self._units = self._units * self.DECAY + cost
        self._budget.record(done, drafting)
        if times is None or times.is_fixed:
            return
        has_change = bool(times.change)
        self._probe_loss -= self.PROBE_SHARE * cost
        if self.is_probe:
            self._probe_loss, self._after_probe = max(0.0, self._probe_loss), -1
        if self._after_probe < 2:  # the probe, and the change of size after it
            self._probe_loss += max(0.0, done.cost - len(done.tokens) / self.rate)
            self._after_probe += 1
        self._probe_loss = min(max(self._probe_loss, -0.5), self.PROBE_DEBT + times.change)
        if drafting:
            self._since_plain += 1
        else:
            self._plain_due = max(0, self._plain_due - 1)
            self._since_plain = 0 if self._was_plain or not has_change else self._since_plain + 1
        self._was_plain = not drafting
        if self._since_plain >= self.PLAIN_EVERY:
            self._checks += 1
            self._since_plain = 0
            if self._checks % self.RUN_EVERY == 0:
                self._plain_due = self.RUN
            elif not has_change:  # otherwise a single one would cost more than it shows
                self._plain_due = 1

    def _plan_with_restore(
        self, draft: Draft, times: PassTimes, sizes: Sequence[int], rate: float, restore: RestoreCost, budget: float
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
        save, load, n_again = restore
        plain = times.ratio(n_again + 1)
        rejection_cost = save + load + times.ratio(n_again + 2) - 1.0 - plain
        best, costs, values = 0, [plain], [1.0 - rate * plain]
        max_cost = self.STAKE * budget - rejection_cost
        sure_cost = 0.0
        reach = n_expected = 1.0
        extra_cost = save
        largest = min(sizes[-1], self._reachable(times) + n_again)
        for k, p in enumerate(draft.acceptance_probs[: min(len(draft), largest - 1 - n_again)], 1):
            cost = times.ratio(n_again + 1 + k)
            extra_cost += reach * (1.0 - p) * (load + cost - 1.0)
            reach *= p
            n_expected += reach
            if cost - plain + 1.0 + save <= self.SURE * (1 + k):
                sure_cost = min(sure_cost or cost, cost)
            max_cost = max(self.STAKE * budget - rejection_cost, sure_cost)
            costs.append(cost)
            values.append(n_expected - rate * (cost + extra_cost))
            if cost <= max_cost and values[k] > values[best]:
                best = k
        self.numbers = (budget, rate, max_cost, costs, values)
        can_probe = not best and draft.tokens and self._may_probe and draft.acceptance_probs[0] > self.LIKELY
        if can_probe and not times.is_fixed and times.seen(2) < times.now - STALE:
            best, self.is_probe = 1, True
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
