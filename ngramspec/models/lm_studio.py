"""Models that LM Studio has on this disk: `lmstudio:PUBLISHER/MODEL`, with `:QUANT` or `:FILE.gguf` behind it."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from ngramspec.errors import ModelError
from ngramspec.models.hub_files import choose, is_model

PREFIX = "lmstudio:"


def find(name: str) -> Path:
    """The GGUF file (the first part of a split one) of a model that LM Studio has fetched.

    Args:
        name: with the prefix; which of a model's files is chosen as for `hf:` names.

    Raises:
        ModelError: LM Studio has no such model, or which of its files is meant is not clear.
    """
    model, _, wanted = name.removeprefix(PREFIX).partition(":")
    models = _models()
    if model not in models:
        has = difflib.get_close_matches(model, models, n=3) or sorted(models)[:12]
        known = f"it has {', '.join(has)}" if has else f"there is none in {' or '.join(map(str, _folders()))}"
        raise ModelError(f"{name}: LM Studio has no model of that name; {known}")
    files = {path.name: path for path in models[model]}
    try:
        return files[choose(files, wanted or None)[0]]
    except ModelError as error:
        raise ModelError(f"{name}: {error}") from None


def listed() -> Iterator[tuple[str, Path]]:
    """All models that LM Studio has fetched: the name, as `find` takes it, and the file."""
    for model, files in sorted(_models().items()):
        yield from ((f"{PREFIX}{model}:{path.name}", path) for path in files if is_model(path.name))


def _models() -> dict[str, list[Path]]:
    """Files by publisher and model."""
    models: dict[str, list[Path]] = {}
    for folder in _folders():
        for path in sorted(folder.glob("*/*/*.gguf")):
            models.setdefault("/".join(path.relative_to(folder).parts[:2]), []).append(path)
    return models


def _folders() -> list[Path]:
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
