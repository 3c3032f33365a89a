"""Tests of the choice of files (git's rules, and files that are not text), of adding them and of removing them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from support.memories import ByteTokenizer, answers, names, open_store, texts

from ngramspec.memory import files
from ngramspec.memory.files import (
    HUGE,
    IN_GITIGNORE,
    LINK,
    SECRET,
    SPECIAL,
    UNREADABLE,
    AddResult,
    add_files,
    find_files,
    read_text,
    remove_files,
)
from ngramspec.memory.memory import Memory
from ngramspec.memory.store import MemoryFileError, Store


def tree(root: Path, names: dict[str, str]) -> None:
    for name, text in names.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, "utf-8")


def found(root: Path) -> list[str]:
    return [path.relative_to(root).as_posix() for path in find_files(root)[0]]


NAMES = """
a.py x.log keep.log build/out.txt sub/build/out.txt #odd docs/draft.md docs/old/er/draft.md docs/final.md trailing
sub/cache/x sub/x.log sub/y.log sub/read.md sub/nested/z.txt sub/deep/x.log other/nested
"""
RULES = {
    ".gitignore": "*.log\n!keep.log\n/build/\n# a comment\n\\#odd\ndocs/**/draft.md\ntrailing   \n[z-a]\n\\\n"
    "**/cache\n",
    "sub/.gitignore": "!x.log\n*.md\nnested/\n",
    "sub/nested/.gitignore": "!*\n",
    **dict.fromkeys(NAMES.split(), "a"),
}


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git to compare with")
def test_find_files_in_repository_returns_files_of_git(tmp_path: Path) -> None:
    tree(tmp_path, RULES)
    clean = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    env = clean | {"HOME": str(tmp_path), "GIT_CONFIG_NOSYSTEM": "1", "XDG_CONFIG_HOME": str(tmp_path)}
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True, env=env)
    (tmp_path / ".git" / "info" / "exclude").write_text("other/\n")
    command = ["git", "ls-files", "-z", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=tmp_path, check=True, env=env, stdout=subprocess.PIPE, text=True).stdout
    expected = sorted(listed.rstrip("\0").split("\0"))
    assert 5 < len(expected) < len(RULES) - 5
    assert sorted(found(tmp_path)) == expected
    assert sorted(found(tmp_path / "sub")) == sorted(n[4:] for n in expected if n.startswith("sub/"))


def test_find_files_without_repository_applies_gitignore_below_folder(tmp_path: Path) -> None:
    # As in git, the first rule is the text after a byte order mark.
    tree(tmp_path, {"out/.gitignore": "\ufeff*.py\n", "out/in/a.py": "a", "out/in/b.txt": "b"})
    assert found(tmp_path) == ["out/.gitignore", "out/in/b.txt"]
    # This folder is not in a repository, so the files above it do not count.
    assert found(tmp_path / "out" / "in") == ["a.py", "b.txt"]


def test_find_files_skips_version_control_links_and_empty_files(tmp_path: Path) -> None:
    tree(tmp_path, {".git/config": "x", ".hg/x": "x", "a/b.txt": "x", ".hidden/c.txt": "x", "empty": ""})
    try:
        (tmp_path / "loop").symlink_to(tmp_path)
        (tmp_path / "link").symlink_to(tmp_path / "a" / "b.txt")
    except OSError:
        pytest.skip("no links here")
    files, skipped = find_files(tmp_path)
    assert [path.relative_to(tmp_path).as_posix() for path in files] == [".hidden/c.txt", "a/b.txt"]
    assert skipped == {tmp_path / "loop": LINK, tmp_path / "link": LINK}


def test_find_files_skips_secret_names_unless_given_explicitly(tmp_path: Path) -> None:
    secret = {".env", "web/.env.local", "tls/server.pem", "id_ed25519", ".netrc", ".aws/credentials", "secrets.toml"}
    plain = [".env.example", "id_ed25519.pub", "keys.py", "web/env.ts"]
    tree(tmp_path, dict.fromkeys([*secret, *plain], "x") | {".gitignore": "secrets.toml\n*.log\n", "a.log": "x"})
    assert found(tmp_path) == sorted([".gitignore", *plain])
    skipped = {path.relative_to(tmp_path).as_posix(): why for path, why in find_files(tmp_path)[1].items()}
    assert {name for name, why in skipped.items() if why == SECRET} == secret - {"secrets.toml", ".aws/credentials"} | {
        ".aws"
    }
    assert {name for name, why in skipped.items() if why == IN_GITIGNORE} == {"secrets.toml", "a.log"}
    assert [path.name for path in find_files(tmp_path / ".env")[0]] == [".env"]


def test_find_files_skips_huge_files_and_pipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_BYTES", 100)
    tree(tmp_path, {"huge.txt": "x" * 101, "large.txt": "x" * 100})
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        assert find_files(tmp_path / "pipe")[1] == {tmp_path / "pipe": SPECIAL}
    found, skipped = find_files(tmp_path)
    assert [path.name for path in found] == ["large.txt"]
    piped = {tmp_path / "pipe": SPECIAL} if hasattr(os, "mkfifo") else {}
    assert skipped == {tmp_path / "huge.txt": HUGE, **piped}


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_find_files_reports_unreadable_folder(tmp_path: Path) -> None:
    tree(tmp_path, {"a.txt": "x", "locked/b.txt": "x"})
    (tmp_path / "locked").chmod(0)
    try:
        found, skipped = find_files(tmp_path)
    finally:
        (tmp_path / "locked").chmod(0o700)
    assert [path.name for path in found] == ["a.txt"]
    assert skipped == {tmp_path / "locked": UNREADABLE}


def test_read_text_returns_text_or_none_for_binary_content(tmp_path: Path) -> None:
    for raw, text in (
        (b"plain\r\n", "plain\r\n"),
        (b"\xef\xbb\xbfmarked", "marked"),
        ("naïve 🙂".encode(), "naïve 🙂"),
        (b"zero\0byte", None),
    ):
        (tmp_path / "file").write_bytes(raw)
        assert read_text(tmp_path / "file") == text
    for encoding in ("latin-1", "utf-16"):
        (tmp_path / "file").write_bytes("Grüße".encode(encoding))
        with pytest.raises(UnicodeError):
            read_text(tmp_path / "file")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "memory")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    tree(folder, {"a.txt": "first", "sub/b.txt": "second", "c.bin": "\0\1"})
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
    monkeypatch.setattr(files, "PIECE", 10)
    pieces: list[str] = []
    for size in (0, 1, 9, 10, 11, 20, 21):
        pieces.clear()
        text = "one\ntwo\nthree and four and five\n"[:size] + "x"
        (tmp_path / "text").write_text(text)
        add_files(store, Watched(pieces.append), [tmp_path / "text"])
        assert "".join(pieces) == text
        assert texts(store) == {"text": text}
        assert all(len(p) <= 10 and (p.endswith("\n") or p[-1] == "x" or "\n" not in p) for p in pieces)


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
