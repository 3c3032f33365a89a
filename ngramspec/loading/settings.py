"""`LoadSettings`: all that a user sets about how a model is loaded and drafted for, each setting told once.

A setting is a field with its type, its default, the values it may have, its flags and its line of help, as in
`ngramspec.sampling.settings`. The options of the command line and of the plugin for `llm` are made of these.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ngramspec.drafting import DEFAULT, DRAFTERS, REMEMBERING, make_drafter
from ngramspec.exactness.decision import Exact
from ngramspec.llama.cache import UNQUANTISED, CacheType
from ngramspec.llama.rpc import PATIENCE, workers
from ngramspec.llama.target import DRAFT_LENGTHS, EXACTNESS, FLASH, MICRO_BATCHES, THREADS, TYPES
from ngramspec.llama.weights import Lora
from ngramspec.machine import Flash
from ngramspec.memory.memory import DEFAULT as DEFAULT_MEMORY
from ngramspec.memory.memory import memory_folder
from ngramspec.policies import POLICIES, make_policy
from ngramspec.policies.policy import FixedPolicy
from ngramspec.sampling.option import FINITE, Allowed, between, option, options, within

ALONE = "model"
"""What `drafter` calls a draft model that drafts alone."""

LEAST_CONTEXT = 16
CONTEXT = Allowed(
    lambda x: isinstance(x, int) and (x == 0 or LEAST_CONTEXT <= x <= 2**24),
    f"0, or from {LEAST_CONTEXT} to {2**24}",
    0,
    2**24,
)
LAYERS = between(-1, 9999)


def _adapters(words: str) -> Allowed:
    """Files of adapters, each with its scale."""

    def holds(value: Any) -> bool:
        try:
            return all(str(name) and FINITE.holds(scale) for name, scale in value)
        except (TypeError, ValueError):  # they are no pairs
            return False

    return Allowed(holds, words)


class LoadSettingsError(ValueError):
    """A setting cannot have its value, or two contradict each other; the text has settings as {draft_model}."""

    def __str__(self) -> str:
        return self.worded({})

    def worded(self, names: Mapping[str, str]) -> str:
        """What is wrong, with the settings called by these names, by their fields'; those left out keep theirs."""
        return re.sub(r"\{(\w+)\}", lambda found: names.get(found[1], found[1]), self.args[0])


def _parse_lora(texts: Sequence[str]) -> tuple[tuple[str, float], ...]:
    """FILE,FILE, as often as was given; a name with a comma stands in quotation marks."""
    names = [name for row in csv.reader(texts) for name in row or [""]]
    if not all(names):
        raise LoadSettingsError(f"{{lora}} is {','.join(texts)!r}, but must be the names of files")
    return tuple((name, 1.0) for name in names)


def _parse_scaled(texts: Sequence[str]) -> tuple[tuple[str, float], ...]:
    """FILE:SCALE,FILE:SCALE in the same way."""
    try:
        pairs = [item.rpartition(":") for item, _ in _parse_lora(texts)]
        return tuple((name, float(scale)) for name, _, scale in pairs)
    except ValueError:
        raise LoadSettingsError(f"{{lora_scaled}} is {','.join(texts)!r}, but must be FILE:SCALE") from None


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """How a model is loaded, and what drafts for it."""

    hf_repo: str | None = option(
        None,
        "-hf",
        "--hf-repo",
        metavar="USER/REPO[:QUANT]",
        help="The model, from Hugging Face, instead of MODEL; quant: Q4_K_M, else Q8_0, else the first.",
    )
    ctx_size: int | None = option(
        None,
        "-c",
        "--ctx-size",
        help="Context in tokens; default, as 0: the model's, if memory allows.",
        allowed=CONTEXT,
    )
    gpu_layers: int = option(-1, "-ngl", "--gpu-layers", help="Layers on the GPU; -1: all.", allowed=LAYERS)
    rpc: str | None = option(
        None,
        metavar="HOST:PORT,...",
        help="Machines to spread the layers over, where ngramspec rpc-worker runs; trusted networks only.",
    )
    rpc_timeout: float | None = option(
        None,
        help=f"Seconds without an answer after which a machine counts as lost; default: {PATIENCE:g}.",
        allowed=within(1),
    )
    threads: int | None = option(
        None,
        "-t",
        "--threads",
        metavar="N|auto",
        help="CPU threads; auto leaves cores that other programs use to them; default: auto.",
        allowed=THREADS,
    )
    threads_batch: int | None = option(
        None, "-tb", "--threads-batch", help="CPU threads for prompts and drafts; default: as -t.", allowed=THREADS
    )
    ubatch_size: int | None = option(
        None,
        "-ub",
        "--ubatch-size",
        help="Tokens of a prompt per pass; default: 512, without flash attention 128.",
        allowed=MICRO_BATCHES,
    )
    flash_attn: Flash | None = option(
        None,
        "-fa",
        "--flash-attn",
        help="Flash attention; auto, the default: llama.cpp decides, off on a CPU for --exact.",
        allowed=FLASH,
    )
    cache_type_k: CacheType = option("f16", "-ctk", "--cache-type-k", help="Type of the K cache.", allowed=TYPES)
    cache_type_v: CacheType = option("f16", "-ctv", "--cache-type-v", help="Type of the V cache.", allowed=TYPES)
    lora: tuple[Lora, ...] = option(
        (),
        metavar="FILE,...",
        help="LoRA adapters of the model, GGUF files; repeatable.",
        allowed=_adapters("names of files, each with a scale"),
        parse=_parse_lora,
        repeatable=True,
    )
    lora_scaled: tuple[Lora, ...] = option(
        (),
        metavar="FILE:SCALE,...",
        help="The same, each made so many times as strong.",
        allowed=_adapters("names of files, each with a finite scale"),
        parse=_parse_scaled,
        repeatable=True,
    )
    no_mmap: bool = option(False, help="Read the model instead of mapping it.")
    no_repack: bool = option(False, help="Leave the weights in the file's order, not that of CPU kernels.")
    no_tuned: bool = option(False, help="Leave out the settings that ngramspec tune --apply keeps.")
    exact: Exact = option(
        "auto",
        help="The same text bit for bit, whatever is drafted: on, off; auto: where it costs at most 5 %.",
        allowed=EXACTNESS,
    )
    draft_model: str | None = option(
        None,
        "-md",
        "--draft-model",
        metavar="MODEL",
        help="Draft with this model of the same vocabulary too; named as MODEL is.",
    )
    gpu_layers_draft: int | None = option(
        None,
        "-ngld",
        "--gpu-layers-draft",
        help="Layers of the draft model on the GPU; default: all, with -ngl 0 none.",
        allowed=LAYERS,
    )
    threads_draft: int | None = option(
        None, "-td", "--threads-draft", help="CPU threads of the draft model; default: as -t.", allowed=THREADS
    )
    mtp: bool = option(False, help="Draft with the model's own NextN (MTP) layer, where it has one.")
    no_draft: bool = option(False, help="Plain decoding: one token per pass.")
    drafter: str = option(
        DEFAULT, help=f"What drafts: {', '.join(DRAFTERS)}; {ALONE}: the draft model without n-grams."
    )
    policy: str = option("cost", help=f"How much to draft: {', '.join(POLICIES)}.")
    draft_max: int | None = option(None, help="Most tokens in a draft; default: the policy's.", allowed=DRAFT_LENGTHS)
    memory: str | None = option(
        None,
        metavar="NAME",
        help=f"Draft from this memory too (ngramspec memory --help); default: {DEFAULT_MEMORY!r}, if it exists.",
    )
    no_memory: bool = option(False, help="Draft from the context alone; remember nothing, nor what drafts have learnt.")

    def __post_init__(self) -> None:
        for name, known in options(self).items():
            value = getattr(self, name)
            if value is not None and known.allowed is not None and not known.allowed.holds(value):
                raise LoadSettingsError(f"{{{name}}} is {value!r}, but must be {known.allowed.words}")
        for wrong in self._contradictions():
            raise LoadSettingsError(wrong)

    def _contradictions(self) -> Iterator[str]:
        """What is wrong with settings that are right by themselves."""
        if self.flash_attn == "off" and self.cache_type_v not in UNQUANTISED:
            yield f"{{cache_type_v}} {self.cache_type_v} needs flash attention; leave out {{flash_attn}} off"
        if self.rpc is None and self.rpc_timeout is not None:
            yield "{rpc_timeout} is for {rpc}; leave it out"
        if self.rpc is not None:
            if self.gpu_layers == 0:
                yield "{gpu_layers} 0 leaves no layer to {rpc}; leave out one of them"
            try:
                workers(self.rpc)
            except ValueError as error:
                yield f"{{rpc}}: {error}"
        yield from self._drafter_contradictions()
        if self.memory is not None:
            memory_folder(self.memory)
            if self.no_memory:
                yield "{memory} and {no_memory} exclude each other"
            if self.no_draft:
                yield "{memory} is for drafts; leave out {no_draft}"
            if self.drafter not in REMEMBERING:
                yield f"the drafter {self.drafter!r} looks at no memory; leave out {{memory}} or {{drafter}}"

    def _drafter_contradictions(self) -> Iterator[str]:
        flag = "{draft_model}" if self.draft_model is not None else "{mtp}" if self.mtp else ""
        if self.draft_model is not None and self.mtp:
            yield "{draft_model} and {mtp} exclude each other"
        if self.draft_model is None and (self.gpu_layers_draft, self.threads_draft) != (None, None):
            yield (
                "{gpu_layers_draft} and {threads_draft} are for a draft model; name it with {draft_model}, or leave"
                " them out"
            )
        if flag and self.drafter not in (DEFAULT, ALONE):
            yield (
                f"with {flag} a model drafts, beside {DEFAULT}, or alone with {{drafter}} {ALONE};"
                f" leave out {{drafter}} {self.drafter}"
            )
        if not flag and self.drafter == ALONE:
            yield f"{{drafter}} {ALONE} is for a draft model; name it with {{draft_model}}, or leave out {{drafter}}"
        if self.drafter not in (*DRAFTERS, ALONE):
            yield f"unknown drafter {self.drafter!r}; choose one of: {', '.join([*DRAFTERS, ALONE])}"
        try:
            if self.drafter not in (DEFAULT, ALONE):
                make_drafter(self.drafter, memory=self.drafter in REMEMBERING and not self.no_memory)
            make_policy(self.policy, self.draft_max)
        except ValueError as error:
            yield str(error)
        if flag and self.no_draft:
            yield f"{flag} is for drafts; leave out {{no_draft}}"

    @property
    def for_target(self) -> dict[str, Any]:
        """The arguments of `Target` that are settings."""
        longest = 1 if self.no_draft else self.draft_max or (FixedPolicy.DRAFT_MAX if self.policy == "fixed" else None)
        return {
            "n_ctx": self.ctx_size or None,
            "n_gpu_layers": self.gpu_layers,
            "threads": self.threads,
            "threads_batch": self.threads_batch,
            "micro_batch": self.ubatch_size,
            "flash_attn": self.flash_attn or "auto",
            "cache_type_k": self.cache_type_k,
            "cache_type_v": self.cache_type_v,
            "mmap": not self.no_mmap,
            "repack": not self.no_repack,
            # In exact mode the sizes of passes must not depend on whether or how much is drafted.
            "draft_max": None if self.exact == "on" else longest,
            "exact": self.exact,
            "lora": self.adapters,
        }

    @property
    def adapters(self) -> tuple[Lora, ...]:
        """The files of all LoRA adapters, each with its scale."""
        return *self.lora, *self.lora_scaled

    def for_draft_model(self, n_ctx: int, threads: int | None) -> LoadSettings:
        """The settings of the draft model of a target with such a context and so many threads.

        It is wholly on the GPU, as it is small, even where the target has no room there; but on the CPU where
        `gpu_layers` is 0, which keeps off the GPU.
        """
        layers = self.gpu_layers_draft
        if layers is None:
            layers = -1 if self.gpu_layers else 0
        return LoadSettings(
            ctx_size=max(LEAST_CONTEXT, n_ctx), gpu_layers=layers, threads=self.threads_draft or threads, exact="off"
        )


_NAMES = tuple(options(LoadSettings))

LOADING, DRAFTING = _NAMES[: _NAMES.index("draft_model")], _NAMES[_NAMES.index("draft_model") :]
"""The settings of the model itself, and those of drafts."""
