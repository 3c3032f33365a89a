"""`LossBudget`: the time that drafting saved, and the time that it may still lose."""

from __future__ import annotations

from ngramspec.steps import Step


class LossBudget:
    """Gains and losses of drafting in seconds, and the budget for further losses.

    A pass is a decode call of the target, and a plain pass one without a draft.

    - The saved time is the time of the tokens of drafted passes one by one, minus the time that the passes took. Old
      values fade, large losses slowly (`REPAYMENT`). The budget is the saved time, plus `ALLOWANCE` of the time spent,
      plus `CREDIT` plain passes.
    - A new text inherits at most `START` plain passes of gain from earlier texts, and at most `DEBT` plain passes of
      loss. It inherits no loss if it repeats an earlier answer.
    - The time of drafts without verification has a limit: `ALLOWANCE` of the time spent, plus `DRAFTING_CREDIT` plain
      passes, plus the time that the drafts of this text saved. So the drafter is called as long as drafting pays.
    - Drafting time beyond `CHEAP` plain passes, as with a draft model, is booked as a loss. When the budget is used up,
      such a drafter is not called.
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
        self._plain_seconds = 0.0
        self._inherited = 0.0  # remaining loss inherited from earlier texts, as a negative number
        self._is_expensive = False
        self._drafting = self._drafted_before = False  # whether the last pass drafted, and the one before

    def begin(self) -> None:
        """Start a text."""
        allowance = self.ALLOWANCE * self._spent
        inherited = max(self._saved + allowance, -self.DEBT * self._plain_seconds)
        self._saved = min(inherited, self.START * self._plain_seconds) - allowance
        self._inherited = min(0.0, inherited)
        self._unverified = min(self._unverified, allowance)  # so that each text has the whole `DRAFTING_CREDIT`

    def forget_inherited_loss(self) -> None:
        """Let drafts of this text start without the loss of earlier texts."""
        self._saved -= self._inherited
        self._inherited = 0.0

    def remaining(self, plain: float, level: float) -> float:
        """Return the remaining budget, in units of `level` seconds; a plain pass takes `plain` units."""
        return (self._saved + self.ALLOWANCE * self._spent + self.CREDIT * (plain * level)) / level

    def can_draft(self) -> bool:
        """Return True if the budget allows calling the drafter now."""
        credit = self.ALLOWANCE * self._spent + self.DRAFTING_CREDIT * self._plain_seconds
        if self._unverified > credit + max(0.0, self._saved - self._inherited):
            return False
        return not self._is_expensive or self.remaining(self._plain_seconds, 1.0) >= 0

    def record(self, done: Step, drafting: bool) -> None:
        """Book a pass; `drafting` means that it has a draft, or keeps a batch size for drafts (`RecurringSizes`)."""
        pass_seconds = done.seconds - done.interruption_seconds
        seconds = pass_seconds + done.draft_seconds
        self._spent = self._spent * self.FADE + seconds
        self._saved -= max((1.0 - self.FADE) * self._saved, -self.REPAYMENT * seconds)
        self._inherited *= self.FADE
        self._unverified *= self.FADE
        self._plain_seconds = self._texts * done.plain_seconds
        expense = max(0.0, done.draft_seconds - self.CHEAP * self._plain_seconds)
        self._is_expensive = expense > 0 or (self._is_expensive and not done.draft_seconds)
        if drafting:
            self._saved += len(done.tokens) * done.plain_seconds - seconds
        else:
            if self._drafting:
                # The first pass of another size rebuilds its graph. The drafts before it cause this cost.
                self._saved -= max(0.0, pass_seconds - self._plain_seconds)
            elif self._drafted_before:
                # On CUDA, the second one captures the graph (see `CostCurve.capture`).
                self._saved -= max(0.0, min(pass_seconds, done.expected_seconds) - self._plain_seconds)
            self._saved -= expense
            self._unverified += done.draft_seconds - expense
        self._drafted_before, self._drafting = self._drafting, drafting
