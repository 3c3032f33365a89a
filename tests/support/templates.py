"""The chat templates of llama.cpp, which its source contains."""

from __future__ import annotations

import os
from pathlib import Path

_DEFAULT = Path(__file__).parents[2] / "build" / "templates"


def template_folder() -> Path | None:
    """Return the folder of the templates: $LLAMA_CPP_TEMPLATES, or build/templates; `None` if it does not exist."""
    folder = Path(os.environ.get("LLAMA_CPP_TEMPLATES") or _DEFAULT)
    return folder if folder.is_dir() else None
