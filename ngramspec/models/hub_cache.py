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


def folders(env: Mapping[str, str]) -> list[Path]:
    """The folders of the cache: the one that llama.cpp alone is told of, then the one that huggingface_hub uses too."""
    own = [Path(os.path.expanduser(told))] if (told := env.get("LLAMA_CACHE")) else []
    return list(dict.fromkeys([*own, _shared(env)]))


def folder_of(repo: str, env: Mapping[str, str]) -> Path:
    """The one of `folders` that holds a repository; if none does, the first, where llama.cpp would put it."""
    every = folders(env)
    return next((folder for folder in every if (folder / _name(repo)).is_dir()), every[0])


def _shared(env: Mapping[str, str]) -> Path:
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
    """The .gguf files of a repository that are there: path in the repository -> file."""
    return _files(folder_of(repo, env) / _name(repo))


def _name(repo: str) -> str:
    return f"{_MODELS}{repo.replace('/', '--')}"


def listed(env: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    """All models that are there: owner/repo:path, and the file."""
    for folder in folders(env):
        for kept in sorted(folder.glob(f"{_MODELS}*--*")):
            repo = kept.name.removeprefix(_MODELS).replace("--", "/", 1)
            if folder_of(repo, env) == folder:
                yield from ((f"{repo}:{name}", path) for name, path in _files(kept).items() if is_model(name))


def _files(kept: Path) -> dict[str, Path]:
    snapshot = _snapshot(kept)
    if snapshot is None:
        return {}
    found = sorted(file for file in snapshot.rglob("*.gguf") if file.is_file())
    return {file.relative_to(snapshot).as_posix(): file for file in found}


def _snapshot(kept: Path) -> Path | None:
    """The folder with a repository's files: of the main branch; if that was not fetched, of another."""
    refs = kept / "refs"
    for ref in (refs / "main", *sorted(refs.glob("*"))):
        try:
            snapshot = kept / "snapshots" / ref.read_text(encoding="utf-8").strip()
        except (OSError, ValueError):
            continue
        if snapshot.is_dir():
            return snapshot
    return None
