"""What a policy is: it decides how many tokens to draft, and knows nothing about where drafts come from.

The loop says `begin()` once per request, and asks three times per pass: `limit()` before the drafter is asked,
`plan(draft, curve)` for what to send, and `record(...)` with what came of it. `ngramspec.policies` has all by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ngramspec.cost.curve import CostCurve
from ngramspec.drafting.draft import Draft
from ngramspec.drafting.price import TokenPrice


class Pass(NamedTuple):
    """One target pass as a policy sees it.

    Attributes:
        emitted: tokens it yielded (accepted + 1).
        drafted: draft tokens in its batch.
        guessed: tokens of the drafter's proposal that were right, sent or not.
        seconds: of the target pass, without an interruption by the system (see `CostCurve.undisturbed`).
        draft_seconds: spent on asking the drafter, and on what lets a refused draft be taken back.
        plain_seconds: what a pass without a draft costs now; 0 when nobody measured.
    """

    emitted: int
    drafted: int
    guessed: int
    seconds: float
    draft_seconds: float
    plain_seconds: float


class Debt(NamedTuple):
    """What drafts cost beside their pass where a refusal means evaluating tokens again.

    Attributes:
        owed: tokens that the next pass evaluates again whatever it holds.
        save: seconds of the checkpoint that a draft needs; 0 where there is one.
        restore: seconds of going back to it.
    """

    owed: int
    save: float
    restore: float


class Policy(Protocol):
    """Decides on the length of each draft. One instance serves many requests."""

    name: str

    def begin(self) -> None:
        """Start a request: what earlier ones taught stays."""

    def limit(self) -> int:
        """How many tokens to ask the drafter for; 0 spares the asking."""

    def price(self, curve: CostCurve | None, sizes: Sequence[int]) -> TokenPrice | None:
        """What the drafter should know of costs before it drafts; None where costs do not matter."""

    def plan(
        self, draft: Draft, curve: CostCurve | None, sizes: Sequence[int], debt: Debt | None = None
    ) -> tuple[int, int]:
        """(draft tokens to send, batch size): the batch is at least one larger and padded where it is more.

        Args:
            draft: what the drafter proposed.
            curve: cost of a pass by size; None when nobody measured.
            sizes: batch sizes that may be used, ascending.
            debt: what taking the draft back would cost; None where it costs nothing.
        """

    def record(self, done: Pass) -> None:
        """Learn from a pass."""


class Gauge(NamedTuple):
    """What a policy that reads logits made of them.

    Attributes:
        entropy: of the target's law of the next token, normalised (0: certain, 1: all tokens alike) and smoothed.
        gamma: most tokens to draft in view of it.
    """

    entropy: float
    gamma: int


@runtime_checkable
class ReadsRow(Protocol):
    """What a `Policy` is besides if it looks at the target's logits; the loop asks once per request."""

    @property
    def gauge(self) -> Gauge | None:
        """What holds now; None before any row was seen."""

    def see(self, row: NDArray[np.float32]) -> None:
        """The logits that decided the token emitted last, of shape (n_vocab,); called after the prefill and each pass.

        Valid during the call alone, not to be written to, and unchecked: nan and inf may be among them.
        """


def smallest(needed: int, sizes: Sequence[int]) -> int:
    """The smallest allowed batch size that holds `needed` tokens."""
    return next(n for n in sizes if n >= needed)
