"""The context size of a loaded model: the requested one if it is possible, otherwise one that fits the memory."""

from __future__ import annotations

from collections.abc import Sequence

import llama_cpp.llama_cpp as llama

from ngramspec.data import ModelError
from ngramspec.llama import devices
from ngramspec.llama.cache import bytes_per_token
from ngramspec.llama.weights import Weights

MIN_CONTEXT, GRAIN = 512, 256
"""Tokens of the smallest context that is chosen to fit the memory, and of the steps between larger ones."""


def choose_context_size(weights: Weights, requested: int | None, texts: int) -> int:
    """Return the context size of each of `texts` sequences in tokens: the requested size, or the largest that fits."""
    if requested is None:
        reserved = weights.plan.asked.reserved if weights.on_gpu else 0
        largest, n_trained = _largest_size(weights, weights.devices, texts, reserved), weights.n_ctx_train or 4096
        if largest >= n_trained:
            return n_trained
        size, each = min(n_trained, max(MIN_CONTEXT, largest)), f", {texts} times," if texts > 1 else ""
        weights.notes.append(
            f"context limited to {size} of the model's {n_trained} tokens to fit{each} in memory (set -c to override)"
        )
        return size
    total = devices.total_bytes(weights.devices, weights.cache_layers)
    # The estimate is exact for plain attention only. Without this check the system ends the process.
    size_bytes = requested * token_bytes(weights, texts)
    if size_bytes > total and not weights.is_recurrent and not weights.window:
        each = f", {texts} of them" if texts > 1 else ""
        raise ModelError(
            f"a context of {requested} tokens{each} needs {size_bytes / 2**30:.1f} GiB for the KV cache, but the"
            f" machine has {total / 2**30:.1f} GiB in total; try {advise_smaller_size(weights, requested, texts)}"
        )
    if requested > weights.n_ctx_train > 0:
        weights.notes.append(
            f"warning: the context of {requested} tokens is larger than the {weights.n_ctx_train} the model was"
            " trained on"
        )
    return requested


def advise_smaller_size(weights: Weights, n_ctx: int, texts: int) -> str:
    """Return advice after a context of `n_ctx` tokens per sequence did not fit, with a size that fits if known."""
    size = _largest_size(weights, devices.devices(), texts)
    advice = "a smaller -c/--ctx-size"
    if MIN_CONTEXT <= size < n_ctx:
        advice += f", such as {size}"
    return f"{advice}, or a smaller -ngl or a larger --n-cpu-moe" if weights.on_gpu else advice


def _largest_size(weights: Weights, present: Sequence[devices.Device], texts: int, reserved: int = 0) -> int:
    """Return the size of a context whose KV cache takes half of the free memory, in tokens per sequence."""
    mapped_bytes = weights.size_bytes if weights.present.mmap else 0
    free = max(0, devices.free_bytes(present, weights.cache_layers, mapped_bytes) - reserved)
    return int(free / 2 / max(1.0, token_bytes(weights, texts))) // GRAIN * GRAIN


def token_bytes(weights: Weights, texts: int) -> float:
    """Return the maximum size in bytes of one token of each of `texts` sequences in the KV cache."""
    model, attention = weights.handle, f"{weights.architecture}.attention"
    heads = max(1, llama.llama_model_n_head(model))
    head_width = llama.llama_model_n_embd(model) // heads
    widths = (
        int(weights.read_metadata(f"{attention}.key_length") or head_width),
        int(weights.read_metadata(f"{attention}.value_length") or head_width),
    )
    layers, kv_heads = llama.llama_model_n_layer(model), llama.llama_model_n_head_kv(model) or heads
    return texts * bytes_per_token(weights.present.cache_types, layers, kv_heads, widths)
