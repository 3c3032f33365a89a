"""The policies for the draft length by name. `ngramspec.policies.policy` defines the interface."""

from __future__ import annotations

from collections.abc import Callable

from ngramspec import leaves
from ngramspec.data import CLASS_FORM, is_user_class
from ngramspec.policies.baselines import EntropyPolicy, HeuristicPolicy, ThresholdPolicy
from ngramspec.policies.cost import CostPolicy
from ngramspec.policies.policy import FixedPolicy, Policy

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
        raise ValueError(f"unknown policy {name!r}; choose one of: {', '.join(POLICIES)}, or {CLASS_FORM}")
    if draft_max is not None and draft_max < 1:
        raise ValueError(f"draft_max must be at least 1, got {draft_max}")
    if is_user_class(name):
        return leaves.UserPolicy(name, draft_max)
    return POLICIES[name]() if draft_max is None else POLICIES[name](draft_max)
