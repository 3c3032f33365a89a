"""`Drafts`: the drafts of one text, from the proposal to its outcome; `Plan` and `Pass`: what a pass evaluates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ngramspec.backend import Logits, Model
from ngramspec.drafting.acceptance_estimator import AcceptanceEstimator
from ngramspec.drafting.draft import NO_DRAFT, Chooser, Draft, Drafter, MarginalCost
from ngramspec.drafting.grammar import GrammarGuide
from ngramspec.policies.policy import Policy, smallest
from ngramspec.steps import Step


class Plan(NamedTuple):
    """The tokens of one text in a pass."""

    draft: Draft  # the draft in the batch; nothing in it is past the end of the text
    # The draft for the verifier: `draft`, followed by the forbidden token if a grammar cut a draft that was drawn
    # blindly. That token is rejected without being sent, and its q determines how its replacement is drawn.
    verified_draft: Draft
    size: int  # of the batch: one token more than the draft, or padded further
    ends: bool  # whether the draft's last token ends the text

    def batch(self, last: int) -> list[int]:
        """Return the tokens to evaluate: the text's last one, the draft, and the padding."""
        tokens = self.draft.tokens
        return [last, *tokens, *[last] * (self.size - 1 - len(tokens))]


def no_draft(size: int) -> Plan:
    """Return the plan that sends no draft, in a batch of `size`."""
    return Plan(NO_DRAFT, NO_DRAFT, size, ends=False)


class Drafts:
    """Drafts for one text at a time.

    Args:
        drafter: Proposes the tokens; `None` means plain decoding.
        policy: Gets the logits of each pass, if it wants them.

    Attributes:
        proposal: All that the drafter proposed for the current pass, sent or not, with estimates; `None` if it was not
            asked.
        fixed_length: See `Drafter.propose`.
    """

    def __init__(self, drafter: Drafter | None, policy: Policy | None = None) -> None:
        self.drafter = drafter
        self.proposal: Draft | None = None
        self._watcher = policy if policy is not None and policy.wants_logits else None
        self._estimator = AcceptanceEstimator()
        self._is_estimated = False  # whether the proposal has estimates from `_estimator`
        self._guide: GrammarGuide | None = None
        self._ends: Mapping[int, bool] | None = None
        self._closing: Callable[[], Sequence[int]] | None = None
        self.fixed_length = False

    def begin(
        self,
        prompt: Sequence[int],
        *,
        guide: GrammarGuide | None = None,
        ends: Mapping[int, bool] | None = None,
        closing: Callable[[], Sequence[int]] | None = None,
        fixed_length: bool = False,
    ) -> None:
        """Start a text.

        Args:
            prompt: The context so far.
            guide: What the text's grammar says of the next tokens; `None` means that any may follow.
            ends: Whether a token ends the text; `None` means that none does.
            closing: Returns the tokens that must come next to close reasoning; `None` means that there never are any.
            fixed_length: As in `Drafter.propose`.
        """
        self._guide, self._ends, self._closing, self.fixed_length = guide, ends, closing, fixed_length
        self.proposal = None
        self._estimator.begin()
        self._is_estimated = False
        if self.drafter is not None:
            self.drafter.begin(prompt)

    def forget_grammar(self) -> None:
        """Draft the rest of the text as if it had no grammar."""
        self._guide = None

    def first(self, token: int) -> None:
        """Show the drafter the prefill's token, for which nothing was drafted."""
        if self.drafter is not None:
            self.drafter.accept((token,))

    # ------------------------------------------------------------------ before a pass

    def propose(self, limit: int, price: MarginalCost | None, choose: Chooser | None) -> Draft:
        """Return a draft with estimates, as the grammar allows it; the arguments are those of `Drafter.propose`."""
        assert self.drafter is not None
        self.proposal = None
        if self._closing is not None and (closing := self.closing_draft(limit)):
            return closing
        draft = self.drafter.propose(limit, choose, fixed_length=self.fixed_length, price=price)
        if draft.acceptance_probs and self._guide is None:
            self.proposal = draft
            return draft
        return self.complete(draft, limit)

    def closing_draft(self, limit: int) -> Draft | None:
        """Return the tokens that must come next to close reasoning as a draft that cannot fail, if there are any."""
        tokens = tuple(self._closing()[:limit]) if self._closing is not None else ()
        if not tokens:
            return None
        q = tuple({token: 1.0} for token in tokens)
        draft = Draft(tokens, q, acceptance_probs=(1.0,) * len(tokens), source="reasoning")
        return draft if self._guide is None else self._guide.shape(draft, limit, fixed_length=self.fixed_length)

    def complete(self, draft: Draft, limit: int) -> Draft:
        """Take a draft of the drafter as the proposal. Return it with estimates, as the grammar allows it."""
        if draft.tokens and not draft.acceptance_probs:
            draft = self._estimator.add_estimates(draft, limit, fixed_length=self.fixed_length)
            self._is_estimated = True
        self.proposal = draft
        return draft if self._guide is None else self._guide.shape(draft, limit, fixed_length=self.fixed_length)

    def plan(self, draft: Draft, size: int, sizes: Sequence[int]) -> Plan:
        """Plan to send a draft in a batch of `size`, or of a smaller one of `sizes`, which ascend.

        The draft is cut after the token that ends the text. One that was drawn blindly is also cut before the first
        token that the grammar forbids.
        """
        length = len(draft.tokens)
        n_legal = n_judged = length
        ends = False
        if self._ends is not None:
            for i, token in enumerate(draft.tokens, 1):
                if self._ends[token]:
                    n_legal = n_judged = i
                    ends = True
                    break
        if self._guide is not None and self.fixed_length:
            n_allowed = self._guide.legal(draft.head(n_judged))
            ends = ends and n_allowed == n_judged
            n_legal, n_judged = n_allowed, min(n_judged, n_allowed + 1)
        if n_legal == length:
            return Plan(draft, draft, size, ends)
        return Plan(draft.head(n_legal), draft.head(n_judged), smallest(1 + n_legal, sizes), ends)

    # ------------------------------------------------------------------ after a pass

    def observe_logits(self, last: int, draft: Draft, rows: Logits, n_accepted: int = 0) -> None:
        """Show the logits of a pass to drafter and policy, if they want them.

        Args:
            last: The token before the draft.
            draft: What was sent.
            rows: At least one row for each of those tokens, shape (n, n_vocab).
            n_accepted: How many tokens of the draft were accepted; `rows[n_accepted]` decided the last token emitted.
        """
        drafter = self.drafter
        if drafter is None:
            return
        if drafter.wants_logits:
            drafter.observe_logits((last, *draft.tokens), rows[: 1 + len(draft)], n_accepted)
        if self._watcher is not None:
            self._watcher.observe_logits(rows[n_accepted])

    def accept(self, step: Step) -> float:
        """Show the outcome of a pass to the drafter, and set `Step.correct_guesses`.

        Returns:
            `Drafter.prefill_seconds` of the proposal.
        """
        drafter = self.drafter
        assert drafter is not None
        reading = 0.0 if self.proposal is None else drafter.prefill_seconds
        if self._is_estimated:
            self._estimator.record_outcome(step.tokens)
            self._is_estimated = False
        if self._guide is not None:
            self._guide.learn(len(step.drafted), step.accepted, step.tokens)
        step.correct_guesses = drafter.accept(step.tokens)
        return reading


class DraftedText:
    """A text that passes are made over. `ngramspec.decoding.text.Text` is one that chooses its tokens.

    Attributes:
        drafts: Drafts for it.
        sequence: Holds it without its last token.
        last: That token.
        tokens_left: Maximum number of tokens that may still be emitted.
    """

    drafts: Drafts
    sequence: Model
    last: int
    tokens_left: int

    def __init__(self, drafts: Drafts, sequence: Model) -> None:
        self.drafts, self.sequence = drafts, sequence

    def choose(self) -> Chooser | None:
        """Return what the drafter picks tokens with in the next draft."""
        return None


class Pass:
    """A pass that was submitted.

    Attributes:
        texts: Its texts; `plans` has the tokens of each, and `steps` the outcome.
        size: Number of tokens, padding included.
        owed: Number of tokens that were evaluated again.
        planning_seconds: Time of drafting and planning, and of rolling back rejected tokens.
        seconds: Time of the pass.
        has_proposal: Whether a drafter was asked.
    """

    __slots__ = (
        "began",
        "has_proposal",
        "owed",
        "planning_seconds",
        "plans",
        "rows",
        "seconds",
        "size",
        "steps",
        "texts",
    )

    def __init__(self, texts: Sequence[DraftedText], plans: Sequence[Plan], size: int, owed: int) -> None:
        self.texts, self.plans, self.size, self.owed = texts, plans, size, owed
        self.steps: list[Step | None] = []
        self.rows: Sequence[Logits] = ()  # of each text; empty until they are there
        self.began = self.planning_seconds = self.seconds = 0.0
        self.has_proposal = False
