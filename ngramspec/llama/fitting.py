"""Fit of a model's layers into the free memory of GPUs, computed from the file's header and numbers alone.

A layer on a GPU occupies its weights and its part of the KV cache there. A model that does not fit is placed as by
llama.cpp's own programs: in a mixture of experts, expert tensors are moved to RAM first, because each token uses only
a few experts. If that is not enough, or there are no experts, whole layers stay in RAM. Layers on several GPUs are
contiguous, and llama.cpp takes them from the end of the model.

Example: 4 layers of 10 MB and an output layer of 5 MB on a GPU with 28 MB. The output layer and the last 2 layers fit
(25 MB), so the result is 3 layers on the GPU. If 8 MB of each layer are experts, the output layer and all layers fit
without the experts of the first 3 layers (5 + 3 x 2 + 10 = 21 MB).
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from ngramspec.models.gguf import GGUFHeader, Scalar

EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch)?exps"
"""Regular expression of the names of expert tensors, also for llama.cpp."""

MIN_CONTEXT = 4096
"""Context size in tokens for which layers are moved to RAM if the user sets none, as in llama.cpp."""

_BLOCK = re.compile(r"blk\.(\d+)\.")
_EMBEDDINGS = "token_embd.weight"
_INPUTS = ("token_embd", "token_types", "position_embd", "per_layer_token_embd")  # llama.cpp keeps these in RAM
_GRAIN = 256  # llama.cpp rounds the number of cells up to a multiple of this


class Demand(NamedTuple):
    """Properties of the contexts that a model is loaded for."""

    n_ctx: int | None = None  # tokens of a sequence; `None` means as many as fit
    texts: int = 1  # number of sequences
    element_bytes: tuple[float, float] = (2.0, 2.0)  # bytes of an element of the K and of the V cache
    micro_batch: int = 512  # tokens of a prompt per pass
    rows: int = 64  # maximum rows of logits of a pass
    flash: bool = True  # whether attention is computed without a matrix of all scores


class LayerSize(NamedTuple):
    """Bytes of a layer."""

    dense: int  # weights that are not experts
    experts: int  # expert tensors
    cache: int  # KV cache


class ModelSizes(NamedTuple):
    """Bytes of a model that can be on GPUs."""

    layers: tuple[LayerSize, ...]
    output: int  # output layer
    largest: int = 0  # largest tensor of a layer
    compute: int = 0  # estimate of the buffers of a pass on each device


class Fit(NamedTuple):
    """Number of layers on GPUs."""

    gpu_layers: int  # layers on GPUs, with the output layer
    cpu_experts: int = 0  # number of first layers whose expert tensors are in RAM
    split: tuple[int, ...] = ()  # layers of each GPU; empty means llama.cpp's own split


def fit(model: ModelSizes, rooms: Sequence[int], shares: Sequence[int], cpu_experts: int | None = None) -> Fit:
    """Place as much as possible of a model on GPUs.

    Args:
        model: Sizes of the model.
        rooms: Bytes that may be used on each GPU, at least one.
        shares: Free bytes of each GPU, in proportion to which llama.cpp splits layers by default; not all 0.
        cpu_experts: Number of first layers whose expert tensors must be in RAM; `None` means as few as possible.
    """
    every = len(model.layers) + 1
    rooms = [room - model.compute for room in rooms]
    if not cpu_experts and (split := _split(_costs(model, 0), rooms, shares)) is not None:
        return Fit(every, split=split)
    # A GPU copies tensors from RAM for large batches, two at a time.
    rooms = [room - 2 * model.largest for room in rooms]
    if cpu_experts is not None:
        first = last = cpu_experts
    else:
        first, last = 1, len(model.layers) if any(layer.experts for layer in model.layers) else 0
    for in_ram in range(first, last + 1):
        if (split := _split(_costs(model, in_ram), rooms, shares)) is not None:
            return Fit(every, in_ram, split)
    costs = _costs(model, last)
    for gpu_layers in range(every - 1, 0, -1):
        if (split := _split(costs[-gpu_layers:], rooms, shares)) is not None:
            return Fit(gpu_layers, last, split)
    return Fit(0, last)


def _costs(model: ModelSizes, cpu_experts: int) -> list[int]:
    """Return the bytes of all layers and the output layer on a GPU, without the experts of the first layers."""
    costs = [
        layer.dense + layer.cache + (layer.experts if number >= cpu_experts else 0)
        for number, layer in enumerate(model.layers)
    ]
    return [*costs, model.output]


def _split(costs: Sequence[int], rooms: Sequence[int], shares: Sequence[int]) -> tuple[int, ...] | None:
    """Return the number of layers per GPU; empty if llama.cpp's own split fits, and `None` if no split does."""
    ends = [end / sum(shares) for end in accumulate(shares)]
    used = [0] * len(rooms)
    for number, cost in enumerate(costs):
        used[bisect_right(ends, number / len(costs))] += cost
    if all(size <= room for size, room in zip(used, rooms, strict=True)):
        return ()
    counts, start = [], 0
    for room in rooms:
        end = start + bisect_right([*accumulate(costs[start:])], room)
        counts.append(end - start)
        start = end
    return tuple(counts) if start == len(costs) else None


# --------------------------------------------------------------------------- sizes


def model_sizes(
    headers: Sequence[GGUFHeader], demand: Demand, in_ram: Callable[[str], bool] = lambda name: False
) -> ModelSizes:
    """Return the sizes of a model from the headers of its files; `in_ram` selects tensors that always stay in RAM."""
    metadata = headers[0].metadata
    shapes = {name: shape for header in headers for name, shape in header.shapes.items()}
    sizes = {name: size for header in headers for name, size in header.sizes.items() if not in_ram(name)}
    numbers = [int(match[1]) for name in shapes if (match := _BLOCK.match(name))]
    count = max(_number(metadata, "block_count"), max(numbers, default=-1) + 1)
    dense, experts = [0] * count, [0] * count
    output = 0
    for name, size in sizes.items():
        if match := _BLOCK.match(name):
            (experts if re.search(EXPERTS, name) else dense)[int(match[1])] += size
        elif not name.startswith(_INPUTS):
            output += size
    if "output.weight" not in shapes and not in_ram("output.weight"):
        output += sizes.get(_EMBEDDINGS, 0)  # llama.cpp loads them again as the output matrix
    layers = tuple(
        LayerSize(dense[number], experts[number], _cache_bytes(number, metadata, shapes, demand))
        for number in range(count)
    )
    largest = max((size for name, size in sizes.items() if _BLOCK.match(name)), default=0)
    return ModelSizes(layers, output, largest, _compute_bytes(metadata, shapes, demand))


def _number(metadata: Mapping[str, Scalar], key: str, default: int = 0) -> int:
    """Return an integer of the architecture; the default if it is missing or an array."""
    value = metadata.get(f"{metadata.get('general.architecture')}.{key}")
    return value if isinstance(value, int) else default


def _context(metadata: Mapping[str, Scalar], demand: Demand) -> int:
    return demand.n_ctx or min(_number(metadata, "context_length", MIN_CONTEXT), MIN_CONTEXT)


def _cache_bytes(
    number: int, metadata: Mapping[str, Scalar], shapes: Mapping[str, tuple[int, ...]], demand: Demand
) -> int:
    """Return the size of a layer's KV cache, also with a sliding window, because llama.cpp keeps all cells by default.

    Recurrent states are small and left out.
    """
    keys, values = _cache_widths(number, metadata, shapes)
    cells = _context(metadata, demand) + demand.rows
    cells = -(-cells // _GRAIN) * _GRAIN
    return int(demand.texts * cells * (keys * demand.element_bytes[0] + values * demand.element_bytes[1]))


def _cache_widths(
    number: int, metadata: Mapping[str, Scalar], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[int, int]:
    """Return the widths of keys and values of a layer, all heads together; 0 if the layer has no attention."""
    prefix = f"blk.{number}."

    def rows(tensor: str) -> int:
        shape = shapes.get(f"{prefix}{tensor}.weight", ())
        return shape[1] if len(shape) > 1 else 0

    if keys := rows("attn_k"):
        return keys, rows("attn_v") or keys
    if latent := rows("attn_kv_a_mqa"):
        return latent, 0  # the values are a part of the keys
    qkv = rows("attn_qkv")
    if not qkv or any(name.startswith(f"{prefix}ssm_") for name in shapes):
        return 0, 0
    heads = _number(metadata, "attention.head_count", 1)
    kv_heads = _number(metadata, "attention.head_count_kv", heads)
    width = qkv * kv_heads // (heads + 2 * kv_heads)
    return width, width


def _compute_bytes(metadata: Mapping[str, Scalar], shapes: Mapping[str, tuple[int, ...]], demand: Demand) -> int:
    """Estimate the buffers of a pass: activations, rows of logits, and scores without flash attention."""
    width = _number(metadata, "embedding_length")
    inner = max(_number(metadata, "feed_forward_length"), width)
    vocabulary = max(shapes.get(_EMBEDDINGS, (0,)))
    numbers = demand.micro_batch * (6 * width + 3 * inner) + demand.rows * vocabulary
    if not demand.flash:
        numbers += demand.micro_batch * _context(metadata, demand) * _number(metadata, "attention.head_count", 1)
    return 4 * numbers
