"""`LoadSettings`: checked settings of loading and drafting, and what they mean for a `Target` and a draft model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ngramspec.drafting import DEFAULT, DRAFTERS, REMEMBERING, make_drafter
from ngramspec.drafting.draft import Drafter
from ngramspec.llama.adapters import Lora
from ngramspec.llama.cache import UNQUANTISED
from ngramspec.llama.devices import AUTO
from ngramspec.llama.placement import EVERY, Placement
from ngramspec.llama.rpc import workers
from ngramspec.loading.options import LoadOptions
from ngramspec.loading.values import MIN_CONTEXT, MODEL_ONLY, NO_DEVICE, LoadSettingsError
from ngramspec.memory.memory import memory_folder
from ngramspec.policies import make_policy
from ngramspec.policies.policy import FixedPolicy, Policy
from ngramspec.sampling.settings import options
from ngramspec.user_class import FORM, is_user_class, load_class


@dataclass(frozen=True, slots=True)
class LoadSettings(LoadOptions):
    """Settings of loading a model and of its drafter.

    Raises:
        LoadSettingsError: A setting has an invalid value, or two settings contradict each other.
    """

    def __post_init__(self) -> None:
        for name, spec in options(self).items():
            value = getattr(self, name)
            if value is not None and spec.allowed is not None and not spec.allowed.accepts(value):
                raise LoadSettingsError(f"{{{name}}} must be {spec.allowed.description}, got {value!r}")
        for message in self._contradictions():
            raise LoadSettingsError(message)

    def _contradictions(self) -> Iterator[str]:
        """Yield messages about settings that contradict each other, with the names of settings as {draft_model}."""
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
        of_draft_model = self.gpu_layers_draft, self.device_draft, self.threads_draft
        if self.draft_model is None and of_draft_model != (None,) * 3:
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
        devices and their shares, unless it has its own; overrides of tensors apply only to the target. The arguments
        are the context size and the number of threads of the target.
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
