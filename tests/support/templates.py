"""llama.cpp's chat templates, which `tools/templates.sh` copies from the sdist of llama-cpp-python."""

from __future__ import annotations

import os
from pathlib import Path


def template_folder() -> Path | None:
    """Return the folder of the templates: $LLAMA_CPP_TEMPLATES or build/templates; `None` if it does not exist."""
    folder = Path(os.environ.get("LLAMA_CPP_TEMPLATES") or Path(__file__).parents[2] / "build" / "templates")
    return folder if folder.is_dir() else None
