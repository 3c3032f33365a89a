"""Contexts of a loaded model: llama.cpp's parameters for them, and the snapshots of recurrent states that fit.

Example: a recurrent model with a state of 20 MB, 1 GB of free memory and one sequence. A snapshot takes as much space
as the state, and snapshots may take a sixteenth of the free memory, 64 MB. So 3 of the 16 requested snapshots fit, and
drafts of up to 3 tokens can be rolled back. If the context does not fit with 3, it is opened with 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llama_cpp.llama_cpp as llama

from ngramspec.llama import bindings, devices
from ngramspec.llama.adapters import open_context
from ngramspec.llama.cache import CACHE_TYPES
from ngramspec.llama.passes import MAX_EVALUATE
from ngramspec.llama.weights import Weights
from ngramspec.machine import MIN_UBATCH, Settings

MICRO_BATCH, WITHOUT_FLASH = 512, 128
"""Tokens of a prompt per micro-batch; the second number is for CPUs without flash attention.

Without flash attention a micro-batch needs heads x n_ctx x n_ubatch scores.
"""

SNAPSHOTS = 16
"""Default number of tokens by which a recurrent state can be rolled back.

Each snapshot takes as much space as the state itself. On some architectures every pass copies all snapshots.
"""

SNAPSHOT_SHARE = 1 / 16  # maximum share of the free RAM or GPU memory for snapshots; one is kept in any case

FLASH_TYPES = {"auto": -1, "on": 1, "off": 0}  # llama.h, enum llama_flash_attn_type

assert MIN_UBATCH >= MAX_EVALUATE  # a pass with the longest draft fits in one micro-batch


def default_micro_batch(weights: Weights, flash_attn: str) -> int:
    """Return the default number of tokens of a micro-batch."""
    return WITHOUT_FLASH if flash_attn == "off" and not weights.on_gpu else MICRO_BATCH


def micro_batch_size(weights: Weights, settings: Settings) -> int:
    """Return the number of tokens of a micro-batch, which is also the maximum of a pass."""
    return settings.micro_batch or default_micro_batch(weights, settings.flash_attn)


def make_params(
    weights: Weights, settings: Settings, cells: int, *, n_seq: int = 1, pooled: bool = False, snapshots: int = 0
) -> Any:
    """Return llama.cpp's parameters of a context with `cells` cells for all sequences together.

    If `pooled`, the sequences share one pool of cells. `snapshots` is the number of snapshots of a recurrent state.
    """
    params = make_small_params(settings, cells, micro_batch_size(weights, settings))
    params.n_seq_max = n_seq
    params.kv_unified = pooled
    params.n_rs_seq = snapshots
    params.op_offload = weights.plan.asked.op_offload
    return params


def make_small_params(settings: Settings, cells: int, micro_batch: int) -> Any:
    """Return llama.cpp's parameters of a context for one sequence, with its defaults for all that is not given."""
    params = llama.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = cells, micro_batch, micro_batch
    params.n_outputs_max = params.n_outputs_max_per_seq = MAX_EVALUATE
    params.n_threads, params.n_threads_batch = settings.threads, settings.threads_batch
    params.flash_attn_type = FLASH_TYPES[settings.flash_attn]
    params.type_k, params.type_v = (CACHE_TYPES[cache_type][0] for cache_type in settings.cache_types)
    return params


def count_snapshots(weights: Weights, params: Any, limit: int, texts: int) -> int:
    """Return the number of snapshots of the recurrent state to request; 0 if the architecture has none.

    Args:
        weights: The loaded model.
        params: Parameters of a context of a few cells with one snapshot, whose states are as large as in a large one.
        limit: Maximum number of snapshots.
        texts: Number of sequences, each with separate snapshots.
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
    """Open a context with `snapshots` snapshots, or as many as fit; `params_of` returns its parameters.

    Returns:
        llama.cpp's context, null if it does not fit, and its number of snapshots.
    """
    while True:
        bindings.log_tail.clear()
        context = open_context(weights.handle, params_of(snapshots), weights.adapters)
        if context or snapshots <= 1:
            return context, snapshots
        snapshots //= 2
