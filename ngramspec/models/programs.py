"""Models that other programs keep on this disk: ollama's and LM Studio's, which need not run.

    ollama:NAME, ollama:NAME:TAG, ollama:hf.co/owner/repo:QUANT
    lmstudio:PUBLISHER/MODEL, with :QUANT or :FILE.gguf behind it

ollama keeps a manifest for each name, a JSON of layers; the layer of the model is a GGUF file, named by its digest.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from ngramspec.errors import ModelError
from ngramspec.models.gguf import GGUFHeader
from ngramspec.models.hub import choose, is_model

OLLAMA, LM_STUDIO = "ollama:", "lmstudio:"

_MODEL = "application/vnd.ollama.image.model"


def find_ollama(name: str, env: Mapping[str, str]) -> Path:
    """The GGUF file of a model that ollama has pulled, by its name with the prefix; without a tag, it is `latest`.

    Raises:
        ModelError: ollama has no such model, or its file is not there.
    """
    wanted = name.removeprefix(OLLAMA)
    bare = wanted.rpartition("/")[2]
    full = wanted if ":" in bare else f"{wanted}:latest"
    found = dict(list_ollama(env))
    if (path := found.get(f"{OLLAMA}{full}")) is not None:
        return path
    if not found:
        raise ModelError(f"{name}: there are no models of ollama in {' or '.join(map(str, _ollama_folders(env)))}")
    names = [one.removeprefix(OLLAMA) for one in found]
    close = difflib.get_close_matches(full, names, n=3) or names[:12]
    raise ModelError(f"{name}: ollama has not pulled it; it has {', '.join(close)}")


def list_ollama(env: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    """All models that ollama has pulled: the name, as `find_ollama` takes it, and the file."""
    for folder in _ollama_folders(env):
        manifests = folder / "manifests"
        for manifest in sorted(_manifests(manifests)):
            host, *owner, model, tag = manifest.relative_to(manifests).parts
            blob = _blob(manifest, folder / "blobs")
            if blob is not None:
                where = [] if host == "registry.ollama.ai" else [host]
                yield f"{OLLAMA}{'/'.join([*where, *(o for o in owner if o != 'library'), model])}:{tag}", blob


def check_layout(name: str, header: GGUFHeader) -> None:
    """Raise ModelError for a file in a layout of ollama's own, which keeps a model's vision in the same file."""
    vision = f"{header.metadata.get('general.architecture')}.vision."
    if any(key.startswith(vision) for key in header.metadata):
        raise ModelError(f"{name} is in a layout of ollama's own, which llama.cpp cannot load; get it as hf:owner/repo")


def _ollama_folders(env: Mapping[str, str]) -> list[Path]:
    """Where ollama keeps models: where it is told to, else a user's folder, and that of Linux's service."""
    if told := env.get("OLLAMA_MODELS"):
        return [Path(told)]
    return [Path(os.path.expanduser("~/.ollama/models")), Path("/usr/share/ollama/.ollama/models")]


def _manifests(manifests: Path) -> Iterator[Path]:
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


# --------------------------------------------------------------------------- LM Studio


def find_lm_studio(name: str) -> Path:
    """The GGUF file (the first part of a split one) of a model that LM Studio has fetched, chosen as for `hf:` names.

    Raises:
        ModelError: LM Studio has no such model, or which of its files is meant is not clear.
    """
    model, _, wanted = name.removeprefix(LM_STUDIO).partition(":")
    models = _lm_studio_models()
    if model not in models:
        has = difflib.get_close_matches(model, models, n=3) or sorted(models)[:12]
        known = f"it has {', '.join(has)}" if has else f"there is none in {' or '.join(map(str, _lm_studio_folders()))}"
        raise ModelError(f"{name}: LM Studio has no model of that name; {known}")
    files = {path.name: path for path in models[model]}
    try:
        return files[choose(files, wanted or None)[0]]
    except ModelError as error:
        raise ModelError(f"{name}: {error}") from None


def list_lm_studio() -> Iterator[tuple[str, Path]]:
    """All models that LM Studio has fetched: the name, as `find_lm_studio` takes it, and the file."""
    for model, files in sorted(_lm_studio_models().items()):
        yield from ((f"{LM_STUDIO}{model}:{path.name}", path) for path in files if is_model(path.name))


def _lm_studio_models() -> dict[str, list[Path]]:
    """Files by publisher and model."""
    models: dict[str, list[Path]] = {}
    for folder in _lm_studio_folders():
        for path in sorted(folder.glob("*/*/*.gguf")):
            models.setdefault("/".join(path.relative_to(folder).parts[:2]), []).append(path)
    return models


def _lm_studio_folders() -> list[Path]:
    """Where LM Studio keeps models: where its settings say, its own folder, and that of older versions."""
    home = Path(os.path.expanduser("~"))
    folders = [home / ".lmstudio" / "models", home / ".cache" / "lm-studio" / "models"]
    try:
        told = json.loads((home / ".lmstudio" / "settings.json").read_bytes())["downloadsFolder"]
    except (OSError, ValueError, KeyError, TypeError):
        told = None
    if isinstance(told, str) and told:
        folders.insert(0, Path(told))
    return list(dict.fromkeys(folders))
