"""Tests of RPC workers: their names, their part in the keys of measurements, and errors."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from architectures.files import architecture
from support.machines import WORKER

from ngramspec.data import ModelError
from ngramspec.llama import bindings, rpc
from ngramspec.llama.target import Target


def test_rpc_workers_returns_host_and_port_of_each_worker() -> None:
    assert rpc.workers("10.0.0.2:50052") == ("10.0.0.2:50052",)
    assert rpc.workers("a.example:1, b:65535") == ("a.example:1", "b:65535")
    assert rpc.workers("a:050052") == ("a:50052",)


def test_rpc_workers_rejects_invalid_lists() -> None:
    wrong = {
        "is not HOST:PORT": ("", "host", ":50052", "host:", "host:-1", "host:²"),
        "1 to 65535": ("host:0", "host:65536", "host:" + "9" * 5000),
        "'' is not HOST:PORT": ("a:1,,b:2",),
        "a:1 is listed twice": ("a:1,a:01",),
        "only IPv4": ("[::1]:50052", "::1:50052"),
    }
    for reason, texts in wrong.items():
        for text in texts:
            with pytest.raises(ValueError, match=reason):
                rpc.workers(text)


def test_target_with_rpc_workers_does_not_use_nextn_head(set_devices: Callable[..., None]) -> None:
    set_devices(WORKER)
    with Target(architecture("glm4moe", head=True), ctx_size=64, gpu_layers=0, threads=1, mtp=True) as target:
        assert target.head is None
        assert "--mtp is not used: it is not supported with --rpc" in target.weights.notes


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Simulate a build with RPC, in which each name is a worker with a device, and return the registered ones."""
    found: list[int] = []
    monkeypatch.setattr(rpc, "registry", lambda: 1)
    monkeypatch.setattr(rpc, "_reach", lambda name, *_: (name, 1))
    monkeypatch.setattr(rpc, "ggml_function", lambda *_: lambda *_: None)
    monkeypatch.setattr(rpc, "_load_function", lambda *_: len)
    monkeypatch.setattr(rpc, "_register", found.append)
    yield found
    rpc._connected.clear()


def test_rpc_connects_once_to_the_same_workers(registered: list[int]) -> None:
    for _ in range(2):
        rpc.connect(["a:1", "bb:2"])
    assert registered == [3, 4]
    with pytest.raises(ModelError, match="this process is connected to a:1, bb:2; start a new process"):
        rpc.connect(["a:1"])


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda: None, "a:1 offers no device"),
        (threading.Event().wait, "a:1 accepts connections, but"),
    ],
)
def test_rpc_connect_with_unusable_worker_registers_none(
    answer: Any, reason: str, registered: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise models that are loaded later without workers would also run on the registered ones."""
    monkeypatch.setattr(rpc, "GREETING", 0.1)
    monkeypatch.setattr(rpc, "_load_function", lambda *_: lambda name: answer() if name == b"a:1" else 1)
    with pytest.raises(ModelError, match=reason):
        rpc.connect(["b:2", "a:1"])
    assert (registered, rpc._connected) == ([], [])


def test_abort_of_the_rpc_backend_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    def reach(name: str, seconds: float) -> None:
        if name == "b:2":
            raise ModelError("connection refused")

    monkeypatch.setattr(rpc, "_reach", reach)
    monkeypatch.setattr(rpc, "time", SimpleNamespace(sleep=lambda _: None))
    for connected, greeted, log, text in (
        (["a:1", "b:2"], [], "", "no RPC worker is listening at b:2; restart it, then this program"),
        (["a:1"], [], "", "an RPC worker closed the connection (a:1); restart it, then this program"),
        ([], ["a:1"], "", "a:1 is not an RPC worker, or uses another version of llama.cpp: its response is invalid"),
        ([], ["a:1"], "version mismatch: 9.1.2", "a:1 uses version 9.1.2 of llama.cpp's RPC protocol, and this build"),
    ):
        monkeypatch.setattr(rpc, "_connected", connected)
        monkeypatch.setattr(rpc, "_greeted", greeted)
        monkeypatch.setattr(bindings, "log_tail", [(4, log)])
        assert rpc.explain_abort().startswith(text)


def test_other_aborts_are_left_to_ggml(capfd: pytest.CaptureFixture[str]) -> None:
    rpc._on_abort(b"ggml.c:1: GGML_ASSERT(x) failed")
    assert capfd.readouterr().err == "ggml.c:1: GGML_ASSERT(x) failed\n"


def test_abort_of_the_rpc_backend_ends_the_process_with_one_line() -> None:
    code = "from ngramspec.llama import rpc; rpc._greeted[:] = ['a:1']; rpc._on_abort(b'ggml-rpc.cpp:1: failed')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("ngramspec: a:1 is not an RPC worker")
    assert done.stderr.count("\n") == 1
