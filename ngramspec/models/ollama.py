"""Models that ollama has on this disk: `ollama:NAME`, `ollama:NAME:TAG`, `ollama:hf.co/owner/repo:QUANT`.

ollama keeps a manifest for each name, a JSON of layers; the layer of the model is a GGUF file, named by its digest.
Nothing is asked of ollama itself, which need not run.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from ngramspec.errors import ModelError
from ngramspec.models.gguf import GGUFHeader

PREFIX = "ollama:"

_OWN = "registry.ollama.ai"
_LIBRARY = "library"
_LATEST = "latest"
_MODEL = "application/vnd.ollama.image.model"


def find(name: str, env: Mapping[str, str]) -> Path:
    """The GGUF file of a model that ollama has pulled.

    Args:
        name: with the prefix; without a tag, the tag is `latest`.
        env: read for OLLAMA_MODELS.

    Raises:
        ModelError: ollama has no such model, or its file is not there.
    """
    wanted = name.removeprefix(PREFIX)
    bare = wanted.rpartition("/")[2]
    full = wanted if ":" in bare else f"{wanted}:{_LATEST}"
    found = dict(listed(env))
    if (path := found.get(f"{PREFIX}{full}")) is not None:
        return path
    if not found:
        raise ModelError(f"{name}: there are no models of ollama in {' or '.join(map(str, _folders(env)))}")
    names = [one.removeprefix(PREFIX) for one in found]
    close = difflib.get_close_matches(full, names, n=3) or names[:12]
    raise ModelError(f"{name}: ollama has not pulled it; it has {', '.join(close)}")


def listed(env: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    """All models that ollama has pulled: the name, as `find` takes it, and the file."""
    for folder in _folders(env):
        manifests = folder / "manifests"
        for manifest in sorted(_files(manifests)):
            host, *owner, model, tag = manifest.relative_to(manifests).parts
            blob = _blob(manifest, folder / "blobs")
            if blob is not None:
                where = [] if host == _OWN else [host]
                yield f"{PREFIX}{'/'.join([*where, *(o for o in owner if o != _LIBRARY), model])}:{tag}", blob


def check_layout(name: str, header: GGUFHeader) -> None:
    """Check that llama.cpp can load a file of ollama's.

    Raises:
        ModelError: it is in a layout of ollama's own, which keeps a model's vision in the same file.
    """
    vision = f"{header.metadata.get('general.architecture')}.vision."
    if any(key.startswith(vision) for key in header.metadata):
        raise ModelError(f"{name} is in a layout of ollama's own, which llama.cpp cannot load; get it as hf:owner/repo")


def _folders(env: Mapping[str, str]) -> list[Path]:
    """Where ollama keeps models: where it is told to, else a user's folder, and that of Linux's service."""
    if told := env.get("OLLAMA_MODELS"):
        return [Path(told)]
    return [Path(os.path.expanduser("~/.ollama/models")), Path("/usr/share/ollama/.ollama/models")]


def _files(manifests: Path) -> Iterator[Path]:
    """Manifests: at least a host, a model and a tag deep. Of a folder that is closed to us: none."""
    for path in manifests.rglob("*"):
        if len(path.relative_to(manifests).parts) > 2 and path.is_file():
            yield path


def _blob(manifest: Path, blobs: Path) -> Path | None:
    """The file of the layer that holds the model, if it is there."""
    try:
        layers = json.loads(manifest.read_bytes())["layers"]
        digest = next(str(layer["digest"]) for layer in layers if layer["mediaType"] == _MODEL)
    except (OSError, ValueError, KeyError, TypeError, StopIteration):
        return None
    blob = blobs / digest.replace(":", "-")
    return blob if blob.is_file() else None
