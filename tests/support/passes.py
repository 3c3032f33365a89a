"""Helpers for tests of policies: drafts, records of passes, a policy with an unlimited loss budget, and brute force."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ngramspec.cost.times import PassTimes
from ngramspec.drafting.draft import Draft, MarginalCost
from ngramspec.policies.cost import CostPolicy
from ngramspec.steps import Step


class UnlimitedPolicy(CostPolicy):
    """Policy that can afford to lose any draft."""

    def __init__(self, draft_max: int = 63, texts: int = 1) -> None:
        super().__init__(draft_max, texts)
        self._budget.CREDIT = 1e6


def draft(chances: Sequence[float], length: int | None = None) -> Draft:
    """Return a draft with these estimates; its length may differ from theirs, as in drafts made without logits."""
    n = len(chances) if length is None else length
    return Draft((7,) * n, ({7: 1.0},) * n, (3,) * n, (5,) * n, tuple(chances), "ngram")


def propose(draft: Draft, limit: int, price: MarginalCost | None) -> Draft:
    """Return the beginning of a draft that a drafter proposes at a price."""
    assert price is not None
    length, reach = 0, 1.0
    while length < min(limit, len(draft)) and price.worth_extending(reach, length):
        reach *= draft.acceptance_probs[length]
        length += 1
    return draft.head(length)


def values_of(chances: Sequence[float], costs: Sequence[float], rate: float, max_cost: float = math.inf) -> list[float]:
    """Return by brute force, for each draft length k, the value of a pass and of the next passes along the chain.

    It is E[tokens(k)] - rate * T(1 + k), plus the value of the next passes, whose drafts cost at most `max_cost`.
    """
    values: list[float] = []
    later = [0.0, 0.0]  # after the whole chain, and after one token less
    for begin in range(max(0, len(chances) - 1), -1, -1):
        chain = chances[begin:]
        values = [
            1 + sum(math.prod(chain[:j]) for j in range(1, k + 1)) - rate * cost + math.prod(chain[: k + 1]) * later[~k]
            for k, cost in enumerate(costs[: len(chain) + 1])
        ]
        later.append(max(value for k, value in enumerate(values) if not k or costs[k] <= max_cost))
    return values


def known(points: Mapping[int, float], switch: float = 0.0) -> PassTimes:
    """Return times with known costs, in any unit."""
    unit = points[1]
    return PassTimes({n: cost / unit for n, cost in points.items()}, (switch / unit, 0.0), is_fixed=True)


def make_step(n_emitted: int, n_drafted: int, n_guessed: int, cost: float, draft_cost: float) -> Step:
    """Return the record of a pass with these numbers of drafted and emitted tokens; their ids are arbitrary."""
    return Step(
        (7,) * n_emitted,
        drafted=(7,) * n_drafted,
        accepted=min(n_emitted - 1, n_drafted),
        correct_guesses=n_guessed,
        batch=1 + n_drafted,
        cost=cost,
        draft_cost=draft_cost,
    )
