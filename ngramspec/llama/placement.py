"""Placement of a model's weights on devices: the user's request (`Placement`), and llama.cpp's parameters (`Plan`).

By default, a model is placed so that it fits into the free memory of the GPUs that llama.cpp selects
(`ngramspec.llama.fitting`). A number of layers that the user sets is not changed.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import llama_cpp.llama_cpp as llama

from ngramspec.data import ModelError
from ngramspec.llama import devices, fitting
from ngramspec.llama.devices import ALL, AUTO, Device
from ngramspec.llama.fitting import EXPERTS, Demand, Fit
from ngramspec.models.check import has_gguf_magic, parts_of
from ngramspec.models.gguf import GGUFHeader, read_header

SplitMode = Literal["layer", "row", "none"]

SPLIT_MODES: dict[str, int] = {"none": 0, "layer": 1, "row": 2}
"""Values of llama.cpp's enum llama_split_mode. "tensor" is experimental there, and rollbacks with it are untested."""

ROW_BACKENDS = ("CUDA", "ROCm", "MUSA", "SYCL")  # backends that can split the rows of a tensor

MARGIN = 2**30  # bytes of each GPU that a fit leaves free, as in llama.cpp
DRAFT_MARGIN = 2**28  # the same for a draft model, for which the target's fit leaves memory free
STEP = 2**28  # a fit counts free memory in multiples of this, so that small changes do not change it
RETRY = 0.8  # factor by which the memory is reduced until a setting differs from one that failed

EVERY = -1
"""Value of `cpu_experts` for all layers."""

_CPU = "CPU"  # name of the type of buffers in RAM

_FLAGS = {
    "main_gpu": "--main-gpu",
    "split_mode": "--split-mode",
    "tensor_split": "--tensor-split",
    "cpu_experts": "--n-cpu-moe",
    "op_offload": "--no-op-offload",
}

_OUT_OF_MEMORY = re.compile(r"unable to allocate|failed to allocate|out of memory|insufficient memory", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Placement:
    """Requested devices of a model; the defaults are llama.cpp's."""

    devices: tuple[str, ...] | None = None  # names of the devices; `None` means those that llama.cpp selects
    main_gpu: int = 0  # index of the only device with `split_mode` "none"
    split_mode: SplitMode = "layer"  # part of a model that is on a single device
    tensor_split: tuple[float, ...] = ()  # share of each device; empty means in proportion to free memory
    cpu_experts: int | None = None  # first layers whose expert tensors are in RAM; `None` means as needed
    overrides: tuple[tuple[str, str], ...] = ()  # regular expressions of tensor names, each with a type of buffer
    op_offload: bool = True  # whether a GPU computes large batches with weights in RAM
    reserved: int = 0  # bytes of GPU memory for a draft model
    margin: int = MARGIN  # bytes of each GPU that a fit leaves free

    def key(self) -> str:
        """Return the request as part of a key; "" for the default."""
        plain = Placement()
        names = [field.name for field in fields(self) if field.name not in ("reserved", "margin")]
        parts = [f" {name}={value}" for name in names if (value := getattr(self, name)) != getattr(plain, name)]
        if self.devices:
            selection = [device for device in devices.devices() if device.name in self.devices]
            parts.append(f" {devices.describe_devices(selection)}")
        return "".join(parts)

    def select(self, all_devices: Sequence[Device]) -> list[Device]:
        """Return the GPUs that a model uses.

        Raises:
            ModelError: A device does not exist.
        """
        gpus = devices.select_gpus(all_devices)
        if self.devices is not None:
            gpus_by_name = {device.name: device for device in all_devices if device.is_gpu}
            for name in self.devices:
                if name not in gpus_by_name:
                    raise ModelError(f"--device {name} does not exist; {_available(list(gpus_by_name.values()))}")
            gpus = [gpus_by_name[name] for name in self.devices]
        if len(self.tensor_split) > len(gpus) > 0:
            raise ModelError(
                f"--tensor-split has {len(self.tensor_split)} values for {len(gpus)} devices; {_available(gpus)}"
            )
        if self.split_mode == "none" and gpus:
            if self.main_gpu >= len(gpus):
                raise ModelError(f"--main-gpu {self.main_gpu} does not exist; {_available(gpus, numbered=True)}")
            gpus = [gpus[self.main_gpu]]
        return gpus


def _available(gpus: Sequence[Device], *, numbered: bool = False) -> str:
    """Return the available devices in words."""
    names = [
        f"{number if numbered else device.name} ({device.name if numbered else device.description})"
        for number, device in enumerate(gpus)
    ]
    return f"available: {', '.join(names)}" if names else "this build of llama.cpp finds no GPU"


@dataclass(frozen=True, slots=True)
class Plan:
    """Placement of a loaded model."""

    asked: Placement
    gpus: tuple[Device, ...]  # GPUs that the model uses, also if it has no layers there
    gpu_layers: int  # number of layers on GPUs for llama.cpp; negative means all
    fit: Fit | None  # placement chosen to fit the memory; `None` means as requested
    notes: tuple[str, ...]
    headers: tuple[GGUFHeader, ...]
    demand: Demand

    @property
    def on_gpu(self) -> bool:
        """True if layers of the model are on a GPU."""
        return self.gpu_layers != 0 and bool(self.gpus)

    @property
    def all_on_gpu(self) -> bool:
        """True if all weights are on GPUs, except the embeddings."""
        return self.on_gpu and self.gpu_layers < 0 and not self.cpu_experts and not self.asked.overrides

    @property
    def cpu_experts(self) -> int:
        """Number of first layers whose expert tensors are in RAM, `EVERY` for all; 0 without a GPU."""
        if not self.on_gpu:
            return 0
        return (self.asked.cpu_experts or 0) if self.fit is None else self.fit.cpu_experts

    @property
    def split(self) -> tuple[float, ...]:
        """Share of each GPU; empty means llama.cpp's own split."""
        return self.asked.tensor_split if self.fit is None else self.fit.split

    @property
    def overrides(self) -> tuple[tuple[str, str], ...]:
        """Regular expressions of tensor names with types of buffers; the first match counts."""
        experts = expert_pattern(self.asked.cpu_experts or 0 if self.fit is None else self.fit.cpu_experts)
        return (*self.asked.overrides, *([(experts, _CPU)] if experts else []))

    @property
    def key(self) -> str:
        """The fit as part of a key; "" if nothing was changed to fit."""
        if self.fit is None or (self.gpu_layers < 0 and not self.cpu_experts and not self.split):
            return ""
        return f" experts={self.cpu_experts} split={self.split}"

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of a `Target` with this placement, whatever memory is free then."""
        shares = tuple(float(share) for share in self.split)
        placement = replace(self.asked, cpu_experts=self.cpu_experts or None, tensor_split=shares)
        return {"n_gpu_layers": ALL if self.gpu_layers < 0 else self.gpu_layers, "placement": placement}

    def summary(self, layers: Mapping[str, int]) -> dict[str, Any]:
        """Return as JSON data which weights are on which devices, given the number of layers by device."""
        return {"gpus": [gpu.name for gpu in self.gpus], "layers": dict(layers), "cpu_experts": self.cpu_experts}

    def apply(self, params: Any) -> list[Any]:
        """Set llama.cpp's parameters of a model; they point to the returned objects.

        Raises:
            ModelError: A type of buffer does not exist.
        """
        params.n_gpu_layers = self.gpu_layers
        params.split_mode, params.main_gpu = SPLIT_MODES[self.asked.split_mode], self.asked.main_gpu
        buffers: list[Any] = []
        if self.asked.devices is not None:
            handles = devices.device_handles()
            pointers = [handles[name] for name in self.asked.devices]
            buffers.append((ctypes.c_void_p * (len(pointers) + 1))(*pointers, None))
            params.devices = ctypes.addressof(buffers[-1])
        if self.split:
            shares = (ctypes.c_float * llama.llama_max_devices())(*self.split)
            buffers.append(shares)
            params.tensor_split = shares
        if self.overrides:
            buffers.append(_overrides(self.overrides))
            params.tensor_buft_overrides = ctypes.addressof(buffers[-1])
        return buffers

    def explain_error(self, error: ModelError) -> ModelError:
        """Return the error of a failed load, with a setting that would fit if memory was missing."""
        if not self.on_gpu or not _OUT_OF_MEMORY.search(str(error)):
            return error
        count = len(_layers(self.headers))
        layers = count + 1 if self.gpu_layers < 0 else self.gpu_layers
        placement = replace(self.asked, cpu_experts=None)
        rooms, shares = _memory(self.gpus, placement)
        smaller = _fit(self.headers, self.demand, placement, rooms, shares)
        # The estimate was too low if this placement should have fitted.
        while any(rooms) and smaller.gpu_layers >= layers and smaller.cpu_experts <= self.cpu_experts:
            rooms = [int(room * RETRY) for room in rooms]
            smaller = _fit(self.headers, self.demand, placement, rooms, shares)
        if smaller.gpu_layers > count and smaller.cpu_experts:
            advice = f"-ngl all --n-cpu-moe {smaller.cpu_experts}"
        else:
            advice = f"-ngl {smaller.gpu_layers}" + (" --cpu-moe" if smaller.cpu_experts else "")
        return ModelError(f"{error}; set {advice} to use less GPU memory")


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
    """Return a regular expression of the expert tensors in the first layers; "" for no layers, `EVERY` means all."""
    if count == EVERY:
        return EXPERTS
    return rf"blk\.({'|'.join(str(number) for number in range(count))}){EXPERTS}" if count else ""


# --------------------------------------------------------------------------- planning


def make_plan(path: Path, n_gpu_layers: int, placement: Placement, demand: Demand) -> Plan:
    """Choose the placement of a model; AUTO layers means as many as fit, and ALL all of them.

    Raises:
        ModelError: A device does not exist.
    """
    gpus = placement.select(devices.devices())
    needs_header = (gpus and n_gpu_layers) or placement.overrides or placement.cpu_experts
    headers = tuple(_headers(path)) if needs_header else ()
    if placement.cpu_experts and headers:
        count = len(_layers(headers))
        placement = replace(
            placement, cpu_experts=count if placement.cpu_experts == EVERY else min(count, placement.cpu_experts)
        )
    notes = list(_ineffective(n_gpu_layers, placement, gpus, headers))
    if warning := devices.missing_gpu(gpus, 0 if placement.devices == () else n_gpu_layers):
        notes.append(warning)
    if n_gpu_layers != AUTO or not headers or not _can_fit(placement, gpus):
        return Plan(placement, tuple(gpus), n_gpu_layers, None, tuple(notes), headers, demand)
    fit = _fit(headers, demand, placement, *_memory(gpus, placement))
    count = len(_layers(headers))
    is_whole = fit.gpu_layers > count
    if not is_whole or (fit.cpu_experts and placement.cpu_experts is None):
        notes.append(_describe(fit, count, gpus))
    return Plan(placement, tuple(gpus), AUTO if is_whole else fit.gpu_layers, fit, tuple(notes), headers, demand)


def _headers(path: Path) -> list[GGUFHeader]:
    """Return the headers of a model's files; empty for files that the loader will reject."""
    parts = [part for part in parts_of(path) if part.exists()]
    return [read_header(part) for part in parts] if parts and all(map(has_gguf_magic, parts)) else []


def _layers(headers: Sequence[GGUFHeader]) -> Sequence[fitting.LayerSize]:
    return fitting.model_sizes(headers, Demand()).layers


def _can_fit(placement: Placement, gpus: Sequence[Device]) -> bool:
    """Return True if a fit can predict where llama.cpp places the weights."""
    is_split = len(gpus) > 1 and (bool(placement.tensor_split) or placement.split_mode == "row")
    return (
        bool(gpus)
        and not is_split
        and all(d.total and d.free for d in gpus)
        and all(b == _CPU for _, b in placement.overrides)
    )


def _memory(gpus: Sequence[Device], placement: Placement) -> tuple[list[int], list[int]]:
    """Return the bytes that a model may use on each GPU, and the free bytes."""
    reserve = placement.margin + placement.reserved // max(1, len(gpus))
    return [max(0, (device.free - reserve) // STEP * STEP) for device in gpus], [max(1, device.free) for device in gpus]


def _fit(
    headers: Sequence[GGUFHeader], demand: Demand, placement: Placement, rooms: Sequence[int], shares: Sequence[int]
) -> Fit:
    """Place a model in the given memory, without the tensors that the user has moved to RAM."""
    patterns = [re.compile(pattern) for pattern, _ in placement.overrides]
    sizes = fitting.model_sizes(headers, demand, lambda name: any(pattern.search(name) for pattern in patterns))
    return fitting.fit(sizes, rooms, shares, placement.cpu_experts)


def _describe(fit: Fit, count: int, gpus: Sequence[Device]) -> str:
    """Return a note about a placement that was changed to fit."""
    names = " and ".join(device.name for device in gpus)
    if fit.gpu_layers > count:
        return (
            f"to fit the memory of {names}, the experts of the first {fit.cpu_experts} of {count} layers are in RAM"
            " (--n-cpu-moe changes it)"
        )
    experts = " without their experts" if fit.cpu_experts else ""
    return f"to fit the memory, {fit.gpu_layers} of {count + 1} layers are on {names}{experts} (-ngl changes it)"


def _ineffective(
    n_gpu_layers: int, placement: Placement, gpus: Sequence[Device], headers: Sequence[GGUFHeader]
) -> Sequence[str]:
    """Return warnings about options that have no effect here."""
    plain, lines = Placement(), []
    flags = [flag for name, flag in _FLAGS.items() if getattr(placement, name) != getattr(plain, name)]
    flags += ["--override-tensor"] * (bool(placement.overrides) and not gpus)
    if gpus and n_gpu_layers:
        flags = []
    elif gpus and not placement.op_offload:
        flags.remove(_FLAGS["op_offload"])
    lines += [f"warning: {flag} has no effect: the model uses no GPU" for flag in flags]
    if gpus and n_gpu_layers and placement.main_gpu and placement.split_mode != "none":
        lines.append("warning: --main-gpu has no effect without --split-mode none; --device selects devices")
    if gpus and placement.split_mode == "row" and not any(device.backend in ROW_BACKENDS for device in gpus):
        lines.append("warning: --split-mode row has no effect: the devices can only split layers")
    names = [name for header in headers for name in header.shapes]
    if (
        placement.cpu_experts is not None
        and not flags
        and names
        and not any(re.search(EXPERTS, name) for name in names)
    ):
        lines.append("warning: --n-cpu-moe has no effect: the model has no expert tensors")
    for pattern, _ in placement.overrides:
        if names and not any(re.search(pattern, name) for name in names):
            lines.append(f"warning: --override-tensor {pattern} has no effect: no tensor has such a name")
    return lines
