"""Policies that look at no estimate and no cost: `fixed` and `heuristic`."""

from __future__ import annotations

from collections.abc import Sequence

from ngramspec.cost.curve import CostCurve
from ngramspec.drafting.draft import Draft
from ngramspec.drafting.price import TokenPrice
from ngramspec.policies.policy import Debt, Pass, Policy, smallest


class FixedPolicy(Policy):
    """Always as many as the drafter has, up to `draft_max`: what most peers do."""

    name = "fixed"

    DRAFT_MAX = 4

    def __init__(self, draft_max: int = DRAFT_MAX) -> None:
        self._draft_max = draft_max

    def begin(self) -> None:
        pass

    def limit(self) -> int:
        return self._draft_max

    def price(self, curve: CostCurve | None, sizes: Sequence[int]) -> TokenPrice | None:
        return None

    def plan(
        self, draft: Draft, curve: CostCurve | None, sizes: Sequence[int], debt: Debt | None = None
    ) -> tuple[int, int]:
        k = min(len(draft), self.limit(), sizes[-1] - 1)
        return k, smallest(1 + k, sizes)

    def record(self, done: Pass) -> None:
        pass


class HeuristicPolicy(FixedPolicy):
    """Two more after a draft that was accepted whole, one fewer after any other, between 1 and `draft_max`.

    The schedule of Hugging Face's assisted generation (`num_assistant_tokens_schedule="heuristic"`).
    """

    name = "heuristic"

    def __init__(self, draft_max: int = 16) -> None:
        super().__init__(draft_max)
        self._length = min(4, draft_max)

    def limit(self) -> int:
        return self._length

    def record(self, done: Pass) -> None:
        if not done.drafted:
            return
        step = 2 if len(done.tokens) == len(done.drafted) + 1 else -1
        self._length = max(1, min(self._draft_max, self._length + step))
