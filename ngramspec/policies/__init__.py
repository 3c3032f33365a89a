"""How many tokens to draft: the policies by name. What a policy is: see `ngramspec.policies.policy`."""

from __future__ import annotations

from collections.abc import Callable

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
    """A policy by name, with its own default for `draft_max` unless one is given.

    Raises:
        ValueError: an unknown name, or a `draft_max` below 1.
    """
    if name not in POLICIES:
        raise ValueError(f"unknown policy {name!r}; choose one of: {', '.join(POLICIES)}")
    if draft_max is None:
        return POLICIES[name]()
    if draft_max < 1:
        raise ValueError(f"draft_max must be at least 1, got {draft_max}")
    return POLICIES[name](draft_max)
