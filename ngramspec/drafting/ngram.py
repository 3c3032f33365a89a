"""`NGramDrafter`: the n-gram predictor as a drafter, with an estimated acceptance probability of each guess."""

from __future__ import annotations

from collections.abc import Sequence

from ngramspec.drafting.acceptance_estimator import AcceptanceEstimator
from ngramspec.drafting.draft import Chooser, Draft, Drafter, MarginalCost
from ngramspec.drafting.predictor import NGramPredictor


class NGramDrafter(Drafter):
    """Drafts with an `NGramPredictor` and learns from every proposal, whether it was verified or not."""

    name = "ngram"

    def __init__(self, predictor: NGramPredictor | None = None) -> None:
        self.predictor = NGramPredictor() if predictor is None else predictor
        self._estimator = AcceptanceEstimator()

    def begin(self, prompt: Sequence[int]) -> None:
        self.predictor.reset()
        self.predictor.update_batch(prompt)
        self._estimator.begin()

    def propose(
        self,
        limit: int,
        choose: Chooser | None = None,
        *,
        fixed_length: bool = False,
        price: MarginalCost | None = None,
    ) -> Draft:
        estimator = self._estimator
        estimator.open(price)
        draft = self.predictor.predict(limit, choose, estimator.add_guess)
        estimator.close(draft.tokens)
        probs = estimator.acceptance_probs
        if fixed_length and draft.tokens:
            probs = [estimator.estimate_undrawn(draft.match_lengths[0], draft.q[0], draft.context_counts[0])] * limit
        return Draft(draft.tokens, draft.q, draft.match_lengths, draft.context_counts, tuple(probs), self.name)

    def accept(self, tokens: Sequence[int]) -> int:
        self.predictor.update_batch(tokens)
        return self._estimator.record_outcome(tokens)
