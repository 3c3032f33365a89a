"""All options of loading and drafting (`LoadOptions`), each defined once.

An option is a field with a type, a default, allowed values, flags and a help text, as in `ngramspec.sampling.settings`.
The options of the command line and of the plugin for `llm` are made of these.
"""

from __future__ import annotations

from dataclasses import dataclass

from ngramspec.cost.bits import Exact
from ngramspec.drafting import DEFAULT, DRAFTERS
from ngramspec.llama.adapters import Lora
from ngramspec.llama.cache import CacheType
from ngramspec.llama.devices import AUTO
from ngramspec.llama.placement import SPLIT_MODES, SplitMode
from ngramspec.llama.rpc import PATIENCE
from ngramspec.llama.target import DRAFT_LENGTHS, EXACTNESS, FLASH, MICRO_BATCHES, THREADS, TYPES
from ngramspec.loading.values import (
    CONTEXT,
    DEVICES,
    LAYERS,
    MODEL_ONLY,
    OVERRIDES,
    SPLIT,
    allow_adapters,
    parse_lora,
    parse_overrides,
    parse_scaled,
)
from ngramspec.machine import Flash
from ngramspec.memory.memory import DEFAULT as DEFAULT_MEMORY
from ngramspec.policies import POLICIES
from ngramspec.sampling.settings import allow_choices, allow_int_range, allow_range, option
from ngramspec.user_class import FORM


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Options of loading a model and of its drafter; `ngramspec.loading.settings.LoadSettings` checks them."""

    hf_repo: str | None = option(
        None,
        "-hf",
        "--hf-repo",
        metavar="USER/REPO[:QUANT]",
        help="Model from Hugging Face, instead of MODEL; default QUANT: Q4_K_M, Q8_0 or the first file.",
    )
    offline: bool = option(False, help="Do not use the network: take models from Hugging Face from the local cache.")
    ctx_size: int | None = option(
        None,
        "-c",
        "--ctx-size",
        help="Context size in tokens; default or 0: the model's own, if memory allows.",
        allowed=CONTEXT,
    )
    gpu_layers: int = option(
        AUTO,
        "-ngl",
        "--gpu-layers",
        "--n-gpu-layers",
        metavar="N",
        help="Number of layers on the GPU; auto (-1): as many as fit in its memory, all (-2): all.",
        allowed=LAYERS,
    )
    device: str | None = option(
        None,
        "-dev",
        "--device",
        metavar="NAME,...",
        help="GPUs to use (see ngramspec info), or none; default: those that llama.cpp selects.",
        allowed=DEVICES,
    )
    split_mode: SplitMode = option(
        "layer",
        "-sm",
        "--split-mode",
        help="Parts of the model that several GPUs share; none: use one GPU.",
        allowed=allow_choices(*SPLIT_MODES),
    )
    main_gpu: int = option(
        0, "-mg", "--main-gpu", help="Index of the GPU for --split-mode none.", allowed=allow_int_range(0, 255)
    )
    tensor_split: str | None = option(
        None,
        "-ts",
        "--tensor-split",
        metavar="N,N,...",
        help="Share of each GPU, such as 3,1; default: in proportion to free memory.",
        allowed=SPLIT,
    )
    n_cpu_moe: int | None = option(
        None,
        "-ncmoe",
        "--n-cpu-moe",
        help="Number of first layers whose experts stay in RAM; default: as many as needed to fit.",
        allowed=allow_int_range(0, 9999),
    )
    cpu_moe: bool = option(False, "-cmoe", "--cpu-moe", help="Keep the experts of all layers in RAM.")
    override_tensor: tuple[tuple[str, str], ...] = option(
        (),
        "-ot",
        "--override-tensor",
        metavar="REGEX=DEVICE,...",
        help="Devices of tensors by their names, such as 'ffn_.*_exps=CPU'; repeatable.",
        allowed=OVERRIDES,
        parse=parse_overrides,
        repeatable=True,
    )
    no_op_offload: bool = option(False, help="Do not use the GPU for large batches with weights in RAM.")
    rpc: str | None = option(
        None,
        metavar="HOST:PORT,...",
        help="Split the layers across machines running ngramspec rpc-worker; trusted networks only.",
    )
    rpc_timeout: float | None = option(
        None,
        help=f"Seconds without a response after which a machine counts as lost; default: {PATIENCE:g}.",
        allowed=allow_range(1),
    )
    threads: int | None = option(
        None,
        "-t",
        "--threads",
        metavar="N|auto",
        help="Number of CPU threads; auto (default): the cores that other programs leave free.",
        allowed=THREADS,
    )
    threads_batch: int | None = option(
        None,
        "-tb",
        "--threads-batch",
        help="Number of CPU threads for prompts and drafts; default: -t.",
        allowed=THREADS,
    )
    ubatch_size: int | None = option(
        None,
        "-ub",
        "--ubatch-size",
        help="Prompt tokens per decode call; default: 512, or 128 on a CPU without flash attention.",
        allowed=MICRO_BATCHES,
    )
    flash_attn: Flash | None = option(
        None,
        "-fa",
        "--flash-attn",
        metavar="on|off|auto",
        help="Flash attention; default: auto (llama.cpp decides; off on a CPU for --exact).",
        allowed=FLASH,
    )
    cache_type_k: CacheType = option(
        "f16",
        "-ctk",
        "--cache-type-k",
        metavar="TYPE",
        help=f"Data type of the K cache, {TYPES.description}.",
        allowed=TYPES,
    )
    cache_type_v: CacheType = option(
        "f16",
        "-ctv",
        "--cache-type-v",
        metavar="TYPE",
        help=f"Data type of the V cache, {TYPES.description}.",
        allowed=TYPES,
    )
    lora: tuple[Lora, ...] = option(
        (),
        metavar="FILE,...",
        help="LoRA adapters (GGUF files); repeatable.",
        allowed=allow_adapters("file names with a scale each"),
        parse=parse_lora,
        repeatable=True,
    )
    lora_scaled: tuple[Lora, ...] = option(
        (),
        metavar="FILE:SCALE,...",
        help="LoRA adapters with a scale; repeatable.",
        allowed=allow_adapters("file names with a finite scale each"),
        parse=parse_scaled,
        repeatable=True,
    )
    no_mmap: bool = option(False, help="Read the model into memory instead of mapping the file.")
    no_repack: bool = option(False, help="Do not rearrange the weights for CPU kernels.")
    ignore_tuned: bool = option(False, help="Ignore the settings saved by ngramspec tune --apply.")
    exact: Exact = option(
        "auto",
        help="Bit-identical output with and without drafts: on, off, or auto (if batch sizes agree).",
        allowed=EXACTNESS,
    )
    draft_model: str | None = option(
        None,
        "-md",
        "--draft-model",
        "--model-draft",
        metavar="MODEL",
        help="Also draft with this smaller model (same vocabulary); accepts the same names as MODEL.",
    )
    gpu_layers_draft: int | None = option(
        None,
        "-ngld",
        "--gpu-layers-draft",
        "--n-gpu-layers-draft",
        "--spec-draft-ngl",
        metavar="N",
        help="Number of draft-model layers on the GPU; default: auto, or none with -ngl 0.",
        allowed=LAYERS,
    )
    device_draft: str | None = option(
        None,
        "-devd",
        "--device-draft",
        "--spec-draft-device",
        metavar="NAME,...",
        help="GPUs for the draft model, or none; default: --device.",
        allowed=DEVICES,
    )
    threads_draft: int | None = option(
        None, "-td", "--threads-draft", help="Number of CPU threads for the draft model; default: -t.", allowed=THREADS
    )
    mtp: bool = option(False, help="Draft with the model's own NextN (MTP) layer, if it has one.")
    no_draft: bool = option(False, help="Turn drafting off: decode one token at a time.")
    drafter: str = option(
        DEFAULT,
        metavar=f"NAME|{FORM}",
        help=f"Drafter: {', '.join(DRAFTERS)}, {MODEL_ONLY} (the draft model without n-grams), or your own class.",
    )
    policy: str = option(
        "cost", metavar=f"NAME|{FORM}", help=f"Policy for the draft length: {', '.join(POLICIES)}, or your own class."
    )
    draft_max: int | None = option(
        None,
        "--draft-max",
        "--spec-draft-n-max",
        help="Maximum draft length in tokens; default depends on --policy.",
        allowed=DRAFT_LENGTHS,
    )
    memory: str | None = option(
        None,
        metavar="NAME",
        help=f"Also draft from this memory (see ngramspec memory); default: {DEFAULT_MEMORY!r}, if it exists.",
    )
    no_memory: bool = option(
        False, help="Draft from the context only; do not read or save a memory or draft statistics."
    )
