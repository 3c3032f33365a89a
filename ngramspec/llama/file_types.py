"""`quantisation`: what llama.cpp calls the way in which most weights of a file are stored."""

from __future__ import annotations

import llama_cpp.llama_cpp as llama

from ngramspec.llama import bindings

_NAMES = {
    value: name.removeprefix("LLAMA_FTYPE_").removeprefix("ALL_").removeprefix("MOSTLY_")
    for name, value in bindings.file_types(llama).items()
    if name.startswith(("LLAMA_FTYPE_ALL_", "LLAMA_FTYPE_MOSTLY_"))
}


def quantisation(file_type: int) -> str | None:
    """The name of a file's `general.file_type`, as Q4_K_M; None for one that llama.cpp does not know."""
    return _NAMES.get(file_type)
