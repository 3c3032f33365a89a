"""Tests of huge pages: the requests to the kernel and the memory they concern."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ngramspec.llama import devices
from ngramspec.llama.devices import LARGE, Range, advise_huge_pages, anonymous_memory

on_linux = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a kernel without transparent huge pages"
)


def place(memory: mmap.mmap) -> Range:
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    return start, start + len(memory)


def holds(ranges: list[Range], part: Range) -> bool:
    return any(start <= part[0] and part[1] <= end for start, end in ranges)


def asked_for(part: Range) -> bool:
    """Return True if the kernel reports the flag "hg" (huge pages advised) for the memory; see proc_pid_smaps(5)."""
    inside = False
    for line in Path("/proc/self/smaps").read_text("utf-8").splitlines():
        key, *values = line.split()
        if not key.endswith(":"):
            start, end = (int(x, 16) for x in key.split("-"))
            inside = start <= part[0] and part[1] <= end
        elif inside and key == "VmFlags:":
            return "hg" in values
    raise AssertionError("the memory is not mapped")


@on_linux
def test_advise_huge_pages_applies_only_to_new_large_memory() -> None:
    old = mmap.mmap(-1, 2 * LARGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    old.madvise(mmap.MADV_DONTDUMP)  # The kernel merges neighbours with equal flags.
    before = anonymous_memory()
    assert holds(before, place(old))
    new = mmap.mmap(-1, 2 * LARGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    small = mmap.mmap(-1, LARGE // 64, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    assert advise_huge_pages(before) >= 2 * LARGE
    assert asked_for(place(new))
    assert not asked_for(place(old))
    assert holds(anonymous_memory(), place(small))
    new[:4] = b"kept"
    assert advise_huge_pages(before) >= 2 * LARGE  # The second call repeats the advice.
    assert new[:4] == b"kept"
    assert advise_huge_pages(anonymous_memory()) == 0  # There is no new memory.


@on_linux
def test_anonymous_memory_excludes_mapped_files(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"\0" * 4096)
    with path.open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), 4096, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    assert not holds(anonymous_memory(), place(mapped))


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: patch.setattr(devices, "_MAPS", Path("/missing")),
        lambda patch: patch.delattr(mmap, "MADV_HUGEPAGE", raising=False),
        pytest.param(lambda patch: patch.setattr(mmap, "MADV_HUGEPAGE", 12345), marks=on_linux),  # the kernel refuses
    ],
)
def test_advise_huge_pages_without_system_support_returns_zero(
    change: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    change(monkeypatch)
    before = anonymous_memory()
    keep = mmap.mmap(-1, 2 * LARGE) if sys.platform == "win32" else mmap.mmap(-1, 2 * LARGE, mmap.MAP_PRIVATE)
    assert advise_huge_pages(before) == 0
    keep.close()


SUMS = "55d0-7ffd ---p 00000000 00:00 0 [rollup]\nRss: 9000 kB\nAnonHugePages:   96256 kB\nSwap: 0 kB\n"


def told(given: str | None, sums: str | None, folder: Path, patch: pytest.MonkeyPatch, *, mapped: bool) -> str | None:
    """Return the message for these contents of the kernel's files; `None` means that a file does not exist."""
    for name, text in (("_GIVEN_TO", given), ("_SUMS", sums)):
        (folder / name).unlink(missing_ok=True)
        if text is not None:
            (folder / name).write_text(text)
        patch.setattr(devices, name, folder / name)
    return devices.describe_huge_pages(mapped)


def test_huge_pages_note_reports_system_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for given, mapped, words in (
        ("always [madvise] never\n", False, "94 MiB of this process, available to programs that request them"),
        ("[always] madvise never\n", True, "94 MiB of this process, available to all; mapped weights do not use them"),
        ("always madvise [never]\n", True, "not available; to enable them, run as root: echo madvise > "),
    ):
        line = told(given, SUMS, tmp_path, monkeypatch, mapped=mapped)
        assert line is not None
        assert line.startswith(words)
        assert ("--no-mmap" in line) == (mapped and "[never]" not in given)
    for unclear, sums in ((None, SUMS), ("", SUMS), ("[madvise] never", None), ("[x]", "Rss")):
        assert told(unclear, sums, tmp_path, monkeypatch, mapped=False) is None
