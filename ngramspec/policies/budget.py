# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""`DraftValue`, the value of each draft length, and `LossBudget`, the time that drafts may still lose."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

import cython

from ngramspec.steps import Step

MAX_TOKENS = cython.declare(cython.int, 64)  # maximum number of tokens in a chain; later ones are ignored


class DraftValue:
    """The value of each draft length, including the decode calls that continue its chain of guesses.

    If a draft was accepted entirely, the rest of the chain can be sent in the next decode call, when its beginning is
    known to be right. So if batches are expensive, an uncertain guess before certain ones is best left to a plain
    decode call. With P(i, k) = p_(i+1) * ... * p_(i+k), the value after i right tokens of the chain is

        W(i) = max over k of 1 + sum over j <= k of P(i, j) - lambda T(1 + k) + P(i, k) p_(i+k+1) W(i + k + 1)

    where lambda is the value of time, in tokens per unit of T. The last term stands for the token that the target adds:
    if it equals the next token of the chain, the chain continues after it. When the text leaves the chain, or the chain
    ends, W is 0. This happens once, however the tokens are divided among decode calls. W is a net value, and negative
    if the time of the rest is worth more than its tokens.

    Example: p = (0.3, 0.99, 0.99, 0.99), lambda = 1, T(1) = 1, T(4) = 2.2 and T(5) = 2.5.

        draft of four tokens    1 + 0.3 + 0.297 + 0.294 + 0.291 - 2.5 = -0.32
        plain decode call       1 - 1 + 0.3 * W(1) = 0.52, with W(1) = 1 + 0.99 + 0.98 + 0.97 - 2.2 = 1.74

    With probability 0.3, the token of the plain call is the first of the chain, and a draft of the other three follows.

    The formula is the optimality equation for the average reward of a semi-Markov decision process (Puterman 1994,
    "Markov Decision Processes", section 11.4) on a chain, solved from its end. Without the last term, it gives the best
    length for a single decode call (Leviathan et al. 2023, section 3.1).
    """

    def __init__(self) -> None:
        # float64 of shape (MAX_TOKENS + 1,)
        self._gross = array("d", bytes(8 * (MAX_TOKENS + 1)))
        self._p = array("d", bytes(8 * (MAX_TOKENS + 1)))
        self._cost = array("d", bytes(8 * (MAX_TOKENS + 1)))
        self._later = array("d", bytes(8 * (MAX_TOKENS + 2)))

    def read(
        self,
        acceptance_probs: Sequence[float],
        costs: Sequence[tuple[int, float]],
        rate: cython.double,
        max_cost: cython.double,
        longest: cython.Py_ssize_t,
    ) -> list[float]:
        """Return the gross value of each length of a draft that a batch fits, in tokens.

        It is the expected tokens of the call plus the net value W of later calls; the cost is not subtracted. `costs`
        are those of `PassTimes.optimal_batches`. `max_cost` and `longest` limit the cost and the draft tokens of a
        later decode call, but not of the first one: the caller compares the lengths that it may take.
        """
        n: cython.Py_ssize_t = min(len(acceptance_probs), len(costs) - 2, MAX_TOKENS)
        p, cost, gross, later = self._p, self._cost, self._gross, self._later
        for k in range(n + 1):
            _, cost[k] = costs[1 + k]
            p[k] = acceptance_probs[k] if k < n else 0.0
        later[n] = later[n + 1] = 0.0
        for i in range(max(0, n - 1), -1, -1):
            reach = n_expected = 1.0
            best = -math.inf
            for k in range(n - i + 1):
                if k > 0:
                    reach *= p[i + k - 1]
                    n_expected += reach
                value = n_expected + reach * p[i + k] * later[i + k + 1]
                if i == 0:
                    gross[k] = value
                elif k == 0 or (k <= longest and cost[k] <= max_cost):
                    best = max(best, value - rate * cost[k])
            later[i] = best
        return [gross[k] for k in range(n + 1)]


class LossBudget:
    """The time that drafting saved, and the time that it may still lose, in plain passes.

    A pass is a decode call of the target, and a plain pass one without a draft. Because plain passes are the unit,
    neither the load of the machine nor its clock creates or destroys savings.

    - The saved time is the number of plain passes for the tokens of drafted passes, minus the cost of these. Old values
      fade, large losses slowly (`REPAYMENT`). The budget is the saved time, plus `ALLOWANCE` of the time spent, plus
      `CREDIT`.
    - A new text inherits at most `START` of gain from earlier texts, and at most `DEBT` of loss. It inherits no loss if
      it repeats an earlier answer.
    - The time of drafts without verification has a limit: `ALLOWANCE` of the time spent, plus `DRAFTING_CREDIT`, plus
      the time that the drafts of this text saved. So the drafter is called as long as drafting pays.
    - Drafting time beyond `CHEAP`, as with a draft model, is booked as a loss. When the budget is used up, such a
      drafter is not called.
    """

    ALLOWANCE = 0.004
    CREDIT = 1.0
    START = 0.5
    DEBT = 2.0
    FADE = 0.995
    # Maximum part of the time spent by which a loss fades. On CUDA, one rejected draft may cost 15 plain passes.
    REPAYMENT = 0.01
    DRAFTING_CREDIT = 0.25
    CHEAP = 0.05

    def __init__(self, texts: int = 1) -> None:
        self._texts = texts
        self._saved = self._spent = self._unverified = 0.0
        self._inherited = 0.0  # remaining loss inherited from earlier texts, as a negative number
        self._is_expensive = False
        self._drafting = self._drafted_before = False  # whether the last pass drafted, and the one before

    def begin(self) -> None:
        """Start a text."""
        allowance = self.ALLOWANCE * self._spent
        inherited = max(self._saved + allowance, -self.DEBT)
        self._saved = min(inherited, self.START) - allowance
        self._inherited = min(0.0, inherited)
        self._unverified = min(self._unverified, allowance)  # so that each text has the whole `DRAFTING_CREDIT`

    def forget_inherited_loss(self) -> None:
        """Let drafts of this text start without the loss of earlier texts."""
        self._saved -= self._inherited
        self._inherited = 0.0

    @property
    def remaining(self) -> float:
        """Remaining budget."""
        return self._saved + self.ALLOWANCE * self._spent + self.CREDIT

    def can_draft(self) -> bool:
        """Return True if the budget allows calling the drafter now."""
        credit = self.ALLOWANCE * self._spent + self.DRAFTING_CREDIT
        if self._unverified > credit + max(0.0, self._saved - self._inherited):
            return False
        return not self._is_expensive or self.remaining >= 0

    def record(self, done: Step, drafting: bool) -> None:
        """Book a pass; `drafting` means that it has a draft, or keeps a batch size for drafts (`CostPolicy`)."""
        cost = done.cost + done.draft_cost
        self._spent = self._spent * self.FADE + cost
        self._saved -= max((1.0 - self.FADE) * self._saved, -self.REPAYMENT * cost)
        self._inherited *= self.FADE
        self._unverified *= self.FADE
        expense = max(0.0, done.draft_cost - self.CHEAP)
        self._is_expensive = expense > 0 or (self._is_expensive and not done.draft_cost)
        if drafting:
            self._saved += len(done.tokens) / self._texts - cost
        else:
            if self._drafting or self._drafted_before:
                # The first pass of another size rebuilds its graph, and on CUDA the second one captures it. The drafts
                # before it cause this cost.
                self._saved -= max(0.0, done.cost - 1.0)
            self._saved -= expense
            self._unverified += done.draft_cost - expense
        self._saved -= done.correction
        self._drafted_before, self._drafting = self._drafting, drafting
