"""What a tuning found, kept in the user's cache folder: one small file per model, build and machine."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ngramspec.errors import NGramSpecError
from ngramspec.storage import cache_folder, recall, write_whole
from ngramspec.tuning.settings import LEAST_MICRO, MOST_MICRO, MOST_THREADS

_THREADS = range(1, MOST_THREADS + 1)
_FOUND: Mapping[str, Sequence[Any]] = {
    **{"threads": _THREADS, "threads_batch": _THREADS, "micro_batch": range(LEAST_MICRO, MOST_MICRO + 1)},
    **{"mmap": (False,), "repack": (False,), "flash_attn": ("on", "off")},
}
"""The values that a tuning finds."""


@dataclass(frozen=True, slots=True)
class Kept:
    """The outcome of a tuning.

    Attributes:
        changes: the settings that were found faster (see `Settings.changes`); empty: none is.
        ratio: their time / that of the settings without them, where something was found.
        date: the day, as in 2026-11-22.
        applied: whether they are to be used.
    """

    changes: dict[str, Any]
    ratio: float | None
    date: str
    applied: bool


def path_of(key: str) -> Path:
    """The file of a model, build and machine, of which `key` is the name."""
    return cache_folder("tuned") / f"{key}.json"


def recalled(path: Path) -> Kept | None:
    """What was kept; None where nothing was, or nothing that makes sense."""
    with suppress(ValueError, KeyError, TypeError, AttributeError):
        data = json.loads(recall(path) or "")
        changes = dict(data["changes"].items())
        ratio = None if data["ratio"] is None else float(data["ratio"])
        right = all(type(value) is type(_FOUND[name][0]) and value in _FOUND[name] for name, value in changes.items())
        if right and type(data["applied"]) is bool and isinstance(data["date"], str):
            return Kept(changes, ratio, data["date"][:10], data["applied"])
    return None


def wanted(kept: Kept | None, said: Collection[str]) -> dict[str, Any]:
    """The kept changes that are to be made: those that are applied, and of which the options have not `said` anything.

    Args:
        kept: what the last tuning found.
        said: names of settings that the user has chosen.
    """
    if kept is None or not kept.applied:
        return {}
    return {name: value for name, value in kept.changes.items() if name not in said}


def keep(path: Path, kept: Kept) -> None:
    """Write it.

    Raises:
        NGramSpecError: it is to be used, and cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(asdict(kept)))
    except OSError as error:
        if kept.applied:
            raise NGramSpecError(f"cannot keep the settings in {path}: {error.strerror or error}") from error
