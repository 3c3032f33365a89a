"""The policies for the draft length by name, and `UserPolicy`. `ngramspec.policies.policy` defines the interface."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ngramspec.cost.times import PassTimes, RestoreCost
from ngramspec.drafting.draft import Draft, MarginalCost
from ngramspec.policies.baselines import EntropyPolicy, HeuristicPolicy, ThresholdPolicy
from ngramspec.policies.cost import CostPolicy
from ngramspec.policies.policy import FixedPolicy, Policy, smallest
from ngramspec.steps import Step
from ngramspec.user_class import FORM, UserCodeError, construct, is_user_class, load_class, user_code

POLICIES: dict[str, Callable[..., Policy]] = {
    "fixed": FixedPolicy,
    "heuristic": HeuristicPolicy,
    "entropy": EntropyPolicy,
    "threshold": ThresholdPolicy,
    "cost": CostPolicy,
}


def make_policy(name: str, draft_max: int | None = None) -> Policy:
    """Create a policy by its name in `POLICIES`, or from the user's class as FILE.py:Class, whose file is run.

    A ValueError means that the name is unknown, or `draft_max` is below 1; a UserCodeError that the user's class cannot
    be used.
    """
    if name not in POLICIES and not is_user_class(name):
        raise ValueError(f"unknown policy {name!r}; choose one of: {', '.join(POLICIES)}, or {FORM}")
    if draft_max is not None and draft_max < 1:
        raise ValueError(f"draft_max must be at least 1, got {draft_max}")
    if is_user_class(name):
        return UserPolicy(name, draft_max)
    return POLICIES[name]() if draft_max is None else POLICIES[name](draft_max)


class UserPolicy(Policy):
    """A policy from a user's file (`--policy FILE.py:Class`), whose plans are limited to possible ones.

    Any failure of its code is a UserCodeError.
    """

    def __init__(self, name: str, draft_max: int | None = None) -> None:
        self.name = name
        arguments = {} if draft_max is None else {"draft_max": draft_max}
        self._user = construct(name, load_class(name, Policy), arguments)
        self.wants_logits = bool(self._user.wants_logits)

    def begin(self) -> None:
        with user_code(self.name):
            self._user.begin()

    def limit(self) -> int:
        with user_code(self.name):
            limit = self._user.limit()
            return max(0, self._to_int(limit, f"limit must return an integer, not {limit!r}"))

    def price(self, times: PassTimes | None, sizes: Sequence[int]) -> MarginalCost | None:
        with user_code(self.name):
            price = self._user.price(times, sizes)
        if price is not None and not (isinstance(price, MarginalCost) and len(price.slopes) > 1):
            raise UserCodeError(f"{self.name}: price must return None or a MarginalCost with at least two slopes")
        return price

    def plan(
        self, draft: Draft, times: PassTimes | None, sizes: Sequence[int], restore: RestoreCost | None = None
    ) -> tuple[int, int]:
        wrong = "plan must return two integers (draft tokens, batch size), not "
        with user_code(self.name):
            plan = self._user.plan(draft, times, sizes, restore)
            if not isinstance(plan, tuple) or len(plan) != 2:
                raise UserCodeError(f"{self.name}: {wrong}{plan!r}")
            length, size = (self._to_int(number, f"{wrong}{plan!r}") for number in plan)
        length = max(0, min(length, len(draft), sizes[-1] - 1))
        return length, smallest(min(max(1 + length, size), sizes[-1]), sizes)

    def record(self, done: Step) -> None:
        with user_code(self.name):
            copy = replace(done)  # the copy prevents user code from changing the record
            self._user.record(copy)
            done.policy_details = {str(name): float(number) for name, number in copy.policy_details.items()}

    def observe_logits(self, row: NDArray[np.float32]) -> None:
        row = row.view()
        row.flags.writeable = False
        with user_code(self.name):
            self._user.observe_logits(row)

    def _to_int(self, number: object, wrong: str) -> int:
        try:
            return operator.index(number)  # type: ignore[arg-type]
        except TypeError:
            raise UserCodeError(f"{self.name}: {wrong}") from None
