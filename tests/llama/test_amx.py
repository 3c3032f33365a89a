"""Tests of AMX: kernels are compared with others, and if they are broken, the build runs without them."""

from __future__ import annotations

import ctypes
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ngramspec_cli.info import _details
from numpy.typing import NDArray
from support.cli_runner import DEMO

from ngramspec.llama import bindings, crash_check, weights
from ngramspec.llama.target import Target


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
