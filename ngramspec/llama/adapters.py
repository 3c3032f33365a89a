"""LoRA adapters: files of small matrices that change the weights of a model in all passes of a context.

A weight W becomes W + scale * alpha / rank * B A (LoRA, arXiv 2106.09685). `open_context` opens all contexts of a
model, so that none lacks its adapters.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as llama

from ngramspec.data import ModelError
from ngramspec.llama import bindings
from ngramspec.models.check import check_adapter_file

Lora = tuple[str | os.PathLike[str], float]
"""Path of an adapter's file, and its scale."""

Adapter = tuple[Any, float]
"""llama.cpp's handle of an adapter, which is freed with the model, and its scale."""


def check_adapters(lora: Sequence[Lora], model: Path) -> str:
    """Return a key of adapters and their scales, after a check that their files fit a model file.

    Raises:
        ModelError: llama.cpp cannot apply a file to the model.
    """
    marks = []
    for name, scale in lora:
        check_adapter_file(Path(name), model)
        with open(name, "rb") as file:
            contents = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=12)).hexdigest()
        marks.append(f" lora={contents}*{scale:g}")
    return "".join(marks)


def load_adapters(lora: Sequence[Lora], model: Any) -> tuple[Adapter, ...]:
    """Load adapters that were checked.

    Raises:
        ModelError: llama.cpp rejects an adapter, or it is an activated one (aLoRA).
    """
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
