"""Tests of the cost curve: values between and beyond measured sizes, updates by passes, measurement on a mock clock."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.mock_target import Clock, MockTarget

from ngramspec.cost.curve import CostCurve
from ngramspec.cost.measure import LONG_ORDER, MEASURE_ORDER, measure

ALL = range(1, 65)
Cost = Callable[[int], float]

curves = st.dictionaries(st.integers(2, 64), st.floats(0.2, 40.0), max_size=10).map(lambda d: CostCurve({1: 1.0, **d}))


@pytest.fixture
def clock() -> Iterator[Clock]:
    fake = Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ngramspec.cost.measure.time", fake)
        yield fake


def timed(clock: Clock, cost: Cost, **options: Any) -> MockTarget:
    return MockTarget(20, seconds=cost, clock=clock, **options)


# --------------------------------------------------------------------------- the curve


def test_cost_curve_interpolates_and_extrapolates_sizes() -> None:
    curve = CostCurve({1: 0.2, 3: 0.4, 5: 0.3})
    expected = {1: 0.2, 2: 0.3, 3: 0.4, 4: 0.35, 5: 0.3, 9: 0.3 + 4 * 0.1 / 4}
    assert {n: curve.seconds(n) for n in expected} == pytest.approx(expected)
    assert curve.ratio(3) == pytest.approx(2.0)
    assert curve.seconds(3) == pytest.approx(curve.level * curve.ratio(3))
    assert CostCurve({1: 0.5}).ratio(8) >= 8, "one point promises nothing"
    for seconds in ({1: 1.0, 2: 0.97}, {1: 1.0, 16: 0.98}):  # Noise that decreases is not extrapolated.
        curve = CostCurve(seconds)
        assert curve.ratio(64) >= curve.ratio(max(seconds)) > 0.9
        assert curve.optimal_batches(ALL)[1][0] <= 16


@given(curve=curves, sizes=st.sets(st.integers(1, 64), min_size=1).map(lambda s: tuple(sorted(s))))
def test_cost_curve_padded_never_exceeds_cost_of_smallest_fit(curve: CostCurve, sizes: tuple[int, ...]) -> None:
    plan = curve.optimal_batches(sizes)
    assert len(plan) == sizes[-1] + 1
    for n in range(1, sizes[-1] + 1):
        size, ratio = plan[n]
        fitting = min(s for s in sizes if s >= n)
        cheapest = min(curve.ratio(s) for s in sizes if s >= n)
        assert size in sizes
        assert size >= n
        assert ratio == curve.ratio(size)
        assert ratio <= curve.ratio(fitting)
        if size != fitting:
            assert ratio < curve.ratio(fitting)
        known = [curve.ratio(s) for s in sizes if s >= n and str(s) in curve.to_json()["seconds"]]
        assert ratio <= 1.05 * min([curve.ratio(fitting), *known])
        assert ratio >= cheapest


@pytest.mark.parametrize(
    "bad", [{}, {2: 1.0}, {1: 0.0}, {1: -1.0}, {1: 1.0, 2: 0.0}, {1: math.nan}, {1: 1.0, 2: math.inf}]
)
def test_cost_curve_rejects_invalid_points(bad: dict[int, float]) -> None:
    with pytest.raises(ValueError, match="cost curve"):
        CostCurve(bad)


# --------------------------------------------------------------------------- refreshing


def test_cost_curve_level_follows_observed_seconds() -> None:
    curve = CostCurve({1: 1.0, 4: 2.0})
    for _ in range(200):
        curve.observe(1, 3.0)
    assert curve.level == pytest.approx(3.0, rel=0.01)
    assert curve.ratio(4) == pytest.approx(2.0)
    for _ in range(200):
        curve.observe(4, 2.0)  # Passes are fast again, as another size shows.
    assert curve.seconds(4) == pytest.approx(2.0, rel=0.05)
    assert curve.seconds(1) < 3.0
    curve.observe(1, 1.0)  # Rare passes over a single token have a large weight.
    assert curve.seconds(1) < 2.2


@pytest.mark.parametrize("measured", [1.1, 2.0, 5.5])
def test_cost_curve_level_and_ratio_converge_to_true_costs(measured: float) -> None:
    # One pass in three has no draft; T(4) is 2, whatever the curve was.
    curve, rng = CostCurve({1: 0.5, 4: 0.5 * measured}), random.Random(0)
    for i in range(3000):
        size = 1 if i % 3 == 0 else 4
        curve.observe(size, (1.0 if size == 1 else 2.0) * rng.uniform(0.95, 1.05))
    assert curve.level == pytest.approx(1.0, rel=0.05)
    assert curve.ratio(4) == pytest.approx(2.0, rel=0.05)


def test_cost_curve_after_outlier_returns_to_true_costs() -> None:
    curve = CostCurve({1: 1.0, 4: 2.0})
    curve.observe(4, 1e6)
    curve.observe(1, 1e6)
    for _ in range(20):
        curve.observe(4, 2.0)
        curve.observe(1, 1.0)
    assert curve.level == pytest.approx(1.0, rel=0.15)
    assert curve.seconds(4) == pytest.approx(2.0, rel=0.15)


@given(curve=curves, passes=st.lists(st.tuples(st.integers(1, 64), st.floats(0.0, 1e3)), max_size=60))
def test_cost_curve_after_any_observation_keeps_finite_ratios(
    curve: CostCurve, passes: list[tuple[int, float]]
) -> None:
    for size, seconds in passes:
        curve.observe(size, seconds)
        assert 0 < curve.level < math.inf
    assert curve.ratio(1) == 1.0
    for n in ALL:  # also beyond a last size that noise on a GPU makes cheaper than one token
        assert 0 < curve.ratio(n) < math.inf
        assert curve.optimal_batches(ALL)[n][0] >= n


def test_cost_curve_undisturbed_limits_single_slow_call_only() -> None:
    curve = CostCurve({1: 1.0, 4: 2.0}, switch=0.5)
    assert curve.without_interruption(1, 9.0) == pytest.approx(1.1)
    assert curve.without_interruption(4, 12.5) == pytest.approx(1.1 * 2.5), (
        "of another kind than the slow one before it"
    )
    assert curve.without_interruption(4, 10.0) == 10.0
    assert curve.without_interruption(4, 2.5) == 2.5
    assert curve.without_interruption(4, 7.5) == pytest.approx(1.1 * 2.5)
    assert curve.without_interruption(1, 8.0) == 8.0
    assert curve.without_interruption(1, 0.5) == 0.5


def test_cost_curve_retime_lowers_disturbed_costs() -> None:
    curve = CostCurve({1: 1.0, 4: 5.9, 8: 2.0})
    assert curve.slopes((1, 4))[0] == pytest.approx(4.9 / 3)
    curve.retime(4, 2.0, 3.0)
    assert curve.level == pytest.approx(2.0)
    assert curve.ratio(4) == pytest.approx(1.5)
    assert curve.slopes((1, 4))[0] == pytest.approx(0.5 / 3)
    curve.retime(8, 1.0, 40.0)  # a disturbed pass
    assert curve.ratio(8) == pytest.approx(2.0)
    curve.retime(1, 3.0, 3.0)
    assert curve.level == pytest.approx(3.0)
    assert curve.ratio(1) == 1.0


def test_cost_curve_retime_ignores_disturbed_single_token_time() -> None:
    """When other servers started at once, T(1) was 0.188 s and T(2) 0.018 s, and all passes were padded to 2."""
    curve = CostCurve({1: 0.018, 2: 0.030})
    curve.retime(2, 0.188, 0.030)
    assert curve.level == pytest.approx(0.018)
    assert curve.ratio(2) == pytest.approx(0.030 / 0.018)
    assert curve.plausible
    assert not CostCurve({1: 0.188, 2: 0.018}).plausible


# --------------------------------------------------------------------------- measuring


def ragged(n: int) -> float:
    return 1e-3 * {1: 1.0, 2: 1.2, 3: 3.5, 4: 1.4}.get(n, 1 + 0.2 * n)


def test_measure_returns_true_costs(clock: Clock) -> None:
    target = timed(clock, ragged)
    target.prefill([1, 2, 3])
    curve = measure(target, 100)
    assert target.tokens == [1, 2, 3]
    for n in MEASURE_ORDER:
        assert curve.seconds(n) == pytest.approx(ragged(n), rel=0.02)
        assert n in target.batches
    assert clock.now < 2.5


@pytest.mark.parametrize(("slope", "measured"), [(0.05, True), (0.18, True), (0.3, False)])
def test_measure_includes_long_sizes_only_if_16_tokens_are_cheap(clock: Clock, slope: float, measured: bool) -> None:
    # This kernel computes 32 tokens in the time of 16.
    steps = {32: 16, 48: 64, 24: 16}
    target = timed(clock, lambda n: 1e-3 * (1 + slope * (steps.get(n, n) - 1)))
    target.prefill([1, 2, 3])
    curve = measure(target, 100)
    assert set(target.batches) == {*MEASURE_ORDER, *(LONG_ORDER if measured else ())}
    assert (curve.ratio(32) == pytest.approx(curve.ratio(16), rel=0.02)) == measured


def test_measure_with_random_outliers_returns_close_costs(clock: Clock) -> None:
    rng = random.Random(2)
    target = timed(clock, lambda n: ragged(n) * (rng.choice([5.0, 30.0]) if rng.random() < 0.25 else 1.0))
    target.prefill([1])
    curve = measure(target, 100)
    close = [n for n in MEASURE_ORDER if curve.ratio(n) == pytest.approx(ragged(n) / ragged(1), rel=0.05)]
    assert len(close) >= len(MEASURE_ORDER) - 1


def test_measure_keeps_within_time_budget(clock: Clock) -> None:
    for single, tokens in product((0.05, 0.5, 3.0, 40.0), (1, 100)):
        clock.now = 0.0
        target = timed(clock, lambda n, single=single: single * (1 + 0.3 * (n - 1)))  # type: ignore[misc]
        target.prefill([1])
        curve = measure(target, tokens)
        # The minimum is a warm-up pass and a measured one.
        assert clock.now <= max(2.0, 0.05 * tokens * single) + 2 * single
        assert curve.level == pytest.approx(single, rel=0.01)
        assert len(target.batches) <= 3 or single < 1 or tokens == 100
        assert target.tokens == [1]
        assert all(curve.ratio(n) > 0 for n in ALL)


def test_measure_repeats_slow_first_call_of_new_size(clock: Clock) -> None:
    # Over a network, workers are queried about the tensors of each new size once.
    seen = set[int]()

    def cost(n: int) -> float:
        extra = 0.0 if n in seen else 0.6
        seen.add(n)
        return 0.25 + extra

    target = timed(clock, cost)
    target.prefill([1])
    curve = measure(target, 100)
    assert {1, 2, 4} <= set(target.batches)
    for n in {1, 2, 4, 3} & set(target.batches):
        assert curve.ratio(n) == pytest.approx(1.0)


def test_measure_with_little_context_uses_only_fitting_sizes(clock: Clock) -> None:
    for room in (1, 2, 3, 7, 15, 16):
        target = timed(clock, ragged, n_ctx=30, slack=0)  # raises above n_ctx
        target.prefill([1] * (30 - room))
        curve = measure(target, 10)
        assert set(target.batches) == {n for n in MEASURE_ORDER if n <= room}
        assert curve.seconds(1) == pytest.approx(ragged(1), rel=0.02)
        assert len(target.tokens) == 30 - room
    target = timed(clock, ragged, n_ctx=30)
    target.prefill([1] * 30)
    with pytest.raises(ValueError, match="room"):
        measure(target, 10)
    target = timed(clock, lambda n: 1e-3, max_batch=24)  # as many as can be rolled back
    target.prefill([1, 2, 3])
    measure(target, 100)
    assert set(target.batches) == {*MEASURE_ORDER, 24}


@given(
    points=st.dictionaries(st.integers(2, 24), st.floats(0.5, 20), max_size=8),
    sizes=st.sets(st.integers(1, 24), min_size=1).map(lambda found: tuple(sorted(found))),
)
def test_cost_curve_slopes_equal_minimum_cost_per_added_token(points: dict[int, float], sizes: tuple[int, ...]) -> None:
    curve = CostCurve({1: 1.0, **points})
    costs = [cost for _, cost in curve.optimal_batches(sizes)[1:]]  # Entry k is for a draft of k tokens.
    slopes = curve.slopes(sizes)
    assert len(slopes) == sizes[-1] + 1
    for k, cost in enumerate(costs[:-1]):
        expected = min((costs[m] - cost) / (m - k) for m in range(k + 1, len(costs)))
        assert slopes[k] == pytest.approx(expected, abs=1e-9)
    assert list(slopes[len(costs) - 1 :]) == [math.inf, math.inf]


def test_cost_curve_switching_charges_both_size_changes() -> None:
    curve = CostCurve({1: 1.0, 4: 2.0, 8: 3.0}, switch=0.25)
    assert curve.switch_cost(1, plain=1) == 0.0
    assert curve.switch_cost(4, plain=1) == pytest.approx(0.5)
    curve.observe(4, 2.25)
    assert curve.ratio(4) == pytest.approx(2.0)  # The cost of a change is not part of a size's cost.
    assert curve.switch_cost(4, plain=1) == 0.0
    assert curve.switch_cost(8, plain=1) == pytest.approx(0.25)
    assert curve.switch_cost(1, plain=1) == 0.0  # It was paid on the way there.


def test_cost_curve_charges_capture_and_does_not_learn_from_it() -> None:
    curve = CostCurve({1: 1.0, 4: 2.0}, switch=0.5, capture=3.0)
    assert curve.switch_cost(4, plain=1) == pytest.approx(0.5 + 0.5 + 3.0)  # the way there, and back to plain passes
    curve.observe(4, 2.5)
    assert curve.switch_cost(4, plain=1) == curve.change_seconds(4) == 3.0
    for size in (4, 1, 1, 4, 4):
        curve.observe(size, (1.0 if size == 1 else 2.0) + curve.change_seconds(size))
    assert (curve.level, curve.ratio(4)) == pytest.approx((1.0, 2.0))
    assert curve.change_seconds(4) == 0.0  # CUDA replays the graph


def changing(
    clock: Clock, switch: float, noise: Callable[[], float], capture: float = 0.0, **options: Any
) -> CostCurve:
    """Return the curve measured on a machine on which a change of size costs `switch` seconds, and then `capture`."""
    last = [0, 0]

    def cost(n: int) -> float:
        change = switch if n != last[-1] else capture if n != last[-2] else 0.0
        last[:] = last[-1], n
        return 1e-3 * (1 + 0.5 * (n - 1)) * noise() + change

    target = timed(clock, cost, **options)
    target.prefill([1])
    return measure(target, 100)


def test_measure_finds_cost_of_size_change(clock: Clock) -> None:
    curve = changing(clock, 3e-4, lambda: 1.0)
    assert curve.switch == pytest.approx(3e-4, rel=1e-3)
    assert curve.level == pytest.approx(1e-3, rel=1e-3)
    assert curve.ratio(5) == pytest.approx(3.0, rel=1e-3)
    assert curve.capture == pytest.approx(0.0, abs=1e-9)
    cuda = changing(clock, 3e-3, lambda: 1.0, capture=5e-3)
    assert (cuda.switch, cuda.capture, cuda.ratio(4)) == pytest.approx((3e-3, 5e-3, 2.5), rel=1e-3)
    again = CostCurve.from_json(json.loads(json.dumps(cuda.to_json())))
    assert (again.switch, again.capture) == (cuda.switch, cuda.capture)


def test_measure_without_certain_size_change_cost_returns_zero(clock: Clock) -> None:
    found = []
    for seed in range(60):
        rng = random.Random(seed)
        found.append(changing(clock, 0.0, lambda rng=rng: rng.lognormvariate(0, 0.1)).switch)  # type: ignore[misc]
    assert sum(switch > 0 for switch in found) <= 1
    assert changing(clock, 3e-4, lambda: 1.0, n_ctx=2).switch == 0.0, "there is room for single tokens only"


def test_measure_with_outliers_finds_cost_of_size_change(clock: Clock) -> None:
    rng = random.Random(2)
    curve = changing(clock, 5e-4, lambda: rng.choice([2.0, 9.0]) if rng.random() < 0.05 else rng.uniform(1.0, 1.02))
    assert curve.switch == pytest.approx(5e-4, rel=0.25)


def test_cost_curve_under_load_keeps_switch_and_ratio() -> None:
    """Under load, the cost of a change once grew to several passes, which stopped drafting and thus any correction."""
    curve, rng = CostCurve({1: 1e-3, 4: 2e-3}, switch=1e-4), random.Random(0)
    for _ in range(1000):
        for size, seconds in ((4, 2e-3), (1, 1e-3), (1, 1e-3)):
            curve.observe(size, seconds * rng.choice((1.0, 1.0, 2.0, 5.0)), is_quiet=False)
    assert curve.switch == 1e-4
    assert curve.ratio(4) == pytest.approx(2.0, rel=0.3)


@pytest.mark.parametrize("true", [1e-4, 6e-4])
def test_cost_curve_separates_level_and_switch(true: float) -> None:
    curve = CostCurve({1: 1e-3, 4: 2e-3}, switch=3e-4)
    for i in range(2000):
        curve.observe(1, 1.5e-3 + (true if i % 3 == 0 else 0.0))
        if i % 3 == 2:
            curve.observe(4, 3e-3 + true)
    assert curve.level == pytest.approx(1.5e-3, rel=0.05)
    assert curve.switch == pytest.approx(true, rel=0.35)


def test_cost_curve_corrects_slope_at_first_larger_batch() -> None:
    curve = CostCurve({1: 1e-3, 16: 4e-3})
    assert curve.ratio(31) == pytest.approx(7.0)
    curve.observe(21, 9e-3)  # expected: 5 ms
    assert curve.ratio(21) == pytest.approx(7.0, rel=0.01)
    assert curve.ratio(31) == pytest.approx(10.0, rel=0.01)
    assert curve.ratio(16) == pytest.approx(4.0, rel=0.01)
    # A pass of a known size is one of many.
    curve.observe(21, 9e-3)
    assert curve.ratio(21) < 7.2
