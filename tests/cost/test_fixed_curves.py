"""Tests of given cost curves: named curves, files, and every error in a file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ngramspec.cost.fixed_curves import CURVES, LARGEST, find_curves, freeze, make_fixed_curve, parse_curve, to_json
from ngramspec.cost.times import PassTimes
from ngramspec.errors import NGramSpecError


@pytest.mark.parametrize("name", CURVES)
def test_find_curves_by_name_returns_linear_interpolation(name: str) -> None:
    points = CURVES[name][0]
    curve = find_curves(name)[name]
    for size in range(1, LARGEST + 1):
        assert curve.ratio(size) == pytest.approx(np.interp(size, list(points), list(points.values())))


def test_given_curve_accepts_expensive_batches() -> None:
    # Real mixtures of experts need the time of three passes for two tokens; the limit is for disturbed measurements.
    assert make_fixed_curve({1: 1.0, 2: 3.05, 64: 200.0}).ratio(2) == 3.05
    assert PassTimes({1: 1.0, 2: 3.05}).ratio(2) == 3.0


def test_given_curve_extrapolates_last_slope() -> None:
    curve = make_fixed_curve({1: 2.0, 4: 4.0, 8: 5.0})
    assert curve.ratio(8) == 2.5
    assert curve.ratio(12) == pytest.approx(3.0)
    assert curve.ratio(LARGEST) == pytest.approx(2.5 + 56 * 0.125)
    assert make_fixed_curve({1: 3.0}).ratio(40) == 1.0


def test_given_curve_ignores_observations() -> None:
    curve = make_fixed_curve({1: 1.0, 64: 5.0}, switch=0.25)
    before = [curve.ratio(size) for size in range(1, 65)]
    for _ in range(200):
        curve.observe(8, 0.1)
        curve.observe(1, 9.0)
    assert [curve.ratio(size) for size in range(1, 65)] == before
    assert (curve.level, curve.change, curve.last) == (1.0, 0.25, 1)


def test_frozen_returns_learned_ratios() -> None:
    real = PassTimes({1: 1.0, 2: 1.5, 8: 2.5}, (0.2, 0.0))
    held = freeze(real)
    assert [held.ratio(n) for n in range(1, 65)] == pytest.approx([real.ratio(n) for n in range(1, 65)])
    assert held.change == pytest.approx(0.2)


def test_find_curves_reads_one_or_several_curves_from_file(tmp_path: Path) -> None:
    one, several = tmp_path / "mine.json", tmp_path / "both.json"
    one.write_text('{"1": 2.0, "8": 5}')
    several.write_text('{"a": {"1": 1.0}, "b": {"1": 1.0, "64": 64.0}}')
    found = find_curves(str(one))
    assert list(found) == ["mine"]
    assert found["mine"].ratio(8) == 2.5
    assert {name: curve.ratio(64) for name, curve in find_curves(str(several)).items()} == {"a": 1.0, "b": 64.0}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not JSON"),
        ("[1, 2]", "contains no curve"),
        ('{"2": 1.0}', "entry for batch size 1 is missing"),
        ('{"1": 1.0, "4": -2}', "a batch of 4 must be finite and above 0, got -2"),
        ('{"1": 1.0, "2": NaN}', "a batch of 2 must be finite and above 0, got nan"),
        ('{"1": 1.0, "two": 2}', "'two': 2"),
        ('{"1": 1.0, "0": 2}', "must be positive"),
        ('{"1": 1.0, "99999999999999999999": 2}', "is not a batch size"),
        ('{"1": "1.0"}', "'1': '1.0'"),
        ('{"1": true}', "'1': True"),
        ('{"1": 1.0, "2": null}', "'2': None"),
        ('{"1": 1.0, "8": 8.0, "9": 1.0}', "cost nothing"),
        ('{"a": {"1": 1.0}, "b": {"3": 1.0}}', "curve b"),
        ('{"1": 1.0, "switch": -0.1}', "at least 0, got -0.1"),
        ('{"1": 1.0, "switch": "0.1"}', "at least 0, got '0.1'"),
        ('{"1": 1.0, "switch": NaN}', "at least 0, got nan"),
        ('{"1": 1.0, "switch": true}', "at least 0, got True"),
        ("[" * 100000, "JSON"),
    ],
)
def test_find_curves_rejects_invalid_file_content(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(NGramSpecError) as error:
        find_curves(str(path))
    assert words in str(error.value)
    assert "bad.json" in str(error.value)
    assert "\n" not in str(error.value)


def test_find_curves_rejects_missing_or_unreadable_source(tmp_path: Path) -> None:
    with pytest.raises(NGramSpecError, match="one of flat, "):
        find_curves("round")
    with pytest.raises(NGramSpecError, match="directory"):
        find_curves(str(tmp_path))
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(NGramSpecError, match="UTF-8"):
        find_curves(str(tmp_path / "binary"))
    with pytest.raises(NGramSpecError):
        find_curves("a\0b")


def test_given_curve_round_trips_through_json() -> None:
    for points in ({"1": 1.0, "2": 1.5, "64": 9.0}, {"1": 2.0, "8": 3.0, "switch": 0.5}):
        curve = parse_curve(points)
        again = parse_curve(json.loads(json.dumps(to_json(curve))))
        assert (again.ratio(33), again.change) == (curve.ratio(33), curve.change)
    assert curve.change == pytest.approx(0.25), "in units of T(1), as the sizes"
