"""The plugin of simonw's `llm`: `llm -m ngramspec/NAME "..."`, for every model that `ngramspec models` lists.

`llm` loads all plugins whenever it starts, so importing this loads neither numpy nor llama.cpp; the first prompt does.
Nothing is printed here: `llm` does that.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import llm

from ngramspec.llm_plugin.model import ALIAS, NGramSpec


@llm.hookimpl
def register_models(register: Callable[..., None]) -> None:
    """Name the default model, and those on this disk."""
    from ngramspec.models.on_disk import names

    register(NGramSpec(None), aliases=(ALIAS,))
    # A folder that cannot be looked into is no reason for `llm` not to start.
    with suppress(OSError):
        for name in dict.fromkeys(name for name, _ in names()):
            register(NGramSpec(name))
