"""Where memories are kept: one folder each, under the user's data folder, with a file for each tokenizer."""

from __future__ import annotations

import re
from pathlib import Path

from ngramspec.memory.snapshot import MemoryFileError
from ngramspec.memory.store import Store
from ngramspec.storage import data_folder

DEFAULT = "default"

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")


def memory_folder(name: str = DEFAULT, folder: Path | None = None) -> Path:
    """The folder of the memory `name`; it may not exist.

    Raises:
        MemoryFileError: no such name is allowed.
    """
    if not _NAME.fullmatch(name):
        raise MemoryFileError(
            f"{name!r} cannot be the name of a memory: it takes up to 64 letters, digits, '_', '-' and '.',"
            " beginning with none of the last two"
        )
    return (folder or data_folder("memory")) / name


def memory_names(folder: Path | None = None) -> list[str]:
    """The memories that hold something."""
    try:
        found = sorted((folder or data_folder("memory")).iterdir())
    except OSError:
        return []
    return [path.name for path in found if _NAME.fullmatch(path.name) and Store.all_in(path)]
