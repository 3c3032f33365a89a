"""Tests of the lowest layer: the user's files, and sequences of tokens."""

from __future__ import annotations

import re
from array import array
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from pathlib import Path

import pytest

from ngramspec.storage import FOLDERS, atomic_write, read_cache, utf8, write_cache, write_whole
from ngramspec.tokens import common_prefix


def test_user_folders_are_separate_and_below_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("XDG_CACHE_HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    folders = {getattr(FOLDERS, f"user_{kind}_path") for kind in ("cache", "data", "config", "state")}
    assert len(folders) == 4
    assert all(folder.is_relative_to(tmp_path) and folder.name == "ngramspec" for folder in folders)


def test_write_whole_replaces_file_atomically(tmp_path: Path) -> None:
    path = tmp_path / "a file"
    for text in ("first\n", "zweite: ü\r\n"):
        write_whole(path, text)
        assert path.read_bytes() == text.encode()
        assert list(tmp_path.iterdir()) == [path]
    # Until the end of the block, the old file stays, next to a new one that other users cannot read.
    with atomic_write(path, prefix="half-") as file:
        file.write(b"after")
        assert path.read_bytes() == text.encode()
        (beside,) = tmp_path.glob("half-*.tmp")
        assert beside.stat().st_mode & 0o077 == 0
    assert path.read_text() == "after"


def test_write_whole_after_failure_keeps_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a file"
    write_whole(path, "before")

    def interrupted() -> None:
        with atomic_write(path) as file:
            file.write(b"half of wh")
            file.flush()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "half a pair: \ud800")
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_keep_creates_folder_and_ignores_write_failure(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "verdict"
    with pytest.raises(FileNotFoundError):
        write_whole(path, "works")
    assert read_cache(path) is None
    write_cache(path, "works")
    assert read_cache(path) == "works"
    # A failure to store is ignored.
    write_cache(path / "verdict", "works")
    assert read_cache(path / "verdict") is None
    path.write_bytes(b"\xff")
    assert read_cache(path) is None


def test_utf8_decodes_text_or_raises_with_position() -> None:
    assert utf8(b"a\r\n\0\xc3\xbc") == "a\r\n\0ü"
    assert utf8(BOM_UTF8 + b"a") == utf8(b"a") == "a"
    for raw, message in (
        (b"ab\xff", "not UTF-8 text (byte 2 is 0xff); convert it to UTF-8"),
        (BOM_UTF8 + b"ab\xff", "not UTF-8 text (byte 5 is 0xff); convert it to UTF-8"),
        (BOM_UTF16_LE, "UTF-16, not UTF-8 text; convert it to UTF-8"),
        (BOM_UTF16_BE, "UTF-16, not UTF-8 text; convert it to UTF-8"),
        (b"GGUF\xff", "a model (GGUF), not UTF-8 text"),
    ):
        with pytest.raises(UnicodeError, match=f"^{re.escape(message)}$"):
            utf8(raw)


def test_common_prefix_returns_length_for_any_sequence_types() -> None:
    pairs = [((1, 2, 3), (1, 2, 4)), ((1, 2), (1, 2, 4)), ((), (1,)), ([1, 2], (1, 2)), ([5], array("i", [6]))]
    for (a, b), length in zip(pairs, (2, 2, 0, 2, 0), strict=True):
        assert common_prefix(a, b) == common_prefix(b, a) == length
