"""`ThresholdPolicy`: draft while the drafter is sure enough. Knows nothing of what a pass costs."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

from ngramspec.cost.curve import CostCurve
from ngramspec.drafting.draft import Draft
from ngramspec.drafting.price import TokenPrice
from ngramspec.policies.policy import Debt, Pass, smallest
from ngramspec.policies.simple import FixedPolicy


class ThresholdPolicy(FixedPolicy):
    """Draft while the drafter is sure enough, by a threshold that adapts.

    The confidence in a position is the drafter's estimate that it will be emitted if it is sent: the product of
    `Draft.chances` up to it. The draft ends before the first position whose confidence is below the threshold, or
    after `draft_max`. After each pass the threshold

        rises   by the factor e^(STEP EDGE)            if a token that was sent was refused,
        falls   by the factor e^(-STEP (1 - EDGE))     if all were accepted, and the next that was proposed, but not
                                                       sent, would have been right,
        stays                                          else: nothing says that the draft had a wrong length.

    Rises and falls balance where the last token that is sent and the first that is not are right with probability
    EDGE: there, drafts end at the right place on average. It is this observed frequency that is held at EDGE, however
    good the drafter's estimates are: a drafter that is too sure of itself gets a higher threshold. Since a right guess
    that was not sent counts, the threshold falls even while nothing is sent. It stays between LOW and HIGH.

    The end of a draft depends on nothing but the estimates and earlier passes: rejection sampling needs that (see
    `blind` in `Drafter.propose`).

    Prior art: assisted generation in Hugging Face's transformers stops drafting at the first token that the draft
    model gives less than `assistant_confidence_threshold` (0.4, a constant, per token); Draft & Verify (Zhang et al.
    2023, arXiv 2309.08168) and AdaEDL (Agrawal et al. 2024, arXiv 2410.18351) adapt such a threshold towards an
    acceptance rate.
    """

    name = "threshold"

    START = 0.4
    LOW, HIGH = 0.01, 0.95
    STEP = 0.1
    EDGE = 1 / 3

    def __init__(self, draft_max: int = 16) -> None:
        super().__init__(draft_max)
        self.threshold = self.START
        self._slopes = array("d", [1.0]) * (draft_max + 1)

    def price(self, curve: CostCurve | None, sizes: Sequence[int]) -> TokenPrice | None:
        # The drafter goes on to the first token below the threshold: whether that one was right is learnt from.
        return TokenPrice(self.threshold, self._slopes)

    def plan(
        self, draft: Draft, curve: CostCurve | None, sizes: Sequence[int], debt: Debt | None = None
    ) -> tuple[int, int]:
        most = min(len(draft), self.limit(), sizes[-1] - 1)
        reach = 1.0
        for k, p in enumerate(draft.chances[:most]):
            reach *= p
            if reach < self.threshold:
                most = k
                break
        return most, smallest(1 + most, sizes)

    def record(self, done: Pass) -> None:
        if len(done.tokens) <= len(done.drafted):
            change = self.STEP * self.EDGE
        elif done.guessed > len(done.drafted):
            change = -self.STEP * (1 - self.EDGE)
        else:
            return
        self.threshold = min(self.HIGH, max(self.LOW, self.threshold * math.exp(change)))
