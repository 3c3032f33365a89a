"""Helpers for tests of policies: drafts, records of passes, and a policy with an unlimited loss budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ngramspec.cost.times import PassTimes
from ngramspec.drafting.draft import Draft
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


def known(points: Mapping[int, float], switch: float = 0.0, capture: float = 0.0) -> PassTimes:
    """Return times with known costs, in any unit."""
    unit = points[1]
    return PassTimes({n: cost / unit for n, cost in points.items()}, (switch / unit, capture / unit), is_fixed=True)


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
