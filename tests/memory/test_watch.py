"""Tests of updates of a memory while files change."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from threading import Timer

import pytest
from support.memories import ByteTokenizer, answers, names, texts

from ngramspec.memory import MemoryFileError, Store, indexing
from ngramspec.memory.indexing import AddResult, add_files, watch_folders

Updates = Iterator[AddResult]


@pytest.fixture
def folder(folder: Path) -> Path:
    (folder / ".gitignore").write_text("*.log\nbuild/\n")
    return folder


@pytest.fixture
def rests() -> list[float]:
    return []


@pytest.fixture
def updates(store: Store, folder: Path, rests: list[float], monkeypatch: pytest.MonkeyPatch) -> Iterator[Updates]:
    """Yield the updates of a watcher of `folder`, which was added before."""
    monkeypatch.setattr(indexing, "CALM_MS", 50)
    monkeypatch.setattr(indexing, "LOOK_MS", 100)
    add_files(store, ByteTokenizer(), [folder])
    store.append([1, 2, 3])
    found = watch_folders(store, ByteTokenizer(), [folder], sleep=rests.append)
    yield found
    found.close()
    assert answers(store) == [[1, 2, 3]]


def counts(added: AddResult) -> tuple[int, int, int]:
    return added.new, added.changed, added.removed


def test_watch_updates_memory_for_every_kind_of_change(
    updates: Updates, store: Store, folder: Path, rests: list[float]
) -> None:
    # This changes a file between adding and watching.
    (folder / "a.txt").write_text("first, changed")
    assert counts(next(updates)) == (0, 1, 0)
    # Editors save files like this.
    (folder / "a.txt.new").write_text("renamed over the old one")
    (folder / "a.txt.new").replace(folder / "a.txt")
    assert counts(next(updates)) == (0, 1, 0)
    assert texts(store)["a.txt"] == "renamed over the old one"
    (folder / "sub" / "b.txt").rename(folder / "c.txt")
    assert counts(next(updates)) == (1, 0, 1)
    (folder / "sub").rename(folder / "moved")
    (folder / "moved" / "d.txt").write_text("new")
    assert counts(next(updates)) == (1, 0, 0)
    for number in range(300):
        (folder / "moved" / f"{number}.txt").write_text(f"burst {number}")
    assert counts(next(updates)) == (300, 0, 0)
    shutil.rmtree(folder / "moved")
    assert counts(next(updates)) == (0, 0, 301)
    for name in (".gitignore", "a.txt", "c.txt"):
        (folder / name).unlink()
    assert counts(next(updates)) == (0, 0, 3)
    assert texts(store) == {}
    # The watcher rests after each update except the last, and after any update with a late notification.
    assert len(rests) >= 6
    assert min(rests) > 0


def test_watch_ignores_ignored_files_and_version_control(updates: Updates, store: Store, folder: Path) -> None:
    (folder / "a.txt").write_text("changed")
    next(updates)
    (folder / "noise.log").write_text("noise")
    (folder / "build").mkdir()
    (folder / "build" / "out.txt").write_text("output")
    written = Timer(0.5, (folder / "c.txt").write_text, ["new"])
    written.start()
    assert counts(next(updates)) == (1, 0, 0)
    written.join()
    assert len(names(store)) == 4
    assert not indexing._of_the_user(None, str(folder / ".git" / "index"))


@pytest.mark.parametrize("stands", [True, False])
def test_watch_of_deleted_or_replaced_folder_raises(
    updates: Updates, folder: Path, tmp_path: Path, stands: bool
) -> None:
    (folder / "a.txt").write_text("changed")
    next(updates)
    folder.rename(tmp_path / "elsewhere")
    if stands:
        folder.mkdir()
    with pytest.raises(MemoryFileError, match="start watching again" if stands else "was deleted"):
        next(updates)
