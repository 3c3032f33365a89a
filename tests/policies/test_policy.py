"""Tests of draft lengths: the cost policy against brute force, and on a simulated machine."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import mul

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.passes import UnlimitedPolicy, draft, known, make_step

from ngramspec.cost.times import PassTimes
from ngramspec.drafting.draft import NO_DRAFT
from ngramspec.policies import POLICIES, make_policy
from ngramspec.policies.cost import CostPolicy

ALL = range(1, 65)
Cost = Callable[[int], float]


def curve_of(cost: Cost, plain: int = 1) -> PassTimes:
    """Return the times of passes of which a plain one has `plain` tokens."""
    return known({n: cost(n) for n in range(1, 17)}).for_plain(plain)


# --------------------------------------------------------------------------- simple policies


def test_make_policy_returns_policy_by_name_and_rejects_invalid() -> None:
    assert set(POLICIES) == {"fixed", "heuristic", "entropy", "threshold", "cost"}
    for name in POLICIES:
        assert make_policy(name).name == name
        assert make_policy(name).limit() >= 1
        assert 1 <= make_policy(name, 1).limit() <= 1
        for wrong in (0, -3):
            with pytest.raises(ValueError, match="draft_max"):
                make_policy(name, wrong)
    with pytest.raises(ValueError, match="cost"):
        make_policy("bold")


@pytest.mark.parametrize("name", ["fixed", "heuristic"])
def test_simple_policies_plan_sends_draft_up_to_limit(name: str) -> None:
    policy = make_policy(name, 4)
    assert policy.plan(draft([0.01] * 4), None, ALL) == (4, 5)
    assert policy.plan(draft([0.01] * 2), None, ALL) == (2, 3)
    assert policy.plan(draft([0.01] * 9), None, ALL) == (4, 5)
    assert policy.plan(NO_DRAFT, None, ALL) == (0, 1)
    assert policy.plan(draft([0.01] * 4), None, (1, 2, 3)) == (2, 3)
    assert policy.plan(draft([0.01] * 3), None, (2, 8)) == (3, 8)
    assert policy.plan(NO_DRAFT, None, (2, 8)) == (0, 2)


def test_heuristic_policy_adapts_limit_and_fixed_policy_keeps_it() -> None:
    policy, fixed = make_policy("heuristic", 8), make_policy("fixed", 6)
    length, rng = policy.limit(), random.Random(0)
    for _ in range(200):
        drafted = rng.randrange(length + 1)
        emitted = rng.choice([1, drafted + 1])
        for each in (policy, fixed):
            each.record(make_step(emitted, drafted, emitted - 1, 1.0, 0.0))
        assert fixed.limit() == 6
        if drafted:
            length = max(1, min(8, length + 2 if emitted == drafted + 1 else length - 1))
        assert policy.limit() == length
    assert make_policy("heuristic", 2).limit() == 2


# --------------------------------------------------------------------------- cost: the length


def values_of(acceptance: Sequence[float], costs: Cost, sizes: Sequence[int], rate: float) -> list[float]:
    """Return by brute force, for each draft length k, the value of a pass and of the next passes along the chain.

    It is E[tokens(k)] - rate * T(1 + k), plus the value of the next passes; batches have the cheapest size that fits.
    """
    time = [rate * min(costs(n) for n in sizes if n > k) for k in range(sizes[-1])]
    values: list[float] = []
    later = [0.0, 0.0]  # after the whole chain, and after one token less
    for begin in range(max(0, len(acceptance) - 1), -1, -1):
        chain = acceptance[begin:]
        values = [
            1 + sum(math.prod(chain[:j]) for j in range(1, k + 1)) - time[k] + math.prod(chain[: k + 1]) * later[-k - 1]
            for k in range(min(len(chain), sizes[-1] - 1) + 1)
        ]
        later.append(max(values))
    return values


@given(
    costs=st.lists(st.floats(1.0, 20.0), min_size=16, max_size=16),
    acceptance=st.lists(st.floats(0.01, 0.99), min_size=1, max_size=15),
    sizes=st.sampled_from([tuple(range(1, 17)), (1, 2, 4, 8, 16), (2, 3, 5, 8), (3, 9)]),
)
def test_cost_policy_plan_maximises_expected_value(
    costs: list[float], acceptance: list[float], sizes: tuple[int, ...]
) -> None:
    least = costs[sizes[0] - 1]

    def cost(n: int) -> float:
        return max(least, costs[n - 1]) if n > sizes[0] else least  # no batch costs less than a plain pass

    k, size = UnlimitedPolicy().plan(draft(acceptance), curve_of(cost, sizes[0]), sizes)
    assert size in sizes
    assert size >= 1 + k
    cheapest = min(cost(n) for n in sizes if n >= 1 + k)
    assert cost(size) <= 1.05 * cheapest  # Padding must save more than noise.
    rate = 1 / min(cost(n) for n in sizes)  # Without records, this is plain decoding's throughput.
    values = values_of(acceptance, cost, sizes, rate)
    assert values[k] >= max(values) - 0.05 * cheapest * rate


@given(throughput=st.floats(1.0, 4.0), p=st.floats(0.3, 0.95), slope=st.floats(0.05, 0.5))
def test_cost_policy_uses_recent_throughput_as_price_of_time(throughput: float, p: float, slope: float) -> None:
    def cost(n: int) -> float:
        return 0.01 * (1 + slope * (n - 1))

    policy = UnlimitedPolicy()
    for _ in range(300):  # These passes of 10 tokens reach the throughput.
        policy.record(make_step(10, 9, 9, 10 / throughput, 0.0))
    k, _ = policy.plan(draft([p] * 15), curve_of(cost), ALL)
    rate = throughput / 0.01
    assert values_of([p] * 15, cost, ALL, rate)[k] >= max(values_of([p] * 15, cost, range(1, 17), rate)) - 0.02


@given(
    costs=st.lists(st.floats(1.0, 20.0), min_size=16, max_size=16),
    acceptance=st.lists(st.floats(0.01, 0.99), min_size=15, max_size=15),
    sizes=st.sampled_from([tuple(range(1, 17)), (1, 2, 4, 8, 16), (2, 3, 5, 8), (3, 9)]),
    passes=st.lists(st.tuples(st.integers(1, 9), st.floats(0.5, 4.0)), max_size=5),
)
def test_cost_policy_price_keeps_every_profitable_draft_length(
    costs: list[float], acceptance: list[float], sizes: tuple[int, ...], passes: list[tuple[int, float]]
) -> None:
    curve, policy = curve_of(lambda n: max(costs[0], costs[n - 1]), sizes[0]), UnlimitedPolicy()
    for emitted, spent in passes:
        policy.record(make_step(emitted, 0, 0, spent, 0.0))
    price = policy.price(curve, sizes)
    assert price is not None
    cut, reach = 0, 1.0
    for p in acceptance[: sizes[-1] - 1]:
        cut += 1
        reach *= p
        if reach < price.rate * price.slopes[cut]:
            break
    reaches = accumulate(acceptance[: sizes[-1] - 1], mul, initial=1.0)
    values = [
        tokens - price.rate * cost
        for tokens, (_, cost) in zip(accumulate(reaches), curve.optimal_batches(sizes)[1:], strict=False)
    ]
    assert max(values[: cut + 1]) >= max(values) - 1e-9


def test_price_of_cost_policy_follows_curve_and_others_return_none() -> None:
    curve = curve_of(lambda n: 1 + 0.1 * (n - 1))
    for name in ("fixed", "heuristic", "entropy"):
        assert make_policy(name).price(curve, ALL) is None
    policy = UnlimitedPolicy()
    assert policy.price(None, ALL) is None
    for throughput in (0.5, 1.0, 2.0):  # tokens per plain pass
        for _ in range(300):
            policy.record(make_step(4, 3, 3, 4 / throughput, 0.0))
        price = policy.price(curve, ALL)
        assert price is not None
        assert price.rate == pytest.approx(max(1.0, throughput))
        assert price.slopes[:5] == curve.slopes(ALL)[:5]


FLAT, STEEP = {1: 1.0, 64: 1.06}, {1: 1.0, 64: 64.0}
PADDED = {1: 1.0, 2: 1.5, 3: 3.0, 4: 1.6, 5: 5.0, 8: 5.0, 16: 6.0}
NOISY = {1: 1.0, 2: 0.99, 3: 1.01, 4: 0.985, 8: 0.99, 16: 0.98}
"""On a GPU, all sizes cost the same within the precision of measurements."""


@pytest.mark.parametrize(
    ("points", "chances", "sizes", "planned"),
    [
        (STEEP, [0.99] * 15, ALL, (0, 1)),
        (FLAT, [0.0005] * 15, ALL, (0, 1)),
        (FLAT, [0.9] * 15, ALL, (15, 16)),
        (FLAT, [], ALL, (0, 1)),
        (None, [0.99] * 15, ALL, (0, 1)),
        # The policy pads to a cheaper size, but not because of noise.
        (PADDED, [0.9, 0.8], ALL, (2, 4)),
        (PADDED, [0.9], ALL, (1, 2)),
        (NOISY, [0.9], ALL, (1, 2)),
        (NOISY, [], ALL, (0, 1)),
        (NOISY, [0.9] * 15, ALL, (15, 16)),
        # The batch has at most the largest allowed size.
        (FLAT, [0.9] * 15, (1,), (0, 1)),
        (FLAT, [0.9] * 15, (1, 2, 3), (2, 3)),
        (FLAT, [0.99] * 80, ALL, (63, 64)),
    ],
)
def test_cost_policy_plan_returns_expected_lengths(
    points: dict[int, float] | None, chances: list[float], sizes: Sequence[int], planned: tuple[int, int]
) -> None:
    times = known(points).for_plain(sizes[0]) if points else None
    assert UnlimitedPolicy().plan(draft(chances), times, sizes) == planned


def test_cost_policy_plan_sends_no_more_than_the_draft() -> None:
    assert UnlimitedPolicy().plan(draft([0.9] * 15, length=3), known(FLAT), ALL) == (3, 4)


# --------------------------------------------------------------------------- cost: the account


def typical(n: int) -> float:
    return 1 + 0.25 * (n - 1)


def test_cost_policy_draft_length_grows_with_savings() -> None:
    policy, curve, sure = CostPolicy(), curve_of(typical), draft([0.99] * 15)
    lengths = []
    for _ in range(8):
        k, size = policy.plan(sure, curve, ALL)
        lengths.append(k)
        policy.record(make_step(1 + k, k, k, typical(size), 0.0))
    assert lengths == sorted(lengths)
    assert 1 <= lengths[0] < 4
    assert lengths[-1] == 15


def test_cost_policy_without_savings_allows_cheapest_profitable_draft() -> None:
    # In a mixture of experts, two tokens cost much more than one, and further tokens add little.
    steep = known({1: 1.0, 2: 2.5, 4: 3.0, 8: 3.6, 16: 5.4})
    k, size = CostPolicy().plan(draft([0.99] * 15), steep, ALL)
    assert (k, size) == (3, 4)


def test_cost_policy_after_calls_of_zero_duration_still_plans() -> None:
    policy, curve = CostPolicy(), curve_of(typical)
    for done in (
        make_step(1, 0, 0, 0.0, 0.0),
        make_step(1, 0, 0, 0.0, 1e-6),
        make_step(3, 2, 2, 0.0, 0.0),
    ):
        policy.record(done)
    for _ in range(200):
        if policy.limit():
            break
        policy.record(make_step(1, 0, 0, 1e-3, 0.0))
    assert policy.limit() > 0
    k, size = policy.plan(draft([0.9] * 15), curve, ALL)
    assert size >= 1 + k
