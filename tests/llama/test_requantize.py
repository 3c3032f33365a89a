"""Tests of the Q4_0 copy of the installed SmolLM2, with the demo model in place of that file."""

from __future__ import annotations

import resource
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.cli_runner import DEMO
from support.machines import CARD

from ngramspec.llama import devices, requantize
from ngramspec.llama.requantize import NOTE, choose_smollm, reorders_q4_0
from ngramspec.model_settings import ModelSettings
from ngramspec.models import find
from ngramspec.models.check import check_complete

X86, ARM = "CPU : AVX2 = 1 | REPACK = 1 |", "CPU : NEON = 1 | DOTPROD = 1 | REPACK = 1 |"
AMX = "CPU : AVX2 = 1 | AMX_INT8 = 1 | REPACK = 1 |"

Choose = Callable[..., Path]


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        (X86, True),
        (ARM, True),
        ("CPU : NEON = 1 | MATMUL_INT8 = 1 | REPACK = 1 |", True),
        ("CPU : VXE = 1 | REPACK = 1 |", True),
        ("CPU : AVX2 = 1 | AVX512 = 1 |", False),
        ("CPU : AVX = 1 | REPACK = 1 |", False),
        ("CPU : NEON = 1 | REPACK = 1 |", False),
        ("CPU : DOTPROD = 1 | REPACK = 1 |", False),
        ("CPU : AVX2 = 0 | REPACK = 1 |", False),
    ],
)
def test_reorders_q4_0_requires_repacking_and_kernels(info: str, expected: bool) -> None:
    assert reorders_q4_0(info) == expected


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def choose(tmp_path: Path, notes: list[str], monkeypatch: pytest.MonkeyPatch) -> Choose:
    """Return `choose_smollm` for the demo model, on a CPU that prefers Q4_0 and with an empty cache."""
    monkeypatch.setattr(find, "cache_folder", tmp_path.joinpath)
    monkeypatch.setattr(devices, "build", lambda: X86)
    monkeypatch.setattr(devices, "devices", list)
    return lambda repack=True: choose_smollm(DEMO, ModelSettings(no_repack=not repack), notes.append)


def test_choose_smollm_converts_once_and_deletes_other_versions(
    choose: Choose, notes: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    old = tmp_path / "models" / "another version" / "demo.Q4_0.gguf"
    old.parent.mkdir(parents=True)
    old.touch()
    copy = choose()
    assert check_complete(copy).metadata["general.file_type"] == 2  # LLAMA_FTYPE_MOSTLY_Q4_0
    assert copy.name == "demo.Q4_0.gguf"
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [copy]
    before = copy.stat()
    assert choose() == copy
    assert copy.stat() == before
    copy.write_bytes(copy.read_bytes()[:-1])
    assert check_complete(choose()).metadata["general.file_type"] == 2
    assert notes == [NOTE, NOTE]
    assert capfd.readouterr() == ("", "")


def test_choose_smollm_in_several_threads_never_returns_half_a_file(choose: Choose, tmp_path: Path) -> None:
    def open_copy(_: int) -> int:
        return check_complete(choose()).required_bytes

    with ThreadPoolExecutor(3) as threads:
        sizes = set(threads.map(open_copy, range(3)))
    (copy,) = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert sizes == {check_complete(copy).required_bytes}


@pytest.mark.parametrize("reason", ["no kernels", "--no-repack", "GPU", "AMX", ""])
def test_choose_smollm_keeps_installed_file_if_q4_0_is_not_faster(
    reason: str, choose: Choose, notes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason == "no kernels":
        monkeypatch.setattr(devices, "build", lambda: "CPU : SSE3 = 1 | REPACK = 1 |")
    if reason == "GPU":
        monkeypatch.setattr(devices, "devices", lambda: [CARD])
    if reason in ("AMX", ""):  # "": with broken AMX kernels
        monkeypatch.setattr(devices, "build", lambda: AMX)
        monkeypatch.setattr(requantize, "has_broken_amx", lambda *, all_on_gpu: all_on_gpu == bool(reason))
    assert (choose(repack=reason != "--no-repack") == DEMO) == bool(reason)
    assert bool(notes) == any(tmp_path.iterdir()) == (not reason)


@pytest.mark.parametrize("reason", ["no folder", "full"])
def test_choose_smollm_without_writable_cache_uses_installed_file(
    reason: str, choose: Choose, notes: list[str], tmp_path: Path
) -> None:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if reason == "no folder":
        (tmp_path / "models").touch()
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limit[1]))
    try:
        assert choose() == DEMO
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert "is not converted, which is slower: cannot write" in notes[-1]
    assert not list(tmp_path.rglob("*.tmp")) + list(tmp_path.rglob("*.gguf"))
