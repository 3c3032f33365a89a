"""What a draft is worth with the passes after it: against all ways to cut a chain into passes."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence

import pytest
from support.passes import Rich

from ngramspec.cost.curve import CostCurve
from ngramspec.drafting.draft import Draft
from ngramspec.policies.outlook import Outlook

COPY = [0.6] + [0.97] * 30
"""It is not clear whether a copy begins; if one does, it goes on."""


def cuts(n: int) -> Iterator[list[int]]:
    """All lists of draft lengths by which passes may go through a chain of n guesses, each adding a token."""
    for k in range(n + 1):
        if n - k - 1 <= 0:
            yield [k]
        else:
            yield from ([k, *rest] for rest in cuts(n - k - 1))


def worth_of(lengths: Sequence[int], chances: Sequence[float], times: Sequence[float], worth: float) -> float:
    """Tokens less time, by going through every place at which the chain may go wrong."""
    total = 0.0
    for wrong in range(len(chances) + 1):
        at, value = 0, 0.0
        for k in lengths:
            right = min(k, wrong - at)
            value += 1 + right - worth * times[k]
            at += right + 1
            if at > min(wrong, len(chances) - 1):
                break
        total += math.prod(chances[:wrong]) * (1 - chances[wrong] if wrong < len(chances) else 1.0) * value
    return total


@pytest.mark.parametrize("seed", range(40))
def test_no_way_to_cut_a_chain_is_better(seed: int) -> None:
    rng = random.Random(seed)
    chances = [rng.random() ** 0.4 for _ in range(rng.randrange(1, 8))]
    times = [1.0, *(rng.uniform(0.8, 5.0) for _ in chances)]
    worth = rng.uniform(0.5, 2.0)
    outlook = Outlook()
    longest = outlook.read(chances, [(n, times[n - 1] if n else 0.0) for n in range(len(times) + 1)], worth, math.inf)
    assert longest == len(chances)
    for k in range(longest + 1):
        best = max(worth_of(c, chances, times, worth) for c in cuts(len(chances)) if c[0] == k)
        assert outlook.tokens[k] - worth * times[k] == pytest.approx(best)


def test_an_unsure_beginning_is_left_to_a_plain_pass() -> None:
    steep, sizes = CostCurve({1: 1.0, 2: 1.6, 16: 4.0, 64: 16.0}), range(1, 65)

    def length(chances: Sequence[float]) -> int:
        n = len(chances)
        return Rich().plan(Draft((7,) * n, chances=tuple(chances)), steep, sizes)[0]

    assert length(COPY) == 0
    assert length(COPY[1:]) > 10
    assert length([0.9, *COPY[1:]]) > 10


def test_where_a_longer_batch_costs_nothing_nothing_waits() -> None:
    flat, sizes = CostCurve({1: 1.0, 64: 1.0}), range(1, 65)
    assert Rich().plan(Draft((7,) * len(COPY), chances=tuple(COPY)), flat, sizes) == (len(COPY), len(COPY) + 1)


def test_passes_looked_ahead_to_cost_no_more_than_this_one_may() -> None:
    costs = [(n, 0.5 + 0.5 * n) for n in range(65)]
    rich, poor = Outlook(), Outlook()
    rich.read(COPY, costs, 1.0, math.inf)
    poor.read(COPY, costs, 1.0, 2.0)
    assert rich.tokens[0] > poor.tokens[0] > 1
