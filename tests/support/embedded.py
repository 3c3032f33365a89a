"""The vectors of a text at once."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from ngramspec.llama.embedder import Embedder


def embedded(embedder: Embedder, tokens: Sequence[int], most: int = 512) -> Any:
    """What `Embedder.reading` comes to."""

    def kept() -> Generator[None, None, None]:
        found.append((yield from embedder.reading(tokens, lambda: most)))

    found: list[Any] = []
    for _ in kept():
        pass
    return found[0]
