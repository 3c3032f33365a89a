"""Text files of the user in a message of chat."""

from __future__ import annotations

import re
from pathlib import Path

from ngramspec.errors import NGramSpecError
from ngramspec.storage import NotUtf8, utf8

LARGEST = 8 * 2**20
"""Bytes of a file that is read."""


class FileError(NGramSpecError):
    """A file cannot stand in a message."""


def as_message(name: str) -> str:
    """A file's name and its text between fences. Raises FileError, in words that begin with the name."""
    path = Path(name).expanduser()
    try:
        if path.stat().st_size > LARGEST:
            raise FileError(f"{name} has more than {LARGEST // 2**20} MiB")
        text = utf8(path.read_bytes(), marked=True)
    except (OSError, ValueError) as error:
        if isinstance(error, NotUtf8):
            raise FileError(f"{name} is {error}") from error
        raise FileError(f"cannot read {name}: {getattr(error, 'strerror', None) or error}") from error
    if not text.strip():
        raise FileError(f"{name} is empty")
    longest = max(map(len, re.findall("`{3,}", text)), default=2)
    fence = "`" * (longest + 1)
    ending = "" if text.endswith("\n") else "\n"
    return f"{path.name}:\n\n{fence}{path.suffix[1:]}\n{text}{ending}{fence}"
