"""`EntropyPolicy`: draft more the surer the models lately were. Knows nothing of what a pass costs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ngramspec.cost.curve import CostCurve
from ngramspec.drafting.draft import Draft
from ngramspec.policies.policy import Debt
from ngramspec.policies.simple import FixedPolicy
from ngramspec.sampling.entropy import normalised_entropy


class EntropyPolicy(FixedPolicy):
    """The surer the models lately were, the more is drafted: gamma from the entropy of their last distributions.

    Per pass, with z the logits that decided the token emitted last and n_vocab their number:

        h      = H(softmax(z)) / ln(n_vocab)                                0: certain, 1: all tokens alike
        h_mean = WEIGHT h + (1 - WEIGHT) h_mean                             an EMA; the first h as it is
        gamma  = gamma_min + (gamma_max - gamma_min) / n_vocab^h_mean       rounded to the nearest, half to even

    n_vocab^h = exp(H) is the perplexity: the number of equally likely tokens that would be as hard to guess. So
    certainty gives gamma_max, two even choices half of what lies between the bounds, ten a tenth. A gamma that falls
    linearly with h would hardly move: among 150,000 tokens ten even choices are an h of 0.19.

    A draft model's entropy counts in the same way, once a draft: that of its first token, known before any is drawn (so
    that rejection sampling stays exact). What the draft has beyond the gamma that follows is not sent.

    The record of every pass gives h_mean and gamma before its draft, as `entropy` and `gamma`. At the end of a text or
    a context, fewer than gamma tokens may have been asked for.

    The logits are taken at temperature 1 and unfiltered, whatever the sampling: the policy never decides on a token.

    Args:
        draft_max: gamma_max.
        gamma_min: 1 to `draft_max`.

    Raises:
        ValueError: `gamma_min` is out of its range.
    """

    name = "entropy"
    wants_logits = True

    WEIGHT = 0.5

    def __init__(self, draft_max: int = 16, gamma_min: int = 1) -> None:
        if not 1 <= gamma_min <= draft_max:
            raise ValueError(f"gamma_min is {gamma_min}, but must be 1 to draft_max, {draft_max}")
        super().__init__(draft_max)
        self._gamma = self._gamma_min = gamma_min
        self._entropy: float | None = None

    def see(self, row: NDArray[np.float32]) -> None:
        self._n_vocab = row.size
        self._learn(normalised_entropy(row))

    def plan(
        self, draft: Draft, curve: CostCurve | None, sizes: Sequence[int], debt: Debt | None = None
    ) -> tuple[int, int]:
        if draft.entropy is not None and self._entropy is not None:
            self._learn(draft.entropy())
        return super().plan(draft, curve, sizes, debt)

    def _learn(self, entropy: float) -> None:
        if not math.isfinite(entropy):
            return
        if self._entropy is not None:
            entropy = self.WEIGHT * entropy + (1 - self.WEIGHT) * self._entropy
        share = float(self._n_vocab) ** -entropy
        self._entropy = entropy
        self._gamma = round(self._gamma_min + (self._draft_max - self._gamma_min) * share)

    def explain(self) -> dict[str, float]:
        return {} if self._entropy is None else {"entropy": self._entropy, "gamma": self._gamma}

    def limit(self) -> int:
        return self._gamma
