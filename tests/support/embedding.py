"""A helper that computes the embeddings of a text without pauses."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from ngramspec.llama.embedder import Embedder


def embed(embedder: Embedder, tokens: Sequence[int], max_tokens: int = 512) -> Any:
    """Return the result of `Embedder.reading`."""

    def run() -> Generator[None, None, None]:
        results.append((yield from embedder.reading(tokens, lambda: max_tokens)))

    results: list[Any] = []
    for _ in run():
        pass
    return results[0]
