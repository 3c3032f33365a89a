"""Which files are taken: git's rules, and what is no text."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from ngramspec.memory import files
from ngramspec.memory.files import BINARY, HUGE, NOT_UTF8, SPECIAL, UNREADABLE, concerns, find_files, read_text
from ngramspec.storage import NotUtf8


def tree(root: Path, names: dict[str, str]) -> None:
    for name, text in names.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, "utf-8")


def found(root: Path) -> list[str]:
    return [file.path.relative_to(root).as_posix() for file in find_files(root).files]


RULES = {
    ".gitignore": "*.log\n!keep.log\n/build/\n# a comment\n\\#odd\ndocs/**/draft.md\ntrailing   \n[z-a]\n\\\n"
    "**/cache\n",
    "a.py": "a",
    "x.log": "a",
    "keep.log": "a",
    "build/out.txt": "a",
    "sub/build/out.txt": "a",
    "#odd": "a",
    "docs/draft.md": "a",
    "docs/old/er/draft.md": "a",
    "docs/final.md": "a",
    "trailing": "a",
    "sub/cache/x": "a",
    "sub/.gitignore": "!x.log\n*.md\nnested/\n",
    "sub/x.log": "a",
    "sub/y.log": "a",
    "sub/read.md": "a",
    "sub/nested/.gitignore": "!*\n",
    "sub/nested/z.txt": "a",
    "sub/deep/x.log": "a",
    "other/nested": "a",
}


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git to compare with")
def test_the_same_files_as_git_takes(tmp_path: Path) -> None:
    tree(tmp_path, RULES)
    clean = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    env = clean | {"HOME": str(tmp_path), "GIT_CONFIG_NOSYSTEM": "1", "XDG_CONFIG_HOME": str(tmp_path)}
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True, env=env)
    (tmp_path / ".git" / "info" / "exclude").write_text("other/\n")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--others", "--exclude-standard"],
        cwd=tmp_path,
        check=True,
        env=env,
        capture_output=True,
        text=True,
    )
    expected = sorted(listed.stdout.rstrip("\0").split("\0"))
    assert 5 < len(expected) < len(RULES) - 5
    assert sorted(found(tmp_path)) == expected
    assert sorted(found(tmp_path / "sub")) == sorted(n[4:] for n in expected if n.startswith("sub/"))
    # What tells of single paths agrees, also on those that are gone.
    (tmp_path / "a.py").unlink()
    assert sorted(n for n in RULES if concerns([tmp_path / n], tmp_path)) == expected
    assert not concerns([tmp_path / ".git" / "index", tmp_path / "build", tmp_path / "other"], tmp_path)
    assert concerns([tmp_path / "x.log", tmp_path / "sub"], tmp_path)
    within = [n for n in RULES if n.startswith("sub/") and concerns([tmp_path / n], tmp_path / "sub")]
    assert sorted(within) == [n for n in expected if n.startswith("sub/")]


def test_rules_without_a_repository(tmp_path: Path) -> None:
    tree(tmp_path, {"out/.gitignore": "*.py\n", "out/in/a.py": "a", "out/in/b.txt": "b"})
    assert found(tmp_path) == ["out/.gitignore", "out/in/b.txt"]
    # Not in a repository, so nothing above counts.
    assert found(tmp_path / "out" / "in") == ["a.py", "b.txt"]


def test_a_file_that_is_named_is_taken_whatever_the_rules(tmp_path: Path) -> None:
    tree(tmp_path, {".gitignore": "*.log\n", "x.log": "a"})
    assert [f.path for f in find_files(tmp_path / "x.log").files] == [tmp_path / "x.log"]


def test_version_control_links_and_empty_files_are_passed_over(tmp_path: Path) -> None:
    tree(tmp_path, {".git/config": "x", ".hg/x": "x", "a/b.txt": "x", ".hidden/c.txt": "x", "empty": ""})
    try:
        (tmp_path / "loop").symlink_to(tmp_path)
        (tmp_path / "link").symlink_to(tmp_path / "a" / "b.txt")
    except OSError:
        pytest.skip("no links here")
    result = find_files(tmp_path)
    assert [f.path.relative_to(tmp_path).as_posix() for f in result.files] == [".hidden/c.txt", "a/b.txt"]
    assert result.skipped == {}


def test_huge_files_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_BYTES", 100)
    tree(tmp_path, {"huge.txt": "x" * 101, "large.txt": "x" * 100})
    result = find_files(tmp_path)
    assert [f.path.name for f in result.files] == ["large.txt"]
    assert result.skipped == {tmp_path / "huge.txt": HUGE}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes in the file system")
def test_a_pipe_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert find_files(tmp_path).files == []
    assert find_files(tmp_path / "pipe").skipped == {tmp_path / "pipe": SPECIAL}


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_a_locked_folder_is_counted(tmp_path: Path) -> None:
    tree(tmp_path, {"a.txt": "x", "locked/b.txt": "x"})
    (tmp_path / "locked").chmod(0)
    try:
        result = find_files(tmp_path)
    finally:
        (tmp_path / "locked").chmod(0o700)
    assert [f.path.name for f in result.files] == ["a.txt"]
    assert result.skipped == {tmp_path / "locked": UNREADABLE}


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"plain\r\n", "plain\r\n"),
        (b"\xef\xbb\xbfmarked", "marked"),
        ("naïve 🙂".encode(), "naïve 🙂"),
        (b"zero\0byte", None),
        ("wide".encode("utf-16"), None),
    ],
)
def test_what_is_text(tmp_path: Path, raw: bytes, text: str | None) -> None:
    (tmp_path / "file").write_bytes(raw)
    assert read_text(find_files(tmp_path).files[0]) == text


def test_other_encodings_are_errors(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes("Grüße".encode("latin-1"))
    with pytest.raises(NotUtf8):
        read_text(find_files(tmp_path).files[0])


def test_the_reasons_read_as_words() -> None:
    assert (BINARY, NOT_UTF8, HUGE) == ("binary", "not UTF-8", "larger than 8 MiB")
