"""Fixtures with a memory's store and a folder of files to add to it."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.memories import open_store

from ngramspec.memory import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "memory")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.txt").write_text("first")
    (folder / "sub" / "b.txt").write_text("second")
    return folder
