"""`DraftBudget`: how much to draft where several texts share a pass. One budget a pass, for which their drafts compete.

Plain decoding of several texts is cheaper per token than of one, and a batch that is larger already has less room for
drafts, so each number of texts has an account of its own: drafting must pay against what *that* many texts would take
without.
"""

from __future__ import annotations

from collections.abc import Sequence

from ngramspec.cost.curve import CostCurve
from ngramspec.drafting.draft import Draft
from ngramspec.drafting.price import TokenPrice
from ngramspec.policies.cost_aware import Batches, CostPolicy
from ngramspec.policies.policy import Debt, Pass


class DraftBudget:
    """A `CostPolicy` for each number of texts.

    Args:
        draft_max: most tokens in a draft.
    """

    def __init__(self, draft_max: int = 63) -> None:
        self._draft_max = draft_max
        self._policies: dict[int, CostPolicy] = {}

    def _of(self, texts: int) -> CostPolicy:
        if texts not in self._policies:
            self._policies[texts] = CostPolicy(self._draft_max, texts)
        return self._policies[texts]

    def begin(self) -> None:
        """A text begins: it may lose little of what others gained."""
        for policy in self._policies.values():
            policy.begin()

    def limit(self, texts: int) -> int:
        """How many tokens to ask each drafter for; 0 spares the asking."""
        return self._of(texts).limit()

    def price(self, texts: int, curve: CostCurve, sizes: Sequence[int]) -> TokenPrice | None:
        """What a drafter should know of costs before it drafts."""
        return self._of(texts).price(curve, sizes)

    def plan(
        self,
        drafts: Sequence[Draft],
        curve: CostCurve,
        sizes: Sequence[int],
        batches: Batches,
        debt: Debt | None = None,
    ) -> list[tuple[int, int]]:
        """(draft tokens to send, batch size) of each text; see `CostPolicy.plan_together`.

        Args:
            drafts, curve, sizes, batches: as there.
            debt: as in `Policy.plan`, which decides for a text that is alone.
        """
        policy = self._of(len(drafts))
        if len(drafts) == 1:
            return [policy.plan(drafts[0], curve, sizes, debt)]
        return policy.plan_together(drafts, curve, sizes, batches)

    def record(self, texts: int, done: Pass) -> None:
        """Learn from a pass, whose tokens, drafts and seconds are those of all texts together.

        Its `plain_seconds` are those of one token: T(texts) / texts.
        """
        self._of(texts).record(done)
