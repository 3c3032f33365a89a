"""What a policy is: it decides how many tokens to draft, and knows nothing about where drafts come from.

The loop says `begin()` once per request, and asks three times per pass: `limit()` before the drafter is asked,
`plan(draft, curve)` for what to send, and `record(done)` with the `Pass` that came of it. `ngramspec.policies` lists
all policies by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ngramspec.cost.curve import CostCurve
from ngramspec.drafting.draft import Draft, Question
from ngramspec.drafting.price import TokenPrice


@dataclass(slots=True)
class Pass:
    """The record of one target pass, or of the prefill and the token it yields (`batch` 0).

    It is filled in while the pass is made. Policies and readers of steps find it complete, and must not change it.

    Attributes:
        tokens: token ids emitted, in order; the last is the target's own, those before it were drafted.
        drafted: token ids sent as a draft.
        accepted: how many of them were emitted.
        guessed: how many tokens of the drafter's proposal were right, sent or not.
        batch: tokens in the pass, padding, questions and tokens that were evaluated again included.
        seconds: of the target pass (of the whole prefill at the first step).
        disturbed: how many of them an interruption by the system added (see `CostCurve.undisturbed`).
        draft_seconds: spent on asking the drafter, and on being able to take a refused draft back.
        plain_seconds: what a pass without a draft costs now; 0 when that was not measured.
        elapsed: seconds since the step before, on the wall: choosing tokens, grammar, and what a reader of the steps
            did in between are in it; 0 at the first step, and where nobody took the time.
        source: the drafter, or "" without a draft.
        close_calls: tokens that rounding could have decided otherwise than in undrafted decoding (see
            `ngramspec.exactness.close_calls`), where `exact="auto"` did not take settings that rule it out.
        explained: what the policy told of its decision; see `Policy.explain`.
    """

    tokens: tuple[int, ...]
    _: KW_ONLY
    drafted: tuple[int, ...] = ()
    accepted: int = 0
    guessed: int = 0
    batch: int = 0
    seconds: float = 0.0
    disturbed: float = 0.0
    draft_seconds: float = 0.0
    plain_seconds: float = 0.0
    elapsed: float = 0.0
    source: str = ""
    close_calls: int = 0
    explained: Mapping[str, float] = field(default_factory=dict)

    @property
    def refused(self) -> tuple[int, ...]:
        """Draft tokens that were not emitted."""
        return self.drafted[self.accepted :]


class Debt(NamedTuple):
    """What a draft costs in addition to its pass, where a refusal means evaluating tokens again.

    Attributes:
        owed: tokens that the next pass evaluates again, whether it holds a draft or not.
        save: seconds of the checkpoint that a draft needs; 0 where there is one already.
        restore: seconds of going back to it.
    """

    owed: int
    save: float
    restore: float


class Policy(Protocol):
    """Decides on the length of each draft. One instance serves many requests.

    Attributes:
        name: what it is called on the command line.
        wants_logits: whether `see` is to be called.
    """

    name: str
    wants_logits: bool = False

    def begin(self) -> None:
        """Start a request: what earlier ones taught stays."""

    def limit(self) -> int:
        """How many tokens to ask the drafter for; 0 spares the asking."""

    def price(self, curve: CostCurve | None, sizes: Sequence[int]) -> TokenPrice | None:
        """What the drafter should know of costs before it drafts; None where costs do not matter."""

    def plan(
        self, draft: Draft, curve: CostCurve | None, sizes: Sequence[int], debt: Debt | None = None
    ) -> tuple[int, int]:
        """How many draft tokens to send, and in a batch of what size: at least one larger, padded if it is more.

        Args:
            draft: what the drafter proposed.
            curve: cost of a pass by size; None when nobody measured.
            sizes: batch sizes that may be used, ascending.
            debt: what taking the draft back would cost; None where it costs nothing.
        """

    def ask(
        self, questions: Sequence[Question], length: int, size: int, curve: CostCurve | None, sizes: Sequence[int]
    ) -> tuple[int, int]:
        """How many questions to send beside a draft, and in a batch of what size then.

        Args:
            questions: see `ngramspec.drafting.draft.Question`; the first ones are sent.
            length: draft tokens that are sent.
            size: of the batch without questions.
            curve, sizes: as in `plan`.
        """
        return 0, size

    def record(self, done: Pass) -> None:
        """Learn from a pass."""

    def see(self, row: NDArray[np.float32]) -> None:
        """Learn from the logits that decided the token emitted last, after the prefill and each pass.

        Args:
            row: of shape (n_vocab,). Valid during the call alone, not to be written to, and unchecked: nan and inf
                may be among them.
        """
        return

    def explain(self) -> dict[str, float]:
        """The numbers behind the next decision, by name, for the record of its pass; empty where there are none."""
        return {}


def smallest(needed: int, sizes: Sequence[int]) -> int:
    """The smallest allowed batch size that holds `needed` tokens."""
    return next(n for n in sizes if n >= needed)
