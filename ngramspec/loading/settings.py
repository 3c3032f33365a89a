"""`LoadSettings`: checked settings of loading a model and of its drafter; `Tuned`: the stored result of `tune`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ngramspec import leaves
from ngramspec.data import CLASS_FORM, NGramSpecError, decode, is_user_class
from ngramspec.drafting import DEFAULT, DRAFTERS, REMEMBERING, make_drafter
from ngramspec.drafting.draft import Drafter
from ngramspec.model_settings import (
    AUTO,
    DEVICES,
    LAYERS,
    MIN_CONTEXT,
    NO_DEVICE,
    PLACEMENT,
    THREADS,
    UNQUANTISED,
    LoadSettingsError,
    ModelSettings,
)
from ngramspec.policies import POLICIES, make_policy
from ngramspec.policies.policy import FixedPolicy, Policy
from ngramspec.sampling.settings import option, options
from ngramspec.storage import read_cache, write_whole

MODEL_ONLY = "model"
"""Value of `drafter` for a draft model without n-grams."""


@dataclass(frozen=True, slots=True)
class LoadSettings(ModelSettings):
    """Settings of loading a model and of its drafter; those of the model itself are fields of `ModelSettings`.

    Raises:
        LoadSettingsError: A setting has an invalid value, or two settings contradict each other.
    """

    hf_repo: str | None = option(
        None,
        "-hf",
        metavar="USER/REPO[:QUANT]",
        help="Model from Hugging Face, instead of MODEL; default QUANT: Q4_K_M, Q8_0 or the first file.",
    )
    offline: bool = option(False, help="Do not use the network: take models from Hugging Face from the local cache.")
    rpc: str | None = option(
        None,
        metavar="HOST:PORT,...",
        help="Split the layers across machines running ngramspec rpc-worker; trusted networks only.",
    )
    ignore_tuned: bool = option(False, help="Ignore the settings saved by ngramspec tune --apply.")
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
        None, "-td", help="Number of CPU threads for the draft model; default: -t.", allowed=THREADS
    )
    no_draft: bool = option(False, help="Turn drafting off: decode one token at a time.")
    drafter: str = option(
        DEFAULT,
        metavar=f"NAME|{CLASS_FORM}",
        help=f"Drafter: {', '.join(DRAFTERS)}, {MODEL_ONLY} (the draft model without n-grams), or your own class.",
    )
    policy: str = option(
        "cost",
        metavar=f"NAME|{CLASS_FORM}",
        help=f"Policy for the draft length: {', '.join(POLICIES)}, or your own class.",
    )
    memory: str | None = option(
        None,
        metavar="NAME",
        help="Also draft from this memory (see ngramspec memory); default: 'default', if it exists.",
    )
    no_memory: bool = option(
        False, help="Draft from the context only; do not read or save a memory or draft statistics."
    )

    def __post_init__(self) -> None:
        ModelSettings.__post_init__(self)
        for message in (*self._device_contradictions(), *self._draft_contradictions()):
            raise LoadSettingsError(message)
        try:
            if self.rpc is not None:
                leaves.workers(self.rpc)
        except ValueError as error:
            raise LoadSettingsError(f"{{rpc}}: {error}") from error
        if self.memory is not None:
            leaves.memory_folder(self.memory)
        self._check_classes()

    def _device_contradictions(self) -> Iterator[str]:
        """Yield messages about settings that contradict each other, with the names of settings as {draft_model}."""
        if self.flash_attn == "off" and self.cache_type_v not in UNQUANTISED:
            yield f"{{cache_type_v}} {self.cache_type_v} requires flash attention; remove {{flash_attn}} off"
        if self.rpc is not None and self.gpu_layers == 0:
            yield "{gpu_layers} 0 cannot be combined with {rpc}: it leaves no layer for the workers"
        if self.device == NO_DEVICE and self.gpu_layers not in (AUTO, 0):
            yield "{device} none cannot be combined with {gpu_layers}: it leaves no GPU for the layers"
        if self.device == NO_DEVICE and self.rpc is not None:
            yield "{device} none cannot be combined with {rpc}: it leaves no layer for the workers"
        if (self.device_draft or self.device) == NO_DEVICE and self.gpu_layers_draft not in (None, AUTO, 0):
            name = "{device}" if self.device_draft is None else "{device_draft}"
            yield f"{name} none cannot be combined with {{gpu_layers_draft}}: it leaves no GPU for the layers"
        if self.split_mode == "none" and self.tensor_split is not None:
            yield "{tensor_split} cannot be combined with {split_mode} none, which uses one GPU"
        if self.cpu_moe and self.n_cpu_moe is not None:
            yield "{cpu_moe} cannot be combined with {n_cpu_moe}; remove one"

    def _draft_contradictions(self) -> Iterator[str]:
        flag = "{draft_model}" if self.draft_model is not None else "{mtp}" if self.mtp else ""
        names = [*DRAFTERS, MODEL_ONLY]
        if self.draft_model is not None and self.mtp:
            yield "{draft_model} cannot be combined with {mtp}"
        if self.draft_model is None and (self.gpu_layers_draft, self.device_draft, self.threads_draft) != (None,) * 3:
            yield "{gpu_layers_draft}, {device_draft} and {threads_draft} require a draft model; set {draft_model}"
        if flag and self.drafter not in (DEFAULT, MODEL_ONLY):
            choices = f"{{drafter}} {DEFAULT} (both) or {{drafter}} {MODEL_ONLY} (the model only)"
            yield f"{{drafter}} {self.drafter} cannot be combined with {flag}; use {choices}"
        if not flag and self.drafter == MODEL_ONLY:
            yield f"{{drafter}} {MODEL_ONLY} requires a draft model; set {{draft_model}}"
        if self.drafter not in names and not is_user_class(self.drafter):
            yield f"unknown drafter {self.drafter!r}; choose one of: {', '.join(names)}, or {CLASS_FORM}"
        if flag and self.no_draft:
            yield f"{flag} cannot be combined with {{no_draft}}"
        if self.memory is not None and (self.no_memory or self.no_draft):
            yield f"{{memory}} cannot be combined with {'{no_memory}' if self.no_memory else '{no_draft}'}"
        if self.memory is not None and self.drafter not in REMEMBERING:
            yield f"the drafter {self.drafter!r} does not use a memory; remove {{memory}} or {{drafter}}"

    def _check_classes(self) -> None:
        """Check that the drafter and the policy can be made; the user's classes are constructed only when used."""
        try:
            if is_user_class(self.drafter):
                leaves.load_class(self.drafter, Drafter)
            elif self.drafter not in (DEFAULT, MODEL_ONLY):
                make_drafter(self.drafter, memory=self.drafter in REMEMBERING and not self.no_memory)
            if is_user_class(self.policy):
                leaves.load_class(self.policy, Policy)
            else:
                make_policy(self.policy, self.draft_max)
        except ValueError as error:
            raise LoadSettingsError(str(error)) from error

    @property
    def of_target(self) -> ModelSettings:
        """Settings of the target, with the length of the longest draft."""
        longest = 1 if self.no_draft else self.draft_max or (FixedPolicy.DRAFT_MAX if self.policy == "fixed" else None)
        values = {name: getattr(self, name) for name in options(ModelSettings)}
        # In exact mode the sizes of passes must not depend on the drafts.
        return ModelSettings(**values | {"draft_max": None if self.exact == "on" else longest})

    def of_draft_model(self, n_ctx: int, threads: int | None) -> ModelSettings:
        """Return the settings of the draft model for a context size and a number of threads of the target.

        A draft model is small, so by default as many of its layers as fit are on the GPU, even if the target does not
        fit there. If `gpu_layers` is 0, which disables the GPU, it is on the CPU. As in llama.cpp, it uses the target's
        devices and their shares, unless it has its own; overrides of tensors apply only to the target.
        """
        layers = self.gpu_layers_draft
        if layers is None:
            layers = AUTO if self.gpu_layers else 0
        settings = ModelSettings(
            ctx_size=max(MIN_CONTEXT, n_ctx),
            gpu_layers=layers,
            device=self.device_draft,
            no_op_offload=self.no_op_offload,
            threads=self.threads_draft or threads,
            exact="off",
        )
        if self.device_draft is not None:
            return settings
        return replace(
            settings,
            device=self.device,
            split_mode=self.split_mode,
            main_gpu=self.main_gpu,
            tensor_split=self.tensor_split,
        )


DRAFTING = (
    *("draft_model", "gpu_layers_draft", "device_draft", "threads_draft", "mtp", "no_draft", "drafter", "policy"),
    *("draft_max", "memory", "no_memory"),
)
"""Names of the settings of drafts."""

LOADING = tuple(name for name in dict.fromkeys(("hf_repo", "offline", *options(LoadSettings))) if name not in DRAFTING)
"""Names of the settings of the model."""

GPUS = (*PLACEMENT, "rpc")
"""Names of the settings for the devices and machines of the weights."""


# --------------------------------------------------------------------------- stored settings

TUNABLE = ("threads", "threads_batch", "ubatch_size", "flash_attn", "no_mmap", "no_repack")
"""Names of the settings that tuning can change."""


@dataclass(frozen=True, slots=True)
class Tuned:
    """The stored result of a tuning, which is applied when the model is loaded."""

    changes: Mapping[str, Any]  # the faster settings (see `ModelSettings.changes`)
    ratio: float  # time with the changes / time without them
    date: str  # the day, as in 2026-11-22


def load_tuned(path: Path) -> Tuned | None:
    """Return the stored result; `None` if nothing is stored, or the file is invalid."""
    with suppress(ValueError, TypeError):
        tuned = decode(Tuned, json.loads(read_cache(path) or ""))
        ModelSettings(**tuned.changes)
        if tuned.changes.keys() <= {*TUNABLE}:
            return replace(tuned, date=tuned.date[:10])
    return None


def save_tuned(path: Path, tuned: Tuned) -> None:
    """Write the result to a file; raise an NGramSpecError if that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(asdict(tuned)))
    except OSError as error:
        raise NGramSpecError(f"cannot save the settings in {path}: {error.strerror or error}") from error
