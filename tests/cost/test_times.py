"""Tests of what passes teach about their costs, and of its file; `policies/test_promise.py` tests what follows."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.mock_target import Clock, MockTarget

from ngramspec.cost.store import StoredTimes, load_last_times, time_passes
from ngramspec.cost.times import FEW, SIZES, STALE, PassTimes, RestoreCost

ALL = range(1, 65)
COSTS = {1: 1.0, 2: 1.2, 3: 1.5, 4: 1.8, 8: 3.0, 16: 5.0, 64: 17.0}


def teach(times: PassTimes, size: int, cost: float, pairs: int = FEW, level: float = 0.01) -> PassTimes:
    """Show pairs of a plain pass and one over `size` tokens."""
    for _ in range(pairs):
        times.observe(times.offset + 1, level)
        times.observe(size, level * cost)
    return times


def ratios_of(times: PassTimes) -> list[float]:
    return [times.ratio(n) for n in ALL]


def test_one_interruption_raises_nothing_and_is_hardly_charged() -> None:
    times = teach(PassTimes(COSTS), 4, 1.8, pairs=8)
    times.observe(1, 0.01)
    charge = times.observe(4, 1.0)
    assert (charge.cost, charge.is_surprising) == (pytest.approx(1.3 * 1.8), True)
    assert times.ratio(4) == pytest.approx(1.8, rel=0.01)
    assert teach(PassTimes(COSTS), 8, 30.0, pairs=1).ratio(8) == pytest.approx(3.0), "one value only lowers a ratio"
    assert teach(PassTimes(COSTS), 16, 2.0, pairs=1).ratio(16) == pytest.approx(2.0)


def test_load_that_begins_during_drafts_hardly_changes_a_ratio() -> None:
    """The first plain pass after the drafts shows that the machine has slowed down."""
    times = PassTimes(COSTS)
    passes = [(1, 1.0), (2, 2.8), (2, 2.8), (4, 3.6), (1, 2.0)]
    charges = [times.observe(size, 0.01 * seconds) for size, seconds in passes]
    assert times.ratio(2) == pytest.approx(1.4)
    assert times.ratio(4) == pytest.approx(1.8)
    assert sum(charge.cost + charge.correction for charge in charges[1:]) < 2 * 1.3 * 1.4 + 1.3 * 1.8 + 2.5


def test_few_values_correct_other_sizes_only_without_a_past() -> None:
    corrected = pytest.approx(1 + (COSTS[8] - 1) * 0.3 / 0.2)
    assert teach(PassTimes(COSTS), 2, 1.3, pairs=2).ratio(8) == corrected
    assert teach(PassTimes(COSTS, pairs=24), 2, 1.3, pairs=2).ratio(8) == pytest.approx(COSTS[8])
    assert teach(PassTimes(COSTS, pairs=24), 2, 1.3, pairs=3).ratio(8) == corrected


def test_values_that_became_too_old_stay_believed_against_a_single_new_one() -> None:
    times = teach(PassTimes(COSTS), 4, 1.2)
    for _ in range(STALE):
        times.observe(1, 0.01)
    assert teach(times, 4, 3.0, pairs=1).ratio(4) == pytest.approx(1.2)
    assert teach(times, 4, 3.0, pairs=FEW).ratio(4) == pytest.approx(3.0)


def test_passes_surprise_only_if_their_size_is_known() -> None:
    """The first answer of a model on a quiet machine, whose batches cost twice as much as the default prior says."""
    times = PassTimes()
    passes = [(1, 1.0), (1, 1.0), (1, 1.0), (8, 6.0), (8, 6.0), (1, 1.0), (16, 12.0), (8, 6.0), (8, 12.0), (1, 2.0)]
    charges = [times.observe(size, 0.01 * cost) for size, cost in passes]
    assert [charge.is_surprising for charge in charges] == [False] * 8 + [True] * 2
    assert PassTimes().observe(8, 0.06).is_surprising, "without a plain pass, no cost is known"


def test_confirmed_cost_is_charged_to_earlier_passes() -> None:
    times = teach(PassTimes(dict.fromkeys(ALL, 1.0)), 2, 1.0, pairs=8, level=1.0)
    charges = [times.observe(size, cost) for size, cost in ((1, 1.0), (8, 6.0), (1, 1.0), (8, 6.0))]
    assert [charge.cost for charge in charges] == pytest.approx([1.0, 1.3, 1.0, 1.3])
    assert charges[3].correction == pytest.approx(2 * (6.0 - 1.3))


def test_unknown_sizes_follow_neighbours() -> None:
    """All passes cost twice as much more as stored; only two sizes were seen."""
    times = PassTimes(COSTS)
    for size in (4, 16):
        teach(times, size, 1 + 2 * (COSTS[size] - 1))
    for size in (2, 3, 8, 64):
        assert times.ratio(size) == pytest.approx(1 + 2 * (COSTS[size] - 1), rel=0.35)
        assert times.ratio(size) > COSTS[size]


@pytest.mark.parametrize(("first", "second"), [(0.5, 0.0), (2.5, 4.0)])
def test_cost_of_change_is_learned_from_three_plain_passes(first: float, second: float) -> None:
    times = PassTimes(COSTS)
    for _ in range(12):
        for size, extra in ((4, first), (1, first), (1, second), (1, 0.0), (1, 0.0)):
            times.observe(size, 0.01 * (COSTS[size] + extra))
    assert times.change == pytest.approx(first + second, rel=0.05)
    assert (times.change_now(1), times.change_now(4)) == (0.0, pytest.approx(first, rel=0.05))


@pytest.mark.parametrize(("below", "change"), [(1, 0.2), (2, 0.0)])
def test_cost_of_change_is_learned_only_if_nearly_all_passes_show_it(below: int, change: float) -> None:
    times = PassTimes(COSTS)
    for first in [0.99] * below + [1.2] * (15 - below):
        for size, cost in ((4, COSTS[4]), (1, first), (1, 1.0), (1, 1.0)):
            times.observe(size, 0.01 * cost)
    assert times.change == pytest.approx(change)


def test_two_passes_refute_a_cost_of_change() -> None:
    times = PassTimes(COSTS, (31.0, 0.0))
    for size in (1, 1, 1, 4, 4, 1, 1, 4):
        times.observe(size, 0.01 * COSTS[size])
    assert times.change == pytest.approx(0.8), "that of a pass over four tokens beyond a plain one"
    for size in (1, 2, 1):
        times.observe(size, 0.01 * COSTS[size])
    assert times.change < 0.3, "what is left is within noise"


def test_wants_plain_pass_for_unknown_size_and_after_change_of_speed() -> None:
    times = PassTimes(COSTS)
    for pairs, passes, seconds, wants_plain in ((0, 6, 0.018, True), (FEW, 20, 0.018, False), (0, 5, 0.036, True)):
        teach(times, 4, 1.8, pairs)
        for _ in range(passes):
            times.observe(4, seconds)
        assert times.wants_plain is wants_plain


def test_pass_without_a_time_is_charged_as_expected_and_teaches_nothing() -> None:
    times = teach(PassTimes(COSTS), 4, 1.8)
    before = ratios_of(times), times.level, times.now
    assert times.observe(8, 9.0, False) == (pytest.approx(3.0), 0.0, False)
    assert (ratios_of(times), times.level, times.now) == (*before[:2], before[2] + 1)
    assert times.last == 8


def test_several_texts_have_separate_times_that_begin_as_part_of_one() -> None:
    times = PassTimes(COSTS)
    four = times.for_plain(4)
    assert [four.ratio(n) for n in (4, 8, 16)] == pytest.approx([1.0, 3.0 / 1.8, 5.0 / 1.8])
    assert teach(four, 8, 1.1).ratio(8) == pytest.approx(1.1)
    assert times.ratio(8) == 3.0
    assert times.for_plain(4) is four
    assert times.now == four.now == 2 * FEW
    assert [four.cost_of(parts, [4]) for parts in ([8], [4, 4])] == pytest.approx([1.1, 2.0])


def test_restore_costs_are_medians_of_what_was_seen() -> None:
    times = PassTimes(COSTS)
    assert times.restore(0) == RestoreCost(0.0, 0.0, 0)
    times.observe(1, 0.01)
    for seconds in (0.005, 0.005, 9.0):
        times.observe_copy(seconds, is_load=False)
        times.observe_copy(2 * seconds, is_load=True)
    assert times.restore(0) == RestoreCost(pytest.approx(0.5), pytest.approx(1.0), 0)
    assert times.restore(7) == RestoreCost(0.0, pytest.approx(1.0), 7), "a checkpoint exists already"


def test_known_costs_never_change() -> None:
    times = PassTimes(COSTS, (0.3, 0.0), is_fixed=True)
    before = ratios_of(times)
    assert [times.observe(size, 2.0).cost for size in (1, 4, 4, 1, 16)] == [2.0] * 5
    times.observe_copy(1.0, is_load=True)
    assert ratios_of(times) == before
    assert (times.change, times.level, times.last, times.wants_plain) == (0.3, 1.0, 16, False)


@given(
    st.lists(st.tuples(st.sampled_from(ALL), st.floats(1e-6, 1e3)), max_size=150),
    st.dictionaries(st.sampled_from(SIZES), st.floats(0.01, 1e4), min_size=1),
)
def test_after_any_passes_costs_are_possible(passes: list[tuple[int, float]], prior: dict[int, float]) -> None:
    times = PassTimes({1: 1.0, **prior})
    for size, seconds in passes:
        assert all(0 <= number < math.inf for number in times.observe(size, seconds)[:2])
    for n, (size, cost) in enumerate(times.optimal_batches(ALL)[1:], 1):
        assert 1 <= times.ratio(n) <= 1.5 * n
        assert size >= n
        assert cost <= times.ratio(n)
    assert not any(map(math.isnan, times.slopes(ALL)))
    assert 0 <= times.change < math.inf


@given(
    points=st.dictionaries(st.integers(2, 20), st.floats(1.0, 30.0), max_size=8),
    sizes=st.sampled_from([tuple(range(1, 21)), (1, 2, 4, 8, 16), (1, 3, 9)]),
)
def test_slopes_equal_minimum_cost_per_added_token(points: dict[int, float], sizes: tuple[int, ...]) -> None:
    times = PassTimes({1: 1.0, **points}, is_fixed=True)
    costs = [cost for _, cost in times.optimal_batches(sizes)[1:]]
    for k, slope in enumerate(times.slopes(sizes)[: len(costs)]):
        later = [(costs[m] - costs[k]) / (m - k) for m in range(k + 1, len(costs))]
        assert slope == pytest.approx(min(later, default=math.inf))


# --------------------------------------------------------------------------- the file


def learn(folder: Path, max_seconds: float = 5.0) -> tuple[StoredTimes, MockTarget]:
    """Return the times of a model after trial passes, which are stored, and the model."""
    clock = Clock()
    target = MockTarget(20, seconds=lambda n: 1e-3 * (1 + 0.1 * (n - 1)), clock=clock)
    target.prefill([1, 2])
    stored, began = StoredTimes(target, folder), clock.now
    time_passes(target, list(range(20)) * 4, stored.times, clock.perf_counter, max_seconds)
    assert target.tokens == [1, 2]
    assert clock.now - began < max_seconds + 0.02
    stored.save()
    return stored, target


def test_stored_times_are_ratios_without_seconds(tmp_path: Path) -> None:
    stored, target = learn(tmp_path)
    (path,) = tmp_path.iterdir()
    data = json.loads(path.read_text())
    assert data.keys() == {"ratios", "change", "pairs"}
    assert data["ratios"]["4"] == pytest.approx(1.3, abs=0.01)
    again = StoredTimes(target, tmp_path).times
    assert ratios_of(again) == pytest.approx(ratios_of(stored.times), rel=1e-3)
    assert (again.level, again.pairs) == (0.0, stored.times.pairs)


def test_save_writes_only_what_is_new(tmp_path: Path) -> None:
    stored, _ = learn(tmp_path)
    (path,) = tmp_path.iterdir()
    path.unlink()
    stored.save()
    assert not path.exists()
    stored.times.observe(1, 0.001)
    stored.times.observe(4, 0.001)
    stored.save()
    assert path.exists()
    stored.forget()
    assert not path.exists()
    assert stored.times.pairs == 0


def test_short_process_changes_stored_ratios_only_in_part(tmp_path: Path) -> None:
    """Batches are twice as expensive for 8 pairs, a third of a window: the stored ratio moves by a quarter."""
    _, target = learn(tmp_path)
    for calls in range(2):
        later = StoredTimes(target, tmp_path)
        before = later.times.ratio(4)
        for _ in range(8):
            later.times.observe(1, 0.01)
            later.times.observe(4, 0.02 * before)
            later.save()  # as after each of several answers
        now = StoredTimes(target, tmp_path).times.ratio(4)
        assert now == pytest.approx(before * 2**0.25, rel=1e-3), calls


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"curve": {"seconds": {"1": 0.412}}}',
        '{"ratios": {"2": 1.5}, "change": [0, 0], "pairs": 1}',
        '{"ratios": {"1": 1, "2": NaN}, "change": [0, 0], "pairs": 1}',
        '{"ratios": {"1": 1, "0": 2}, "change": [0, 0], "pairs": 1}',
        '{"ratios": {"1": 1, "2": -1}, "change": [0, 0], "pairs": 1}',
        '{"ratios": {"1": 1}, "change": [-1, 0], "pairs": 1}',
        '{"ratios": {"1": 1}, "change": [0, 0]}',
        '{"ratios": {"1": 1}, "change": [1e999, 0], "pairs": 1}',
    ],
)
def test_damaged_and_old_files_count_as_none(tmp_path: Path, text: str) -> None:
    _, target = learn(tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_text(text)
    times = StoredTimes(target, tmp_path).times
    assert (ratios_of(times), times.pairs) == (ratios_of(PassTimes()), 0)


def test_without_folder_to_write_times_are_still_learned(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert learn(tmp_path / "file" / "folder")[0].times.ratio(4) == pytest.approx(1.3, abs=0.01)


def test_load_last_times_returns_newest_of_model(tmp_path: Path) -> None:
    for age, (name, ratio) in enumerate((("a1", 1.5), ("a2", 1.7), ("b1", 1.9))):
        path = tmp_path / f"{name}-times.json"
        path.write_text(json.dumps({"ratios": {"1": 1.0, "4": ratio}, "change": [0, 0], "pairs": 3}))
        os.utime(path, (1000 + age, 1000 + age))
    newest, only = load_last_times("a", tmp_path), load_last_times("b", tmp_path)
    assert newest is not None
    assert only is not None
    assert (newest.ratio(4), only.ratio(4)) == (pytest.approx(1.7), pytest.approx(1.9))
    assert load_last_times("c", tmp_path) is None


def test_time_passes_ends_within_its_time(tmp_path: Path) -> None:
    _, target = learn(tmp_path, max_seconds=0.02)
    assert 1 < max(target.batches) < 8
