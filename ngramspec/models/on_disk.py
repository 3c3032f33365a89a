"""`installed`: the models that are on this disk already, by the names under which `resolve` finds them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from ngramspec.errors import ModelError
from ngramspec.models import hub, hub_cache, lm_studio, ollama
from ngramspec.models.check import SPLIT_NAME, parts_of
from ngramspec.models.find import SMOLLM, check_named, smollm_file


class Installed(NamedTuple):
    """A model on this disk.

    Attributes:
        name: as `resolve` takes it.
        path: its file; the first part of a split model.
        size: bytes of all its parts.
        architecture: of llama.cpp.
        file_type: number of its quantisation, as llama.cpp counts them; None if the file does not say it.
        flaw: why it cannot be used; None if nothing is known against it.
    """

    name: str
    path: Path
    size: int
    architecture: str
    file_type: int | None
    flaw: str | None


def names(env: Mapping[str, str] = os.environ) -> Iterator[tuple[str, Path]]:
    """Names and files of SmolLM2, and of what the hub's cache, ollama and LM Studio hold; no file is looked into.

    Files beside models, as of vision, are left out, and so are all parts of a split model but the first.
    """
    own = smollm_file()
    named = [(SMOLLM, own)] if own else []
    cached = ((f"{hub.PREFIX}{name}", path) for name, path in hub_cache.listed(env))
    for name, path in chain(named, cached, ollama.listed(env), lm_studio.listed()):
        split = SPLIT_NAME.match(path.name)
        if not split or int(split["part"]) == 1:
            yield name, path


def installed(env: Mapping[str, str] = os.environ) -> Iterator[Installed]:
    """The models of `names`, looked at."""
    return (_looked_at(name, path) for name, path in names(env))


def _looked_at(name: str, path: Path) -> Installed:
    try:
        header = check_named(name, path)
        size = sum(part.stat().st_size for part in parts_of(path))
    except (ModelError, OSError) as error:
        return Installed(name, path, 0, "", None, str(error))
    kind = header.metadata.get("general.file_type")
    return Installed(
        name,
        path,
        size,
        str(header.metadata.get("general.architecture", "")),
        kind if isinstance(kind, int) else None,
        None,
    )
