"""AMX: a build whose kernels are broken is found out in a child process, once, and goes on without them."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.cli_runner import DEMO, run
from support.fake_child import Child

from ngramspec.llama import amx, amx_trial, weights
from ngramspec.llama.amx import works
from ngramspec.llama.target import Target

KILL_OUTSIDE = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
CRASHES = ["SIGSEGV", "SIGILL", "SIGABRT"]


@pytest.fixture
def library(tmp_path: Path) -> Path:
    folder = tmp_path / "lib"
    folder.mkdir()
    for name in ("libggml.so", "libggml-cpu.so", "libllama.so"):
        (folder / name).write_bytes(b"code")
    return folder / "libggml.so"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "new" / "verdicts"


def crash(name: str) -> str:
    without_core = "import os, resource, signal; resource.setrlimit(resource.RLIMIT_CORE, (0, 0))"
    return f"{without_core}; os.kill(os.getpid(), signal.{name})"


@pytest.mark.parametrize("script", ["", *map(crash, CRASHES), "raise SystemExit(3)"])
def test_a_verdict_is_reached_once(script: str, library: Path, folder: Path, tmp_path: Path) -> None:
    child = Child(tmp_path, script)
    verdicts = [works(library, folder, command=child.command) for _ in range(3)]
    assert verdicts == [script == ""] * 3
    assert child.starts == 1


def test_a_child_that_hangs(library: Path, folder: Path, tmp_path: Path) -> None:
    child = Child(tmp_path, "import time; time.sleep(600)")
    assert [works(library, folder, command=child.command, patience=0.5) for _ in range(2)] == [False, False]
    assert child.starts <= 1  # 0: it was not even up by then


@pytest.mark.parametrize("script", ["raise RuntimeError", KILL_OUTSIDE, "raise KeyboardInterrupt"])
def test_what_tells_nothing_of_the_kernels_is_not_kept(
    script: str, library: Path, folder: Path, tmp_path: Path
) -> None:
    child = Child(tmp_path, script)
    assert [works(library, folder, command=child.command) for _ in range(2)] == [False, False]
    assert child.starts == 2
    assert works(library, folder, command=[sys.executable, "-c", ""])


@pytest.mark.parametrize("command", [["/nonexistent/python"], [""]])
def test_a_child_that_cannot_be_started(command: list[str], library: Path, folder: Path) -> None:
    assert not works(library, folder, command=command)
    assert not folder.exists()


def test_a_frozen_application_starts_no_copy_of_itself(
    library: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    child = Child(tmp_path, "")
    assert not works(library, folder, command=child.command)
    assert child.starts == 0


@pytest.mark.parametrize("change", ["size", "time", "another", "place"])
def test_another_build_is_tried_again(change: str, library: Path, folder: Path, tmp_path: Path) -> None:
    assert not works(library, folder, command=Child(tmp_path, crash("SIGSEGV")).command)
    kernels = library.parent / "libggml-cpu.so"
    if change == "size":
        stat = kernels.stat()
        kernels.write_bytes(b"longer code")
        os.utime(kernels, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    elif change == "time":
        os.utime(kernels, ns=(0, 1_000_000_007))
    elif change == "another":
        (library.parent / "libggml-cpu-sapphirerapids.so").touch()
    else:
        library = library.parent.rename(tmp_path / "moved") / library.name
    child = Child(tmp_path, "")
    assert [works(library, folder, command=child.command) for _ in range(2)] == [True, True]
    assert child.starts == 1


def test_other_files_do_not_matter(library: Path, folder: Path, tmp_path: Path) -> None:
    child = Child(tmp_path, "")
    assert works(library, folder, command=child.command)
    (library.parent / "libllama.so").write_bytes(b"longer code")
    (library.parent / "libggml-broken-link.so").symlink_to("nowhere")
    assert works(library, folder, command=child.command)
    assert child.starts == 1


def test_a_folder_that_cannot_be_written(library: Path, tmp_path: Path) -> None:
    # Root may write anywhere, but not below a file.
    file = tmp_path / "file"
    file.touch()
    for script, verdict in (("", True), (crash("SIGILL"), False)):
        child = Child(tmp_path, script)
        assert [works(library, file / "verdicts", command=child.command) for _ in range(2)] == [verdict] * 2
        assert child.starts == 2


@pytest.mark.parametrize("content", [b"", b"wor", b"\xff\xfe", b"broken\n"])
def test_a_damaged_verdict_is_none(content: bytes, library: Path, folder: Path, tmp_path: Path) -> None:
    child = Child(tmp_path, "")
    works(library, folder, command=child.command)
    (file,) = folder.iterdir()
    file.write_bytes(content)
    assert works(library, folder, command=child.command)
    assert child.starts == 2


def test_the_child_imports_from_where_this_process_does(
    library: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "only_there.py").touch()
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "only_here.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path / "elsewhere"))
    monkeypatch.chdir(tmp_path / "here")
    script = "import only_there\ntry:\n import only_here\nexcept ImportError:\n pass\nelse:\n raise SystemExit(3)"
    assert works(library, folder, command=[sys.executable, "-P", "-c", script])


# ---------------------------------------------------------------------- what the child does


def test_the_real_child_comes_to_a_verdict() -> None:
    verdict = amx._try(amx._CHILD, 60)
    assert verdict is not None
    assert verdict or "AMX_INT8 = 1" in weights.build()


@pytest.mark.parametrize(
    ("error", "code"), [(0.0, 0), (0.01, 0), (0.3, 3), (float("nan"), 3), (float("inf"), 3)], ids=str
)
def test_wrong_logits_are_found(error: float, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = []

    class Fake:
        def __init__(self, path: Path, *, extra_buffers: bool, **_: Any) -> None:
            loaded.append((path, extra_buffers))
            self.error = error if extra_buffers else 0.0

        def __enter__(self) -> Fake:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def evaluate(self, tokens: Iterable[int]) -> NDArray[np.float32]:
            logits = np.outer([*tokens], np.linspace(-5, 5, 100)).astype(np.float32)
            # One column, as a tile would be.
            logits[:, :3] *= 1 + self.error * 10
            return logits

    monkeypatch.setattr(amx_trial, "Target", Fake)
    assert amx_trial.compare() == code
    assert sorted(loaded) == [(DEMO, False), (DEMO, True)]


# ---------------------------------------------------------------------- without them


def fake_ggml(*types: bytes) -> tuple[Any, Any]:
    """A library whose extra memory types have these names, and its list of them (numbered from 1)."""
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


@pytest.mark.parametrize(
    ("types", "left"),
    [
        ([b"AMX", b"CPU_REPACK"], [2]),
        ([b"CPU_KLEIDIAI", b"AMX", b"CPU_REPACK"], [1, 3]),
        ([b"AMX"], []),
        ([b"CPU_REPACK"], [1]),
        ([], []),
    ],
)
def test_hiding_leaves_the_other_types(types: list[bytes], left: list[int]) -> None:
    library, handles = fake_ggml(*types)
    assert amx.hide(library)
    assert [*handles][: len(left) + 1] == [*left, None]
    assert amx.hide(library)  # once more changes nothing
    assert [*handles][: len(left) + 1] == [*left, None]


def test_a_library_that_does_not_export_its_list() -> None:
    library, handles = fake_ggml(b"AMX")
    library.ggml_backend_dev_by_type = lambda kind: None
    assert not amx.hide(library)
    del library.ggml_backend_dev_by_type
    assert not amx.hide(library)
    assert [*handles] == [1, None]


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A build with AMX whose kernels are broken; the libraries that were asked about."""
    name, asked = weights.build(), []
    monkeypatch.setattr(weights, "build", lambda: f"{name} AMX_INT8 = 1 |")
    monkeypatch.setattr(amx, "works", asked.append)
    return asked


@pytest.fixture
def parameters(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """llama.cpp's parameters of each load."""
    default, used = weights.llama.llama_model_default_params, []
    monkeypatch.setattr(weights.llama, "llama_model_default_params", lambda: used.append(default()) or used[-1])
    return used


def load(**options: Any) -> Target:
    return Target(DEMO, n_ctx=64, n_gpu_layers=0, threads=1, **options)


@pytest.mark.parametrize("hidden", [True, False])
def test_a_load_without_them(
    hidden: bool, broken: list[Path], parameters: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Really hidden, they would be so for the other tests of this process too.
    monkeypatch.setattr(amx, "hide", lambda library: hidden)
    with load() as loaded:
        assert loaded.amx_broken
        assert not loaded.uses_amx
        assert loaded.notes == [amx.NOTE]
        fingerprint = loaded.fingerprint
    (library,) = broken
    assert library.is_file()
    assert [*library.parent.glob("*ggml*cpu*")]
    assert parameters[0].use_extra_bufts is hidden
    monkeypatch.setattr(amx, "works", lambda library: True)
    with load() as working:
        assert (working.amx_broken, working.notes) == (False, [])
        assert working.uses_amx
        assert working.fingerprint != fingerprint
    assert parameters[1].use_extra_bufts


def test_the_childs_own_loads_ask_nobody(broken: list[Path], parameters: list[Any]) -> None:
    for extra in (True, False):
        with load(extra_buffers=extra) as loaded:
            assert not loaded.amx_broken
    assert broken == []
    assert [(p.use_extra_bufts, p.no_host) for p in parameters] == [(True, True), (False, False)]


def test_nobody_asks_where_no_weight_would_use_them(broken: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(is_gpu=True)
    monkeypatch.setattr(weights.devices, "devices", lambda library: [gpu])
    assert not weights.has_broken_amx(-1)
    assert broken == []
    assert weights.has_broken_amx(10)
    monkeypatch.setattr(weights, "build", lambda: "CPU : AVX512 = 1 | AMX_INT8 = 0 |")
    assert not weights.has_broken_amx(0)
    assert len(broken) == 1


def test_the_user_is_told(env: dict[str, str]) -> None:
    script = (
        "from ngramspec.llama import amx, devices\n"
        "name = devices.build()\n"
        "devices.build = lambda: name + ' AMX_INT8 = 1 |'\n"
        "amx.works = lambda library: False\n"
        "from ngramspec_cli.app import main\n"
        "main()"
    )
    command = [sys.executable, "-c", script]
    done = run(env, "complete", "-t", "1", "-c", "256", "-n", "4", stdin=b"one two", command=command)
    assert done.code == 0, done.err
    assert done.err.splitlines().count(amx.NOTE) == 1
    info = run(env, "info", "-t", "1", "-c", "256", command=command)
    assert info.err.splitlines().count(amx.NOTE) == 1
    (line,) = [line for line in info.out.splitlines() if line.startswith("build ")]
    assert line.endswith("its AMX kernels are broken and not used")
