"""Tests of adding files to a memory and removing them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from support.memories import ByteTokenizer, answers, names, texts

from ngramspec.memory import Memory, MemoryFileError, Store, files
from ngramspec.memory import indexing as indexing_module
from ngramspec.memory.indexing import AddResult, add_files, remove_files


@pytest.fixture
def folder(folder: Path) -> Path:
    (folder / "c.bin").write_bytes(b"\0\1")
    return folder


class Watched(ByteTokenizer):
    """Tokenizer that passes each text to a callback first."""

    def __init__(self, see: Callable[[str], object]) -> None:
        self._see = see

    def tokenize(self, text: str, *, special: bool = False, add_bos: bool = True) -> list[int]:
        self._see(text)
        return super().tokenize(text, special=special, add_bos=add_bos)


def add(store: Store, *paths: Path) -> AddResult:
    return add_files(store, ByteTokenizer(), paths)


@pytest.mark.parametrize("threads", [1, 4])
def test_add_files_indexes_folders_and_skips_unchanged_files(store: Store, folder: Path, threads: int) -> None:
    seen: list[tuple[int, int]] = []
    added = add_files(
        store, ByteTokenizer(), [folder], threads=threads, progress=lambda *bytes_read: seen.append(bytes_read)
    )
    assert added == AddResult(new=2, changed=0, unchanged=0, removed=0, tokens=11, skipped={"binary": 1})
    assert seen == [(5, 13), (7, 13), (13, 13)]
    assert texts(store) == {"a.txt": "first", "b.txt": "second"}
    assert names(store) == [str(folder / "a.txt"), str(folder / "sub" / "b.txt")]
    index = Memory(store.read()).indexes[0]
    assert bytes(list(index.tokens[:5])) == b"first"
    assert index.tokens[5] == -1
    # Unchanged files are not indexed again.
    before = store.generation()
    again = add(store, folder, folder / "a.txt")
    assert (again.new, again.unchanged, again.tokens) == (0, 2, 0)
    assert store.generation() == before
    assert len(names(store)) == 2


def test_add_files_replaces_changed_file(store: Store, folder: Path) -> None:
    add(store, folder)
    store.append([1, 2, 3])
    (folder / "a.txt").write_bytes(b"fresh")
    os.utime(folder / "a.txt", ns=(1, 1))
    again = add(store, folder)
    assert (again.new, again.changed, again.unchanged, again.tokens) == (0, 1, 1, 5)
    assert texts(store) == {"b.txt": "second", "a.txt": "fresh"}
    # The newest file is last, since chains begin there.
    assert list(texts(store)) == ["b.txt", "a.txt"]
    assert answers(store) == [[1, 2, 3]]
    # A file that the user named stays, although it is ignored now.
    (folder / ".gitignore").write_text("a.txt\n")
    add(store, folder)
    assert set(texts(store)) == {".gitignore", "a.txt", "b.txt"}
    add(store, folder / "a.txt")
    assert set(texts(store)) == {".gitignore", "a.txt", "b.txt"}


def test_add_files_removes_files_missing_from_added_folder(
    store: Store, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere.txt"
    elsewhere.write_bytes(b"third")
    add(store, folder, elsewhere)
    elsewhere.unlink()
    (folder / "a.txt").unlink()
    # This file is no longer text.
    (folder / "sub" / "b.txt").write_bytes(b"\0")
    (folder / "d.txt").write_bytes(b"fourth")
    again = add(store, folder)
    assert (again.new, again.removed) == (1, 2)
    # The scan does not look for a file that was added separately.
    assert texts(store) == {"elsewhere.txt": "third", "d.txt": "fourth"}
    (folder / "e.txt").write_text("fifth")
    monkeypatch.setattr(files, "MAX_BYTES", 5)
    again = add(store, folder)
    assert (again.removed, again.skipped) == (1, {"binary": 2, files.HUGE: 1})
    assert texts(store) == {"elsewhere.txt": "third", "e.txt": "fifth"}


def test_add_files_splits_long_texts_into_pieces(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexing_module, "PIECE", 10)
    pieces: list[str] = []
    for size in (0, 1, 9, 10, 11, 20, 21):
        pieces.clear()
        text = "one\ntwo\nthree and four and five\n"[:size] + "x"
        (tmp_path / "text").write_text(text)
        add_files(store, Watched(pieces.append), [tmp_path / "text"])
        assert "".join(pieces) == text
        assert texts(store) == {"text": text}
        assert all(len(p) <= 10 and (p.endswith("\n") or p[-1] == "x" or "\n" not in p) for p in pieces)


# ---------------------------------------------------------------------- what cannot be added


def test_add_files_rejects_paths_without_text(store: Store, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    (tmp_path / "numbers").mkdir()
    (tmp_path / "numbers" / "x").write_bytes(b"\0")
    (tmp_path / "numbers" / "y").write_bytes(b"\xff\xfe\xfa")
    for path, words in (
        (tmp_path / "gone", "no such file or folder"),
        (tmp_path / "nothing", "no text files to add"),
        (folder / "c.bin", r"no text files to add \(skipped: 1 binary\)"),
        (tmp_path / "numbers", r"no text files to add \(skipped: 1 binary, 1 not UTF-8 text, convert to UTF-8\)"),
    ):
        with pytest.raises(MemoryFileError, match=words) as error:
            add(store, folder, path)
        assert str(path) in str(error.value)
    assert not store.path.exists()


def test_add_files_skips_file_deleted_during_indexing(store: Store, folder: Path) -> None:
    deleting = Watched(lambda _: (folder / "sub" / "b.txt").unlink(missing_ok=True))
    added = add_files(store, deleting, [folder])
    assert added.skipped == {"binary": 1, "unreadable": 1}
    assert texts(store) == {"a.txt": "first"}


# ---------------------------------------------------------------------- removing


def test_remove_files_removes_only_files_under_path(store: Store, folder: Path, tmp_path: Path) -> None:
    add(store, folder)
    store.append([1])
    (folder / "sub" / "b.txt").unlink()
    assert remove_files(store, folder / "nowhere") == 0
    assert remove_files(store, folder / "su") == 0
    assert remove_files(store, folder / "sub") == 1
    assert texts(store) == {"a.txt": "first"}
    assert remove_files(store, folder / "a.txt") == 1
    assert texts(store) == {}
    assert answers(store) == [[1]]
    try:
        (tmp_path / "link").symlink_to(folder)
    except OSError:
        pytest.skip("no links here")
    add(store, tmp_path / "link")
    assert add(store, folder).unchanged == 1
    assert remove_files(store, tmp_path / "link") == 1
