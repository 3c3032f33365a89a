"""`Drafts`: the drafts of a sequence, one text after the other: their state, and drafts that no drafter makes alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ngramspec.drafting.acceptance_estimator import AcceptanceEstimator
from ngramspec.drafting.draft import Draft, Drafter
from ngramspec.drafting.grammar import GrammarGuide
from ngramspec.policies.policy import Policy


class Drafts:
    """Drafts for one text at a time.

    Args:
        drafter: Proposes the tokens; `None` means plain decoding.
        policy: Gets the logits of each pass, if it wants them.

    Attributes:
        is_slow: True if a model drafts, whose passes take time too.
        observer: The policy, if it wants logits.
        estimator: Estimates the drafts of a drafter that makes no estimates.
        is_estimated: True if the current proposal has estimates from `estimator`.
        proposal: All that the drafter proposed for the current pass, sent or not, with estimates; `None` if it was not
            asked.
        guide, ends, closing, fixed_length: See `begin`.
    """

    def __init__(self, drafter: Drafter | None, policy: Policy | None = None) -> None:
        self.drafter = drafter
        self.is_slow = drafter is not None and drafter.drafts_stepwise
        self.observer = policy if policy is not None and policy.wants_logits else None
        self.estimator = AcceptanceEstimator()
        self.is_estimated = False
        self.proposal: Draft | None = None
        self.guide: GrammarGuide | None = None
        self.ends: Mapping[int, bool] | None = None
        self.closing: Callable[[], Sequence[int]] | None = None
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
            prompt: Tokens of the context so far.
            guide: What the text's grammar says of the next tokens; `None` means that any may follow.
            ends: Whether a token ends the text; `None` means that none does.
            closing: Returns the tokens that must come next to close reasoning; `None` means that there never are any.
            fixed_length: As in `Drafter.propose`.
        """
        self.guide, self.ends, self.closing, self.fixed_length = guide, ends, closing, fixed_length
        self.proposal = None
        self.estimator.begin()
        self.is_estimated = False
        if self.drafter is not None:
            self.drafter.begin(prompt)

    def first(self, token: int) -> None:
        """Show the drafter the prefill's token, for which nothing was drafted."""
        if self.drafter is not None:
            self.drafter.accept((token,))

    def closing_draft(self, limit: int) -> Draft | None:
        """Return the tokens that must come next to close reasoning as a draft that cannot fail, if there are any."""
        tokens = tuple(self.closing()[:limit]) if self.closing is not None else ()
        if not tokens:
            return None
        q = tuple({token: 1.0} for token in tokens)
        return self._shape(Draft(tokens, q, acceptance_probs=(1.0,) * len(tokens), source="reasoning"), limit)

    def complete(self, draft: Draft, limit: int) -> Draft:
        """Take a draft of the drafter as the proposal. Return it with estimates, as the grammar allows it."""
        if draft.tokens and not draft.acceptance_probs:
            draft = self.estimator.add_estimates(draft, limit, fixed_length=self.fixed_length)
            self.is_estimated = True
        self.proposal = draft
        return self._shape(draft, limit)

    def _shape(self, draft: Draft, limit: int) -> Draft:
        return draft if self.guide is None else self.guide.shape(draft, limit, fixed_length=self.fixed_length)
