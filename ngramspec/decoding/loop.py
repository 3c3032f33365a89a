"""`DecodingLoop`: the passes of a model over one text: draft, plan, evaluate, verify, roll back, learn.

1. Draft: the drafter proposes a chain of tokens, with an estimate p_i of the probability that the target accepts the
   i-th token if it accepts all tokens before it.
2. Plan: the policy chooses the number of these tokens to verify, and a batch size (`ngramspec.policies.policy`).
3. Evaluate: one pass gives the logits after the last token and after each token of the draft.
4. Verify: the text grows by the drafted tokens that the target accepts and by one more, so that it is the text of
   plain decoding (Stern et al. 2018; `ngramspec.acceptance.rules`).
5. Roll back: the cache is cut after the accepted tokens. A recurrent state cannot be cut and goes back to the
   checkpoint before the pass; the tokens since then are owed: the next pass evaluates them again before its own.
6. Learn: policy and cost curve learn what the pass yielded and how long it took.

`submit` makes steps 1 to 3, `commit` steps 4 and 5, `report` step 6. On a GPU, `submit` returns before the work is
done, and `SpeculativeDecoder` submits the next pass before it reports the last one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from ngramspec.backend import Logits
from ngramspec.cost.curve import CostCurve
from ngramspec.cost.measure import RestoreCost
from ngramspec.cpu.thread_governor import Conditions
from ngramspec.decoding.drafts import Drafts
from ngramspec.decoding.text import DraftedText, Plan, Text, no_draft
from ngramspec.errors import TargetError
from ngramspec.exactness.decision import ExactnessMode
from ngramspec.policies.policy import Policy, smallest
from ngramspec.steps import Step
from ngramspec.user_class import UserCodeError

READY = 0.05
"""A pass whose logits were ready after this share of its time ended at an unknown earlier time."""


@dataclass(slots=True)
class Pass:
    """A pass that was submitted."""

    texts: Sequence[DraftedText]
    plans: Sequence[Plan]  # tokens of each text
    size: int  # number of tokens, padding included
    owed: int  # number of tokens that were evaluated again
    has_proposal: bool  # whether a drafter was asked
    rows: Sequence[Logits] = ()  # of each text; empty until they are there
    steps: list[Step | None] = field(default_factory=list)  # outcome of each text
    began: float = 0.0
    seconds: float = 0.0  # time of the pass
    planning_seconds: float = 0.0  # time of drafting, planning, learning, and rolling back rejected tokens


class DecodingLoop:
    """Makes the passes of one model, decides on every draft, and learns from every pass.

    Args:
        policy: Decides how many tokens to draft.
        clock: Returns the time in seconds.

    Attributes:
        curve, sizes: See `prepare`.
        exactness: Batch sizes that do not move logits, and how far others move them.
        has_branches: Whether the pass planned last has branches; see `BranchingLoop`.
    """

    has_branches = False

    def __init__(self, policy: Policy, clock: Callable[[], float] = time.perf_counter) -> None:
        self.policy = policy
        self.exactness = ExactnessMode()
        self._clock = clock
        self._conditions: Conditions | None = None  # under which `curve` holds
        self._curves: dict[tuple[int, int] | None, CostCurve] = {}  # by numbers of threads
        self.prepare(None, (1,))

    def prepare(
        self,
        curve: CostCurve | None,
        sizes: Sequence[int],
        restore: RestoreCost | None = None,
        *,
        is_provisional: bool = False,
    ) -> None:
        """Set what holds from here on.

        Args:
            curve: Cost of a pass by batch size; `None` if it is not known.
            sizes: Batch sizes that may be used, ascending.
            restore: Cost of rolling back a draft; `None` means that it costs nothing.
            is_provisional: True if other programs ran while the curve was measured.
        """
        self._is_provisional = is_provisional
        if curve is None or self._curves.get(curve.threads) is not curve:
            self._curves = {} if curve is None else {curve.threads: curve}
        self.sizes, self._restore = sizes, restore
        self._conditions = None
        self._use(curve)

    def submit(self, texts: Sequence[DraftedText]) -> Pass:
        """Draft for a text that has not ended, plan, and begin the pass.

        Raises:
            TargetError: the pass failed, or a draft model's; the text is as before.
        """
        clock, (text,) = self._clock, texts
        sequence = text.sequence
        began = clock()
        if self._conditions is None:
            self._follow(sequence.conditions)
        owed = sequence.owed
        plan = self._plain if text.drafts.drafter is None else self.plan(text, owed)
        # So that the draft can be rolled back. If tokens are owed, there is a checkpoint before them already.
        if plan.draft.tokens and sequence.replays and not owed:
            sequence.checkpoint()
        current = Pass(texts, (plan,), plan.size, owed, text.drafts.proposal is not None)
        current.began = submit_time = clock()
        tokens = (text.last,) if plan.size == 1 else plan.batch(text.last)
        if self.has_branches:
            current.rows = (self.evaluate_branches(text, tokens),)
        else:
            sequence.submit(tokens)
            if not sequence.returns_early:
                current.rows = (sequence.fetch(),)
        current.seconds = clock() - submit_time
        current.planning_seconds = submit_time - began
        return current

    def submit_ahead(self, texts: Sequence[DraftedText], last: Pass) -> Pass | None:
        """`submit` before the last pass is reported; `None` after an error, which the next `submit` raises again."""
        curve, following = self.curve, None
        # The plan charges changes of size as after `last`, whose time the curve learns only when it is reported.
        before = (0, False) if curve is None else curve.begin_pass(last.size + last.owed)
        with suppress(TargetError, UserCodeError):
            following = self.submit(texts)
        if curve is not None:
            curve.last, curve.last_is_first = before
        return following

    def evaluate_branches(self, text: DraftedText, tokens: Sequence[int]) -> Logits:
        """Evaluate tokens of a pass with branches; return the logits after each token."""
        raise NotImplementedError

    def plan(self, text: DraftedText, owed: int) -> Plan:
        """Return what the next pass evaluates of a text that owes `owed` tokens."""
        policy, curve, sizes = self.policy, self.curve, self.sizes
        room = min(sizes[-1], text.sequence.max_batch) - owed - 1
        limit = min(policy.limit(), room, text.tokens_left - 1)
        if limit < 1:
            text.drafts.proposal = None
            return self._plain
        draft = text.propose(limit, policy.price(curve, sizes))
        restore = self._restore
        if restore is not None and owed:  # there is a checkpoint already
            restore = restore._replace(save=0.0, recompute=owed)
        length, size = policy.plan(draft, curve, sizes, restore)
        if length:
            return text.plan(draft.head(length), size, sizes)
        return self._plain if size == self._plain.size else no_draft(size)

    def commit(self, current: Pass) -> None:
        """Grow the texts of a pass by its outcome. What must be known before the next pass is known then."""
        if not current.rows:
            self.wait(current)
        exactness, is_alone = self.exactness, len(current.texts) == 1
        bound = 0.0 if is_alone and current.size in exactness.agreeing else exactness.max_logit_shift
        for text, plan, rows in zip(current.texts, current.plans, current.rows, strict=True):
            assert isinstance(text, Text)
            if text.is_released:
                current.steps.append(None)
                continue
            step = text.commit(plan, rows, bound)
            current.steps.append(step)
            sequence = text.sequence
            if len(sequence.tokens) > text.settled:
                began = self._clock()
                sequence.rollback(text.settled)
                current.planning_seconds += self._clock() - began
            if step is not None and text.drafts.drafter is not None:
                self.accept(current, text.drafts, step)

    def accept(self, current: Pass, drafts: Drafts, step: Step) -> None:
        """Show the outcome of a pass to the drafter of a text, and set `Step.correct_guesses`."""
        drafter, guide = drafts.drafter, drafts.guide
        if drafter is None:
            return
        began = self._clock()
        if drafts.proposal is not None:
            current.planning_seconds -= drafter.prefill_seconds
        if drafts.is_estimated:
            drafts.estimator.record_outcome(step.tokens)
            drafts.is_estimated = False
        if guide is not None:
            guide.learn(len(step.drafted), step.accepted, step.tokens)
        step.correct_guesses = drafter.accept(step.tokens)
        current.planning_seconds += self._clock() - began

    def wait(self, current: Pass) -> None:
        """Wait for the logits of a pass whose `submit` returned early, and measure its time."""
        start = self._clock()
        current.rows = self.fetch(current)
        end = self._clock()
        current.seconds = end - current.began
        if end - start < READY * current.seconds and self.curve is not None:
            # They had been there for some time, while something else was done.
            current.seconds = min(current.seconds, self.curve.seconds(current.size))

    def fetch(self, current: Pass) -> Sequence[Logits]:
        """Return the logits of each text of a pass; wait for them if necessary."""
        return (current.texts[0].sequence.fetch(),)

    def report(self, current: Pass) -> Sequence[Step | None]:
        """Learn from a pass, and return the completed step of each text; `None` if an error ended it before."""
        (step,), (text,) = current.steps, current.texts
        conditions = text.sequence.conditions
        is_quiet = (conditions is self._conditions or self._follow(conditions)) and conditions.is_quiet
        if step is None:
            return current.steps
        step.batch = current.size + current.owed
        step.seconds = current.seconds
        step.is_quiet = is_quiet
        curve = self.curve
        if curve is not None:
            step.plain_seconds = curve.seconds(self._plain.size)
            if not self._is_provisional:
                step.expected_seconds = curve.seconds(step.batch) + curve.change_seconds(step.batch)
        if text.drafts.drafter is not None:
            if curve is not None:
                quiet_seconds = curve.without_interruption(step.batch, step.seconds, is_quiet)
                step.interruption_seconds = step.seconds - quiet_seconds
            if current.has_proposal:
                step.draft_seconds = current.planning_seconds
            self.policy.record(step)
        if curve is not None and step.batch <= self.sizes[-1]:
            curve.observe(step.batch, step.seconds, step.is_quiet)
        return current.steps

    def finish(self, current: Pass, step: Step) -> None:
        """Learn from a pass over one text whose draft the caller verified, with this outcome."""
        current.steps.append(step)
        self.accept(current, current.texts[0].drafts, step)
        self.report(current)

    def _use(self, curve: CostCurve | None) -> None:
        self.curve, sizes = curve, self.sizes
        self._plain = no_draft(curve.optimal_batches(sizes)[1][0] if curve else smallest(1, sizes))

    def _follow(self, conditions: Conditions) -> bool:
        """Use the curve for these conditions. Return True if they are as they were at the last pass."""
        before, self._conditions = self._conditions, conditions
        if conditions == before or self.curve is None or not self.curve.measured:
            return True
        threads = conditions.threads, conditions.threads_batch
        if self.curve.threads not in (None, threads):
            if threads not in self._curves:
                self._curves[threads] = self.curve.copy(threads)
            self._use(self._curves[threads])
        if before is not None and before.period != conditions.period:
            self.curve.restart()
        return before is None
