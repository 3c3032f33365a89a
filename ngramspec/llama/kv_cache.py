"""How large a KV cache is, and how much context fits in the memory there is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CacheType = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"]

# enum ggml_type and bytes per element (ggml.h; a quantised block holds 32 elements).
CACHE_TYPES: dict[CacheType, tuple[int, float]] = {
    "f32": (0, 4.0),
    "f16": (1, 2.0),
    "bf16": (30, 2.0),
    "q8_0": (8, 34 / 32),
    "q5_1": (7, 24 / 32),
    "q5_0": (6, 22 / 32),
    "q4_1": (3, 20 / 32),
    "q4_0": (2, 18 / 32),
}

UNQUANTISED: tuple[CacheType, ...] = ("f32", "f16", "bf16")
"""Element types that are not quantised: llama.cpp has a V cache of others with flash attention only."""

LEAST, GRAIN = 512, 256
"""A context is never capped below the one, and to multiples of the other, in tokens."""


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What one token takes in the KV cache: layers, KV heads, and the widths of a head's key and value."""

    layers: int
    heads: int
    key_width: int
    value_width: int

    def bytes_per_token(self, key_type: CacheType, value_type: CacheType) -> float:
        """Upper estimate: sliding-window and recurrent layers take less."""
        widths = self.key_width * CACHE_TYPES[key_type][1] + self.value_width * CACHE_TYPES[value_type][1]
        return self.layers * self.heads * widths


def fitting_context(trained: int, bytes_per_token: float, free: int, texts: int = 1) -> tuple[int, str | None]:
    """The context size to use when none was asked for, and a line for the user if it is not the model's own.

    Args:
        trained: tokens the model was trained on; 0 when unknown.
        bytes_per_token: of the KV cache.
        free: bytes of free RAM or GPU memory; half of them may become KV cache.
        texts: how many contexts of that size there will be.
    """
    trained = trained or 4096
    fits = int(free / 2 / max(1.0, texts * bytes_per_token)) // GRAIN * GRAIN
    if fits >= trained:
        return trained, None
    size = min(trained, max(LEAST, fits))
    each = f", {texts} times," if texts > 1 else ""
    return size, f"context capped at {size} of the model's {trained} tokens to fit{each} in memory (-c sets it)"
