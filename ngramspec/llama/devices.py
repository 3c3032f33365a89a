"""Properties of the llama.cpp build: its version, its devices and their memory, and huge pages (Linux)."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import llama_cpp.llama_cpp as llama
import psutil
from llama_cpp import __version__ as binding_version

from ngramspec.llama import bindings

LARGE = 32 * 2**20  # bytes from which glibc's malloc maps every block on its own; the weights are one block

_MAPS = Path("/proc/self/maps")
_SUMS = Path("/proc/self/smaps_rollup")
_GIVEN_TO = Path("/sys/kernel/mm/transparent_hugepage/enabled")

Range = tuple[int, int]  # addresses from the first up to, and without, the second


def build() -> str:
    """The build behind `llama_cpp`: its version and what llama.cpp says of its backends."""
    info = llama.llama_print_system_info().decode("utf-8", "replace")
    return f"llama-cpp-python {binding_version}; {' '.join(info.split())}"


@cache
def quantisation(file_type: int) -> str | None:
    """The name of a file's `general.file_type`, as Q4_K_M; None for one that llama.cpp does not know."""
    for name, value in bindings.file_types(llama).items():
        if value == file_type and name.startswith(("LLAMA_FTYPE_ALL_", "LLAMA_FTYPE_MOSTLY_")):
            return name.removeprefix("LLAMA_FTYPE_").removeprefix("ALL_").removeprefix("MOSTLY_")
    return None


CPU, GPU, INTEGRATED = 0, 1, 2  # ggml-backend.h, enum ggml_backend_dev_type


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


def free_bytes(devices: Sequence[Device], on_gpu: bool) -> int:
    """Free memory of the kind that holds the KV cache."""
    gpus = [d.free for d in devices if d.is_gpu and d.total > 0]
    return sum(gpus) if on_gpu and gpus else int(psutil.virtual_memory().available)


def devices() -> list[Device]:
    """The devices that the loaded ggml library has registered; empty if it does not export its registry."""
    function, pointer, text = partial(bindings.ggml_function, llama), ctypes.c_void_p, ctypes.c_char_p
    try:
        count = function("ggml_backend_dev_count", ctypes.c_size_t)
        get = function("ggml_backend_dev_get", pointer, ctypes.c_size_t)
        name, about = (function(f"ggml_backend_dev_{part}", text, pointer) for part in ("name", "description"))
        kind = function("ggml_backend_dev_type", ctypes.c_int, pointer)
        memory = function("ggml_backend_dev_memory", None, pointer, *[ctypes.POINTER(ctypes.c_size_t)] * 2)
    except AttributeError:
        return []
    found = []
    for handle in map(get, range(count())):
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        memory(handle, ctypes.byref(free), ctypes.byref(total))
        said = name(handle).decode(), about(handle).decode(errors="replace")
        found.append(Device(*said, kind(handle) in (GPU, INTEGRATED), free.value, total.value))
    return found


# --------------------------------------------------------------------------- huge pages
#
# Every pass reads all weights, 4 KiB at a time unless the pages are huge. With pages of 2 MiB the processor looks up
# 512 times fewer addresses. Many distributions hand them out only to programs that ask (`/sys/kernel/mm/` says
# `madvise`), and llama.cpp does not ask. This asks when the RAM into which it copies quantised layers is mapped and not
# yet written: nothing is copied, and loading gets no slower. The mapped file's own pages are not helped.


def anonymous_memory() -> list[Range]:
    """Writable memory of this process that no file is behind, ascending; empty where the system does not tell."""
    try:
        lines = _MAPS.read_text("utf-8", "replace").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        # start-end permissions offset device inode [name]; see proc_pid_maps(5).
        addresses, permissions, _offset, _device, inode, *name = line.split(maxsplit=5)
        if permissions == "rw-p" and inode == "0" and (not name or name[0].startswith("[anon:")):
            start, end = addresses.split("-")
            found.append((int(start, 16), int(end, 16)))
    return found


def advise_huge_pages(before: Sequence[Range]) -> int:
    """Ask for huge pages in the large blocks that were mapped since `before`, a result of `anonymous_memory`.

    The kernel shows neighbours as one block; one that has grown is asked for whole. Returns the bytes asked for.
    """
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None:
        return 0
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    blocks = [(start, end - start) for start, end in anonymous_memory() if (start, end) not in before]
    return sum(size for start, size in blocks if size >= LARGE and madvise(start, size, advice) == 0)


def huge_pages_told(mapped: bool) -> str | None:
    """Who gets huge pages here, how much of this process lies in them, and what would put more there, in a line.

    `mapped`: whether weights may lie in the mapped file. None where the system does not tell.
    """
    try:
        # As in "always [madvise] never".
        given = _GIVEN_TO.read_text("ascii").split("[")[1].split("]")[0]
        sums = dict(line.split(":", 1) for line in _SUMS.read_text("ascii").splitlines()[1:])
        used = int(sums["AnonHugePages"].split()[0]) // 1024
    except (OSError, ValueError, IndexError, KeyError):
        return None
    if given == "never":
        return f"not available; to enable them, run as root: echo madvise > {_GIVEN_TO}"
    line = f"{used} MiB of this process, available to {'all' if given == 'always' else 'programs that request them'}"
    return f"{line}; mapped weights do not use them, but with --no-mmap they do" if mapped else line
