"""What the llama.cpp build is and can use: its version, its devices and their memory, and huge pages (Linux)."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
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


# --------------------------------------------------------------------------- huge pages
#
# Every pass reads all weights, 4 KiB at a time unless the pages are huge. llama.cpp copies the weights of quantised
# layers into memory of its own, in the order its kernels read them. With pages of 2 MiB the processor looks up 512
# times fewer addresses on the way through. Many distributions hand them out only to programs that ask
# (`/sys/kernel/mm/transparent_hugepage/enabled` says `madvise`), and llama.cpp does not ask. This asks when the RAM is
# mapped and not yet written, so nothing is copied and loading gets no slower. numpy does the same for its large arrays.
# Weights that stay in the mapped file are not helped: the file's pages are the page cache's.


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

    Returns:
        Bytes asked for; 0 where the system has no huge pages, or nothing large was mapped. Never raises OSError.
    """
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None:
        return 0
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    blocks = [block for now in anonymous_memory() for block in outside(now, before) if block[1] - block[0] >= LARGE]
    return sum(end - start for start, end in blocks if madvise(start, end - start, advice) == 0)


def huge_pages_told(mapped: bool) -> str | None:
    """Who gets huge pages here, how much of this process lies in them, and what would put more there, in a line.

    Args:
        mapped: whether weights may lie in the mapped file.

    Returns:
        None where the system does not tell.
    """
    try:
        # As in "always [madvise] never".
        given = _GIVEN_TO.read_text("ascii").split("[")[1].split("]")[0]
        sums = dict(line.split(":", 1) for line in _SUMS.read_text("ascii").splitlines()[1:])
        used = int(sums["AnonHugePages"].split()[0]) // 1024
    except (OSError, ValueError, IndexError, KeyError):
        return None
    if given == "never":
        return f"the system gives none; as root: echo madvise > {_GIVEN_TO}"
    line = f"{used} MiB of this process, given to {'all' if given == 'always' else 'programs that ask'}"
    return f"{line}; weights in the mapped file lie in none, with --no-mmap they do" if mapped else line


def outside(block: Range, others: Sequence[Range]) -> Iterator[Range]:
    """The parts of a block that lie in none of the others, which ascend and do not overlap.

    The kernel shows neighbours as one mapping, so a new block may hide in one that has grown.
    """
    start, end = block
    for low, high in others:
        if low < end and high > start:
            if low > start:
                yield start, low
            start = max(start, high)
    if start < end:
        yield start, end
