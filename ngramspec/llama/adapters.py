"""LoRA adapters: files of small matrices by which every context of a loaded model changes its weights.

A weight W becomes W + scale * alpha / rank * B A (LoRA, arXiv 2106.09685). An adapter is loaded once per model, which
frees it, and set on each context: `open_context` is the one way to make one.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import llama_cpp.llama_cpp as llama

from ngramspec.errors import ModelError
from ngramspec.llama import log
from ngramspec.models.check import check_adapter_file

Lora = tuple[str | os.PathLike[str], float]
"""An adapter's file, and its scale."""


class Adapter(NamedTuple):
    """An adapter of a loaded model."""

    handle: Any  # llama.cpp's
    scale: float


def check(lora: Sequence[Lora], model: Path) -> str:
    """Refuse files that are no adapters for a model file; returns what tells these adapters, so scaled, from others.

    Raises:
        ModelError: a file is not one that llama.cpp can apply to the model.
    """
    marks = []
    for name, scale in lora:
        check_adapter_file(Path(name), model)
        with open(name, "rb") as file:
            contents = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=12)).hexdigest()
        marks.append(f" lora={contents}*{scale:g}")
    return "".join(marks)


def load(lora: Sequence[Lora], model: Any) -> tuple[Adapter, ...]:
    """Load adapters that were checked, for a model's handle.

    Raises:
        ModelError: llama.cpp refuses one, or it is made to be switched on by tokens of the text (aLoRA).
    """
    found = []
    for name, scale in lora:
        log.tail.clear()
        handle = llama.llama_adapter_lora_init(model, os.fsencode(name))
        if not handle:
            raise ModelError(f"{name}: llama.cpp cannot load this adapter ({log.last_complaint()})")
        if llama.llama_adapter_get_alora_n_invocation_tokens(handle):
            raise ModelError(f"{name} is switched on by tokens of the text (aLoRA), which is not supported")
        found.append(Adapter(handle, scale))
    return tuple(found)


def open_context(model: Any, params: Any, adapters: Sequence[Adapter]) -> Any:
    """llama.cpp's context of a model, with its adapters set; null if there is no memory for it."""
    context = llama.llama_init_from_model(model, params)
    if context and adapters:
        handles = (llama.llama_adapter_lora_p_ctypes * len(adapters))(*(one.handle for one in adapters))
        scales = (ctypes.c_float * len(adapters))(*(one.scale for one in adapters))
        llama.llama_set_adapters_lora(context, handles, len(adapters), scales)
    return context
