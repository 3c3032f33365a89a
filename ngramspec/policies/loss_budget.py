"""`LossBudget`: the time that drafting saved, and the time that it may still lose, in plain passes."""

from __future__ import annotations

from ngramspec.steps import Step


class LossBudget:
    """Gains and losses of drafting, and the budget for further losses.

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
