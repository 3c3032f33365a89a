"""`ModelSettings`: the settings of a loaded model, each declared once under the name of llama.cpp's option.

A setting is a field with a type, a default, allowed values, flags and a help text, as in `ngramspec.sampling.settings`.
The options of the command line and of the plugin for `llm` are made of these.
"""

from __future__ import annotations

import csv
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

from ngramspec.cost.bits import EXACT, Exact
from ngramspec.sampling.settings import FINITE, Allowed, allow_choices, allow_int_range, option, options

Flash = Literal["auto", "on", "off"]
SplitMode = Literal["none", "layer", "row"]
CacheType = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"]
UNQUANTISED: tuple[CacheType, ...] = ("f32", "f16", "bf16")
"""Element types that are not quantised; llama.cpp supports other types in the V cache only with flash attention."""

Lora = tuple[str | os.PathLike[str], float]
"""Path of an adapter's file, and its scale."""

AUTO, ALL = -1, -2  # llama.cpp's numbers of GPU layers for "as many as fit" and "all"
NO_DEVICE = "none"  # value of `device` for the CPU
MIN_CONTEXT = 16
MAX_DRAFT = 63
THREADS = allow_int_range(1, 512)
LAYERS = allow_int_range(ALL, 9999)
CACHE = allow_choices(*get_args(CacheType))
DEVICES = Allowed(
    lambda x: isinstance(x, str) and all(x.split(",")) and len({*x.split(",")}) == x.count(",") + 1,
    "a list of different device names, or 'none'",
)


class LoadSettingsError(ValueError):
    """A setting cannot have its value, or two contradict each other; the text has settings as {draft_model}."""

    def __str__(self) -> str:
        return self.message({})

    def message(self, names: Mapping[str, str]) -> str:
        """Format the message, replacing field names by the given display names (such as command-line flags)."""
        return re.sub(r"\{(\w+)\}", lambda match: names.get(match[1], match[1]), self.args[0])


def _is_split(text: Any) -> bool:
    """Return True if a text is a list of shares."""
    try:
        shares = [float(share) for share in re.split("[,/]", text)]
    except (TypeError, ValueError):
        return False
    return all(0 <= share < math.inf for share in shares) and sum(shares) > 0


def _are_overrides(value: Any) -> bool:
    """Return True if a value consists of pairs of a regular expression and a device."""
    try:
        return all(re.compile(pattern) and pattern and device for pattern, device in value)
    except (TypeError, ValueError, re.error):
        return False


def _are_adapters(value: Any) -> bool:
    """Return True if a value consists of pairs of a file and a scale."""
    try:
        return all(str(name) and FINITE.accepts(scale) for name, scale in value)
    except (TypeError, ValueError):  # the items are not pairs
        return False


def parse_overrides(texts: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Parse REGEX=DEVICE,REGEX=DEVICE of each occurrence of the option; "=" in a regular expression is allowed."""
    parts = [item.rpartition("=") for row in csv.reader(texts) for item in row or [""]]
    pairs = tuple((pattern, device) for pattern, _, device in parts)
    if not _are_overrides(pairs):
        raise LoadSettingsError(f"{{override_tensor}} must be REGEX=DEVICE, got {','.join(texts)!r}")
    return pairs


def parse_lora(texts: Sequence[str]) -> tuple[tuple[str, float], ...]:
    """Parse FILE,FILE of each occurrence of the option; a name with a comma must be in quotation marks."""
    names = [name for row in csv.reader(texts) for name in row or [""]]
    if not all(names):
        raise LoadSettingsError(f"{{lora}} must be a list of file names, got {','.join(texts)!r}")
    return tuple((name, 1.0) for name in names)


def parse_scaled(texts: Sequence[str]) -> tuple[tuple[str, float], ...]:
    """Parse FILE:SCALE,FILE:SCALE of each occurrence of the option."""
    try:
        pairs = [item.rpartition(":") for item, _ in parse_lora(texts)]
        return tuple((name, float(scale)) for name, _, scale in pairs)
    except ValueError:
        raise LoadSettingsError(f"{{lora_scaled}} must be FILE:SCALE, got {','.join(texts)!r}") from None


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Settings of a loaded model."""

    ctx_size: int | None = option(
        None,
        "-c",
        help="Context size in tokens; default or 0: the model's own, if memory allows.",
        allowed=Allowed(
            lambda x: isinstance(x, int) and (x == 0 or MIN_CONTEXT <= x <= 2**24),
            f"0 or from {MIN_CONTEXT} to {2**24}",
            0,
        ),
    )
    gpu_layers: int = option(
        AUTO,
        "-ngl",
        "--gpu-layers",
        "--n-gpu-layers",
        help="Number of layers on the GPU; auto (-1): as many as fit in its memory, all (-2): all.",
        allowed=LAYERS,
    )
    device: str | None = option(
        None,
        "-dev",
        metavar="NAME,...",
        help="GPUs to use (see ngramspec info), or none; default: those that llama.cpp selects.",
        allowed=DEVICES,
    )
    split_mode: SplitMode = option(
        "layer",
        "-sm",
        help="Parts of the model that several GPUs share; none: use one GPU.",
        allowed=allow_choices(*get_args(SplitMode)),
    )
    main_gpu: int = option(0, "-mg", help="Index of the GPU for --split-mode none.", allowed=allow_int_range(0, 255))
    tensor_split: str | None = option(
        None,
        "-ts",
        metavar="N,N,...",
        help="Share of each GPU, such as 3,1; default: in proportion to free memory.",
        allowed=Allowed(_is_split, "a list of numbers of at least 0 with a positive sum"),
    )
    n_cpu_moe: int | None = option(
        None,
        "-ncmoe",
        help="Number of first layers whose experts stay in RAM; default: as many as needed to fit.",
        allowed=allow_int_range(0, 9999),
    )
    cpu_moe: bool = option(False, "-cmoe", help="Keep the experts of all layers in RAM.")
    override_tensor: tuple[tuple[str, str], ...] = option(
        (),
        "-ot",
        metavar="REGEX=DEVICE,...",
        help="Devices of tensors by their names, such as 'ffn_.*_exps=CPU'; repeatable.",
        allowed=Allowed(_are_overrides, "valid regular expressions of tensor names with a device each"),
        parse=parse_overrides,
        repeatable=True,
    )
    no_op_offload: bool = option(False, help="Do not use the GPU for large batches with weights in RAM.")
    threads: int | None = option(
        None,
        "-t",
        metavar="N|auto",
        help="Number of CPU threads; auto (default): the cores that other programs leave free.",
        allowed=THREADS,
    )
    threads_batch: int | None = option(
        None, "-tb", help="Number of CPU threads for prompts and drafts; default: -t.", allowed=THREADS
    )
    ubatch_size: int | None = option(
        None,
        "-ub",
        help="Prompt tokens per decode call; default: 512, or 128 on a CPU without flash attention.",
        allowed=allow_int_range(MAX_DRAFT + 1, 4096),
    )
    flash_attn: Flash | None = option(
        None,
        "-fa",
        metavar="on|off|auto",
        help="Flash attention; default: auto (llama.cpp decides; off on a CPU for --exact).",
        allowed=allow_choices(*get_args(Flash)),
    )
    cache_type_k: CacheType = option(
        "f16", "-ctk", metavar="TYPE", help=f"Data type of the K cache, {CACHE.description}.", allowed=CACHE
    )
    cache_type_v: CacheType = option(
        "f16", "-ctv", metavar="TYPE", help=f"Data type of the V cache, {CACHE.description}.", allowed=CACHE
    )
    lora: tuple[Lora, ...] = option(
        (),
        metavar="FILE,...",
        help="LoRA adapters (GGUF files); repeatable.",
        allowed=Allowed(_are_adapters, "file names with a scale each"),
        parse=parse_lora,
        repeatable=True,
    )
    lora_scaled: tuple[Lora, ...] = option(
        (),
        metavar="FILE:SCALE,...",
        help="LoRA adapters with a scale; repeatable.",
        allowed=Allowed(_are_adapters, "file names with a finite scale each"),
        parse=parse_scaled,
        repeatable=True,
    )
    no_mmap: bool = option(False, help="Read the model into memory instead of mapping the file.")
    no_repack: bool = option(False, help="Do not rearrange the weights for CPU kernels.")
    exact: Exact = option(
        "auto",
        help="Bit-identical output with and without drafts: on, off, or auto (if batch sizes agree).",
        allowed=allow_choices(*EXACT),
    )
    mtp: bool = option(False, help="Draft with the model's own NextN (MTP) layer, if it has one.")
    draft_max: int | None = option(
        None,
        "--draft-max",
        "--spec-draft-n-max",
        help="Maximum draft length in tokens; default depends on --policy.",
        allowed=allow_int_range(1, MAX_DRAFT),
    )

    def __post_init__(self) -> None:
        own_class: Any = type(self)  # mypy does not take it for hashable
        for name, spec in options(own_class).items():
            value = getattr(self, name)
            if value is not None and spec.allowed is not None and not spec.allowed.accepts(value):
                raise LoadSettingsError(f"{{{name}}} must be {spec.allowed.description}, got {value!r}")

    @property
    def cache_types(self) -> tuple[CacheType, CacheType]:
        """Element types of the K and of the V cache."""
        return self.cache_type_k, self.cache_type_v

    @property
    def adapters(self) -> tuple[Lora, ...]:
        return *self.lora, *self.lora_scaled

    def changes(self, base: Self) -> dict[str, Any]:
        """Return the settings that differ from `base`, with their values."""
        changes = {name: getattr(self, name) for name in NAMES if getattr(self, name) != getattr(base, name)}
        if changes.keys() & {"threads", "threads_batch"}:  # `threads` sets the default of `threads_batch`
            changes = {"threads": self.threads, "threads_batch": self.threads_batch} | changes
        return changes


NAMES = tuple(options(ModelSettings))
PLACEMENT = NAMES[NAMES.index("gpu_layers") : NAMES.index("no_op_offload") + 1]
"""Names of the settings for the devices of the weights."""


def flags(changes: Mapping[str, Any]) -> str:
    """Return llama.cpp's command line options for these changes (see `ModelSettings.changes`)."""
    specs, words = options(ModelSettings), list[str]()
    for name, value in changes.items():
        words += [specs[name].flags[0]] if value is True else [specs[name].flags[0], str(value)]
    return " ".join(words)
