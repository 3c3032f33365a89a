"""Tests of the prose check: it finds its phrases, no file exceeds its limit, and limits only fall."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def prose(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "tools")
    return importlib.import_module("prose")


def test_prose_check_of_repository_stays_within_baseline(prose: ModuleType) -> None:
    limits = json.loads(prose.BASELINE.read_text("utf-8"))
    assert prose.find_excess(prose.count_hits(prose.list_files()), limits) == []


def test_prose_check_finds_hits_in_prose_but_not_in_code(prose: ModuleType) -> None:
    python = '"""Go on."""\ngo_on = lately = 1  # measured anew\ntext = "but for this"  # prose: ok\n'
    assert [(hit.line, hit.rule) for hit in prose.find_hits("a.py", python)] == [(1, "L03"), (2, "L06")]
    markdown = "# Title\n\n    go on\n\nUse `go on` beside it.\n\n```sh\nlately\n```\n"  # prose: ok
    assert [(hit.line, hit.rule) for hit in prose.find_hits("a.md", markdown)] == [(5, "L01")]
    assert [hit.rule for hit in prose.find_hits("page.js", "// lately\n")] == ["L06"]  # prose: ok


def test_prose_baseline_reports_excess_and_only_decreases(prose: ModuleType) -> None:
    limits = {"better.py": 3, "clean.py": 1, "gone.py": 2, "same.py": 2, "worse.py": 1}
    counts = {"better.py": 2, "new.py": 1, "same.py": 2, "worse.py": 4}
    assert [message.split(":")[0] for message in prose.find_excess(counts, limits)] == ["new.py", "worse.py"]
    assert prose.lower_limits(counts, limits) == {"better.py": 2, "same.py": 2, "worse.py": 1}
