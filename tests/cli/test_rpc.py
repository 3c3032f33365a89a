"""Tests of `--rpc` and `rpc-worker` as a user runs them: errors, other programs at the address, and lost workers.

Tests that require llama.cpp's RPC backend are skipped if the build lacks it:
CMAKE_ARGS="-DGGML_RPC=on" pip install --force-reinstall --no-cache-dir llama-cpp-python
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from support.cli_runner import COMMAND, DEMO, ENDLESS, PATIENCE, run, run_process

from ngramspec.data import ModelError
from ngramspec.llama import bindings, rpc
from ngramspec.loading import load
from ngramspec.loading.settings import LoadSettings
from ngramspec.model_settings import LoadSettingsError

SMALL = ["complete", "-t", "1", "-c", "512", str(DEMO)]
TEXT = b"def add(a, b):\n    return a + b\n"


def lacks_rpc() -> bool:
    bindings.init_backend()
    try:
        rpc.registry()
    except ModelError:
        return True
    return False


LACKS = lacks_rpc()
needs_rpc = pytest.mark.skipif(LACKS, reason="llama-cpp-python was built without RPC")


def test_load_settings_reject_a_worker_without_a_port() -> None:
    with pytest.raises(LoadSettingsError, match="rpc: 'host' is not HOST:PORT"):
        LoadSettings(rpc="host")


def test_find_connects_workers_of_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(rpc, "connect", asked.append)
    load.find(DEMO, LoadSettings())
    load.find(DEMO, LoadSettings(rpc="a:1,b:2"))
    assert asked == [("a:1", "b:2")]


@pytest.mark.skipif(not LACKS, reason="llama-cpp-python was built with RPC")
@pytest.mark.parametrize("arguments", [[*SMALL, "--rpc", "127.0.0.1:1"], ["rpc-worker"]])
def test_rpc_without_backend_explains_how_to_build_it(env: dict[str, str], arguments: Sequence[str]) -> None:
    run(env, *arguments, stdin=TEXT).assert_failed('CMAKE_ARGS="-DGGML_RPC=on" pip install')


@contextmanager
def stranger(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """Run a listener that is not a worker."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    client, _ = listener.accept()
                    threading.Thread(target=answer, args=(client,), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def web(client: socket.socket) -> None:
    with suppress(OSError), client:
        client.recv(1000)
        client.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")


def other_version(client: socket.socket) -> None:
    with suppress(OSError):
        client.recv(1000)
        client.sendall((28).to_bytes(8, "little") + bytes([99, 1, 2]) + bytes(25))
        client.recv(1)


@needs_rpc
@pytest.mark.parametrize(
    ("answer", "reason"),
    [(web, "is not an RPC worker"), pytest.param(other_version, "uses version 99.1.2", marks=pytest.mark.exhaustive)],
)
def test_rpc_with_other_program_at_address_fails_with_one_line(
    env: dict[str, str], answer: Callable[[socket.socket], None], reason: str
) -> None:
    with stranger(answer) as address:
        done = run_process(env, *SMALL, "--rpc", address, stdin=TEXT)
    done.assert_failed(reason)
    assert done.error_message.startswith(address)


@needs_rpc
def test_rpc_with_unreachable_worker_fails(env: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    for worker, why in ((address, "(Connection refused)"), ("no-such-host.invalid:50052", "")):
        run(env, *SMALL, "--rpc", worker, stdin=TEXT).assert_failed(
            f"RPC worker {worker} cannot be reached {why}".strip()
        )


class Worker:
    """An `rpc-worker` in a separate process."""

    def __init__(self, env: dict[str, str], *arguments: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = listener.getsockname()[1]
        self.name = f"127.0.0.1:{self.port}"
        command = [*COMMAND, "rpc-worker", "-t", "1", "--port", str(self.port), *arguments]
        self.process = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, stdout=subprocess.PIPE)
        deadline = time.monotonic() + PATIENCE
        while self.process.poll() is None and time.monotonic() < deadline:
            with suppress(OSError):
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            time.sleep(0.05)
        raise AssertionError(self.end())

    def end(self, number: int = signal.SIGTERM) -> str:
        """Return its output after it has ended."""
        self.process.send_signal(signal.SIGCONT)
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=PATIENCE)
        assert out == b""
        return err.decode()


@pytest.fixture
def pair(env: dict[str, str]) -> Iterator[tuple[Worker, Worker]]:
    workers = Worker(env), Worker(env)
    yield workers
    for worker in workers:
        if worker.process.returncode is None:
            worker.end(signal.SIGKILL)


def over(pair: Sequence[Worker], *more: str) -> list[str]:
    return [*SMALL, "--rpc", ",".join(worker.name for worker in pair), *more]


@needs_rpc
@pytest.mark.exhaustive
def test_rpc_with_two_workers_keeps_text(env: dict[str, str], pair: tuple[Worker, Worker]) -> None:
    drafted = run_process(env, *over(pair, "-n", "48", "--exact", "on", "--policy", "fixed"), stdin=TEXT)
    plain = run_process(env, *over(pair, "-n", "48", "--exact", "on", "--no-draft"), stdin=TEXT)
    assert drafted.ok().raw == plain.ok().raw != b""
    twice = run_process(env, *over(pair[:1], "-n", "4")[:-3], f"{pair[0].name},localhost:{pair[0].port}", stdin=TEXT)
    twice.assert_failed("are the same worker")
    for worker, (number, code) in zip(pair, ((signal.SIGTERM, 143), (signal.SIGINT, 130)), strict=True):
        said = worker.end(number)
        assert worker.process.returncode == code
        assert f"at {worker.name}; press Ctrl-C to stop" in said
        assert "trusted networks only" not in said


LOST = "no RPC worker is listening at {}; restart it, then this program"


@needs_rpc
@pytest.mark.exhaustive
def test_rpc_after_lost_worker_ends_with_message(env: dict[str, str], pair: tuple[Worker, Worker]) -> None:
    command = [*COMMAND, *over(pair, "--no-draft", "--exact", "off", "-n", "470", *ENDLESS)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        process.stdin.write(TEXT)
        process.stdin.close()
        process.stdin = None
        assert process.stdout.read1(1)
        pair[1].process.send_signal(signal.SIGKILL)
        _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert LOST.format(pair[1].name) in err.decode()


@needs_rpc
def test_rpc_worker_rejects_unusable_address(env: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = listener.getsockname()[1]
        for host, port in (("127.0.0.1", taken), ("192.0.2.1", 50052), ("::1", 50052), ("no-such-host.invalid", 50052)):
            done = run(env, "rpc-worker", "--host", host, "--port", str(port))
            done.assert_failed(f"cannot listen on {host}:{port}")


@needs_rpc
@pytest.mark.exhaustive
@pytest.mark.skipif(os.name != "posix", reason="an address that is all of the machine's")
def test_rpc_worker_on_public_address_warns_about_security(env: dict[str, str], tmp_path: Path) -> None:
    worker = Worker({**env, "XDG_CACHE_HOME": str(tmp_path)}, "--host", "0.0.0.0", "--cache")
    assert "trusted networks only" in worker.end()
    assert (tmp_path / "ngramspec" / "rpc").is_dir()
