"""Where a model comes from: a file, a Hugging Face repository, or the demo model in the package.

What is returned is a whole GGUF file that llama.cpp can open; everything else is a `ModelError`.
"""

from __future__ import annotations

import importlib.resources
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ngramspec.errors import ModelError
from ngramspec.hub import PREFIX, Progress, fetch
from ngramspec.model_file import check_model_file, has_gguf_magic

MODEL_VARIABLE = "NGRAMSPEC_MODEL"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model ready to be loaded.

    Attributes:
        path: the GGUF file; the first part of a split model.
        label: a short name for people.
        demo: whether it is the tiny model inside the package, chosen because no other was named.
    """

    path: Path
    label: str
    demo: bool


def resolve(
    name: str | None,
    env: Mapping[str, str] = os.environ,
    progress: Progress | None = None,
) -> ModelSource:
    """Find, fetch if need be, and check the model that `name` asks for.

    Args:
        name: a path, or `hf:owner/repo`, `hf:owner/repo:QUANT`, `hf:owner/repo:FILE.gguf`; None for
            the model in NGRAMSPEC_MODEL, and without that the demo model.
        env: read for NGRAMSPEC_MODEL and for huggingface_hub's HF_ENDPOINT, HF_HOME, HF_HUB_CACHE
            and HF_HUB_OFFLINE. Access tokens are found by huggingface_hub itself.
        progress: told about downloads.

    Raises:
        ModelError: there is no such model or it cannot be used; one line that says what to do.
    """
    if name is not None:
        return _named(name, env, progress)
    name = env.get(MODEL_VARIABLE)
    if not name:
        return demo_model()
    try:
        return _named(name, env, progress)
    except ModelError as error:
        raise ModelError(f"{error} (the model is named by {MODEL_VARIABLE})") from error


def is_model_argument(text: str) -> bool:
    """Whether an argument names a model: `hf:...`, or a file that begins like a GGUF file."""
    # os.path, as Path.expanduser() raises on the "~name" of an unknown user; text may be anything.
    return text.startswith(PREFIX) or has_gguf_magic(Path(os.path.expanduser(text)))


def _named(name: str, env: Mapping[str, str], progress: Progress | None) -> ModelSource:
    if not name.strip():
        raise ModelError(f"the name of the model is empty; pass a .gguf file or {PREFIX}owner/repo")
    if name.startswith(PREFIX):
        path, label = fetch(name, env, progress)
    elif "://" in name:
        raise ModelError(f"{name} is a URL; download the file, or write {PREFIX}owner/repo:file.gguf")
    else:
        path = Path(os.path.expanduser(name))
        label = path.name
    check_model_file(path)
    return ModelSource(path, label, demo=False)


def demo_model() -> ModelSource:
    """The model inside the package.

    Raises:
        ModelError: the installation lacks it.
    """
    path = Path(str(importlib.resources.files("ngramspec.demo") / "demo.gguf"))
    if not path.is_file():
        raise ModelError("the demo model is missing from this installation; pass a .gguf file")
    return ModelSource(path, "demo model", demo=True)
