"""Where ngramspec keeps files of its own, by the system's customs, and how they are written: whole or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import platformdirs


def cache_folder(kind: str) -> Path:
    """The folder for what can be found out again: measurements and verdicts."""
    return Path(platformdirs.user_cache_dir("ngramspec", appauthor=False)) / kind


def data_folder(kind: str) -> Path:
    """The folder for what cannot: the user's own."""
    return Path(platformdirs.user_data_dir("ngramspec", appauthor=False)) / kind


def config_folder() -> Path:
    """The folder of the user's settings."""
    return Path(platformdirs.user_config_dir("ngramspec", appauthor=False))


def write_whole(path: Path, data: Any) -> None:
    """Write JSON whole or not at all; a folder that cannot be written costs a new measurement, no more."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(data, file)
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError:
        pass
