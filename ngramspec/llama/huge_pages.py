"""Requests for huge pages of memory (Linux), and a description of how many this process uses.

Every pass reads all weights. With pages of 2 MiB the processor looks up 512 times fewer addresses than with 4 KiB. Many
distributions give huge pages only to programs that request them (`/sys/kernel/mm/` says `madvise`), and llama.cpp does
not. `advise_huge_pages` requests them when the RAM into which llama.cpp copies quantised layers is mapped and not yet
written: nothing is copied, and loading gets no slower. The pages of the mapped file are not affected.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from pathlib import Path

LARGE = 32 * 2**20  # bytes from which glibc's malloc maps every block on its own; the weights are one block

_MAPS = Path("/proc/self/maps")
_SUMS = Path("/proc/self/smaps_rollup")
_GIVEN_TO = Path("/sys/kernel/mm/transparent_hugepage/enabled")

Range = tuple[int, int]  # addresses from the first up to, and without, the second


def anonymous_memory() -> list[Range]:
    """Return the writable memory of this process without a file, ascending; empty if the system does not report it."""
    try:
        lines = _MAPS.read_text("utf-8", "replace").splitlines()
    except OSError:
        return []
    blocks = []
    for line in lines:
        # start-end permissions offset device inode [name]; see proc_pid_maps(5).
        addresses, permissions, _offset, _device, inode, *name = line.split(maxsplit=5)
        if permissions == "rw-p" and inode == "0" and (not name or name[0].startswith("[anon:")):
            start, end = addresses.split("-")
            blocks.append((int(start, 16), int(end, 16)))
    return blocks


def advise_huge_pages(before: Sequence[Range]) -> int:
    """Request huge pages for the large blocks that were mapped since `before`, a result of `anonymous_memory`.

    The kernel reports adjacent blocks as one, so a block that has grown is requested as a whole. Return the number of
    requested bytes.
    """
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None:
        return 0
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    blocks = [(start, end - start) for start, end in anonymous_memory() if (start, end) not in before]
    return sum(size for start, size in blocks if size >= LARGE and madvise(start, size, advice) == 0)


def describe_huge_pages(mapped: bool) -> str | None:
    """Return in one line which programs get huge pages, how much this process uses, and how to use more.

    `mapped` is true if weights may be in the mapped file. The result is `None` if the system does not report it.
    """
    try:
        # As in "always [madvise] never".
        mode = _GIVEN_TO.read_text("ascii").split("[")[1].split("]")[0]
        sums = dict(line.split(":", 1) for line in _SUMS.read_text("ascii").splitlines()[1:])
        used = int(sums["AnonHugePages"].split()[0]) // 1024
    except (OSError, ValueError, IndexError, KeyError):
        return None
    if mode == "never":
        return f"not available; to enable them, run as root: echo madvise > {_GIVEN_TO}"
    line = f"{used} MiB of this process, available to {'all' if mode == 'always' else 'programs that request them'}"
    return f"{line}; mapped weights do not use them, but with --no-mmap they do" if mapped else line
