"""Tests of the file of costs: only ratios, and whatever is in a file, the costs are possible."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from support.mock_target import Clock, MockTarget

from ngramspec.cost.store import StoredTimes, load_batch_cost_ratio
from ngramspec.cost.times import PassTimes
from ngramspec.cost.trial_passes import time_passes


def cost(n: int) -> float:
    return 1e-3 * (1 + 0.1 * (n - 1))


def make_target() -> tuple[MockTarget, Clock]:
    clock = Clock()
    return MockTarget(20, seconds=cost, clock=clock), clock


def learn(folder: Path) -> StoredTimes:
    """Return the times of a model after trial passes, which are stored."""
    target, clock = make_target()
    target.prefill([1, 2])
    stored = StoredTimes(target, folder)
    time_passes(target, list(range(20)) * 4, stored.times, clock.perf_counter)
    assert target.tokens == [1, 2]
    stored.save()
    return stored


def test_stored_times_are_ratios_without_seconds(tmp_path: Path) -> None:
    stored = learn(tmp_path)
    (path,) = tmp_path.iterdir()
    data = json.loads(path.read_text())
    assert data.keys() == {"ratios", "change", "pairs"}
    assert data["ratios"]["4"] == pytest.approx(1.3, abs=0.01)
    again = StoredTimes(make_target()[0], tmp_path).times
    assert [again.ratio(n) for n in range(1, 65)] == pytest.approx(
        [stored.times.ratio(n) for n in range(1, 65)], rel=1e-3
    )
    assert (again.level, again.pairs) == (0.0, stored.times.pairs)


def test_save_writes_only_what_is_new(tmp_path: Path) -> None:
    stored = learn(tmp_path)
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


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"curve": {"seconds": {"1": 0.412}}}',
        '{"ratios": {"2": 1.5}, "change": [0, 0], "pairs": 1}',
        '{"ratios": {"1": 1, "2": NaN}, "change": [0, 0], "pairs": 1}',
        '{"ratios": {"1": 1, "0": 2}, "change": [0, 0], "pairs": 1}',
        '{"ratios": {"1": 1, "2": -1}, "change": [0, 0], "pairs": 1}',
        '{"ratios": {"1": 1}, "change": [-1, 0], "pairs": 1}',
        '{"ratios": {"1": 1}, "change": [0], "pairs": 1}',
        '{"ratios": {"1": 1}, "change": [0, 0]}',
        '{"ratios": {"1": 1}, "change": [1e999, 0], "pairs": 1}',
    ],
)
def test_damaged_and_old_files_count_as_none(tmp_path: Path, text: str) -> None:
    learn(tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_text(text)
    times = StoredTimes(make_target()[0], tmp_path).times
    assert [times.ratio(n) for n in range(1, 65)] == [PassTimes().ratio(n) for n in range(1, 65)]
    assert times.pairs == 0


def test_without_folder_to_write_times_are_still_learned(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert learn(tmp_path / "file" / "folder").times.ratio(4) == pytest.approx(1.3, abs=0.01)


def test_load_batch_cost_ratio_returns_newest_of_model(tmp_path: Path) -> None:
    for age, (name, ratio) in enumerate((("a1", 1.5), ("a2", 1.7), ("b1", 1.9))):
        path = tmp_path / f"{name}-times.json"
        path.write_text(json.dumps({"ratios": {"1": 1.0, "4": ratio}, "change": [0, 0], "pairs": 3}))
        os.utime(path, (1000 + age, 1000 + age))
    assert load_batch_cost_ratio("a", tmp_path) == pytest.approx(1.7)
    assert load_batch_cost_ratio("b", tmp_path) == pytest.approx(1.9)
    assert load_batch_cost_ratio("c", tmp_path) is None


def test_time_passes_ends_within_its_time(tmp_path: Path) -> None:
    target, clock = make_target()
    target.prefill([1, 2])
    times = StoredTimes(target, tmp_path).times
    time_passes(target, list(range(20)) * 4, times, clock.perf_counter, max_seconds=0.02)
    assert 1 < max(target.batches) < 8
    assert clock.now < 0.04
