"""All settings of loading and drafting (`LoadSettings`), each defined once.

A setting is a field with a type, a default, allowed values, flags and a help text, as in `ngramspec.sampling.settings`.
The options of the command line and of the plugin for `llm` are made of these.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ngramspec.drafting import DEFAULT, DRAFTERS, REMEMBERING, make_drafter
from ngramspec.drafting.draft import Drafter
from ngramspec.exactness.decision import Exact
from ngramspec.llama.adapters import Lora
from ngramspec.llama.cache import UNQUANTISED, CacheType
from ngramspec.llama.devices import ALL, AUTO
from ngramspec.llama.placement import EVERY, SPLIT_MODES, Placement, SplitMode
from ngramspec.llama.rpc import PATIENCE, workers
from ngramspec.llama.target import DRAFT_LENGTHS, EXACTNESS, FLASH, MICRO_BATCHES, THREADS, TYPES
from ngramspec.machine import Flash
from ngramspec.memory.memory import DEFAULT as DEFAULT_MEMORY
from ngramspec.memory.memory import memory_folder
from ngramspec.policies import POLICIES, make_policy
from ngramspec.policies.policy import FixedPolicy, Policy
from ngramspec.sampling.option import FINITE, Allowed, allow_choices, allow_int_range, allow_range, option, options
from ngramspec.user_class import FORM, is_user_class, load_class

MODEL_ONLY = "model"
"""Value of `drafter` for a draft model without n-grams."""

NO_DEVICE = "none"
"""Value of `device` for the CPU."""

MIN_CONTEXT = 16
CONTEXT = Allowed(
    lambda x: isinstance(x, int) and (x == 0 or MIN_CONTEXT <= x <= 2**24),
    f"0 or from {MIN_CONTEXT} to {2**24}",
    0,
    2**24,
)
LAYERS = allow_int_range(ALL, 9999)


DEVICES = Allowed(
    lambda x: isinstance(x, str) and all(x.split(",")) and len({*x.split(",")}) == x.count(",") + 1,
    "a list of different device names, or 'none'",
)


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


def _parse_overrides(texts: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Parse REGEX=DEVICE,REGEX=DEVICE of each occurrence of the option; "=" in a regular expression is allowed."""
    parts = [item.rpartition("=") for row in csv.reader(texts) for item in row or [""]]
    pairs = tuple((pattern, device) for pattern, _, device in parts)
    if not _are_overrides(pairs):
        raise LoadSettingsError(f"{{override_tensor}} must be REGEX=DEVICE, got {','.join(texts)!r}")
    return pairs


def _allow_adapters(words: str) -> Allowed:
    """Return the allowed values of a list of adapter files with their scales."""

    def holds(value: Any) -> bool:
        try:
            return all(str(name) and FINITE.accepts(scale) for name, scale in value)
        except (TypeError, ValueError):  # the items are not pairs
            return False

    return Allowed(holds, words)


class LoadSettingsError(ValueError):
    """A setting cannot have its value, or two contradict each other; the text has settings as {draft_model}."""

    def __str__(self) -> str:
        return self.message({})

    def message(self, names: Mapping[str, str]) -> str:
        """Format the message, replacing field names by the given display names (such as command-line flags)."""
        return re.sub(r"\{(\w+)\}", lambda match: names.get(match[1], match[1]), self.args[0])


def _parse_lora(texts: Sequence[str]) -> tuple[tuple[str, float], ...]:
    """Parse FILE,FILE of each occurrence of the option; a name with a comma must be in quotation marks."""
    names = [name for row in csv.reader(texts) for name in row or [""]]
    if not all(names):
        raise LoadSettingsError(f"{{lora}} must be a list of file names, got {','.join(texts)!r}")
    return tuple((name, 1.0) for name in names)


def _parse_scaled(texts: Sequence[str]) -> tuple[tuple[str, float], ...]:
    """Parse FILE:SCALE,FILE:SCALE of each occurrence of the option."""
    try:
        pairs = [item.rpartition(":") for item, _ in _parse_lora(texts)]
        return tuple((name, float(scale)) for name, _, scale in pairs)
    except ValueError:
        raise LoadSettingsError(f"{{lora_scaled}} must be FILE:SCALE, got {','.join(texts)!r}") from None


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """Settings of loading a model and of its drafter."""

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
        metavar="N|all|auto",
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
        allowed=Allowed(_is_split, "a list of numbers of at least 0 with a positive sum"),
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
        allowed=Allowed(_are_overrides, "valid regular expressions of tensor names with a device each"),
        parse=_parse_overrides,
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
    cache_type_k: CacheType = option("f16", "-ctk", "--cache-type-k", help="Data type of the K cache.", allowed=TYPES)
    cache_type_v: CacheType = option("f16", "-ctv", "--cache-type-v", help="Data type of the V cache.", allowed=TYPES)
    lora: tuple[Lora, ...] = option(
        (),
        metavar="FILE,...",
        help="LoRA adapters (GGUF files); repeatable.",
        allowed=_allow_adapters("file names with a scale each"),
        parse=_parse_lora,
        repeatable=True,
    )
    lora_scaled: tuple[Lora, ...] = option(
        (),
        metavar="FILE:SCALE,...",
        help="LoRA adapters with a scale; repeatable.",
        allowed=_allow_adapters("file names with a finite scale each"),
        parse=_parse_scaled,
        repeatable=True,
    )
    no_mmap: bool = option(False, help="Read the model into memory instead of mapping the file.")
    no_repack: bool = option(False, help="Do not rearrange the weights for CPU kernels.")
    ignore_tuned: bool = option(False, help="Ignore the settings saved by ngramspec tune --apply.")
    exact: Exact = option(
        "auto",
        help="Bit-identical output with and without drafts: on, off, or auto (if it costs at most 5 %).",
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
        metavar="N|all|auto",
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

    def __post_init__(self) -> None:
        for name, spec in options(self).items():
            value = getattr(self, name)
            if value is not None and spec.allowed is not None and not spec.allowed.accepts(value):
                raise LoadSettingsError(f"{{{name}}} must be {spec.allowed.description}, got {value!r}")
        for message in self._contradictions():
            raise LoadSettingsError(message)

    def _contradictions(self) -> Iterator[str]:
        """Yield messages about settings that contradict each other."""
        if self.flash_attn == "off" and self.cache_type_v not in UNQUANTISED:
            yield f"{{cache_type_v}} {self.cache_type_v} requires flash attention; remove {{flash_attn}} off"
        if self.rpc is None and self.rpc_timeout is not None:
            yield "{rpc_timeout} requires {rpc}"
        if self.rpc is not None:
            if self.gpu_layers == 0:
                yield "{gpu_layers} 0 cannot be combined with {rpc}: it leaves no layer for the workers"
            try:
                workers(self.rpc)
            except ValueError as error:
                yield f"{{rpc}}: {error}"
        yield from self._placement_contradictions()
        yield from self._drafter_contradictions()
        if self.memory is not None:
            memory_folder(self.memory)
            if self.no_memory:
                yield "{memory} cannot be combined with {no_memory}"
            if self.no_draft:
                yield "{memory} cannot be combined with {no_draft}"
            if self.drafter not in REMEMBERING:
                yield f"the drafter {self.drafter!r} does not use a memory; remove {{memory}} or {{drafter}}"

    def _placement_contradictions(self) -> Iterator[str]:
        if self.device == NO_DEVICE and self.gpu_layers not in (AUTO, 0):
            yield "{device} none cannot be combined with {gpu_layers}: it leaves no GPU for the layers"
        if self.device == NO_DEVICE and self.rpc is not None:
            yield "{device} none cannot be combined with {rpc}: it leaves no layer for the workers"
        if (self.device_draft or self.device) == NO_DEVICE and self.gpu_layers_draft not in (None, AUTO, 0):
            flag = "{device}" if self.device_draft is None else "{device_draft}"
            yield f"{flag} none cannot be combined with {{gpu_layers_draft}}: it leaves no GPU for the layers"
        if self.split_mode == "none" and self.tensor_split is not None:
            yield "{tensor_split} cannot be combined with {split_mode} none, which uses one GPU"
        if self.cpu_moe and self.n_cpu_moe is not None:
            yield "{cpu_moe} cannot be combined with {n_cpu_moe}; remove one"

    def _drafter_contradictions(self) -> Iterator[str]:
        flag = "{draft_model}" if self.draft_model is not None else "{mtp}" if self.mtp else ""
        if self.draft_model is not None and self.mtp:
            yield "{draft_model} cannot be combined with {mtp}"
        if self.draft_model is None and (self.gpu_layers_draft, self.device_draft, self.threads_draft) != (None,) * 3:
            yield "{gpu_layers_draft}, {device_draft} and {threads_draft} require a draft model; set {draft_model}"
        if flag and self.drafter not in (DEFAULT, MODEL_ONLY):
            yield (
                f"{{drafter}} {self.drafter} cannot be combined with {flag}; use {{drafter}} {DEFAULT} (both) or"
                f" {{drafter}} {MODEL_ONLY} (the model only)"
            )
        if not flag and self.drafter == MODEL_ONLY:
            yield f"{{drafter}} {MODEL_ONLY} requires a draft model; set {{draft_model}}"
        if self.drafter not in (*DRAFTERS, MODEL_ONLY) and not is_user_class(self.drafter):
            yield f"unknown drafter {self.drafter!r}; choose one of: {', '.join([*DRAFTERS, MODEL_ONLY])}, or {FORM}"
        # The user's classes are constructed only when they are used.
        for name, base in ((self.drafter, Drafter), (self.policy, Policy)):
            if is_user_class(name):
                load_class(name, base)
        try:
            if self.drafter not in (DEFAULT, MODEL_ONLY) and not is_user_class(self.drafter):
                make_drafter(self.drafter, memory=self.drafter in REMEMBERING and not self.no_memory)
            if not is_user_class(self.policy):
                make_policy(self.policy, self.draft_max)
        except ValueError as error:
            yield str(error)
        if flag and self.no_draft:
            yield f"{flag} cannot be combined with {{no_draft}}"

    @property
    def target_arguments(self) -> dict[str, Any]:
        """Arguments of `Target`, by name."""
        longest = 1 if self.no_draft else self.draft_max or (FixedPolicy.DRAFT_MAX if self.policy == "fixed" else None)
        return {
            "n_ctx": self.ctx_size or None,
            "n_gpu_layers": self.gpu_layers,
            "placement": self.placement,
            "threads": self.threads,
            "threads_batch": self.threads_batch,
            "micro_batch": self.ubatch_size,
            "flash_attn": self.flash_attn or "auto",
            "cache_type_k": self.cache_type_k,
            "cache_type_v": self.cache_type_v,
            "mmap": not self.no_mmap,
            "repack": not self.no_repack,
            # In exact mode the sizes of passes must not depend on the drafts.
            "draft_max": None if self.exact == "on" else longest,
            "exact": self.exact,
            "lora": self.adapters,
        }

    @property
    def placement(self) -> Placement:
        """Requested devices of the weights."""
        names = None if self.device is None else () if self.device == NO_DEVICE else tuple(self.device.split(","))
        return Placement(
            devices=names,
            main_gpu=self.main_gpu,
            split_mode=self.split_mode,
            tensor_split=tuple(map(float, re.split("[,/]", self.tensor_split))) if self.tensor_split else (),
            cpu_experts=EVERY if self.cpu_moe else self.n_cpu_moe,
            overrides=self.override_tensor,
            op_offload=not self.no_op_offload,
        )

    @property
    def adapters(self) -> tuple[Lora, ...]:
        """Files of all LoRA adapters, each with its scale."""
        return *self.lora, *self.lora_scaled

    def make_draft_settings(self, n_ctx: int, threads: int | None) -> LoadSettings:
        """Return the settings of the draft model.

        A draft model is small, so by default as many of its layers as fit are on the GPU, even if the target does not
        fit there. If `gpu_layers` is 0, which disables the GPU, it is on the CPU. As in llama.cpp, it uses the target's
        devices and their shares, unless it has its own; overrides of tensors apply only to the target.

        Args:
            n_ctx: Context size of the target.
            threads: Number of threads of the target.
        """
        layers = self.gpu_layers_draft
        if layers is None:
            layers = AUTO if self.gpu_layers else 0
        own = self.device_draft is not None
        return LoadSettings(
            ctx_size=max(MIN_CONTEXT, n_ctx),
            gpu_layers=layers,
            device=self.device_draft if own else self.device,
            split_mode="layer" if own else self.split_mode,
            main_gpu=0 if own else self.main_gpu,
            tensor_split=None if own else self.tensor_split,
            no_op_offload=self.no_op_offload,
            threads=self.threads_draft or threads,
            exact="off",
        )


_NAMES = tuple(options(LoadSettings))

LOADING, DRAFTING = _NAMES[: _NAMES.index("draft_model")], _NAMES[_NAMES.index("draft_model") :]
"""Names of the settings of the model, and of the settings of drafts."""

PLACEMENT = _NAMES[_NAMES.index("gpu_layers") : _NAMES.index("no_op_offload") + 1]
"""Names of the settings for the devices of the weights."""
