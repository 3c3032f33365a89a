"""Tests of texts that share a pass: the policy spends its budget on the best drafts, and only if they pay."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.mock_shared import MockShared
from support.passes import UnlimitedPolicy, draft, known

from ngramspec.policies.cost import CostPolicy

SIZES = range(1, 65)


def whole(lengths: Sequence[int]) -> Sequence[int]:
    return [sum(lengths)]


def value(chances: Sequence[Sequence[float]], lengths: Sequence[int], rate: float, cost: float) -> float:
    """Return E[tokens] - rate * T."""
    expected = float(len(chances))
    for of, length in zip(chances, lengths, strict=True):
        expected += sum(math.prod(of[: i + 1]) for i in range(length))
    return expected - rate * cost


def test_price_with_several_texts_divides_loss_budget() -> None:
    curve = known(dict.fromkeys(SIZES, 1.0))  # A pass of four texts costs as much as one.
    alone, shared = (CostPolicy(texts=texts).price(curve, SIZES) for texts in (1, 4))
    assert alone is not None
    assert shared is not None
    assert 0 < shared.loss_budget == pytest.approx(alone.loss_budget / 4)


CHANCES = st.lists(st.lists(st.floats(0.01, 0.99), max_size=4), min_size=2, max_size=4)


@given(CHANCES, st.floats(0.05, 1.5), st.floats(0.0, 0.2))
def test_plan_together_with_shared_cache_finds_best_lengths(
    chances: list[list[float]], slope: float, bend: float
) -> None:
    curve = known({n: 1 + slope * (n - 1) * (1 + bend * n) for n in SIZES})
    times = curve.for_plain(len(chances))
    policy = UnlimitedPolicy(texts=len(chances))
    planned = policy.plan_batch([draft(of) for of in chances], times, SIZES, whole)
    rate = float(len(chances))

    def of(lengths: Sequence[int]) -> float:
        size = sum(1 + length for length in lengths)
        return value(chances, lengths, rate, times.ratio(size))

    best = max(map(of, itertools.product(*(range(len(c) + 1) for c in chances))))
    assert of([length for length, _ in planned]) == pytest.approx(best)
    assert all(size == 1 + length for length, size in planned)


def test_plan_together_with_separate_caches_pads_to_one_batch() -> None:
    """Reading the weights costs 1 and a token 0.05, so a second batch for a longer draft costs as much as 20 tokens."""
    curve = known({n: 1 + 0.05 * (n - 1) for n in SIZES})
    shared = MockShared(4, split=True)
    chances = [[0.9, 0.9], [0.9, 0.9, 0.9], [0.9], []]
    planned = UnlimitedPolicy(texts=4).plan_batch(
        [draft(of) for of in chances], curve, SIZES, lambda shape: shared.batches(shape, shared.sequences)
    )
    sizes = {size for _, size in planned}
    assert len(sizes) == 1 < sizes.pop()
    assert [length for length, _ in planned][3] == 0
