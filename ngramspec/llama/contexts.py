"""Contexts of a loaded model: their size, llama.cpp's parameters for them, and the snapshots of recurrent states.

Example: a recurrent model with a state of 20 MB, 1 GB of free memory and one sequence. A snapshot takes as much space
as the state, and snapshots may take a sixteenth of the free memory, 64 MB. So 3 of the 16 requested snapshots fit, and
drafts of up to 3 tokens can be rolled back. If the context does not fit with 3, it is opened with 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import llama_cpp.llama_cpp as llama

from ngramspec.data import ModelError
from ngramspec.llama import bindings, devices
from ngramspec.llama.cache import CACHE_TYPES, bytes_per_token
from ngramspec.llama.passes import MAX_EVALUATE
from ngramspec.llama.placement import MICRO_BATCH
from ngramspec.llama.weights import Weights
from ngramspec.model_settings import ModelSettings

WITHOUT_FLASH = 128
"""Default micro-batch on CPUs without flash attention, which needs heads x n_ctx x n_ubatch scores."""

SNAPSHOTS = 16
"""Default number of tokens by which a recurrent state can be rolled back.

Each snapshot takes as much space as the state itself. On some architectures every pass copies all snapshots.
"""

SNAPSHOT_SHARE = 1 / 16  # maximum share of the free RAM or GPU memory for snapshots; one is kept in any case

FLASH_TYPES = {"auto": -1, "on": 1, "off": 0}  # llama.h, enum llama_flash_attn_type

MIN_CONTEXT, GRAIN = 512, 256
"""Tokens of the smallest context that is chosen to fit the memory, and of the steps between larger ones."""


def micro_batch_size(weights: Weights, settings: ModelSettings) -> int:
    """Return the number of tokens of a micro-batch, which is also the maximum of a pass."""
    default = WITHOUT_FLASH if settings.flash_attn == "off" and not weights.on_gpu else MICRO_BATCH
    return settings.ubatch_size or default


def make_params(
    weights: Weights, settings: ModelSettings, cells: int, *, n_seq: int = 1, pooled: bool = False, snapshots: int = 0
) -> Any:
    """Return llama.cpp's parameters of a context with `cells` cells for all sequences together.

    If `pooled`, the sequences share one pool of cells. `snapshots` is the number of snapshots of a recurrent state.
    """
    params = make_small_params(settings, cells, micro_batch_size(weights, settings))
    params.n_seq_max = n_seq
    params.kv_unified = pooled
    params.n_rs_seq = snapshots
    params.op_offload = not settings.no_op_offload
    return params


def make_small_params(settings: ModelSettings, cells: int, micro_batch: int) -> Any:
    """Return llama.cpp's parameters of a context for one sequence, with its defaults for all that is not given."""
    params = llama.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = cells, micro_batch, micro_batch
    params.n_outputs_max = params.n_outputs_max_per_seq = MAX_EVALUATE
    params.n_threads, params.n_threads_batch = settings.threads, settings.threads_batch
    params.flash_attn_type = FLASH_TYPES[settings.flash_attn or "auto"]
    params.type_k, params.type_v = (CACHE_TYPES[cache_type][0] for cache_type in settings.cache_types)
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
    free = devices.free_bytes(weights.devices, weights.cache_layers)
    return max(1, min(limit, int(SNAPSHOT_SHARE * free / max(1, size * texts))))


def open_largest(weights: Weights, params_of: Callable[[int], Any], snapshots: int) -> tuple[Any, int]:
    """Open a context with `snapshots` snapshots, or as many as fit; return it (null if none fits) and their number."""
    while True:
        bindings.log_tail.clear()
        context = weights.open_context(params_of(snapshots))
        if context or snapshots <= 1:
            return context, snapshots
        snapshots //= 2


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
    mapped_bytes = 0 if weights.settings.no_mmap else weights.size_bytes
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
    return texts * bytes_per_token(weights.settings.cache_types, layers, kv_heads, widths)
