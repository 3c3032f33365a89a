"""Tests of kernels for CPUs: broken AMX kernels are not used, and SmolLM2 is copied as Q4_0 if that is faster.

The demo model is in place of the installed SmolLM2.
"""

from __future__ import annotations

import ctypes
import resource
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ngramspec_cli.info import _details
from numpy.typing import NDArray
from support.cli_runner import DEMO
from support.machines import CARD

from ngramspec.llama import bindings, crash_check, devices, requantize, weights
from ngramspec.llama.requantize import NOTE, choose_smollm, reorders_q4_0
from ngramspec.llama.target import Target
from ngramspec.model_settings import ModelSettings
from ngramspec.models import find
from ngramspec.models.check import check_complete


def test_amx_compare_on_this_build_accepts_its_kernels() -> None:
    """Test kernels in this process, which a build with broken kernels would crash."""
    if "AMX_INT8 = 1" in weights.build():
        pytest.skip("a build with AMX: the child is started for every other test")
    assert crash_check.compare_amx() == 0


@pytest.mark.parametrize(("error", "code"), [(0.0, 0), (0.01, 0), (0.3, 3), (np.nan, 3), (np.inf, 3)])
def test_amx_compare_rejects_wrong_logits(error: float, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def logits(path: Path, extra: bool) -> NDArray[np.float32]:
        tried.append((path, extra))
        found = np.outer(range(1, 17), np.linspace(-5, 5, 100)).astype(np.float32)
        # Broken kernels change some columns, those of a tile.
        found[:, :3] *= 1 + error * 10 * extra
        return found

    monkeypatch.setattr(crash_check, "_logits", logits)
    assert crash_check.compare_amx() == code
    assert tried == [(DEMO, False), (DEMO, True)]


def fake_ggml(*types: bytes) -> tuple[Any, Any]:
    """Return a library whose extra memory types have these names, and its list of them (numbered from 1)."""
    handles = (ctypes.c_void_p * (len(types) + 1))(*range(1, len(types) + 1), None)
    getter = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda device: ctypes.addressof(handles))
    keep = [getter]
    known = {b"ggml_backend_dev_get_extra_bufts": ctypes.cast(getter, ctypes.c_void_p).value}
    library = SimpleNamespace(
        ggml_backend_dev_by_type=lambda kind: 7 if kind == 0 else None,
        ggml_backend_dev_backend_reg=lambda device: device + 1,
        ggml_backend_reg_get_proc_address=lambda registry, name: known[name] if registry == 8 else None,
        ggml_backend_buft_name=lambda kind: types[kind - 1],
        keep=keep,
    )
    return library, handles


def test_amx_hide_removes_only_amx_from_memory_types(monkeypatch: pytest.MonkeyPatch) -> None:
    for types, left in (
        ([b"AMX", b"CPU_REPACK"], [2]),
        ([b"CPU_KLEIDIAI", b"AMX", b"CPU_REPACK"], [1, 3]),
        ([b"AMX"], []),
        ([b"CPU_REPACK"], [1]),
        ([], []),
    ):
        library, handles = fake_ggml(*types)
        monkeypatch.setattr(bindings, "ggml", partial(lambda it: it, library))
        for _ in range(2):  # The second call changes nothing.
            assert crash_check.hide_amx()
            assert [*handles][: len(left) + 1] == [*left, None]
    # This library does not export its list.
    library, handles = fake_ggml(b"AMX")
    monkeypatch.setattr(bindings, "ggml", lambda: library)
    library.ggml_backend_dev_by_type = lambda kind: None
    assert not crash_check.hide_amx()
    del library.ggml_backend_dev_by_type
    assert not crash_check.hide_amx()
    assert [*handles] == [1, None]


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Simulate an AMX build with broken kernels, and return the libraries that were checked."""
    name, asked = weights.build(), []
    monkeypatch.setattr(weights, "build", lambda: f"{name} AMX_INT8 = 1 |")
    monkeypatch.setattr(crash_check, "amx_works", asked.append)
    return asked


@pytest.fixture
def parameters(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return llama.cpp's parameters of each load."""
    default, used = weights.llama.llama_model_default_params, []
    monkeypatch.setattr(weights.llama, "llama_model_default_params", lambda: used.append(default()) or used[-1])
    return used


def load(**options: Any) -> Target:
    return Target(DEMO, ctx_size=64, gpu_layers=0, threads=1, **options)


@pytest.mark.parametrize("hidden", [True, False])
def test_target_with_broken_amx_loads_without_its_kernels(
    hidden: bool, broken: list[Path], parameters: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The real `hide` would also affect the other tests of this process.
    monkeypatch.setattr(crash_check, "hide_amx", lambda: hidden)
    with load() as loaded:
        assert loaded.weights.amx_broken
        assert loaded.weights.notes == [crash_check.AMX_NOTE]
        assert _details(loaded)["build"].endswith("its AMX kernels are broken and not used")
        fingerprint = loaded.sequences[0].fingerprint
    (library,) = broken
    assert library.is_file()
    assert [*library.parent.glob("*ggml*cpu*")]
    assert parameters[0].use_extra_bufts is hidden
    monkeypatch.setattr(crash_check, "amx_works", lambda library: True)
    with load() as working:
        assert (working.weights.amx_broken, working.weights.notes) == (False, [])
        assert working.sequences[0].fingerprint != fingerprint
    assert parameters[1].use_extra_bufts


def test_has_broken_amx_without_repacked_cpu_weights_skips_check(
    broken: list[Path], parameters: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with load(no_repack=True) as loaded:
        assert not loaded.weights.amx_broken
    assert not parameters[0].use_extra_bufts
    assert not weights.has_broken_amx(all_on_gpu=True)
    assert broken == []
    assert weights.has_broken_amx(all_on_gpu=False)
    monkeypatch.setattr(weights, "build", lambda: "CPU : AVX512 = 1 | AMX_INT8 = 0 |")
    assert not weights.has_broken_amx(all_on_gpu=False)
    assert len(broken) == 1


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
    monkeypatch.setattr(find, "FOLDERS", SimpleNamespace(user_cache_path=tmp_path))
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
