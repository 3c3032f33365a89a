"""What the cache of the Hugging Face hub holds on this disk: huggingface_hub's, and llama.cpp's too.

Reads the layout that huggingface_hub documents ("Understand caching"): its own look-ups take a file name that is known
already, and files that are there need no package.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from ngramspec.models.hub_files import is_model

_MODELS = "models--"


def folder(env: Mapping[str, str]) -> Path:
    """The cache folder, as huggingface_hub and llama.cpp find it."""
    for name, below in (
        ("HF_HUB_CACHE", ""),
        ("HUGGINGFACE_HUB_CACHE", ""),
        ("HF_HOME", "hub"),
        ("XDG_CACHE_HOME", "huggingface/hub"),
    ):
        if told := env.get(name):
            return Path(os.path.expanduser(told)) / below
    return Path(os.path.expanduser("~/.cache/huggingface/hub"))


def files(repo: str, env: Mapping[str, str]) -> dict[str, Path]:
    """The .gguf files of a repository's main branch that are there: path in the repository -> file."""
    return _files(folder(env) / f"{_MODELS}{repo.replace('/', '--')}")


def listed(env: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    """All models that are there: owner/repo:path, and the file."""
    for kept in sorted(folder(env).glob(f"{_MODELS}*--*")):
        repo = kept.name.removeprefix(_MODELS).replace("--", "/", 1)
        yield from ((f"{repo}:{name}", path) for name, path in _files(kept).items() if is_model(name))


def _files(kept: Path) -> dict[str, Path]:
    try:
        commit = (kept / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return {}
    snapshot = kept / "snapshots" / commit
    found = sorted(file for file in snapshot.rglob("*.gguf") if file.is_file())
    return {file.relative_to(snapshot).as_posix(): file for file in found}
