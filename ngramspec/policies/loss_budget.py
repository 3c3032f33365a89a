"""`LossBudget`: the time that drafting saved, and how much of it may still be lost."""

from __future__ import annotations

from ngramspec.steps import Step


class LossBudget:
    """What drafting gained and lost, in seconds; what may still be lost follows from it.

    - Saved are the seconds that the tokens of drafted passes would have taken one by one, less those they took. The
      past fades. What is left to lose is this, plus ALLOWANCE of the time spent, plus CREDIT plain passes.
    - A new text may lose at most START plain passes of what earlier texts left, and takes over at most DEBT plain
      passes of what they lost; nothing of it if the text repeats an earlier answer.
    - Asking the drafter without sending its draft takes less than OVERHEAD of the time, a credit of ASKING_CREDIT plain
      passes, and what drafts saved: asking continues as long as drafting as a whole pays.
    - What asking takes beyond CHEAP plain passes, as a draft model does, is booked too, and once nothing is left to
      lose such a drafter is not asked.
    """

    ALLOWANCE = 0.004
    CREDIT = 1.0
    START = 1.0
    DEBT = 2.0
    OVERHEAD = 0.004
    FADE = 0.995
    ASKING_CREDIT = 0.25
    RESERVE = 2.0  # plain passes' time of savings that asking may use up later
    CHEAP = 0.05

    def __init__(self, texts: int = 1) -> None:
        self._texts = texts
        self._saved = self._spent = self._asked = 0.0
        self._plain_seconds = 0.0
        self._inherited = 0.0  # what is left of the loss that the text took over, as a negative number
        self._dear = self._drafting = False

    def begin(self) -> None:
        """Start a text."""
        allowance = self.ALLOWANCE * self._spent
        least, most = -self.DEBT * self._plain_seconds, self.START * self._plain_seconds
        self._saved = min(max(self._saved, least - allowance), most - allowance)
        self._inherited = min(0.0, self._saved + allowance)

    def forget_inherited_loss(self) -> None:
        """Let drafts of this text start without the loss of earlier texts."""
        self._saved -= self._inherited
        self._inherited = 0.0

    def left(self, plain: float, level: float) -> float:
        """What may still be lost, in units of `level` seconds; a plain pass takes `plain` of them."""
        return (self._saved + self.ALLOWANCE * self._spent + self.CREDIT * (plain * level)) / level

    def can_ask(self) -> bool:
        """Whether asking the drafter can be afforded now."""
        if self._asked > self.OVERHEAD * self._spent + self.ASKING_CREDIT * self._plain_seconds:
            return False
        return not self._dear or self.left(self._plain_seconds, 1.0) >= 0

    def book(self, done: Step, drafting: bool) -> None:
        """Book a pass; `drafting`: it has a draft, or keeps to a size for the sake of drafts (see `RecurringSizes`)."""
        passed = done.seconds - done.interruption_seconds
        seconds = passed + done.draft_seconds
        self._spent = self._spent * self.FADE + seconds
        self._saved *= self.FADE
        self._inherited *= self.FADE
        self._asked *= self.FADE
        self._plain_seconds = self._texts * done.plain_seconds
        dear = max(0.0, done.draft_seconds - self.CHEAP * self._plain_seconds)
        self._dear = dear > 0 or (self._dear and not done.draft_seconds)
        if drafting:
            saved = len(done.tokens) * done.plain_seconds - seconds
            self._saved += saved
            self._asked = max(-self.RESERVE * self._plain_seconds, self._asked - max(0.0, saved))
        else:
            if self._drafting:
                # The first pass of another size builds its graph anew, for which the drafts before it are to blame.
                self._saved -= max(0.0, passed - self._plain_seconds)
            self._saved -= dear
            self._asked += done.draft_seconds - dear
        self._drafting = drafting
