"""What the llama.cpp build is and can use: its version, the devices it has found, and their memory."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import llama_cpp.llama_cpp as llama
import psutil
from llama_cpp import __version__ as binding_version


def build() -> str:
    """The build behind `llama_cpp`: its version and what llama.cpp says of its backends."""
    info = llama.llama_print_system_info().decode("utf-8", "replace")
    return f"llama-cpp-python {binding_version}; {' '.join(info.split())}"


@dataclass(frozen=True, slots=True)
class Device:
    """A compute device of the build; memory in bytes as its driver reports it."""

    name: str
    description: str
    is_gpu: bool
    free: int
    total: int


def total_bytes(devices: Sequence[Device], on_gpu: bool) -> int:
    """All the memory of the kind that holds the KV cache."""
    gpus = sum(d.total for d in devices if d.is_gpu)
    return gpus if on_gpu and gpus else int(psutil.virtual_memory().total)


def free_bytes(devices: Sequence[Device], on_gpu: bool, reserve: int) -> int:
    """Free memory where the KV cache will live, less `reserve` bytes that something else will fill."""
    gpus = [d.free for d in devices if d.is_gpu and d.total > 0]
    free = sum(gpus) if on_gpu and gpus else int(psutil.virtual_memory().available)
    return max(0, free - reserve)


def devices(libggml: ctypes.CDLL) -> list[Device]:
    """The devices that the loaded ggml library has registered; empty if it does not export its registry."""
    try:
        count, get = libggml.ggml_backend_dev_count, libggml.ggml_backend_dev_get
        label, about = libggml.ggml_backend_dev_name, libggml.ggml_backend_dev_description
        kind, memory = libggml.ggml_backend_dev_type, libggml.ggml_backend_dev_memory
    except AttributeError:
        return []
    count.restype, get.restype, get.argtypes = ctypes.c_size_t, ctypes.c_void_p, [ctypes.c_size_t]
    for function in (label, about):
        function.restype, function.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
    size_p = ctypes.POINTER(ctypes.c_size_t)
    kind.restype, kind.argtypes = ctypes.c_int, [ctypes.c_void_p]
    memory.restype, memory.argtypes = None, [ctypes.c_void_p, size_p, size_p]
    found = []
    for i in range(count()):
        handle, free, total = get(i), ctypes.c_size_t(), ctypes.c_size_t()
        memory(handle, ctypes.byref(free), ctypes.byref(total))
        # ggml-backend.h, enum ggml_backend_dev_type: 1 is a GPU, 2 an integrated one.
        is_gpu = kind(handle) in (1, 2)
        text = (label(handle).decode(), about(handle).decode(errors="replace"))
        found.append(Device(*text, is_gpu, free.value, total.value))
    return found
