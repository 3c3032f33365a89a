"""Tests of the choice of files: git's rules, and files that are not text."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from ngramspec.memory import files
from ngramspec.memory.files import HUGE, IN_GITIGNORE, LINK, SECRET, SPECIAL, UNREADABLE, find_files, read_text


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
