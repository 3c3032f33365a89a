"""What a policy is: it decides how many tokens to draft, and knows nothing about where drafts come from.

The loop says `begin()` once per request, and asks three times per pass: `limit()` before the drafter is asked,
`plan(draft, curve)` for what to send, and `record(done)` with the `Step` that came of it. `ngramspec.policies` lists
all policies by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ngramspec.cost.curve import CostCurve
from ngramspec.cost.measure import RestoreCost
from ngramspec.drafting.draft import Draft, MarginalCost
from ngramspec.steps import Step

Batches = Callable[[Sequence[int]], Sequence[int]]  # see `ngramspec.shared_model.SharedModel.batches`


class Policy(Protocol):
    """Decides on the length of each draft. One instance serves many requests."""

    name: str  # what it is called on the command line
    wants_logits: bool = False  # whether `observe_logits` is to be called

    def begin(self) -> None:
        """Start a request: what earlier ones taught stays."""
        return

    def limit(self) -> int:
        """How many tokens to ask the drafter for; 0 spares the asking."""

    def price(self, curve: CostCurve | None, sizes: Sequence[int]) -> MarginalCost | None:
        """What the drafter should know of costs before it drafts; None where costs do not matter."""
        return None

    def plan(
        self, draft: Draft, curve: CostCurve | None, sizes: Sequence[int], restore: RestoreCost | None = None
    ) -> tuple[int, int]:
        """How many draft tokens to send, and in a batch of what size: at least one larger, padded if it is more.

        Args:
            draft: what the drafter proposed.
            curve: cost of a pass by size; None when nobody measured.
            sizes: batch sizes that may be used, ascending.
            restore: what taking the draft back would cost; None where it costs nothing.
        """

    def shared(self, texts: int) -> Policy:
        """The policy for passes that so many texts share."""
        return self

    def plan_together(
        self, drafts: Sequence[Draft], curve: CostCurve, sizes: Sequence[int], batches: Batches
    ) -> list[tuple[int, int]]:
        """`plan` for texts that share a pass: (draft tokens, batch size) of each; no drafts unless a policy says so."""
        return [(0, 1)] * len(drafts)

    def record(self, done: Step) -> None:
        """Learn from a pass; of several texts, what they did together, `plain_seconds` of a token being T(n) / n."""
        return

    def observe_logits(self, row: NDArray[np.float32]) -> None:
        """Learn from the logits that decided the token emitted last, after the prefill and each pass.

        Of shape (n_vocab,), valid during the call alone, not to be written to, and unchecked: nan and inf may occur.
        """
        return

    def explain(self) -> dict[str, float]:
        """The numbers behind the next decision, by name, for the record of its pass; empty where there are none."""
        return {}


class FixedPolicy(Policy):
    """Always as many as the drafter has, up to `draft_max`: what most peers do."""

    name = "fixed"

    DRAFT_MAX = 4

    def __init__(self, draft_max: int = DRAFT_MAX) -> None:
        self._draft_max = draft_max

    def limit(self) -> int:
        return self._draft_max

    def plan(
        self, draft: Draft, curve: CostCurve | None, sizes: Sequence[int], restore: RestoreCost | None = None
    ) -> tuple[int, int]:
        k = min(len(draft), self.limit(), sizes[-1] - 1)
        return k, smallest(1 + k, sizes)


def smallest(needed: int, sizes: Sequence[int]) -> int:
    """The smallest allowed batch size that holds `needed` tokens."""
    return next(n for n in sizes if n >= needed)
