"""`Weights`: a GGUF model in memory with its LoRA adapters, its properties, the contexts that fit, and its keys.

An adapter changes a weight W to W + scale * alpha / rank * B A in all passes of a context (LoRA, arXiv 2106.09685).
`open_context` opens all contexts of a model, so that none lacks its adapters.

Example of snapshots: a recurrent model with a state of 20 MB, 1 GB of free memory and one sequence. A snapshot takes
as much space as the state, and snapshots may take a sixteenth of the free memory, 64 MB. So 3 of the 16 requested ones
fit, and drafts of up to 3 tokens can be rolled back. If the context does not fit with 3, it is opened with 1.
"""

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

from ngramspec import leaves
from ngramspec.cpu.cores import logical_cores, machine_name, physical_cores, usable_cores
from ngramspec.data import ModelError
from ngramspec.llama import bindings, crash_check, devices
from ngramspec.llama.bindings import NativeObject
from ngramspec.llama.cache import CACHE_TYPES, is_recurrent
from ngramspec.llama.devices import build
from ngramspec.llama.passes import MAX_EVALUATE
from ngramspec.llama.placement import MARGIN, MICRO_BATCH, make_plan, placement_key
from ngramspec.llama.vocabulary import Vocabulary, open_model
from ngramspec.model_settings import Lora, ModelSettings
from ngramspec.models.check import check_adapter_file, read_edges

HAS_AMX = "AMX_INT8 = 1"  # entry in llama.cpp's system info if build and processor have AMX kernels

MIN_CONTEXT, GRAIN = 512, 256
"""Tokens of the smallest context that is chosen to fit the memory, and of the steps between larger ones."""

Adapter = tuple[Any, float]
"""llama.cpp's handle of an adapter, which is freed with the model, and its scale."""


class Weights(NativeObject):
    """The weights of a model in memory, with its adapters; see `Target` for the arguments and errors."""

    handle: Any = None  # llama.cpp's handle of the model; `None` after `close`

    def __init__(
        self,
        path: str | os.PathLike[str],
        settings: ModelSettings,
        texts: int = 1,
        reserved: int = 0,
        margin: int = MARGIN,
    ) -> None:
        self.path, self.settings, self.texts, self.reserved = Path(path), settings, texts, reserved
        self.n_threads = settings.threads or usable_cores()  # CPU threads of a pass over one token
        bindings.init_backend()
        self.notes: list[str] = []  # notes for the user about how the model was loaded
        if settings.mtp:
            is_remote = any(device.backend == "RPC" for device in devices.devices())
            why = "it is not supported with --rpc" if is_remote else leaves.head_missing(self.path)
            self.notes += [f"--mtp is not used: {why}"] if why else []
        self.has_head = settings.mtp and not self.notes
        adapter_key = check_adapters(settings.adapters, self.path)
        self.plan = make_plan(self.path, settings, texts, reserved, margin)
        self.on_gpu = self.plan.on_gpu  # whether any of the layers is on a GPU
        self._load()
        self.adapters = load_adapters(settings.adapters, self.handle)
        # A build whose kernels get fixed keeps its name, and its passes then cost half.
        self._loaded_as = (
            f"{self.plan.key} {self.amx_broken=} {settings.no_repack=} {settings.no_mmap=} {self.has_head=}"
        )
        self._loaded_as += adapter_key

    def _load(self) -> None:
        params, self.amx_broken = make_model_params(self.settings, all_on_gpu=self.plan.all_on_gpu)
        self._placement_buffers = self.plan.apply(params)
        if self.has_head:
            params.load_mtp = True
        if self.amx_broken:
            self.notes.append(crash_check.AMX_NOTE)
        device_names: dict[int, str] = {}

        def note_layer(line: str) -> None:
            if match := re.match(r"load_tensors: layer +(\d+) assigned to device (.+?)(?:, is_swa|$)", line):
                device_names[int(match[1])] = match[2]

        try:
            with bindings.log_listener(note_layer):
                self.handle, header = open_model(self.path, params)
        except ModelError as error:
            causes = ("unable to allocate", "failed to allocate", "out of memory", "insufficient memory")
            if self.on_gpu and any(cause in str(error).lower() for cause in causes):
                advice = "set a smaller -ngl or a larger --n-cpu-moe to use less GPU memory"
                raise ModelError(f"{error}; {advice}") from None
            raise
        self.vocabulary = Vocabulary(self.path, self.handle, header)
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
        return devices.describe_huge_pages(not self.settings.no_mmap and not self.on_gpu)

    @property
    def can_pool(self) -> bool:
        """True if sequences can share a pool of cells without a change of their logits."""
        # These select blocks of cells (llama-cpp-python 0.3.36). In a pool, all cells are attended to (minimax-m3), or
        # logits depend on the places of a sequence's cells (qwen4exp).
        return self.architecture not in ("minimax-m3", "qwen4exp")

    @property
    def needs_pool(self) -> bool:
        """True if llama.cpp aborts the process if a batch contains sequences with separate caches."""
        return self.architecture == "minimax-01"

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

    def micro_batch_size(self, settings: ModelSettings) -> int:
        """Return the number of tokens of a micro-batch, which is also the maximum of a pass."""
        # Without flash attention, a CPU needs room for heads x n_ctx x n_ubatch scores.
        return settings.ubatch_size or (128 if settings.flash_attn == "off" and not self.on_gpu else MICRO_BATCH)

    def context_params(self, settings: ModelSettings, cells: int, **more: Any) -> Any:
        """Return the result of `make_context_params` with the micro-batch of these settings."""
        self.check_open()
        return make_context_params(settings, cells, self.micro_batch_size(settings), **more)

    def open_context(self, params: Any) -> Any:
        """Return llama.cpp's context of the model, with its adapters set; null if there is no memory for it."""
        return open_context(self.handle, params, self.adapters)

    def count_snapshots(self, settings: ModelSettings, limit: int) -> int:
        """Return the number of snapshots of the recurrent state to request; 0 if the architecture has none."""
        if not self.is_recurrent:
            return 0
        # The states of a small context are as large as those of a large one.
        context = llama.llama_init_from_model(self.handle, self.context_params(settings, MAX_EVALUATE, snapshots=1))
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
        free = devices.cache_room(self.devices, self.cache_layers)
        return max(1, min(limit, int(free / 16 / max(1, size * self.texts))))

    def choose_context_size(self) -> int:
        """Return the context size of each sequence in tokens: the requested size, or the largest that fits."""
        requested = self.settings.ctx_size
        if not requested:
            reserved = self.reserved if self.on_gpu else 0
            largest, n_trained = self._largest_size(self.devices, reserved), self.n_ctx_train or 4096
            if largest >= n_trained:
                return n_trained
            size, each = min(n_trained, max(MIN_CONTEXT, largest)), f", {self.texts} times," if self.texts > 1 else ""
            self.notes.append(
                f"context limited to {size} of the model's {n_trained} tokens to fit{each} in memory"
                " (set -c to override)"
            )
            return size
        total = devices.cache_room(self.devices, self.cache_layers, if_empty=True)
        # The estimate is exact for plain attention only. Without this check the system ends the process.
        size_bytes = requested * self.token_bytes
        if size_bytes > total and not self.is_recurrent and not self.window:
            each = f", {self.texts} of them" if self.texts > 1 else ""
            raise ModelError(
                f"a context of {requested} tokens{each} needs {size_bytes / 2**30:.1f} GiB for the KV cache, but the"
                f" machine has {total / 2**30:.1f} GiB in total; try {self.advise_smaller_size(requested)}"
            )
        if requested > self.n_ctx_train > 0:
            self.notes.append(
                f"warning: the context of {requested} tokens is larger than the {self.n_ctx_train} the model was"
                " trained on"
            )
        return requested

    def advise_smaller_size(self, n_ctx: int) -> str:
        """Return advice after a context of `n_ctx` tokens did not fit, with a size that fits if known."""
        size = self._largest_size(devices.devices())
        advice = "a smaller -c/--ctx-size"
        if MIN_CONTEXT <= size < n_ctx:
            advice += f", such as {size}"
        return f"{advice}, or a smaller -ngl or a larger --n-cpu-moe" if self.on_gpu else advice

    def _largest_size(self, present: Sequence[devices.Device], reserved: int = 0) -> int:
        """Return the size of a context whose KV cache takes half of the free memory, in tokens per sequence."""
        mapped_bytes = 0 if self.settings.no_mmap else self.size_bytes
        free = max(0, devices.cache_room(present, self.cache_layers, mapped_bytes) - reserved)
        return int(free / 2 / max(1.0, self.token_bytes)) // GRAIN * GRAIN

    @property
    def token_bytes(self) -> float:
        """Maximum size in bytes of one token of each sequence in the KV cache."""
        heads = max(1, llama.llama_model_n_head(self.handle))
        n_layers, n_kv_heads = llama.llama_model_n_layer(self.handle), llama.llama_model_n_head_kv(self.handle) or heads
        widths: list[float] = []
        for name, cache_type in zip(("key", "value"), self.settings.cache_types, strict=True):
            width = self.read_metadata(f"{self.architecture}.attention.{name}_length")
            widths.append(int(width or llama.llama_model_n_embd(self.handle) // heads) * CACHE_TYPES[cache_type][1])
        return float(self.texts * n_layers * n_kv_heads) * sum(widths)

    def key(self, settings: str) -> str:
        threads = self.settings.threads, self.settings.threads_batch
        names = [device.name for device in self.devices]
        return machine_key(self.path, f"{threads} {self._loaded_as} {settings} {names}")

    def check_open(self) -> None:
        if not self.handle:
            raise ValueError("the target is closed")

    def close(self) -> None:
        """Free the model; the vocabulary cannot be used afterwards either."""
        if self.handle:
            self.vocabulary.close()
            llama.llama_model_free(self.handle)
            self.handle = None


def machine_key(path: Path, settings: str) -> str:
    """Return the key of measurements of a model file under some settings. Raises OSError."""
    return f"{model_key(path)}{hashlib.blake2b(settings.encode(), digest_size=12).hexdigest()}"


def model_key(path: Path) -> str:
    """Return the prefix of the keys for a model file; it changes with file, build, machine and GPUs. Raises OSError."""
    bindings.init_backend()
    size = path.stat().st_size
    parts = f"{size} {build()} {machine_name()}{devices.gpu_identity()}".encode()
    return hashlib.blake2b(read_edges(path, size) + parts, digest_size=12).hexdigest()


def tuning_key(path: Path, settings: ModelSettings) -> str:
    """Return the key of the fastest settings of a model file. Raises OSError."""
    placement = placement_key(settings, settings.gpu_layers)
    cores = physical_cores(), logical_cores()
    return machine_key(path, f"tuned {placement} kv={settings.cache_types} cores={cores}")


def make_model_params(settings: ModelSettings, *, all_on_gpu: bool) -> tuple[Any, bool]:
    """Return llama.cpp's parameters for loading a model, and whether its AMX kernels are off, being broken."""
    params = llama.llama_model_default_params()
    bindings.set_mapped(params, not settings.no_mmap)
    params.use_extra_bufts = not settings.no_repack
    amx_broken = not settings.no_repack and has_broken_amx(all_on_gpu)
    if amx_broken:
        params.use_extra_bufts = crash_check.hide_amx()
    before = devices.anonymous_memory()

    @llama.llama_progress_callback  # type: ignore[untyped-decorator]
    def on_progress(done: float, _data: Any) -> bool:
        # The first call comes when all buffers are mapped and none is filled.
        if done == 0:
            devices.advise_huge_pages(before)
        return True

    params.progress_callback = on_progress
    return params, amx_broken


def make_context_params(
    settings: ModelSettings, cells: int, micro_batch: int, *, n_seq: int = 1, pooled: bool = False, snapshots: int = 0
) -> Any:
    """Return llama.cpp's parameters of a context with `cells` cells for all sequences, in one pool if `pooled`."""
    params = llama.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = cells, micro_batch, micro_batch
    params.n_outputs_max = params.n_outputs_max_per_seq = MAX_EVALUATE
    params.n_seq_max, params.kv_unified, params.n_rs_seq = n_seq, pooled, snapshots
    params.n_threads, params.n_threads_batch = settings.threads, settings.threads_batch
    # enum llama_flash_attn_type
    params.flash_attn_type = {"auto": -1, "on": 1, "off": 0}[settings.flash_attn or "auto"]
    params.type_k, params.type_v = (CACHE_TYPES[cache_type][0] for cache_type in settings.cache_types)
    params.op_offload = not settings.no_op_offload
    return params


def has_broken_amx(all_on_gpu: bool) -> bool:
    """Return True if weights in RAM would be placed for AMX kernels that do not work."""
    return HAS_AMX in build() and not all_on_gpu and not crash_check.amx_works(Path(libggml._name))


def check_adapters(lora: Sequence[Lora], model: Path) -> str:
    """Return a key of adapters and their scales, after a check that their files fit a model file."""
    marks = []
    for name, scale in lora:
        check_adapter_file(Path(name), model)
        with open(name, "rb") as file:
            contents = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=12)).hexdigest()
        marks.append(f" lora={contents}*{scale:g}")
    return "".join(marks)


def load_adapters(lora: Sequence[Lora], model: Any) -> tuple[Adapter, ...]:
    adapters = []
    for name, scale in lora:
        bindings.log_tail.clear()
        handle = llama.llama_adapter_lora_init(model, os.fsencode(name))
        if not handle:
            raise ModelError(f"{name}: llama.cpp cannot load this adapter ({bindings.last_complaint()})")
        if llama.llama_adapter_get_alora_n_invocation_tokens(handle):
            raise ModelError(f"{name} is an activated adapter (aLoRA), which is not supported")
        adapters.append((handle, scale))
    return tuple(adapters)


def open_context(model: Any, params: Any, adapters: Sequence[Adapter]) -> Any:
    """Return llama.cpp's context of a model, with its adapters set; null if there is no memory for it."""
    bindings.log_tail.clear()
    context = llama.llama_init_from_model(model, params)
    if context and adapters:
        set_adapters(context, adapters)
    return context


def set_adapters(context: Any, adapters: Sequence[Adapter]) -> None:
    """Apply adapters in the following passes of a context; those with scale 0 have no effect."""
    effective = [(handle, scale) for handle, scale in adapters if scale]
    handles = (llama.llama_adapter_lora_p_ctypes * len(effective))(*(handle for handle, _ in effective))
    scales = (ctypes.c_float * len(effective))(*(scale for _, scale in effective))
    llama.llama_set_adapters_lora(context, handles, len(effective), scales)
