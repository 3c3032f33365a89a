"""Huge pages for the weights (Linux): every pass reads all weights, 4 KiB at a time unless the pages are huge.

llama.cpp copies the weights of quantised layers into memory of its own, in the order its kernels read them. With
pages of 2 MiB the processor looks up 512 times fewer addresses on the way through. Many distributions hand them out
only to programs that ask (`/sys/kernel/mm/transparent_hugepage/enabled` says `madvise`), and llama.cpp does not
ask. This module asks when the RAM is mapped and not yet written, so nothing is copied and loading gets no slower.
numpy does the same for its large arrays.

Weights that stay in the mapped file are not helped: the file's pages are the page cache's.

What the system gives at all is set by root; `told` says what it is, and how much of this process lies in huge pages.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path

MINIMUM = 32 * 2**20
"""Bytes from which glibc's malloc maps every block on its own; the weights are one block."""

_MAPS = Path("/proc/self/maps")
_SUMS = Path("/proc/self/smaps_rollup")
_GIVEN_TO = Path("/sys/kernel/mm/transparent_hugepage/enabled")

Range = tuple[int, int]
"""Addresses from the first up to, and without, the second."""


def anonymous() -> list[Range]:
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


def advise(before: Sequence[Range]) -> int:
    """Ask for huge pages in the large blocks that were mapped since `before`, a result of `anonymous`.

    Returns:
        Bytes asked for; 0 where the system has no huge pages, or nothing large was mapped. Never raises OSError.
    """
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None:
        return 0
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    blocks = [block for now in anonymous() for block in outside(now, before) if block[1] - block[0] >= MINIMUM]
    return sum(end - start for start, end in blocks if madvise(start, end - start, advice) == 0)


def told(mapped: bool) -> str | None:
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
