"""Contexts of a loaded model: their size, llama.cpp's parameters for them, and the snapshots of recurrent states.

Example: a recurrent model with a state of 20 MB, 1 GB of free memory and one sequence. A snapshot takes as much space
as the state, and snapshots may take a sixteenth of the free memory, 64 MB. So 3 of the 16 requested snapshots fit, and
drafts of up to 3 tokens can be rolled back. If the context does not fit with 3, it is opened with 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import llama_cpp.llama_cpp as llama

from ngramspec.data import ModelError
from ngramspec.llama import devices
from ngramspec.llama.cache import CACHE_TYPES
from ngramspec.llama.passes import MAX_EVALUATE
from ngramspec.llama.placement import MICRO_BATCH
from ngramspec.llama.weights import Weights
from ngramspec.model_settings import ModelSettings

SNAPSHOTS = 16
"""Default number of tokens by which a recurrent state can be rolled back.

Each snapshot takes as much space as the state itself. On some architectures every pass copies all snapshots.
"""

MIN_CONTEXT, GRAIN = 512, 256
"""Tokens of the smallest context that is chosen to fit the memory, and of the steps between larger ones."""


def micro_batch_size(weights: Weights, settings: ModelSettings) -> int:
    """Return the number of tokens of a micro-batch, which is also the maximum of a pass."""
    # Without flash attention, a CPU needs room for heads x n_ctx x n_ubatch scores.
    return settings.ubatch_size or (128 if settings.flash_attn == "off" and not weights.on_gpu else MICRO_BATCH)


def make_params(
    settings: ModelSettings, cells: int, micro_batch: int, *, n_seq: int = 1, pooled: bool = False, snapshots: int = 0
) -> Any:
    """Return llama.cpp's parameters of a context with `cells` cells for all sequences together.

    If `pooled`, the sequences share one pool of cells. `snapshots` is the number of snapshots of a recurrent state.
    """
    params = llama.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = cells, micro_batch, micro_batch
    params.n_outputs_max = params.n_outputs_max_per_seq = MAX_EVALUATE
    params.n_seq_max, params.kv_unified, params.n_rs_seq = n_seq, pooled, snapshots
    params.n_threads, params.n_threads_batch = settings.threads, settings.threads_batch
    params.flash_attn_type = {"auto": -1, "on": 1, "off": 0}[
        settings.flash_attn or "auto"
    ]  # enum llama_flash_attn_type
    params.type_k, params.type_v = (CACHE_TYPES[cache_type][0] for cache_type in settings.cache_types)
    params.op_offload = not settings.no_op_offload
    return params


def count_snapshots(weights: Weights, params: Any, limit: int, texts: int) -> int:
    """Return the number of snapshots of the recurrent state to request; 0 if the architecture has none.

    `params` are those of a context of a few cells with one snapshot, whose states are as large as in a large one.
    """
    if not weights.is_recurrent:
        return 0
    context = llama.llama_init_from_model(weights.handle, params)
    if not context:
        return limit
    try:
        if llama.llama_n_rs_seq(context) == 0:
            return 0
        token = (llama.llama_token * 1)(0)
        if llama.llama_decode(context, llama.llama_batch_get_one(token, 1)) != 0:
            return limit
        size = llama.llama_state_seq_get_size_ext(context, 0, llama.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY)
    finally:
        llama.llama_free(context)
    free = devices.cache_room(weights.devices, weights.cache_layers)
    return max(1, min(limit, int(free / 16 / max(1, size * texts))))


# --------------------------------------------------------------------------- size


def choose_context_size(weights: Weights, requested: int | None, texts: int) -> int:
    """Return the context size of each of `texts` sequences in tokens: the requested size, or the largest that fits."""
    if not requested:
        reserved = weights.reserved if weights.on_gpu else 0
        largest, n_trained = _largest_size(weights, weights.devices, texts, reserved), weights.n_ctx_train or 4096
        if largest >= n_trained:
            return n_trained
        size, each = min(n_trained, max(MIN_CONTEXT, largest)), f", {texts} times," if texts > 1 else ""
        weights.notes.append(
            f"context limited to {size} of the model's {n_trained} tokens to fit{each} in memory (set -c to override)"
        )
        return size
    total = devices.cache_room(weights.devices, weights.cache_layers, if_empty=True)
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
    mapped_bytes = 0 if weights.settings.no_mmap else weights.size_bytes
    free = max(0, devices.cache_room(present, weights.cache_layers, mapped_bytes) - reserved)
    return int(free / 2 / max(1.0, token_bytes(weights, texts))) // GRAIN * GRAIN


def token_bytes(weights: Weights, texts: int) -> float:
    """Return the maximum size in bytes of one token of each of `texts` sequences in the KV cache.

    With 32 layers, 8 KV heads and f16 keys and values of 128 numbers each, it is 32 * 8 * (128 + 128) * 2 = 131 072.
    """
    model = weights.handle
    heads = max(1, llama.llama_model_n_head(model))
    result = float(texts * llama.llama_model_n_layer(model) * (llama.llama_model_n_head_kv(model) or heads))
    widths: list[float] = []
    for name, cache_type in zip(("key", "value"), weights.settings.cache_types, strict=True):
        width = weights.read_metadata(f"{weights.architecture}.attention.{name}_length")
        widths.append(int(width or llama.llama_model_n_embd(model) // heads) * CACHE_TYPES[cache_type][1])
    return result * sum(widths)
