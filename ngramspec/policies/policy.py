"""The interface of policies, which choose the draft length, and `FixedPolicy`, the simplest one.

The loop calls `begin()` once per request, and four methods per decode call: `limit()` and `price(times, sizes)` before
it calls the drafter, which ends its proposal by both, `plan(draft, times, sizes)` for the number of proposed tokens to
verify, and `record(done)` with the resulting `Step`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ngramspec.cost.times import PassTimes, RestoreCost
from ngramspec.drafting.draft import Draft, MarginalCost
from ngramspec.steps import Step


class Policy(ABC):
    """Chooses the length of each draft. One instance serves many requests.

    Only `limit` is required; the other methods have defaults.
    """

    name: str = ""  # name on the command line
    wants_logits: bool = False  # True to receive logits in `observe_logits`

    def begin(self) -> None:
        """Start a request; what was learned from earlier ones stays."""
        return

    @abstractmethod
    def limit(self) -> int:
        """Return the maximum number of tokens to request from the drafter; 0 means not to call it."""

    def price(self, times: PassTimes | None, sizes: Sequence[int]) -> MarginalCost | None:
        """Return the price of a draft token for the drafter; `None` means that a draft may be as long as `limit`."""
        return None

    def plan(
        self, draft: Draft, times: PassTimes | None, sizes: Sequence[int], restore: RestoreCost | None = None
    ) -> tuple[int, int]:
        """Return the number of draft tokens to verify, and the batch size: at least one more, padded if larger.

        By default the whole draft is verified, up to `limit`.

        Args:
            draft: The drafter's proposal.
            times: Cost of a decode call by its size; `None` if it is not known.
            sizes: Allowed batch sizes, ascending.
            restore: Cost of a rollback; `None` if it is free.
        """
        return verify_up_to(self.limit(), draft, sizes)

    def record(self, done: Step) -> None:
        """Learn from a decode call; may store the numbers that decided its length in `done.policy_details`."""
        return

    def observe_logits(self, row: NDArray[np.float32]) -> None:
        """Learn from the logits that decided the last emitted token, after the prefill and after each decode call.

        Args:
            row: Logits of shape (n_vocab,). Valid only during the call, read-only, and unchecked: nan and inf may
                occur.
        """
        return


class FixedPolicy(Policy):
    """Always drafts as many tokens as the drafter has, up to `draft_max`."""

    name = "fixed"

    DRAFT_MAX = 4

    def __init__(self, draft_max: int = DRAFT_MAX) -> None:
        self._draft_max = draft_max

    def limit(self) -> int:
        return self._draft_max

    def plan(
        self, draft: Draft, times: PassTimes | None, sizes: Sequence[int], restore: RestoreCost | None = None
    ) -> tuple[int, int]:
        return verify_up_to(self._draft_max, draft, sizes)  # one call fewer in each pass than `Policy.plan`


def verify_up_to(limit: int, draft: Draft, sizes: Sequence[int]) -> tuple[int, int]:
    """Return the plan that verifies at most `limit` tokens of a draft in the smallest possible batch."""
    length = min(len(draft), limit, sizes[-1] - 1)
    return length, smallest(1 + length, sizes)


def smallest(n_tokens: int, sizes: Sequence[int]) -> int:
    """Return the smallest allowed batch size for `n_tokens` tokens."""
    for size in sizes:
        if size >= n_tokens:
            return size
    raise ValueError(f"no allowed batch size holds {n_tokens} tokens")
