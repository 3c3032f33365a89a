"""Tests of given cost curves: named curves, files, and every error in a file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ngramspec.cost.fixed_curves import CURVES, SWITCH, find_curves, freeze, make_fixed_curve, parse_curve, to_json
from ngramspec.cost.times import LARGEST, PassTimes
from ngramspec.data import NGramSpecError


@pytest.mark.parametrize("name", CURVES)
def test_find_curves_by_name_returns_linear_interpolation(name: str) -> None:
    points = dict(CURVES[name][0])
    curve = find_curves(name)[name]
    assert curve.change == points.pop(SWITCH, 0.0)
    for size in range(1, LARGEST + 1):
        assert curve.ratio(size) == pytest.approx(np.interp(size, [int(n) for n in points], list(points.values())))


def test_given_curve_accepts_expensive_batches_and_extrapolates_last_slope() -> None:
    # Real mixtures of experts need the time of three passes for two tokens; the limit is for disturbed measurements.
    assert make_fixed_curve({1: 1.0, 2: 3.05, 64: 200.0}).ratio(2) == 3.05
    assert PassTimes({1: 1.0, 2: 3.05}).ratio(2) == 3.0
    curve = make_fixed_curve({1: 2.0, 4: 4.0, 8: 5.0})
    assert [curve.ratio(n) for n in (8, 12, LARGEST)] == pytest.approx([2.5, 3.0, 2.5 + 56 * 0.125])
    assert make_fixed_curve({1: 3.0}).ratio(40) == 1.0


def test_freeze_returns_learned_ratios() -> None:
    real = PassTimes({1: 1.0, 2: 1.5, 8: 2.5}, (0.2, 0.0))
    held = freeze(real)
    assert [held.ratio(n) for n in range(1, 65)] == pytest.approx([real.ratio(n) for n in range(1, 65)])
    assert held.change == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("text", "ratios"),
    [('{"1": 2.0, "8": 5}', {"file": 2.5}), ('{"a": {"1": 1}, "b": {"1": 1, "8": 8}}', {"a": 1.0, "b": 8.0})],
)
def test_find_curves_reads_one_or_several_curves_from_file(tmp_path: Path, text: str, ratios: object) -> None:
    (tmp_path / "file.json").write_text(text)
    assert {name: curve.ratio(8) for name, curve in find_curves(str(tmp_path / "file.json")).items()} == ratios


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "not JSON"),
        (b"[1, 2]", "contains no curve"),
        (b'{"2": 1.0}', "entry for batch size 1 is missing"),
        (b'{"1": 1.0, "4": -2}', "a batch of 4 must be finite and above 0, got -2"),
        (b'{"1": 1.0, "2": NaN}', "a batch of 2 must be finite and above 0, got nan"),
        (b'{"1": 1.0, "two": 2}', "'two': 2"),
        (b'{"1": 1.0, "0": 2}', "must be positive"),
        (b'{"1": 1.0, "99999999999999999999": 2}', "is not a batch size"),
        (b'{"1": "1.0"}', "'1': '1.0'"),
        (b'{"1": 1.0, "2": null}', "'2': None"),
        (b'{"1": 1.0, "8": 8.0, "9": 1.0}', "cost nothing"),
        (b'{"a": {"1": 1.0}, "b": {"3": 1.0}}', "curve b"),
        (b'{"1": 1.0, "switch": -0.1}', "at least 0, got -0.1"),
        (b'{"1": 1.0, "switch": NaN}', "at least 0, got nan"),
        (b'{"1": 1.0, "switch": true}', "at least 0, got True"),
        (b"[" * 100000, "JSON"),
        (b"\xff\xfe", "UTF-8"),
    ],
)
def test_find_curves_rejects_invalid_file_content(tmp_path: Path, text: bytes, words: str) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(text)
    with pytest.raises(NGramSpecError) as error:
        find_curves(str(path))
    assert words in str(error.value)
    assert "bad.json" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("name", "words"), [("round", "one of flat, "), (".", "directory"), ("a\0b", "null")])
def test_find_curves_rejects_missing_or_unreadable_source(name: str, words: str) -> None:
    with pytest.raises(NGramSpecError, match=words):
        find_curves(name)


@pytest.mark.parametrize(
    ("points", "change"), [({"1": 1.0, "2": 1.5, "64": 9.0}, 0.0), ({"1": 2.0, "8": 3.0, "switch": 0.5}, 0.25)]
)
def test_given_curve_round_trips_through_json(points: dict[str, float], change: float) -> None:
    curve = parse_curve(points)
    again = parse_curve(json.loads(json.dumps(to_json(curve))))
    assert (again.ratio(33), again.change) == (curve.ratio(33), curve.change)
    assert curve.change == pytest.approx(change), "in units of T(1), as the sizes"
