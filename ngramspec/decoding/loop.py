"""`DecodingLoop`: the passes of a model over its texts; `SharedTexts` are several texts in one pass.

`submit` drafts, plans (`ngramspec.policies.policy`), and begins a pass over the last token of each text and its draft.
`commit` verifies: a text grows by the draft tokens that the target accepts and by one more, so that it is the text of
plain decoding (Stern et al. 2018; `ngramspec.acceptance.rules`). `report` learns from what the pass yielded and cost.

Invariants: after `commit`, the sequence of a text holds `Text.settled` tokens, all of prompt and text but the last. A
recurrent state cannot be cut. It goes back to the checkpoint before the pass, and the next pass first evaluates the
tokens since then (`owed`). On a GPU, `submit` returns before the work is done, and the next pass is submitted between
`commit` and `report`. So `report` reads only its `Pass` and what no `submit` changes: the proposal of `Drafts` and
`branches` already belong to the next one, and `submit_ahead` restores `PassTimes`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

from ngramspec.backend import ExactnessMode, Logits, Model, Part, SequenceModel, SharedModel
from ngramspec.cost.times import Charge, PassTimes
from ngramspec.data import TargetError, UserCodeError
from ngramspec.decoding.text import DraftedText, Drafts, Plan, Text, no_draft
from ngramspec.drafting.draft import NO_DRAFT
from ngramspec.policies.cost import CostPolicy
from ngramspec.policies.policy import Policy, smallest
from ngramspec.steps import Step

_ONE_TOKEN = no_draft(1)


class SharedTexts:
    """The sequences of texts that share a pass; one policy divides the draft tokens among them.

    An idle sequence in a gap between theirs takes part with a token that is rolled back, if that is cheaper than
    another batch (see `SharedModel.batches`).
    """

    def __init__(
        self,
        model: SharedModel,
        sequences: Sequence[SequenceModel],
        times: PassTimes,
        policy: CostPolicy,
        max_batch: int,
    ) -> None:
        n = len(sequences)
        self.sequences = list(sequences)
        self.times, self.policy = times.for_plain(n), policy.for_n_sequences(n)
        self._model = model
        self._fillers: list[SequenceModel] = []
        self._plain = self._batches([1] * n)  # sizes of the batches of a pass without drafts
        numbers = [sequence.number for sequence in sequences]
        between = {*range(min(numbers), max(numbers))} - {*numbers}
        if between and not model.drafts_alone:
            self._fillers = [sequence for sequence in model.sequences if sequence.number in between]
            bare, self._plain = self._plain, self._batches([1] * n)
            costs = [sum(map(times.ratio, parts)) for parts in (self._plain, bare)]
            if costs[0] >= costs[1] or n + len(self._fillers) > max_batch:
                self._fillers, self._plain = [], bare

    def _batches(self, shape: Sequence[int]) -> Sequence[int]:
        """Return the sizes of the batches that llama.cpp makes of a pass with `shape[i]` tokens of text i."""
        return self._model.batches([*shape, *[min(shape)] * len(self._fillers)], [*self.sequences, *self._fillers])

    def plan(self, texts: Sequence[DraftedText], sizes: Sequence[int]) -> Sequence[Plan]:
        """Return what the next pass evaluates of each text, in batches of these sizes."""
        policy, times, n = self.policy, self.times, len(texts)
        if texts[0].drafts.drafter is None:
            return [_ONE_TOKEN] * n
        max_draft = 0 if self._model.drafts_alone else min(policy.limit(), sizes[-1] - n)
        limits = [min(max_draft, text.tokens_left - 1) for text in texts]
        for text in texts:
            text.drafts.proposal = None
        if max(limits) < 1 or (texts[0].drafts.is_slow and not times.level):
            return [_ONE_TOKEN] * n
        price = policy.price(times, sizes)
        proposals = [
            text.drafts.propose(limit, text.choose(), price) if limit > 0 else NO_DRAFT
            for text, limit in zip(texts, limits, strict=True)
        ]
        shapes = policy.plan_batch(proposals, times, sizes, self._batches)
        return [
            text.plan(proposal.head(length), size, (size,))
            for text, proposal, (length, size) in zip(texts, proposals, shapes, strict=True)
        ]

    def submit(self, tokens_of: Sequence[Sequence[int]]) -> None:
        """Begin a pass over tokens of each text; after a TargetError, the sequences are as before."""
        parts = [
            Part(sequence, tokens, len(tokens)) for sequence, tokens in zip(self.sequences, tokens_of, strict=True)
        ]
        filler = [0] * min(map(len, tokens_of))
        before = [len(sequence.tokens) for sequence in self._fillers]
        self._model.submit_together([*parts, *(Part(sequence, filler, 0) for sequence in self._fillers)])
        for sequence, length in zip(self._fillers, before, strict=True):
            sequence.rollback(length)

    def fetch(self) -> Sequence[Logits]:
        """Return the logits of each text after the last pass."""
        return self._model.fetch_together()[: len(self.sequences)]

    def learn(self, plans: Sequence[Plan], owed: int, seconds: float, is_timed: bool) -> Charge:
        """Learn the time of a pass, and return its cost."""
        times, batches = self.times, self._batches([plan.size for plan in plans])
        if len(batches) == 1 == len(self._plain):
            return times.observe(batches[0] + owed, seconds, is_timed)
        # The time of several batches cannot be divided.
        return times.book(times.cost_of(batches, self._plain), batches, seconds)


@dataclass(slots=True)
class Pass:
    """A pass that was submitted."""

    texts: Sequence[DraftedText]
    plans: Sequence[Plan]  # tokens of each text
    size: int  # number of tokens, padding included
    owed: int  # number of tokens that were evaluated again
    has_proposal: bool  # whether a drafter was asked
    group: SharedTexts | None = None  # several texts
    rows: Sequence[Logits] = ()  # of each text; empty until they are there
    steps: list[Step | None] = field(default_factory=list)  # outcome of each text
    began: float = 0.0
    seconds: float = 0.0  # time of the pass
    is_timed: bool = True  # whether `seconds` is the time of the pass, and not longer
    planning_seconds: float = 0.0  # time of drafting, planning, learning, and rolling back rejected tokens

    def fetch(self) -> Sequence[Logits]:
        """Return the logits of each text; wait for them if necessary."""
        return (self.texts[0].sequence.fetch(),) if self.group is None else self.group.fetch()


class DecodingLoop:
    """Makes the passes of one model, decides on every draft, and learns from every pass.

    `policy` decides how many tokens to draft; it is a `CostPolicy` if several texts share passes, whose `model` is then
    given.
    """

    branches: Sequence[object] = ()  # what else the pass planned last evaluates, with `ask`; see `BranchingLoop`

    def __init__(
        self, policy: Policy, clock: Callable[[], float] = time.perf_counter, model: SharedModel | None = None
    ) -> None:
        self.policy = policy
        self.exactness = ExactnessMode()  # batch sizes that do not move logits, and how far others move them
        self.clock, self._model = clock, model
        self._group: SharedTexts | None = None  # of the last pass over several texts
        self.prepare(None, (1,))

    def prepare(self, times: PassTimes | None, sizes: Sequence[int]) -> None:
        """Set the costs of passes, `None` if nothing is known or learned, and the allowed batch sizes, ascending."""
        self.times, self.sizes = times, sizes
        self._plain = no_draft(times.optimal_batches(sizes)[1][0] if times else smallest(1, sizes))
        self._plain_only: Sequence[Plan] = (self._plain,)

    def submit(self, texts: Sequence[DraftedText]) -> Pass:
        """Draft for texts that have not ended, plan, and begin the pass.

        Raises:
            TargetError: the pass failed, or a draft model's; the texts are as before.
        """
        clock, text = self.clock, texts[0]
        began = clock()
        owed = 0
        for each in texts:
            owed += each.sequence.owed
        group, plans = None, self._plain_only
        if len(texts) > 1:
            group = self._group_of(texts)
            plans = group.plan(texts, self.sizes)
        elif text.drafts.drafter is not None:
            plans = (self.plan(text, owed),)
        size, has_proposal = 0, False
        for each, plan in zip(texts, plans, strict=True):
            size += plan.size
            has_proposal = has_proposal or each.drafts.proposal is not None
            # So that the draft can be rolled back. If tokens are owed, there is a checkpoint before them already.
            if plan.draft.tokens and each.sequence.replays and not owed:
                self.checkpoint(each.sequence)
        current = Pass(texts, plans, size, owed, has_proposal, group)
        current.began = submit_time = clock()
        if group is not None:
            group.submit([plan.batch(each.last) for each, plan in zip(texts, plans, strict=True)])
        elif self.branches:
            current.rows = (self.ask(text, plans[0].batch(text.last)),)
        else:
            text.sequence.submit((text.last,) if size == 1 else plans[0].batch(text.last))
        if not current.rows and not text.sequence.returns_early:
            current.rows = current.fetch()
        current.seconds = clock() - submit_time
        current.planning_seconds = submit_time - began
        return current

    def submit_ahead(self, texts: Sequence[DraftedText], last: Pass) -> Pass | None:
        """`submit` before the last pass is reported; `None` after an error, which the next `submit` raises again."""
        times = self.times
        # A change of size is charged as after `last`, of which `report` will learn the size and the time.
        before = times.begin_pass(last.size + last.owed) if times is not None else None
        try:
            return self.submit(texts)
        except (TargetError, UserCodeError):
            return None
        finally:
            if times is not None and before is not None:
                times.end_pass(before)

    def _group_of(self, texts: Sequence[DraftedText]) -> SharedTexts:
        sequences = [cast(SequenceModel, text.sequence) for text in texts]
        if self._group is None or self._group.sequences != sequences:
            assert self._model is not None
            assert self.times is not None
            max_batch = self.exactness.sizes[-1] if self.exactness.sizes else self._model.max_rows
            self._group = SharedTexts(self._model, sequences, self.times, cast(CostPolicy, self.policy), max_batch)
        return self._group

    def checkpoint(self, sequence: Model) -> None:
        """Make a checkpoint, and learn what it costs."""
        began = self.clock()
        sequence.checkpoint()
        if self.times is not None:
            self.times.observe_copy(self.clock() - began, is_load=False)

    def ask(self, text: DraftedText, tokens: Sequence[int]) -> Logits:
        """Evaluate the tokens of a pass and `branches`, and return the logits after each token."""
        raise NotImplementedError

    def plan(self, text: DraftedText, owed: int) -> Plan:
        """Return what the next pass evaluates of a single text, which owes `owed` tokens."""
        policy, times, sizes = self.policy, self.times, self.sizes
        room = min(sizes[-1], text.sequence.max_batch) - owed - 1
        limit = min(policy.limit(), room, text.tokens_left - 1)
        if limit < 1 or (text.drafts.is_slow and times is not None and not times.level):
            text.drafts.proposal = None
            return self._plain
        draft = text.drafts.propose(limit, text.choose(), policy.price(times, sizes))
        restore = times.restore(owed) if times is not None and text.sequence.replays else None
        length, size = policy.plan(draft, times, sizes, restore)
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
                began = self.clock()
                sequence.rollback(text.settled)
                seconds = self.clock() - began
                current.planning_seconds += seconds
                if sequence.replays and self.times is not None:
                    self.times.observe_copy(seconds, is_load=True)
            if step is not None and text.drafts.drafter is not None:
                self.accept(current, text.drafts, step)

    def accept(self, current: Pass, drafts: Drafts, step: Step) -> None:
        """Show the outcome of a pass to the drafter of a text, and set `Step.correct_guesses`."""
        drafter, guide = drafts.drafter, drafts.guide
        if drafter is None:
            return
        began = self.clock()
        if drafts.proposal is not None:
            current.planning_seconds -= drafter.prefill_seconds
        if drafts.is_estimated:
            drafts.estimator.record_outcome(step.tokens)
            drafts.is_estimated = False
        if guide is not None:
            guide.learn(len(step.drafted), step.accepted, step.tokens)
        step.correct_guesses = drafter.accept(step.tokens)
        current.planning_seconds += self.clock() - began

    def wait(self, current: Pass) -> None:
        """Wait for the logits of a pass whose `submit` returned early, and measure its time."""
        start = self.clock()
        current.rows = current.fetch()
        end = self.clock()
        current.seconds = end - current.began
        # With a shorter wait, they had been there for some unknown time, while something else was done.
        current.is_timed = end - start >= 0.05 * current.seconds

    def report(self, current: Pass) -> Sequence[Step | None]:
        """Learn from a pass, and return the completed step of each text; `None` if an error ended it before."""
        steps, group, times = current.steps, current.group, self.times
        step = steps[0] if group is None else join(steps)
        if step is None:
            return steps
        step.batch = current.size + current.owed
        step.seconds = current.seconds
        drafts = current.texts[0].drafts.drafter is not None
        if drafts and current.has_proposal:
            step.draft_seconds = current.planning_seconds
        if group is not None:
            times = group.times
            charge = group.learn(current.plans, current.owed, current.seconds, current.is_timed)
        elif times is not None:
            charge = times.observe(step.batch, current.seconds, current.is_timed)
        if times is not None:
            step.cost, step.correction, step.is_surprising = charge
            step.draft_cost = times.charge_drafting(step.draft_seconds)
        if drafts:
            (self.policy if group is None else group.policy).record(step)
        if group is not None:
            self._share(step, current)
        return steps

    def _share(self, whole: Step, current: Pass) -> None:
        """Divide the costs of a pass among its texts."""
        n = len(current.texts)
        for step, plan in zip(current.steps, current.plans, strict=True):
            if step is not None:
                share = plan.size / current.size
                step.batch, step.seconds, step.draft_seconds = plan.size, share * whole.seconds, whole.draft_seconds / n
                # A plain pass gives each text a token, so it costs each of them one.
                step.cost, step.draft_cost = share * n * whole.cost, whole.draft_cost
                step.is_surprising = whole.is_surprising

    def finish(self, current: Pass, step: Step) -> None:
        """Learn from a pass over one text whose draft the caller verified, with this outcome."""
        current.steps.append(step)
        self.accept(current, current.texts[0].drafts, step)
        self.report(current)


def join(steps: Sequence[Step | None]) -> Step:
    """Return the steps of one pass as one step of all its texts."""
    taken = [step for step in steps if step is not None]
    return Step(
        tuple(token for step in taken for token in step.tokens),
        drafted=tuple(token for step in taken for token in step.drafted),
        accepted=sum(step.accepted for step in taken),
        # As many drafters were asked: it paid if each had one token right.
        correct_guesses=sum(step.correct_guesses for step in taken) // len(steps),
    )
