"""Published policies for comparison: `heuristic`, `entropy` and `threshold`. They ignore the cost of a decode call."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ngramspec.cost.times import PassTimes, RestoreCost
from ngramspec.drafting.draft import Draft, MarginalCost
from ngramspec.policies.policy import FixedPolicy, verify_up_to
from ngramspec.sampling.distribution import entropy_ratio
from ngramspec.steps import Step


class HeuristicPolicy(FixedPolicy):
    """Drafts two tokens more after a draft that was accepted entirely, and one fewer after any other.

    This is `num_assistant_tokens_schedule="heuristic"` of Hugging Face's assisted generation.
    """

    name = "heuristic"

    def __init__(self, draft_max: int = 16) -> None:
        super().__init__(draft_max)
        self._length = min(4, draft_max)

    def limit(self) -> int:
        return self._length

    def record(self, done: Step) -> None:
        if not done.drafted:
            return
        step = 2 if len(done.tokens) == len(done.drafted) + 1 else -1
        self._length = max(1, min(self._draft_max, self._length + step))


class EntropyPolicy(FixedPolicy):
    """Drafts more tokens when the entropy of the models' recent distributions is low.

    For each decode call, with z the logits that decided the last emitted token and n_vocab their number:

        h      = H(softmax(z)) / ln(n_vocab)                                0: certain, 1: all tokens equally likely
        h_mean = WEIGHT h + (1 - WEIGHT) h_mean                             an EMA, which starts with the first h
        gamma  = 1 + (draft_max - 1) / n_vocab^h_mean                       rounded to the nearest, half to even

    n_vocab^h = exp(H) is the perplexity. Certainty gives gamma = draft_max, and two equally likely tokens half of the
    range above 1. The entropy of a draft model is included in the same way, once per draft: that of the first token,
    known before any token is drawn, so that rejection sampling stays exact. The logits are used unfiltered and at
    temperature 1 for any sampling.
    """

    name = "entropy"
    wants_logits = True
    WEIGHT = 0.5

    def __init__(self, draft_max: int = 16) -> None:
        super().__init__(draft_max)
        self._gamma, self._entropy = 1, math.nan  # until the first logits
        self._details: Mapping[str, float] = {}  # numbers that determined the last `limit`

    def observe_logits(self, row: NDArray[np.float32]) -> None:
        self._n_vocab = row.size
        self._learn(entropy_ratio(row))

    def plan(
        self, draft: Draft, times: PassTimes | None, sizes: Sequence[int], restore: RestoreCost | None = None
    ) -> tuple[int, int]:
        if draft.entropy is not None and not math.isnan(self._entropy):
            self._learn(draft.entropy())
        return verify_up_to(self._gamma, draft, sizes)

    def _learn(self, entropy: float) -> None:
        if not math.isfinite(entropy):
            return
        if not math.isnan(self._entropy):
            entropy = self.WEIGHT * entropy + (1 - self.WEIGHT) * self._entropy
        self._entropy = entropy
        self._gamma = round(1 + (self._draft_max - 1) * float(self._n_vocab) ** -entropy)

    def limit(self) -> int:
        self._details = {} if math.isnan(self._entropy) else {"entropy": self._entropy, "gamma": self._gamma}
        return self._gamma

    def record(self, done: Step) -> None:
        done.policy_details = self._details


class ThresholdPolicy(FixedPolicy):
    """Drafts while the drafter's confidence is above an adaptive threshold.

    The confidence in a position is the estimated probability that it is accepted: the product of
    `Draft.acceptance_probs` up to it. The draft ends before the first position whose confidence is below the threshold,
    or after `draft_max`. After each decode call the threshold

        rises   by the factor e^(STEP EDGE)            if a verified token was rejected,
        falls   by the factor e^(-STEP (1 - EDGE))     if all were accepted, and the next proposed token, which was
                                                       not verified, would have been right,
        stays                                          otherwise, because no outcome shows a wrong length.

    Rises and falls balance when the last verified token and the first one after it are right with probability EDGE,
    whether estimates are good or bad. Right guesses that were not verified count too, so the threshold falls even while
    no draft is verified. It stays between LOW and HIGH.

    Draft & Verify (Zhang et al. 2023, arXiv 2309.08168) and AdaEDL (Agrawal et al. 2024, arXiv 2410.18351) adapt such
    a threshold towards an acceptance rate.
    """

    name = "threshold"
    START, LOW, HIGH = 0.4, 0.01, 0.95
    STEP, EDGE = 0.1, 1 / 3

    def __init__(self, draft_max: int = 16) -> None:
        super().__init__(draft_max)
        self.threshold = self.START
        self._slopes = array("d", [1.0]) * (draft_max + 1)

    def price(self, times: PassTimes | None, sizes: Sequence[int]) -> MarginalCost | None:
        # The drafter continues to the first token below the threshold, because `record` learns from its outcome.
        return MarginalCost(self.threshold, self._slopes)

    def plan(
        self, draft: Draft, times: PassTimes | None, sizes: Sequence[int], restore: RestoreCost | None = None
    ) -> tuple[int, int]:
        length, reach = self._draft_max, 1.0
        for k, p in enumerate(draft.acceptance_probs[:length]):
            reach *= p
            if reach < self.threshold:
                length = k
                break
        return verify_up_to(length, draft, sizes)

    def record(self, done: Step) -> None:
        if len(done.tokens) <= len(done.drafted):
            change = self.STEP * self.EDGE
        elif done.correct_guesses > len(done.drafted):
            change = -self.STEP * (1 - self.EDGE)
        else:
            return
        self.threshold = min(self.HIGH, max(self.LOW, self.threshold * math.exp(change)))
