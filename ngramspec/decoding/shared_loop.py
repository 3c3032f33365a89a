"""`SharedLoop`: passes over several texts whose sequences share a cache, in groups of `SharedSequences`.

A pass reads the weights once for all of its texts, and one policy divides the draft tokens among them. With one text it
is a `DecodingLoop`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from ngramspec.backend import Logits, Part, SequenceModel, SharedModel
from ngramspec.cost.times import Charge, PassTimes
from ngramspec.decoding.loop import DecodingLoop, Pass
from ngramspec.decoding.text import DraftedText, Plan, no_draft
from ngramspec.drafting.draft import NO_DRAFT, Draft, MarginalCost
from ngramspec.drafting.draft_model.passes import Drafting, StepwiseDrafter, draft_batch
from ngramspec.policies.cost import CostPolicy
from ngramspec.steps import Step

_ONE_TOKEN = no_draft(1)


class SharedSequences:
    """Sequences whose texts share a pass, and how large the batches are that llama.cpp makes of it.

    An idle sequence in a gap between theirs takes part with a token that is rolled back, if that is cheaper than
    another batch (see `SharedModel.batches`).
    """

    def __init__(
        self, model: SharedModel, sequences: Sequence[SequenceModel], times: PassTimes, max_batch: int
    ) -> None:
        self._model = model
        self.sequences = list(sequences)
        self._fillers: list[SequenceModel] = []
        self.plain = self.batches([1] * len(sequences))  # sizes of the batches of a pass without drafts
        numbers = [sequence.number for sequence in sequences]
        between = {*range(min(numbers), max(numbers))} - {*numbers}
        if between and not model.drafts_alone:
            self._fillers = [sequence for sequence in model.sequences if sequence.number in between]
            bare, self.plain = self.plain, self.batches([1] * len(sequences))
            costs = [sum(map(times.ratio, parts)) for parts in (self.plain, bare)]
            if costs[0] >= costs[1] or len(sequences) + len(self._fillers) > max_batch:
                self._fillers, self.plain = [], bare

    def batches(self, shape: Sequence[int]) -> Sequence[int]:
        """Return the sizes of the batches of a pass with `shape[i]` tokens of text i."""
        return self._model.batches([*shape, *[min(shape)] * len(self._fillers)], [*self.sequences, *self._fillers])

    def submit(self, tokens_of: Sequence[Sequence[int]]) -> None:
        """Begin a pass over tokens of each text.

        Raises:
            TargetError: the pass failed; the sequences are as before.
        """
        parts = [
            Part(sequence, tokens, len(tokens)) for sequence, tokens in zip(self.sequences, tokens_of, strict=True)
        ]
        if not self._fillers:
            self._model.submit_together(parts)
            return
        filler = [0] * min(map(len, tokens_of))
        before = [len(sequence.tokens) for sequence in self._fillers]
        self._model.submit_together([*parts, *(Part(sequence, filler, 0) for sequence in self._fillers)])
        for sequence, length in zip(self._fillers, before, strict=True):
            sequence.rollback(length)

    def fetch(self) -> list[Logits]:
        """Return the logits of each text after the last pass."""
        return self._model.fetch_together()[: len(self.sequences)]


@dataclass(slots=True, kw_only=True)
class SharedPass(Pass):
    """A pass over several texts."""

    group: SharedSequences


class SharedLoop(DecodingLoop):
    """The decoding loop of a model that holds several texts; `largest` is the maximum number of tokens of a batch."""

    def __init__(self, model: SharedModel, largest: int, policy: CostPolicy, clock: Callable[[], float]) -> None:
        super().__init__(policy, clock)
        self._model, self._largest, self._cost_policy = model, largest, policy
        self._group: SharedSequences | None = None  # of the last pass over several texts

    def submit(self, texts: Sequence[DraftedText]) -> Pass:
        if len(texts) == 1:
            return super().submit(texts)
        clock = self._clock
        began = clock()
        group = self._group_of([cast(SequenceModel, text.sequence) for text in texts])
        plans = [_ONE_TOKEN] * len(texts) if texts[0].drafts.drafter is None else self._plan_together(texts, group)
        owed = 0
        for text, plan in zip(texts, plans, strict=True):
            sequence = text.sequence
            owed += sequence.owed
            if plan.draft.tokens and sequence.replays and not sequence.owed:
                self.checkpoint(sequence)
        has_proposal = any(text.drafts.proposal is not None for text in texts)
        current = SharedPass(texts, plans, sum(plan.size for plan in plans), owed, has_proposal, group=group)
        current.began = submit_time = clock()
        group.submit([plan.batch(text.last) for text, plan in zip(texts, plans, strict=True)])
        if not self._model.returns_early:
            current.rows = group.fetch()
        current.seconds = clock() - submit_time
        current.planning_seconds = submit_time - began
        return current

    def _group_of(self, sequences: Sequence[SequenceModel]) -> SharedSequences:
        if self._group is None or self._group.sequences != sequences:
            assert self.times is not None
            self._group = SharedSequences(self._model, sequences, self.times, self._largest)
        return self._group

    def _plan_together(self, texts: Sequence[DraftedText], group: SharedSequences) -> Sequence[Plan]:
        """Return what the next pass evaluates of each text."""
        n = len(texts)
        assert self.times is not None
        policy, times, sizes = self._cost_policy.for_n_sequences(n), self.times.for_plain(n), self.sizes
        max_draft = 0 if self._model.drafts_alone else min(policy.limit(), sizes[-1] - n)
        limits = [min(max_draft, text.tokens_left - 1) for text in texts]
        if max(limits) < 1 or (texts[0].drafts.is_slow and not times.level):
            for text in texts:
                text.drafts.proposal = None
            return [_ONE_TOKEN] * n
        price = policy.price(times, sizes)
        proposals = _propose(texts, limits, price)
        shapes = policy.plan_batch(proposals, times, sizes, group.batches)
        return [
            text.plan(proposal.head(length), size, (size,))
            for text, proposal, (length, size) in zip(texts, proposals, shapes, strict=True)
        ]

    def fetch(self, current: Pass) -> Sequence[Logits]:
        return current.group.fetch() if isinstance(current, SharedPass) else super().fetch(current)

    def report(self, current: Pass) -> Sequence[Step | None]:
        if not isinstance(current, SharedPass):
            return super().report(current)
        steps = [step for step in current.steps if step is not None]
        n, overhead = len(current.texts), current.planning_seconds if current.has_proposal else 0.0
        charge, level = self._learn_together(current)
        for step, plan in zip(current.steps, current.plans, strict=True):
            if step is not None:
                share = plan.size / current.size
                step.batch, step.seconds, step.draft_seconds = plan.size, current.seconds * share, overhead / n
                step.is_surprising = charge.is_surprising
                # A plain pass gives each text a token, so it costs each of them one.
                step.cost, step.draft_cost = charge.cost * share * n, step.draft_seconds / level * n if level else 0.0
        if current.texts[0].drafts.drafter is not None:
            self._cost_policy.for_n_sequences(n).record(
                Step(
                    tuple(token for step in steps for token in step.tokens),
                    drafted=tuple(token for step in steps for token in step.drafted),
                    accepted=sum(step.accepted for step in steps),
                    # As many drafters were asked: it paid if each had one token right.
                    correct_guesses=sum(step.correct_guesses for step in steps) // n,
                    batch=current.size + current.owed,
                    seconds=current.seconds,
                    cost=charge.cost,
                    correction=charge.correction,
                    draft_seconds=overhead,
                    draft_cost=overhead / level if level else 0.0,
                )
            )
        return current.steps

    def _learn_together(self, current: SharedPass) -> tuple[Charge, float]:
        """Learn the time of a pass over several texts; return its charge, and the seconds of a plain pass of them."""
        assert self.times is not None
        group, times = current.group, self.times.for_plain(len(current.texts))
        batches = group.batches([plan.size for plan in current.plans])
        if len(batches) == 1 == len(group.plain):
            whole = batches[0] + current.owed
            charge = times.observe(whole, current.seconds) if current.is_timed else times.skip(whole)
        else:  # the time of one batch is the time of the pass; that of several cannot be divided
            charge = times.book(times.cost_of(batches, group.plain), batches, current.seconds)
        return charge, times.level


def _propose(texts: Sequence[DraftedText], limits: Sequence[int], price: MarginalCost | None) -> list[Draft]:
    """Return a draft for each text; those of a draft model share its passes."""
    pairs = list(zip(texts, limits, strict=True))
    drafter = texts[0].drafts.drafter
    if drafter is not None and drafter.drafts_stepwise:
        return draft_batch([_propose_stepwise(text, limit, price) for text, limit in pairs], price)
    for text, limit in pairs:
        if limit < 1:
            text.drafts.proposal = None
    return [text.propose(limit, price) if limit > 0 else NO_DRAFT for text, limit in pairs]


def _propose_stepwise(text: DraftedText, limit: int, price: MarginalCost | None) -> Drafting:
    """`DraftedText.propose` as a generator, which yields the passes of the draft model that it needs."""
    drafts = text.drafts
    drafts.proposal = None
    if limit < 1:
        return NO_DRAFT
    closing = drafts.closing_draft(limit)
    if closing is not None:
        return closing
    drafter = cast(StepwiseDrafter, drafts.drafter)
    draft = yield from drafter.propose_stepwise(limit, text.choose(), fixed_length=drafts.fixed_length, price=price)
    return drafts.complete(draft, limit)
