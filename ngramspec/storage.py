"""Files of the user's and of ngramspec's own: where they are kept, how they are written, how text is read from them."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import platformdirs


def cache_folder(kind: str) -> Path:
    """The folder for what can be found out again: measurements and verdicts."""
    return Path(platformdirs.user_cache_dir("ngramspec", appauthor=False)) / kind


def data_folder(kind: str) -> Path:
    """The folder for what cannot be found out again: the user's own data."""
    return Path(platformdirs.user_data_dir("ngramspec", appauthor=False)) / kind


def config_folder() -> Path:
    """The folder of the user's settings."""
    return Path(platformdirs.user_config_dir("ngramspec", appauthor=False))


def state_folder() -> Path:
    """The folder for what is handy to have the next time: the history of what was typed."""
    return Path(platformdirs.user_state_dir("ngramspec", appauthor=False))


@contextmanager
def replacing(path: Path, prefix: str = ".ngramspec-") -> Iterator[BinaryIO]:
    """A file to write in the place of `path`: after the block `path` is the whole new file, or unchanged on an error.

    Nobody but the user may read it. A crash may leave a file PREFIX*.tmp beside it.

    Raises:
        OSError: the folder does not exist or cannot be written, or whatever else the block raises.
    """
    if sys.is_finalizing():  # a generator that was left open ends after the modules
        raise OSError("Python is ending")
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=prefix, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def write_whole(path: Path, text: str) -> None:
    """Write a text file whole or not at all; raises OSError, as `replacing` does."""
    with replacing(path) as file:
        file.write(text.encode("utf-8"))


def keep(path: Path, text: str) -> None:
    """Write a text to a cache; nothing happens if the folder cannot be made or written."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)


def keep_json(path: Path, data: Any) -> None:
    """`keep`, as JSON."""
    keep(path, json.dumps(data))


def recall(path: Path) -> str | None:
    """Read a cached text; None if it does not exist or cannot be read."""
    with suppress(OSError, ValueError):
        return utf8(path.read_bytes())
    return None


def utf8(raw: bytes, *, marked: bool = False) -> str:
    """Decode bytes as UTF-8; no line break is changed. `marked`: leave out a byte order mark.

    Raises UnicodeError, which says where they are none: "not UTF-8 text (byte 5 is 0xff)".
    """
    try:
        return raw.decode("utf-8-sig" if marked else "utf-8")
    except UnicodeDecodeError as error:
        raise UnicodeError(f"not UTF-8 text (byte {error.start} is 0x{raw[error.start]:02x})") from error
