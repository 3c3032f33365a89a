"""Tests of AMX: a child process detects once that a build's kernels are broken, and the build runs without them."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ngramspec_cli.info import _details
from numpy.typing import NDArray
from support.cli_runner import DEMO, run
from support.fake_child import HANGS, FakeChild

from ngramspec.llama import bindings, crash_check, weights
from ngramspec.llama.crash_check import amx_works
from ngramspec.llama.target import Target

VERDICTS = [((0, ""), True), ((3, ""), False), ((-11, ""), False), (HANGS, False)]
"""(end of the child process, True if the kernels work)."""

NO_VERDICTS = [(1, "Traceback"), (-9, ""), None]
"""Ends of the child process without information about the kernels."""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(crash_check, "cache_folder", tmp_path.joinpath)
    folder = tmp_path / "lib"
    folder.mkdir()
    for name in ("libggml.so", "libggml-cpu.so", "libllama.so"):
        (folder / name).write_bytes(b"code")
    return folder / "libggml.so"


@pytest.mark.parametrize(("ended", "verdict"), [*VERDICTS, *((ended, False) for ended in NO_VERDICTS)])
def test_amx_works_caches_verdicts_but_not_inconclusive_results(
    ended: Any, verdict: bool, child: FakeChild, library: Path
) -> None:
    child.result = ended
    assert [amx_works(library) for _ in range(2)] == [verdict] * 2
    assert child.starts == (2 if ended in NO_VERDICTS else 1)
    if ended in NO_VERDICTS:
        child.result = (0, "")
        assert amx_works(library)


def test_amx_works_after_changed_build_checks_again(child: FakeChild, library: Path, tmp_path: Path) -> None:
    kernels = library.with_name("libggml-cpu.so")

    def resize() -> None:
        stat = kernels.stat()
        kernels.write_bytes(b"longer code")
        os.utime(kernels, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    changes: list[Callable[[], object]] = [
        resize,
        lambda: os.utime(kernels, ns=(0, 1_000_000_007)),
        library.with_name("libggml-cpu-zen4.so").touch,
    ]
    assert amx_works(library)
    for starts, change in enumerate(changes, 2):
        change()
        assert [amx_works(library) for _ in range(2)] == [True, True]
        assert child.starts == starts
    # Other files have no influence, but the folder has.
    library.with_name("libllama.so").write_bytes(b"longer code")
    library.with_name("libggml-broken-link.so").symlink_to("nowhere")
    assert amx_works(library)
    assert child.starts == len(changes) + 1
    assert amx_works(library.parent.rename(tmp_path / "moved") / library.name)
    assert child.starts == len(changes) + 2


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
        monkeypatch.setattr(bindings, "ggml", partial(lambda it, _api: it, library))
        for _ in range(2):  # The second call changes nothing.
            assert crash_check.hide_amx()
            assert [*handles][: len(left) + 1] == [*left, None]
    # This library does not export its list.
    library, handles = fake_ggml(b"AMX")
    monkeypatch.setattr(bindings, "ggml", lambda _api: library)
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


def test_complete_with_broken_amx_prints_note_once(
    env: dict[str, str], broken: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    hide = crash_check.hide_amx  # The real `hide` still runs, for machines with broken kernels.
    monkeypatch.setattr(crash_check, "hide_amx", lambda: hide() or True)
    done = run(env, "complete", "-t", "1", "-c", "256", "-n", "2", "--exact", "off", "--no-draft", stdin=b"one two")
    assert done.code == 0, done.err
    assert done.err.splitlines().count(crash_check.AMX_NOTE) == 1
    assert len(broken) == 1
