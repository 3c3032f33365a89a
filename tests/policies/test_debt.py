"""How much to draft where a refusal means evaluating the pass again, in front of the next one."""

from __future__ import annotations

import itertools
import random

import pytest
from support.passes import Rich

from ngramspec.cost.curve import CostCurve
from ngramspec.drafting.draft import Draft
from ngramspec.policies.policy import Debt

SIZES = range(1, 65)


def draft(acceptance: list[float]) -> Draft:
    return Draft(tuple(range(len(acceptance))), chances=tuple(acceptance))


def curve(slope: float) -> CostCurve:
    return CostCurve({1: 1.0, 64: 1 + 63 * slope})


def worth_of(k: int, acceptance: list[float], t: CostCurve, debt: Debt) -> float:
    """Tokens less seconds, by going through everything that may be refused; a second is worth a token."""
    value = 0.0
    for outcome in itertools.product((True, False), repeat=k):
        p = 1.0
        for right, a in zip(outcome, acceptance, strict=False):
            p *= a if right else 1 - a
        accepted = next((i for i, right in enumerate(outcome) if not right), k)
        seconds = t.ratio(debt.owed + 1 + k) + (debt.save if k else 0.0)
        if accepted < k:
            seconds += debt.restore + t.ratio(debt.owed + accepted + 2) - t.ratio(1)
        value += p * (1 + accepted - seconds)
    return value


@pytest.mark.parametrize("seed", range(30))
def test_the_length_is_the_best_of_all(seed: int) -> None:
    rng = random.Random(seed)
    acceptance = [rng.random() ** 0.3 for _ in range(6)]
    t = curve(rng.choice((0.02, 0.1, 0.4)))
    debt = Debt(rng.choice((0, 0, 3, 20)), rng.choice((0.0, 0.1, 0.5)), rng.choice((0.0, 0.1)))
    best = max(range(7), key=lambda k: worth_of(k, acceptance, t, debt))
    assert Rich().plan(draft(acceptance), t, SIZES, debt) == (best, 1 + best)


def test_a_refusal_costs() -> None:
    t, acceptance = curve(0.4), [0.7] * 8
    free, _ = Rich().plan(draft(acceptance), t, SIZES)
    cheap, _ = Rich().plan(draft(acceptance), t, SIZES, Debt(0, 0.0, 0.0))
    dear, _ = Rich().plan(draft(acceptance), t, SIZES, Debt(0, 0.5, 0.5))
    assert free > cheap >= dear == 0


def test_no_pass_is_larger_than_the_largest() -> None:
    k, size = Rich().plan(draft([0.99] * 60), curve(0.01), SIZES, Debt(40, 0.0, 0.0))
    assert size == 1 + k
    assert 40 + size <= 64
