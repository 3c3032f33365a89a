"""An embedder without a model."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np

from ngramspec.data import TargetError


class CountingEmbedder:
    """Embedder that returns the first token and the number of tokens as the embedding."""

    width = 3
    n_ctx = 16

    def __init__(self, pooling: str = "mean", scale: float = 1.0) -> None:
        self.pooling, self._scale = pooling, scale

    def reading(self, tokens: Sequence[int], max_chunk: Callable[[], int]) -> Generator[None, None, Any]:
        yield
        if self._scale == 0:
            raise TargetError("llama_decode returned 1")
        rows = len(tokens) if self.pooling == "none" else 1
        return np.array([[tokens[i], len(tokens), 0] for i in range(rows)], np.float32) * self._scale


def expected_embeddings(*texts: Sequence[int]) -> Any:
    """Return the normalised embeddings of texts of tokens."""
    raw = np.array([[tokens[0], len(tokens), 0] for tokens in texts], np.float32)
    return raw / np.linalg.norm(raw, axis=1, keepdims=True)
