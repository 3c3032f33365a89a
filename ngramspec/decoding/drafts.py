"""What is drafted for a `Text`: its `Drafts`, from a proposal to what is learnt of it, and the `Plan` of a pass.

A `Batch` are the sequences whose texts go through a pass together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ngramspec.backend import Logits, Model
from ngramspec.cost.curve import CostCurve
from ngramspec.drafting.chances import ChanceEstimator
from ngramspec.drafting.draft import NO_DRAFT, Chooser, Draft, Drafter, Drafting, MarginalCost
from ngramspec.drafting.grammar import GrammarGuide
from ngramspec.policies.policy import Policy, smallest
from ngramspec.shared_model import Part, SequenceModel, SharedModel
from ngramspec.steps import Step


class Plan(NamedTuple):
    """What a pass is to evaluate of one text."""

    sent: Draft  # the draft in its batch; nothing in it is past the end of the text
    # what the verifier judges: `sent`, followed by the forbidden token if a grammar cut a draft that was drawn blindly.
    # That token is refused without being sent; its q says how to draw the one in its place.
    verified_draft: Draft
    size: int  # of the batch: one token more than the draft, or padded further
    ends: bool  # whether the draft's last token ends the text

    def batch(self, last: int) -> list[int]:
        """The tokens to evaluate: the text's last one, the draft, and what pads it to its size."""
        sent = self.sent.tokens
        return [last, *sent, *[last] * (self.size - 1 - len(sent))]


def no_draft(size: int) -> Plan:
    """The plan of a pass without a draft."""
    return Plan(NO_DRAFT, NO_DRAFT, size, ends=False)


class Drafts:
    """The drafts of one text at a time.

    Args:
        drafter: guesses the tokens; None for plain decoding.
        policy: is shown logits, if it wants them.
    """

    def __init__(self, drafter: Drafter | None, policy: Policy | None = None) -> None:
        self.drafter = drafter
        # all that the drafter proposed for the pass planned last, sent or not, with estimates; None if it was not asked
        self.proposal: Draft | None = None
        self._watcher = policy if policy is not None and policy.wants_logits else None
        self._record = ChanceEstimator()
        self._guide: GrammarGuide | None = None
        self._is_eog: Callable[[int], bool] | None = None
        self._closing: Callable[[], Sequence[int]] | None = None
        self._blind = False

    def begin(
        self,
        prompt: Sequence[int],
        *,
        guide: GrammarGuide | None = None,
        is_eog: Callable[[int], bool] | None = None,
        closing: Callable[[], Sequence[int]] | None = None,
        fixed_length: bool = False,
    ) -> None:
        """Start a text, whose context so far is `prompt`.

        Args:
            guide: what its grammar knows of the next tokens; None: any may follow.
            is_eog: whether a token ends the text; None: none does.
            closing: Returns the tokens that must come next to close reasoning; `None` means that there never are any.
            fixed_length: as in `Drafter.propose`.
        """
        self._guide, self._is_eog, self._closing, self._blind = guide, is_eog, closing, fixed_length
        self.proposal = None
        self._record.begin()
        if self.drafter is not None:
            self.drafter.begin(prompt)

    def forget_grammar(self) -> None:
        """Draft the rest of the text as if it had no grammar."""
        self._guide = None

    def first(self, token: int) -> None:
        """Tell the drafter of the prefill's token, for which nothing was drafted."""
        if self.drafter is not None:
            self.drafter.accept((token,))

    def proposing(self, limit: int, price: MarginalCost | None, choose: Chooser | None = None) -> Drafting:
        """What may follow, with estimates, as the grammar allows it; arguments as in `Drafter.propose`.

        It is a generator, like `Drafter.propose_stepwise`, so that several texts can be drafted for together.
        """
        self.proposal = None
        if self.drafter is None or limit < 1:
            return NO_DRAFT
        if self._closing is not None and (closing := tuple(self._closing()[:limit])):
            certain = (1.0,) * len(closing)
            draft = Draft(closing, tuple({t: 1.0} for t in closing), acceptance_probs=certain, source="reasoning")
        else:
            draft = yield from self.drafter.propose_stepwise(limit, choose, fixed_length=self._blind, price=price)
            self.proposal = draft = self._record.estimated(draft, limit, fixed_length=self._blind)
        return draft if self._guide is None else self._guide.shape(draft, limit, fixed_length=self._blind)

    def plan(self, draft: Draft, size: int, sizes: Sequence[int]) -> Plan:
        """The plan to send a draft in a batch of `size`, or of a smaller one of `sizes`, which ascend.

        The draft is cut after the token that ends the text; one that was drawn blindly is also cut before the first
        token that the grammar forbids.
        """
        end = None
        if self._is_eog is not None:
            end = next((i for i, token in enumerate(draft.tokens, 1) if self._is_eog(token)), None)
        legal = judged = len(draft) if end is None else end
        if self._guide is not None and self._blind:
            legal = self._guide.legal(draft.head(judged))
            judged = min(judged, legal + 1)
        size = size if legal == len(draft) else smallest(1 + legal, sizes)
        return Plan(draft.head(legal), draft.head(judged), size, ends=legal == end)

    def observe_logits(self, last: int, draft: Draft, rows: Logits, accepted: int = 0) -> None:
        """Show the logits of a pass to drafter and policy, if they want them.

        Args:
            last, draft: the tokens that were evaluated, without the padding behind them.
            rows: at least one for each of those tokens, of shape (n, n_vocab).
            accepted: how many tokens of the draft were accepted; `rows[accepted]` decided the last token emitted.
        """
        if self.drafter is None:
            return
        if self.drafter.wants_logits:
            self.drafter.observe_logits((last, *draft.tokens), rows[: 1 + len(draft)], accepted)
        if self._watcher is not None:
            self._watcher.observe_logits(rows[accepted])

    def settle(self, step: Step) -> float:
        """Report the outcome to the drafter, set `Step.correct_guesses` and return `Drafter.prefill_seconds`."""
        assert self.drafter is not None
        reading = 0.0 if self.proposal is None else self.drafter.prefill_seconds
        self._record.settle(step.tokens)
        if self._guide is not None:
            self._guide.learn(len(step.drafted), step.accepted, step.tokens)
        step.correct_guesses = self.drafter.accept(step.tokens)
        return reading


class Text:
    """A text that passes are made over; `ngramspec.decoding.generation.Generation` is one that chooses its tokens."""

    drafts: Drafts  # made for it
    sequence: Model  # holds it without its last token
    last: int  # that token
    left: int  # most tokens that may still be emitted

    def __init__(self, drafts: Drafts, sequence: Model) -> None:
        self.drafts, self.sequence = drafts, sequence

    def chooser(self) -> Chooser | None:
        """What the drafter is to pick with now."""
        return None


class Batch:
    """Sequences whose texts share a pass, and how large the batches are that llama.cpp makes of it.

    An idle sequence in a gap between theirs goes along with a token that is taken back, where that is cheaper than
    another batch (see `SharedModel.batches`).

    Args:
        model: whose sequences they are.
        sequences: of the texts.
        curve: what a batch costs.
        most: tokens of the largest batch that may be used.
    """

    def __init__(self, model: SharedModel, sequences: Sequence[SequenceModel], curve: CostCurve, most: int) -> None:
        self._model = model
        self.sequences = list(sequences)
        self.drafts_alone = model.drafts_alone  # as of `SharedModel`
        self._fillers: list[SequenceModel] = []
        self._plain = self.batches([1] * len(sequences))
        numbers = [sequence.number for sequence in sequences]
        between = {*range(min(numbers), max(numbers))} - {*numbers}
        if between and not model.drafts_alone:
            self._fillers = [sequence for sequence in model.sequences if sequence.number in between]
            bare, self._plain = self._plain, self.batches([1] * len(sequences))
            if self.plain_cost(curve) >= sum(map(curve.ratio, bare)) or len(sequences) + len(self._fillers) > most:
                self._fillers, self._plain = [], bare

    def batches(self, shape: Sequence[int]) -> Sequence[int]:
        """The sizes of the batches of a pass in which each text has so many tokens."""
        return self._model.batches([*shape, *[min(shape)] * len(self._fillers)], [*self.sequences, *self._fillers])

    def plain_cost(self, curve: CostCurve) -> float:
        """What a pass without drafts costs, in units of T(1)."""
        return sum(map(curve.ratio, self._plain))

    def evaluate(self, batches: Sequence[Sequence[int]]) -> list[Logits]:
        """Evaluate tokens of each text; the logits after each. TargetError: failed, the sequences are as before."""
        parts = [Part(sequence, tokens, len(tokens)) for sequence, tokens in zip(self.sequences, batches, strict=True)]
        if not self._fillers:
            return self._model.evaluate_together(parts)
        filler = [0] * min(map(len, batches))
        before = [len(sequence.tokens) for sequence in self._fillers]
        rows = self._model.evaluate_together([*parts, *(Part(sequence, filler, 0) for sequence in self._fillers)])
        for sequence, length in zip(self._fillers, before, strict=True):
            sequence.rollback(length)
        return rows[: len(parts)]
