"""What is kept of a tuning, and files that something else wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ngramspec.errors import NGramSpecError
from ngramspec.tuning.kept import Kept, forget, keep, outcome, recalled
from ngramspec.tuning.settings import Settings, flags

PRESENT = Settings(4, 4)
FASTER = Settings(3, 4, flash_attn="off", mmap=False, repack=False, micro_batch=256)


def test_what_was_kept_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "new" / "key.json"
    assert recalled(path) is None
    kept = outcome(FASTER, PRESENT, 0.9, "2026-11-22", applied=True)
    keep(path, kept)
    assert recalled(path) == kept
    assert flags(kept.changes) == "-t 3 -tb 4 -fa off -ub 256 --no-mmap --no-repack"
    assert forget(path)
    assert not forget(path)
    assert recalled(path) is None


def test_nothing_found_is_nothing_to_apply() -> None:
    assert outcome(None, PRESENT, 0.9, "2026-11-22", applied=True) == Kept({}, None, "2026-11-22", applied=False)


@pytest.mark.parametrize(
    "changes",
    [
        {"threads": "3"},
        {"threads": 0},
        {"threads_batch": 513},
        {"micro_batch": 8},
        {"mmap": True},
        {"flash_attn": "auto"},
        {"flash_attn": ["off"]},
        {"cache_types": ["q4_0", "q4_0"]},
        {"psychic": 1},
        [],
        None,
    ],
)
def test_what_no_tuning_finds_is_not_applied(tmp_path: Path, changes: Any) -> None:
    path = tmp_path / "key.json"
    path.write_text(json.dumps({"changes": changes, "ratio": 0.9, "date": "2026-11-22", "applied": True}))
    assert recalled(path) is None


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"changes": {}, "ratio": "x", "date": "", "applied": true}'])
def test_a_damaged_file_is_nothing(tmp_path: Path, text: str) -> None:
    path = tmp_path / "key.json"
    path.write_text(text)
    assert recalled(path) is None


def test_what_cannot_be_kept_is_told_where_it_matters(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "key.json"
    keep(path, Kept({}, None, "2026-11-22", applied=False))
    with pytest.raises(NGramSpecError, match="cannot keep the settings"):
        keep(path, Kept({"threads": 3}, 0.9, "2026-11-22", applied=True))
