"""The settings that `ngramspec tune --apply` keeps, and how they become options of other commands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ngramspec.llama.weights import tuning_key
from ngramspec.tuning.kept import Kept, path_of
from ngramspec.tuning.settings import flags


def file_for(model: Path, gpu_layers: int, cache_types: Sequence[str]) -> Path:
    """Where the settings are kept that are the fastest for a model, loaded so."""
    return path_of(tuning_key(model, gpu_layers, cache_types))


def as_options(changes: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `LoadOptions` that make these changes."""
    found: dict[str, Any] = {}
    for name, value in changes.items():
        match name:
            case "mmap" | "repack":
                found[f"no_{name}"] = not value
            case "micro_batch":
                found["ubatch_size"] = value
            case _:
                found[name] = value
    return found


def told(kept: Kept | None, *, left_out: bool) -> str:
    """What tuning found and whether it is used, in a line."""
    if kept is None:
        return "no: ngramspec tune finds the settings that are fastest here"
    if not kept.changes or kept.ratio is None:
        return f"nothing was found faster than the settings as they are ({kept.date})"
    what = f"{flags(kept.changes)}, {1 / kept.ratio:.2f} times as fast where it acts ({kept.date})"
    if not kept.applied:
        return f"{what}; not used: ngramspec tune --apply keeps it"
    return f"{what}{'; left out here' if left_out else ''}"
