"""Tests of the prose check: it finds its phrases, and the repository contains none of them."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def prose(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "tools")
    return importlib.import_module("prose")


@pytest.mark.exhaustive
def test_prose_check_of_repository_finds_no_hits(prose: ModuleType) -> None:
    hits = [(path, hit) for path in prose.list_files() for hit in prose.find_hits(path.name, path.read_text("utf-8"))]
    assert hits == []


def test_prose_check_finds_hits_in_prose_but_not_in_code(prose: ModuleType) -> None:
    python = '"""Go on."""\ngo_on = lately = 1  # measured anew\ntext = "but for this"  # prose: ok\n'
    assert [(hit.line, hit.rule) for hit in prose.find_hits("a.py", python)] == [(1, "L03"), (2, "L06")]
    markdown = "# Title\n\n    go on\n\nUse `go on` beside it.\n\n```sh\nlately\n```\n"  # prose: ok
    assert [(hit.line, hit.rule) for hit in prose.find_hits("a.md", markdown)] == [(5, "L01")]
    assert [hit.rule for hit in prose.find_hits("page.js", "// lately\n")] == ["L06"]  # prose: ok


def test_prose_check_of_file_with_hits_lists_them_and_fails(
    prose: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text("Use it beside that.\n", "utf-8")  # prose: ok
    assert prose.main([str(page)]) == 1
    assert capsys.readouterr().out.startswith(f"{page}:1: L01 ")
    page.write_text("Use it next to that.\n", "utf-8")
    assert prose.main([str(page)]) == 0
