"""The user's and ngramspec's files: their folders, atomic writing, and decoding of text."""

from __future__ import annotations

import os
import secrets
import sys
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from platformdirs import PlatformDirs

UTF16 = "UTF-16, not UTF-8 text; convert it to UTF-8"
"""Message on UTF-16, which follows "is"."""

FOLDERS = PlatformDirs("ngramspec", appauthor=False)
"""The user's folders: `user_cache_path` for data that can be computed again, `user_data_path` for the user's own data,
`user_config_path` for settings, and `user_state_path` for data that is only convenient to keep."""


@contextmanager
def atomic_path(path: Path, prefix: str = ".ngramspec-", mode: int = 0o600) -> Iterator[Path]:
    """Create an empty temporary file that replaces `path` after the block; on an error `path` is unchanged.

    By default, only the user may read the file. A crash may leave a file PREFIX*.tmp next to it. An OSError means that
    the folder does not exist or cannot be written.
    """
    if sys.is_finalizing():  # a generator that was left open ends after the modules
        raise OSError("Python is ending")
    temporary = path.with_name(f"{prefix}{secrets.token_hex(8)}.tmp")
    os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode))
    try:
        yield temporary
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def atomic_write(path: Path, prefix: str = ".ngramspec-") -> Iterator[BinaryIO]:
    """Open a file that replaces `path` after the block; see `atomic_path`."""
    with atomic_path(path, prefix) as temporary, temporary.open("wb") as file:
        yield file


def write_whole(path: Path, text: str) -> None:
    """Write a text file atomically; raise an OSError if that fails."""
    with atomic_write(path) as file:
        file.write(text.encode("utf-8"))


def write_cache(path: Path, text: str) -> None:
    """Write a text to a cache; ignore the error if the folder cannot be created or written."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)


def read_cache(path: Path) -> str | None:
    """Return a cached text; `None` if it does not exist or cannot be read."""
    with suppress(OSError, ValueError):
        return utf8(path.read_bytes())
    return None


def utf8(raw: bytes) -> str:
    """Decode bytes as UTF-8 without changing line breaks, and remove a byte order mark at the start.

    The message of a UnicodeError follows "is": "not UTF-8 text (byte 5 is 0xff); convert ...".
    """
    text = raw.removeprefix(BOM_UTF8)
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        at = len(raw) - len(text) + error.start
        if is_utf16(raw):
            reason = UTF16
        elif raw.startswith(b"GGUF"):
            reason = "a model (GGUF), not UTF-8 text"
        else:
            reason = f"not UTF-8 text (byte {at} is 0x{raw[at]:02x}); convert it to UTF-8"
        raise UnicodeError(reason) from error


def is_utf16(raw: bytes) -> bool:
    """Return True if bytes begin with a byte order mark of UTF-16, which is never the start of UTF-8 text."""
    return raw.startswith((BOM_UTF16_LE, BOM_UTF16_BE))
