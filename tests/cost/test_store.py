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


def ratios(times: PassTimes) -> list[float]:
    return [times.ratio(n) for n in range(1, 65)]


def test_stored_times_are_ratios_without_seconds(tmp_path: Path) -> None:
    stored, target = learn(tmp_path)
    (path,) = tmp_path.iterdir()
    data = json.loads(path.read_text())
    assert data.keys() == {"ratios", "change", "pairs"}
    assert data["ratios"]["4"] == pytest.approx(1.3, abs=0.01)
    again = StoredTimes(target, tmp_path).times
    assert ratios(again) == pytest.approx(ratios(stored.times), rel=1e-3)
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
    _, target = learn(tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_text(text)
    times = StoredTimes(target, tmp_path).times
    assert (ratios(times), times.pairs) == (ratios(PassTimes()), 0)


def test_without_folder_to_write_times_are_still_learned(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert learn(tmp_path / "file" / "folder")[0].times.ratio(4) == pytest.approx(1.3, abs=0.01)


def test_load_batch_cost_ratio_returns_newest_of_model(tmp_path: Path) -> None:
    for age, (name, ratio) in enumerate((("a1", 1.5), ("a2", 1.7), ("b1", 1.9))):
        path = tmp_path / f"{name}-times.json"
        path.write_text(json.dumps({"ratios": {"1": 1.0, "4": ratio}, "change": [0, 0], "pairs": 3}))
        os.utime(path, (1000 + age, 1000 + age))
    found = [load_batch_cost_ratio(name, tmp_path) for name in "abc"]
    assert found == [pytest.approx(1.7), pytest.approx(1.9), None]


def test_time_passes_ends_within_its_time(tmp_path: Path) -> None:
    _, target = learn(tmp_path, max_seconds=0.02)
    assert 1 < max(target.batches) < 8
