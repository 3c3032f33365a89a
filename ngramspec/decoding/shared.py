"""`SharedTexts`: texts whose sequences share a pass, which reads the weights once for all of them."""

from __future__ import annotations

from collections.abc import Sequence

from ngramspec.backend import Logits, Part, SequenceModel, SharedModel
from ngramspec.cost.times import Charge, PassTimes
from ngramspec.decoding.text import DraftedText, Plan, no_draft
from ngramspec.drafting.draft import NO_DRAFT
from ngramspec.policies.cost import CostPolicy
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
        self.returns_early = model.returns_early
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
            whole = batches[0] + owed
            return times.observe(whole, seconds) if is_timed else times.skip(whole)
        # The time of several batches cannot be divided.
        return times.book(times.cost_of(batches, self._plain), batches, seconds)


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
