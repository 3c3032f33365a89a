"""Tests of stored measurements: complete files, several processes, and files from other writers."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.mock_target import Clock, MockTarget

from ngramspec.cost import measure
from ngramspec.cost.calibration import EXACT_TOLERANCE, Calibration, choose_class, load_batch_cost_ratio
from ngramspec.cost.curve import CostCurve
from ngramspec.cost.measure import SIZES, ProbeReport


@pytest.fixture(autouse=True)
def clock() -> Iterator[Clock]:
    fake = Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ngramspec.cost.measure.time", fake)
        yield fake


LONG = 10_000  # tokens of a text before which a size may be measured again
EXACT = (2, 3, 4, 5, 6, 8)
"""Sizes of the class of `target_on` that exact mode selects."""


def target_on(clock: Clock, *, slope: float = 0.1, single: float = 1e-3, odd: int = 0, **options: Any) -> MockTarget:
    """Return a target with kernels for size 1, sizes up to 8, and larger ones; `odd` moves the border."""
    return MockTarget(
        20,
        seconds=lambda n: single * (1 + slope * (n - 1)),
        clock=clock,
        kernels=lambda n, depth: 0 if n == 1 else 1 if n <= 8 + odd else 2,
        **options,
    )


def run_process(target: MockTarget, folder: Path) -> Calibration:
    """Return the calibration of a process that measures the curve, or one size of it again."""
    calibration = Calibration.load(target, folder)
    calibration.ensure_curve(target, LONG)
    calibration.save()
    return calibration


def measured(target: MockTarget, folder: Path) -> Calibration:
    Calibration.load(target, folder).ensure_exact(target)
    target.prefill([1, 2])
    return run_process(target, folder)


def test_calibration_load_returns_saved_measurements(clock: Clock, tmp_path: Path) -> None:
    target = target_on(clock)
    first = measured(target, tmp_path / "new" / "folder")
    again = Calibration.load(target, tmp_path / "new" / "folder")
    assert first.exact_sizes == again.exact_sizes == EXACT
    assert again.probe == first.probe
    assert again.curve is not None
    assert first.curve is not None
    assert again.curve.to_json()["seconds"] == pytest.approx(first.curve.to_json()["seconds"])
    assert again.curve.switch == pytest.approx(first.curve.switch)
    assert [p.suffix for p in (tmp_path / "new" / "folder").iterdir()] == [".json"]
    other = Calibration.load(target_on(clock, seed=1), tmp_path / "new" / "folder")
    assert (other.curve, other.probe, other.exact_sizes) == (None, None, None)


def test_calibration_measures_once_per_process(clock: Clock, tmp_path: Path) -> None:
    target = target_on(clock)
    calibration = measured(target, tmp_path)
    passes = target.passes
    assert calibration.ensure_curve(target, LONG) is calibration.curve
    calibration.ensure_exact(target)
    assert target.passes == passes


def test_ensure_curve_restores_kv_cache(clock: Clock, tmp_path: Path) -> None:
    target = target_on(clock)
    for _ in range(3):  # One process measures, and two later ones time again.
        target.prefill([1, 2, 3])
        calibration = run_process(target, tmp_path)
        assert target.tokens == [1, 2, 3]
    calibration.ensure_exact(target)
    assert target.tokens == []


def test_ensure_curve_in_later_process_refines_cached_curve(clock: Clock, tmp_path: Path) -> None:
    # The first process was disturbed and measured the maximum cost for every batch.
    target = target_on(clock, slope=1.5)
    target.prefill([1])
    run_process(target, tmp_path)
    calm, costs = target_on(clock, slope=0.1), []
    calm.prefill([1])
    for _ in range(len(SIZES)):
        before = calm.passes
        curve = run_process(calm, tmp_path).curve
        assert curve is not None
        assert calm.passes - before < target.passes / 3
        costs.append(sum(curve.ratio(n) for n in SIZES))
    assert costs == sorted(costs, reverse=True)
    assert curve.ratio(8) == pytest.approx(1.7, rel=0.05)
    assert curve.ratio(16) == pytest.approx(2.5, rel=0.05)


@pytest.mark.parametrize("slowdown", [0.02, 0.4], ids=["20 ms", "400 ms"])
def test_ensure_curve_after_disturbed_measurement_measures_all_sizes(
    clock: Clock, tmp_path: Path, slowdown: float
) -> None:
    # Threads that wait for each other made all sizes slow and steep, although the machine seemed idle.
    busy = target_on(clock, slope=0.9, single=slowdown)
    busy.prefill([1])
    calibration = run_process(busy, tmp_path)
    assert calibration.curve is not None
    assert not calibration.needs_measuring
    idle = target_on(clock)
    idle.prefill([1])
    curve = Calibration.load(idle, tmp_path).ensure_curve(idle)
    assert curve.level == pytest.approx(1e-3, rel=0.01)
    assert [curve.ratio(n) for n in SIZES] == pytest.approx([1 + 0.1 * (n - 1) for n in SIZES], rel=0.01)
    # A curve whose passes become as fast while the process runs is measured again too; a given curve is not.
    for _ in range(100):
        calibration.curve.observe(1, 1e-3)
    assert calibration.needs_measuring
    assert not Calibration.from_curve(calibration.curve).needs_measuring


def test_ensure_curve_times_sizes_that_cost_more_than_larger_ones(clock: Clock, tmp_path: Path) -> None:
    target = target_on(clock)
    target.prefill([1])
    calibration = Calibration.load(target, tmp_path)
    curve = calibration.ensure_curve(target, LONG)
    for size in (3, 4):  # a program that was not noticed slowed these passes
        for _ in range(60):
            curve.observe(size, 4e-3)
    curve.level = 1e-3
    assert measure.doubtful_sizes(curve, SIZES) == [3, 4]
    calibration.save()
    curve = Calibration.load(target, tmp_path).ensure_curve(target, LONG)
    assert [curve.ratio(size) for size in (3, 4)] == pytest.approx([1.2, 1.3], rel=0.02)
    assert measure.doubtful_sizes(curve, SIZES) == []


def test_ensure_curve_before_short_text_measures_at_most_1_percent(clock: Clock, tmp_path: Path) -> None:
    target = target_on(clock)
    target.prefill([1])
    run_process(target, tmp_path)
    for tokens, passes in ((99, 0), (200, 0), (LONG, 7)):
        before = target.passes
        Calibration.load(target, tmp_path).ensure_curve(target, tokens)
        assert target.passes - before == passes


def test_ensure_curve_in_longer_context_keeps_ratios(clock: Clock, tmp_path: Path) -> None:
    target = target_on(clock)
    target.prefill([1])
    calibration = Calibration.load(target, tmp_path)
    curve = calibration.ensure_curve(target, LONG)
    for _ in range(200):
        curve.observe(1, 0.01)  # deep in a context, each pass takes ten times as long
    calibration.save()
    before = target.passes
    again = Calibration.load(target, tmp_path)
    assert again.ensure_curve(target, LONG).level == pytest.approx(1e-3, rel=0.01)
    assert not again.needs_measuring
    assert target.passes - before <= 8


def test_ensure_curve_with_full_context_keeps_cache(clock: Clock, tmp_path: Path) -> None:
    target = target_on(clock, n_ctx=32)
    measured(target, tmp_path)
    for room in (0, 1, 2):
        target.prefill([1] * (32 - room))
        Calibration.load(target, tmp_path).ensure_curve(target, LONG)
        assert len(target.tokens) == 32 - room


# --------------------------------------------------------------------------- files

SECONDS: list[Any] = [{}, {"2": 1.0}, {"one": 1.0}, {"1": "x"}, {"1": None}, {"1": -1}, {"1": [1]}, [], "1", 3, None]
SECONDS += [{"1": math.inf}, {"1": math.nan}, {"1": 10**400}, {"1": 0.188, "2": 0.018}]
TEXTS = ["", "{", "[]", "null", "3", '"text"', "{}", "\0\1\2"]
CLASSES: list[Any] = [3, None, [], [[1, 2], ["x"]], [[2, 4]], [[1, 1000]], [[1, 2], [2, 3]]]


def damaged(kept: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (description of the damage, content of the file)."""
    curve, probe = kept["curve"], kept["probe"]
    wrong: dict[str, list[Any]] = {
        "curve": [{**curve, "seconds": seconds} for seconds in SECONDS],
        "probe": [{**probe, "classes": classes} for classes in CLASSES],
        "exact_sizes": [[2, 3], [1000], [0], [-1], [8, 2], "12", 3, [2.5], {"2": 1}, True],
        "uses": ["often", None],
    }
    wrong["curve"] += [{**curve, "switch": switch} for switch in (-1, math.inf, "x")]
    wrong["curve"] += [{"seconds": curve["seconds"]}, [1, 2], 3, "text"]
    wrong["probe"] += [{**probe, "depths": None}, {**probe, "max_difference": "much"}, {"depths": [1]}, [1], 3]
    for name, values in wrong.items():
        for value in values:
            yield name, {**kept, name: value}


def test_calibration_load_ignores_damaged_files(clock: Clock, tmp_path: Path) -> None:
    target = target_on(clock)
    path = tmp_path / f"{target.fingerprint}.json"
    measured(target, tmp_path)
    whole = path.read_text()
    kept = json.loads(whole)
    for data in damaged(kept):
        path.write_text(json.dumps(data))
        known = Calibration.load(target, tmp_path)
        assert known.curve is None or data["curve"] == kept["curve"]
        assert known.exact_sizes is None or data["curve"] != kept["curve"], data
    for text in (*TEXTS, *(whole[:cut] for cut in range(0, len(whole) - 1, 7))):
        path.write_text(text)
        known = Calibration.load(target, tmp_path)
        assert (known.curve, known.probe, known.exact_sizes) == (None, None, None)
    path.write_bytes(b"\xff\xfe{")
    assert Calibration.load(target, tmp_path).curve is None
    measured(target, tmp_path)
    assert Calibration.load(target, tmp_path).exact_sizes == EXACT


def test_calibration_with_unwritable_folder_still_measures(clock: Clock, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    target = target_on(clock)
    assert measured(target, tmp_path / "file").curve is not None
    assert Calibration.load(target, tmp_path / "file").curve is None
    assert (tmp_path / "file").read_text() == "in the way"


def test_calibration_save_after_write_error_keeps_old_file(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = target_on(clock)
    calibration = measured(target, tmp_path)
    path = tmp_path / f"{target.fingerprint}.json"
    before = path.read_text()

    def full(data: object, file: Any) -> None:
        file.write('{"half')
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("ngramspec.storage.json.dump", full)
        calibration.save()
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]


def test_calibration_of_other_version_keeps_only_exact_sizes(clock: Clock, tmp_path: Path) -> None:
    target = target_on(clock)
    measured(target, tmp_path)
    path = tmp_path / f"{target.fingerprint}.json"
    kept = json.loads(path.read_text())
    for version in (None, 1, kept["version"] + 1):
        other = {name: value for name, value in kept.items() if name != "version"}
        path.write_text(json.dumps(other if version is None else {**other, "version": version}))
        known = Calibration.load(target, tmp_path)
        assert (known.curve, known.exact_sizes) == (None, EXACT)
    target.prefill([1])
    known.ensure_curve(target, LONG)
    known.save()
    assert json.loads(path.read_text()).keys() == kept.keys()
    assert Calibration.load(target, tmp_path).curve is not None


def test_kept_steepness_returns_newest_ratio_of_model(tmp_path: Path) -> None:
    assert load_batch_cost_ratio("model", tmp_path / "none") is None
    for age, (name, ratio) in enumerate([("model-a", 1.5), ("model-b", 2.5), ("other-a", 3.5)]):
        path = tmp_path / f"{name}.json"
        Calibration(path, CostCurve({1: 0.01, 4: 0.01 * ratio})).save()
        os.utime(path, (1000 - age, 1000 - age))
    (tmp_path / "model-c-exact.json").write_text("{}")
    assert load_batch_cost_ratio("model", tmp_path) == pytest.approx(1.5), "the newest of its settings"
    assert load_batch_cost_ratio("third", tmp_path) is None


def test_calibration_save_keeps_exact_sizes_of_other_process(clock: Clock, tmp_path: Path) -> None:
    target = target_on(clock)
    plain = Calibration.load(target, tmp_path)  # without exact mode, saved at the end
    target.prefill([1])
    plain.ensure_curve(target, LONG)
    exact = Calibration.load(target, tmp_path)
    exact.ensure_exact(target)
    plain.save()
    assert Calibration.load(target, tmp_path).exact_sizes == exact.exact_sizes


def test_ensure_exact_keeps_first_saved_sizes(clock: Clock, tmp_path: Path) -> None:
    first, second = target_on(clock), target_on(clock, odd=1)
    late = Calibration.load(second, tmp_path)  # before the choice of the other
    early = Calibration.load(first, tmp_path)
    early.ensure_exact(first)
    assert late.ensure_exact(second) == early.exact_sizes == EXACT
    late.save()
    assert Calibration.load(first, tmp_path).exact_sizes == early.exact_sizes


@pytest.mark.parametrize(
    ("classes", "costs", "chosen"),
    [
        ((SIZES,), {1: 1.0, 16: 4.0}, SIZES),  # All sizes agree.
        # Without a draft, the larger class costs almost nothing, within the limit for exactness.
        (((1,), (2, 3, 4)), {1: 1.0, 2: EXACT_TOLERANCE - 0.01, 4: 1.5}, (2, 3, 4)),
        (((1,), (2, 3, 4)), {1: 1.0, 2: EXACT_TOLERANCE + 0.01, 4: 1.8}, (1,)),
        # The cheapest size of a class need not be its smallest.
        (((1,), (2, 4, 8)), {1: 1.0, 2: 1.9, 4: 1.1, 8: 1.4}, (2, 4, 8)),
        # Of equal classes, the one with the smallest size is chosen.
        (((1, 2), (3, 4)), {1: 1.0, 4: 1.01}, (1, 2)),
        (((3, 4), (1, 2)), {1: 1.0, 4: 1.01}, (1, 2)),
        # This class is cheaper than one token.
        (((1,), (16,), (2, 3)), {1: 1.0, 2: 3.0, 3: 3.0, 16: 0.5}, (1,)),
    ],
)
def test_choose_class_prefers_cheap_class_within_tolerance(
    classes: tuple[tuple[int, ...], ...], costs: dict[int, float], chosen: tuple[int, ...]
) -> None:
    assert choose_class(ProbeReport((96,), classes, 0.1), CostCurve(costs)) == chosen


def test_calibration_after_forget_measures_again(clock: Clock, tmp_path: Path) -> None:
    target = target_on(clock)
    fresh = measured(target, tmp_path)
    fresh.forget()
    assert (fresh.curve, fresh.probe, fresh.exact_sizes) == (None, None, None)
    assert list(tmp_path.iterdir()) == []
    assert Calibration.load(target, tmp_path).curve is None
    assert fresh.ensure_exact(target) == EXACT
    assert Calibration.load(target, tmp_path).exact_sizes == EXACT
    in_memory = Calibration()
    assert in_memory.ensure_exact(target) == EXACT
    in_memory.save()
    in_memory.forget()
    assert len(list(tmp_path.iterdir())) == 1
