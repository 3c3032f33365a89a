"""Placement of a model's weights on devices, by default as much on GPUs as fits their free memory.

A layer on a GPU occupies its weights and its part of the KV cache there. A model that does not fit is placed as by
llama.cpp's own programs: in a mixture of experts, expert tensors are moved to RAM first, because each token uses only
a few experts. If that is not enough, or there are no experts, whole layers stay in RAM. Layers on several GPUs are
contiguous, and llama.cpp takes them from the end of the model. A number of layers that the user sets is not changed.

Example: 4 layers of 10 MB and an output layer of 5 MB on a GPU with 28 MB. The output layer and the last 2 layers fit
(25 MB), so the result is 3 layers on the GPU. If 8 MB of each layer are experts, the output layer and all layers fit
without the experts of the first 3 layers (5 + 3 x 2 + 10 = 21 MB).
"""

from __future__ import annotations

import ctypes
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import llama_cpp.llama_cpp as llama

from ngramspec.data import ModelError
from ngramspec.llama import devices
from ngramspec.llama.cache import CACHE_TYPES
from ngramspec.llama.devices import Device
from ngramspec.llama.passes import MAX_EVALUATE
from ngramspec.model_settings import ALL, AUTO, NO_DEVICE, PLACEMENT, ModelSettings
from ngramspec.models.check import read_headers
from ngramspec.models.gguf import GGUFHeader, Scalar

MICRO_BATCH = 512  # default number of tokens of a prompt per micro-batch

MARGIN = 2**30  # bytes of each GPU that a fit leaves free, as in llama.cpp
DRAFT_MARGIN = 2**28  # the same for a draft model, for which the target's fit leaves memory free
STEP = 2**28  # a fit counts free memory in multiples of this, so that small changes do not change it

EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch)?exps"
"""Regular expression of the names of expert tensors, also for llama.cpp."""

_BLOCK = re.compile(r"blk\.(\d+)\.")
_EMBEDDINGS = "token_embd.weight"


@dataclass(frozen=True, slots=True)
class Plan:
    settings: ModelSettings  # requested settings
    gpus: tuple[Device, ...]  # GPUs that the model uses, also if it has no layers there
    gpu_layers: int  # number of layers on GPUs for llama.cpp, with the output layer; negative means all
    cpu_experts: int = 0  # number of first layers whose expert tensors are in RAM
    split: tuple[float, ...] = ()  # share of each GPU; empty means llama.cpp's own split
    notes: tuple[str, ...] = ()

    @property
    def on_gpu(self) -> bool:
        return self.gpu_layers != 0 and bool(self.gpus)

    @property
    def all_on_gpu(self) -> bool:
        """True if all weights are on GPUs, except the embeddings."""
        return self.on_gpu and self.gpu_layers < 0 and not self.cpu_experts and not self.settings.override_tensor

    @property
    def key(self) -> str:
        return f"{placement_key(self.settings, self.gpu_layers)} experts={self.cpu_experts} split={self.split}"

    @property
    def fixed(self) -> dict[str, Any]:
        """Settings that give a copy of the model this placement, whatever memory is free then."""
        return {
            "gpu_layers": ALL if self.gpu_layers < 0 else self.gpu_layers,
            "n_cpu_moe": self.cpu_experts or None,
            "cpu_moe": False,
            "tensor_split": ",".join(map(str, self.split)) or None,
        }

    def summary(self, layers: Mapping[str, int]) -> dict[str, Any]:
        """Return as JSON data which weights are on which devices, given the number of layers by device."""
        return {"gpus": [gpu.name for gpu in self.gpus], "layers": dict(layers), "cpu_experts": self.cpu_experts}

    def apply(self, params: Any) -> list[Any]:
        """Set llama.cpp's parameters of a model; they point to the returned objects."""
        settings = self.settings
        params.n_gpu_layers = self.gpu_layers
        # enum llama_split_mode; "tensor" is experimental there, and rollbacks with it are untested
        params.split_mode = {"none": 0, "layer": 1, "row": 2}[settings.split_mode]
        params.main_gpu = settings.main_gpu
        buffers: list[Any] = []
        if settings.device is not None:
            handles = {device.name: device.handle for device in devices.devices()}
            pointers = [handles[name] for name in _names(settings.device)]
            buffers.append((ctypes.c_void_p * (len(pointers) + 1))(*pointers, None))
            params.devices = ctypes.addressof(buffers[-1])
        if self.split:
            params.tensor_split = (ctypes.c_float * llama.llama_max_devices())(*self.split)
            buffers.append(params.tensor_split)
        # The first match counts.
        overrides = settings.override_tensor
        if self.cpu_experts:
            overrides = (*overrides, (expert_pattern(self.cpu_experts), "CPU"))
        if overrides:
            buffers.append(_overrides(overrides))
            params.tensor_buft_overrides = ctypes.addressof(buffers[-1])
        return buffers


class _Override(ctypes.Structure):
    """llama.h, struct llama_model_tensor_buft_override."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buffer", ctypes.c_void_p))


def _overrides(pairs: Sequence[tuple[str, str]]) -> Any:
    """Return llama.cpp's array of overrides, whose end is an empty element."""
    types = devices.buffer_types()
    for pattern, name in pairs:
        if name not in types:
            raise ModelError(
                f"--override-tensor {pattern}={name}: unknown buffer type {name}; available: {', '.join(types)}"
            )
    elements = [_Override(pattern.encode(), types[name]) for pattern, name in pairs]
    return (_Override * (len(elements) + 1))(*elements, _Override())


def expert_pattern(count: int) -> str:
    """Return a regular expression of the expert tensors in the first layers, at least one."""
    return rf"blk\.({'|'.join(str(number) for number in range(count))}){EXPERTS}"


def _names(device: str) -> list[str]:
    return [] if device == NO_DEVICE else device.split(",")


def placement_key(settings: ModelSettings, gpu_layers: int) -> str:
    """Return the requested devices of the weights as part of a key; -1 and -2 layers have the same key."""
    plain = ModelSettings()
    key = {name: getattr(settings, name) for name in PLACEMENT if getattr(settings, name) != getattr(plain, name)}
    key["gpu_layers"] = max(AUTO, gpu_layers)
    if settings.device is not None:
        names = _names(settings.device)
        key["device"] = devices.describe_devices([device for device in devices.devices() if device.name in names])
    return str(key)


def select_gpus(settings: ModelSettings) -> list[Device]:
    registered = devices.devices()
    gpus = devices.select_gpus(registered)
    if settings.device is not None:
        gpus_by_name = {device.name: device for device in registered if device.is_gpu}
        for name in _names(settings.device):
            if name not in gpus_by_name:
                raise ModelError(f"--device {name} does not exist; {_available(list(gpus_by_name.values()))}")
        gpus = [gpus_by_name[name] for name in _names(settings.device)]
    if (count := len(_shares(settings))) > len(gpus) > 0:
        raise ModelError(f"--tensor-split has {count} values for {len(gpus)} devices; {_available(gpus)}")
    if settings.split_mode == "none" and gpus:
        if settings.main_gpu >= len(gpus):
            raise ModelError(f"--main-gpu {settings.main_gpu} does not exist; {_available(gpus, numbered=True)}")
        gpus = [gpus[settings.main_gpu]]
    return gpus


def _available(gpus: Sequence[Device], *, numbered: bool = False) -> str:
    names = [
        f"{number if numbered else device.name} ({device.name if numbered else device.description})"
        for number, device in enumerate(gpus)
    ]
    return f"available: {', '.join(names)}" if names else "this build of llama.cpp finds no GPU"


def _shares(settings: ModelSettings) -> tuple[float, ...]:
    return tuple(map(float, re.split("[,/]", settings.tensor_split))) if settings.tensor_split else ()


def make_plan(path: Path, settings: ModelSettings, texts: int = 1, reserved: int = 0, margin: int = MARGIN) -> Plan:
    """Choose the placement of a model; `reserved` bytes of all GPUs together and `margin` of each stay free."""
    gpus = select_gpus(settings)
    headers = read_headers(path) if gpus and settings.gpu_layers else []
    sizes = model_sizes(headers, settings, texts) if headers else Sizes([], [], [], 0)
    count = len(sizes.dense)
    experts = settings.n_cpu_moe
    if settings.cpu_moe or experts:
        experts = count if experts is None else min(count, experts)
    split = _shares(settings)
    warning = devices.missing_gpu(gpus, 0 if settings.device == NO_DEVICE else settings.gpu_layers)
    notes = [] if warning is None else [warning]
    plan = Plan(settings, tuple(gpus), settings.gpu_layers, experts or 0, split, tuple(notes))
    # Otherwise a fit cannot predict where llama.cpp places the weights.
    is_predictable = (
        not (len(gpus) > 1 and (split or settings.split_mode == "row"))
        and all(device.total and device.free for device in gpus)
        and all(buffer == "CPU" for _, buffer in settings.override_tensor)
    )
    if settings.gpu_layers != AUTO or not headers or not is_predictable:
        return plan
    reserve = margin + reserved // len(gpus)
    rooms = [max(0, (device.free - reserve) // STEP * STEP) for device in gpus]
    layers, in_ram, split = fit(sizes, rooms, [max(1, device.free) for device in gpus], experts)
    is_whole = layers > count
    names = " and ".join(device.name for device in gpus)
    if not is_whole:
        without = " without their experts" if in_ram else ""
        notes.append(f"to fit the memory, {layers} of {count + 1} layers are on {names}{without} (-ngl changes it)")
    elif in_ram and experts is None:
        notes.append(
            f"to fit the memory of {names}, the experts of the first {in_ram} of {count} layers are in RAM"
            " (--n-cpu-moe changes it)"
        )
    return replace(
        plan,
        gpu_layers=AUTO if is_whole else layers,
        cpu_experts=in_ram if layers else 0,
        split=split,
        notes=tuple(notes),
    )


class Sizes(NamedTuple):
    """Bytes of a model that can be on GPUs."""

    dense: list[int]  # weights of each layer that are not experts
    experts: list[int]  # expert tensors of each layer
    caches: list[int]  # KV cache of each layer
    output: int  # output layer
    largest: int = 0  # largest tensor of a layer
    compute: int = 0  # estimate of the buffers of a pass on each device


def model_sizes(headers: Sequence[GGUFHeader], settings: ModelSettings, texts: int = 1) -> Sizes:
    """Return the sizes of a model from the headers of its files, without the tensors that settings move to RAM."""
    patterns = [re.compile(pattern) for pattern, _ in settings.override_tensor]

    def in_ram(name: str) -> bool:
        return any(pattern.search(name) for pattern in patterns)

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
        elif not name.startswith(("token_embd", "token_types", "position_embd", "per_layer_token_embd")):
            output += size  # llama.cpp keeps the others in RAM
    if "output.weight" not in shapes and not in_ram("output.weight"):
        output += sizes.get(_EMBEDDINGS, 0)  # llama.cpp loads them again as the output matrix
    # If the user sets no context size, layers are moved to RAM for one of at most 4,096 tokens, as in llama.cpp.
    n_ctx = settings.ctx_size or min(_number(metadata, "context_length", 4096), 4096)
    # The cache has all cells also with a sliding window, as by default in llama.cpp, which rounds them up to a multiple
    # of 256. Recurrent states are small and left out.
    cells = texts * (-(-(n_ctx + MAX_EVALUATE) // 256) * 256)
    key_bytes, value_bytes = (CACHE_TYPES[cache_type][1] for cache_type in settings.cache_types)
    widths = [_cache_widths(number, metadata, shapes) for number in range(count)]
    caches = [int(cells * (keys * key_bytes + values * value_bytes)) for keys, values in widths]
    largest = max((size for name, size in sizes.items() if _BLOCK.match(name)), default=0)
    # The buffers of a pass: activations, rows of logits, and scores without flash attention.
    width = _number(metadata, "embedding_length")
    inner = max(_number(metadata, "feed_forward_length"), width)
    micro_batch = settings.ubatch_size or MICRO_BATCH
    values = micro_batch * (6 * width + 3 * inner) + MAX_EVALUATE * max(shapes.get(_EMBEDDINGS, (0,)))
    if settings.flash_attn == "off":
        values += micro_batch * n_ctx * _number(metadata, "attention.head_count", 1)
    return Sizes(dense, experts, caches, output, largest, 4 * values)


def _number(metadata: Mapping[str, Scalar], key: str, default: int = 0) -> int:
    """Return an integer of the architecture; the default if it is missing or an array."""
    value = metadata.get(f"{metadata.get('general.architecture')}.{key}")
    return value if isinstance(value, int) else default


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


def fit(
    sizes: Sizes, rooms: Sequence[int], shares: Sequence[int], cpu_experts: int | None = None
) -> tuple[int, int, tuple[int, ...]]:
    """Place as much as possible of a model on GPUs that have `rooms` bytes.

    By default, llama.cpp splits layers in proportion to `shares`, which are not all 0. The expert tensors of the first
    `cpu_experts` layers must be in RAM; `None` means as few as possible. Return the number of layers on GPUs, with the
    output layer; the number of first layers whose expert tensors are in RAM; and the number of layers of each GPU,
    empty for llama.cpp's own split.
    """
    count = len(sizes.dense)

    def costs(in_ram: int) -> list[int]:
        """Return the bytes of all layers and the output layer on a GPU, without the experts of the first layers."""
        experts = [0] * in_ram + sizes.experts[in_ram:]
        return [*map(sum, zip(sizes.dense, experts, sizes.caches, strict=True)), sizes.output]

    rooms = [room - sizes.compute for room in rooms]
    if not cpu_experts and (split := _split(costs(0), rooms, shares)) is not None:
        return count + 1, 0, split
    # A GPU copies tensors from RAM for large batches, two at a time.
    rooms = [room - 2 * sizes.largest for room in rooms]
    if cpu_experts is not None:
        first = last = cpu_experts
    else:
        first, last = 1, count if any(sizes.experts) else 0
    for in_ram in range(first, last + 1):
        if (split := _split(costs(in_ram), rooms, shares)) is not None:
            return count + 1, in_ram, split
    for gpu_layers in range(count, 0, -1):
        if (split := _split(costs(last)[-gpu_layers:], rooms, shares)) is not None:
            return gpu_layers, last, split
    return 0, last, ()


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
