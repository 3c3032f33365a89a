"""`Weights`: a GGUF model in memory with its adapters, its properties, and the keys of measurements of it."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as llama
from llama_cpp._ggml import libggml

from ngramspec import machine
from ngramspec.cpu.cores import logical_cores, physical_cores
from ngramspec.data import ModelError
from ngramspec.llama import amx, bindings, devices, huge_pages, rpc
from ngramspec.llama.adapters import Lora, check_adapters, load_adapters
from ngramspec.llama.cache import is_recurrent
from ngramspec.llama.devices import AUTO, build
from ngramspec.llama.fitting import Demand
from ngramspec.llama.native import NativeObject
from ngramspec.llama.placement import Placement, make_plan
from ngramspec.llama.vocabulary import Vocabulary, open_model
from ngramspec.machine import Settings
from ngramspec.models.check import has_gguf_magic, parts_of, read_edges
from ngramspec.models.gguf import read_header

HAS_AMX = "AMX_INT8 = 1"  # entry in llama.cpp's system info if build and processor have AMX kernels

ARCHITECTURES = frozenset({"deepseek2", "deepseek32", "glm4moe", "nemotron_h_moe", "qwen35", "qwen35moe", "qwen3next"})
"""Values of general.architecture whose heads are tested. llama.cpp has graphs for more, and some of them end the
process if a tensor has an unexpected shape."""

_LAYER = re.compile(r"load_tensors: layer +(\d+) assigned to device (.+?)(?:, is_swa|$)")  # from llama.cpp's log

_HEAD = ".nextn.eh_proj.weight"  # end of the name of a tensor that each NextN layer has once


def head_missing(path: Path) -> str:
    """Return why the head of a model cannot be run with this build of llama.cpp, in a few words; "" if it can."""
    if bindings.head_functions(llama) is None:
        return "this build of llama-cpp-python does not support NextN layers"
    if not has_gguf_magic(path):
        return ""  # the loader reports the error
    headers = [read_header(part) for part in parts_of(path) if has_gguf_magic(part)]
    count = sum(name.endswith(_HEAD) for header in headers for name in header.shapes)
    architecture = headers[0].metadata.get("general.architecture")
    if not count:
        return "its file contains no NextN layer"
    if architecture not in ARCHITECTURES:
        return f"NextN layers of {architecture} are not supported"
    if count > 1:
        return f"it has {count} NextN layers, and only models with one are supported"
    return ""


class Weights(NativeObject):
    """The weights of a model in memory, with its adapters.

    See `ngramspec.llama.target.Target` for the arguments and errors.

    Attributes:
        present: Settings that the model was loaded with.
        notes: Notes for the user about how the model was loaded.
        handle: llama.cpp's handle of the model; `None` after `close`.
        has_head: Whether the model's own head was requested and is loaded.
        amx_broken: Whether AMX kernels are off because they compute wrong results in this build.
        is_recurrent: Whether the model has a recurrent state.
        n_ctx_train: Context size of the training in tokens.
        quantisation: Name of the quantisation; `None` means unknown.
    """

    handle: Any = None

    def __init__(
        self,
        path: str | os.PathLike[str],
        present: Settings,
        *,
        n_gpu_layers: int,
        placement: Placement,
        demand: Demand,
        head: bool,
        lora: Sequence[Lora],
    ) -> None:
        self.path, self.present = Path(path), present
        self.notes: list[str] = []
        bindings.init_backend()
        self.has_head = head and self._can_load_head()
        adapter_key = check_adapters(lora, self.path)
        self.plan = make_plan(self.path, n_gpu_layers, placement, demand)
        self._load()
        self.adapters = load_adapters(lora, self.handle)
        self.on_gpu = self.plan.on_gpu  # whether any of the layers is on a GPU
        # A build whose kernels get fixed keeps its name, and its passes then cost half.
        marks = [" amx=off"] * self.amx_broken + [" extra=off"] * (not present.repack)
        marks += [" mmap=off"] * (not present.mmap) + [" head"] * self.has_head
        placed = f"{_placement_key(self.plan.gpu_layers, placement)}{self.plan.key}"
        self._loaded_as = f"{placed}{''.join(marks)}{adapter_key}"

    def _can_load_head(self) -> bool:
        """Return True if the model's own head can be run here; otherwise a note gives the reason."""
        why = "it is not supported with --rpc" if rpc.list_workers() else head_missing(self.path)
        if why:
            self.notes.append(f"--mtp is not used: {why}")
        return not why

    def _load(self) -> None:
        params, self.amx_broken = make_model_params(self.present, all_on_gpu=self.plan.all_on_gpu)
        self._placement_buffers = self.plan.apply(params)
        if self.has_head:
            params.load_mtp = True
        if self.amx_broken:
            self.notes.append(amx.NOTE)
        device_names: dict[int, str] = {}

        def note_layer(line: str) -> None:
            if match := _LAYER.match(line):
                device_names[int(match[1])] = match[2]

        try:
            with bindings.log_listener(note_layer):
                self.handle, header = open_model(self.path, params)
        except ModelError as error:
            raise self.plan.explain_error(error) from None
        self.vocabulary = Vocabulary.from_handle(self.path, self.handle, header)
        self._layer_devices = [device_names[layer] for layer in sorted(device_names)]
        if llama.llama_model_has_encoder(self.handle) or not llama.llama_model_has_decoder(self.handle):
            raise ModelError(f"{self.path}: this model has an encoder; only decoder-only models are supported")
        if llama.llama_model_is_diffusion(self.handle):
            raise ModelError(f"{self.path}: a diffusion model does not decode token by token")
        self.n_ctx_train: int = llama.llama_model_n_ctx_train(self.handle)
        self.size_bytes: int = llama.llama_model_size(self.handle)
        self.n_params: int = llama.llama_model_n_params(self.handle)
        kind = self.read_metadata("general.file_type") or ""
        self.quantisation = devices.quantisation(int(kind)) if kind.isdecimal() else None
        self.architecture = self.read_metadata("general.architecture") or "unknown"
        self.name = self.read_metadata("general.name") or self.path.stem
        buffer = ctypes.create_string_buffer(256)
        llama.llama_model_desc(self.handle, buffer, 256)
        self.description = buffer.value.decode("utf-8", "replace")
        self.devices = devices.devices()
        self.notes += self.plan.notes
        self.is_recurrent = is_recurrent(self.handle)

    @property
    def layers(self) -> Counter[str]:
        """Number of layers by the name of their device, with the output layer; empty if llama.cpp does not log it."""
        return Counter(self._layer_devices)

    @property
    def cache_layers(self) -> Counter[str]:
        """Number of layers by the name of their device, without the output layer, which has no KV cache."""
        gpus = [device.name for device in self.plan.gpus] if self.on_gpu else []
        return Counter(self._layer_devices[:-1] or gpus or ["CPU"])

    @property
    def huge_pages(self) -> str | None:
        return huge_pages.describe_huge_pages(self.present.mmap and not self.on_gpu)

    @property
    def can_pool(self) -> bool:
        """True if sequences can share a pool of cells without a change of their logits."""
        return self.architecture not in BLOCKS_OF_CELLS

    @property
    def window(self) -> int:
        """Number of tokens in the shortest sliding window; 0 without one."""
        size = int(llama.llama_model_n_swa(self.handle))
        if size or not self.is_recurrent:
            return size
        # llama.cpp returns 0 for DeepSeek4, because its window does not limit how far its cache can be cut.
        return int(self.read_metadata(f"{self.architecture}.attention.sliding_window") or 0)

    def read_metadata(self, key: str) -> str | None:
        """Return a value of the file's header as text; `None` if it has none."""
        buffer = ctypes.create_string_buffer(1024)
        length = llama.llama_model_meta_val_str(self.handle, key.encode(), buffer, 1024)
        return buffer.value.decode("utf-8", "replace") if length >= 0 else None

    def key(self, settings: str) -> str:
        """Return the key of measurements of these weights under some settings of a context."""
        single, batch = self.present.threads, self.present.threads_batch
        threads = f"{single}" if single == batch else f"{single}/{batch}"
        devices = [d.name for d in self.devices]
        return machine_key(self.path, f"{threads} {self._loaded_as} {settings} {devices}")

    def check_open(self) -> None:
        """Raise ValueError after `close`."""
        if not self.handle:
            raise ValueError("the target is closed")

    def close(self) -> None:
        """Free the model; the vocabulary cannot be used afterwards either."""
        if self.handle:
            self.vocabulary.close()
            llama.llama_model_free(self.handle)
            self.handle = None


BLOCKS_OF_CELLS = ("minimax-m3", "qwen4exp")
"""Architectures whose attention selects blocks of cells (llama-cpp-python 0.3.36). If several sequences share a pool,
logits depend on the places of a sequence's cells (qwen4exp), or all cells are attended to (minimax-m3)."""


def machine_key(path: Path, settings: str) -> str:
    """Return the key of measurements of a model file under some settings. Raises OSError."""
    return f"{model_key(path)}{hashlib.blake2b(settings.encode(), digest_size=12).hexdigest()}"


def model_key(path: Path) -> str:
    """Return the prefix of the keys for a model file; it changes with file, build, machine and GPUs. Raises OSError."""
    bindings.init_backend()
    size = path.stat().st_size
    parts = f"{size} {build()} {machine.name()}{devices.gpu_identity()}".encode()
    return hashlib.blake2b(read_edges(path, size) + parts, digest_size=12).hexdigest()


def tuning_key(path: Path, n_gpu_layers: int, cache_types: Sequence[str], placement: Placement | None = None) -> str:
    """Return the key of the fastest settings of a model file. Raises OSError."""
    cores = physical_cores(), logical_cores()
    return machine_key(
        path, f"tuned {_placement_key(n_gpu_layers, placement or Placement())} kv={tuple(cache_types)} cores={cores}"
    )


def _placement_key(n_gpu_layers: int, placement: Placement) -> str:
    """Return the placement of the layers as part of a key: costs depend on devices and on a network."""
    far = rpc.list_workers() if n_gpu_layers else ()
    return f"ngl={max(AUTO, n_gpu_layers)}{f' rpc={far}' if far else ''}{placement.key()}"


def make_model_params(settings: Settings, *, all_on_gpu: bool) -> tuple[Any, bool]:
    """Return llama.cpp's parameters for loading a model, and whether its AMX kernels are off, being broken."""
    params = llama.llama_model_default_params()
    bindings.set_mapped(llama, params, settings.mmap)
    params.use_extra_bufts = settings.repack
    amx_broken = settings.repack and has_broken_amx(all_on_gpu)
    if amx_broken:
        params.use_extra_bufts = amx.hide()
    before = huge_pages.anonymous_memory()

    @llama.llama_progress_callback  # type: ignore[untyped-decorator]
    def on_progress(done: float, _data: Any) -> bool:
        # The first call comes when all buffers are mapped and none is filled.
        if done == 0:
            huge_pages.advise_huge_pages(before)
        rpc.alive()
        return True

    params.progress_callback = on_progress
    return params, amx_broken


def has_broken_amx(all_on_gpu: bool) -> bool:
    """Return True if weights in RAM would be placed for AMX kernels that do not work."""
    return HAS_AMX in build() and not all_on_gpu and not amx.works(Path(libggml._name))
