"""Layers of a model on other machines with llama.cpp's RPC backend, and the error when one of them is lost.

    connect(workers("10.0.0.2:50052,10.0.0.3:50052"))   # once per process, before a model is loaded
    target = Target(path)                               # llama.cpp then spreads its layers over these machines too

llama.cpp registers devices per process, so it spreads every model that is loaded afterwards. See `README.md` in this
folder.
"""

from __future__ import annotations

import ctypes
import os
import socket
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import llama_cpp.llama_cpp as llama

from ngramspec.data import ModelError, TargetError, get_reason
from ngramspec.llama import bindings, devices
from ngramspec.llama.watchdog import Watchdog

PATIENCE = 300.0
"""Default number of seconds without a response after which a worker counts as lost.

A slow machine may need that long for one chunk of a prompt.
"""

ENDING = 10
"""Number of times, 0.2 s apart, to ask which worker is lost: one that crashes keeps its sockets until it has ended."""

GREETING, REACHING, ASKING = 10.0, 5.0, 1.0
"""Timeouts in seconds: of a worker's greeting, of connecting to it, and of connecting to find out which one is lost."""

BUILD = 'CMAKE_ARGS="-DGGML_RPC=on" pip install --force-reinstall --no-cache-dir llama-cpp-python'

CALLS = (
    "llama_model_load_from_file",
    "llama_init_from_model",
    "llama_adapter_lora_init",
    "llama_decode",
    "llama_encode",
    "llama_get_logits_ith",
    "llama_synchronize",
    "llama_memory_clear",
    "llama_memory_seq_cp",
    "llama_state_get_data",
    "llama_state_get_size",
    "llama_state_set_data",
    "llama_state_seq_get_data_ext",
    "llama_state_seq_get_size_ext",
    "llama_state_seq_set_data_ext",
)
"""Functions of llama.cpp that may communicate with a worker: those used in this folder and by `llama_cpp.Llama`."""

FREES = ("llama_free", "llama_model_free", "llama_adapter_lora_free")


_connection = SimpleNamespace(names=(), watchdog=None)
"""Workers of this process: the names passed to `connect`, and the `Watchdog` of the calls; `None` before `connect`."""

_ggml = partial(bindings.ggml_function, llama)


def workers(text: str) -> tuple[str, ...]:
    """Return the workers named in a list HOST:PORT,HOST:PORT,...

    Raises:
        ValueError: An item is not HOST:PORT, or is listed twice.
    """
    result: list[str] = []
    for name in (part.strip() for part in text.split(",")):
        host, _, port = name.rpartition(":")
        if ":" in host or host.startswith("["):
            raise ValueError(
                f"{name!r}: llama.cpp's RPC supports only IPv4; pass an IPv4 address or a host name, HOST:PORT"
            )
        if not host or not port.isdecimal() or not port.isascii() or not 1 <= int(port[:6]) <= 65535:
            raise ValueError(f"{name!r} is not HOST:PORT, with a port from 1 to 65535")
        worker = f"{host}:{int(port)}"
        if worker in result:
            raise ValueError(f"{worker} is listed twice")
        result.append(worker)
    return tuple(result)


def list_workers() -> tuple[str, ...]:
    """Return the workers that this process is connected to."""
    names: tuple[str, ...] = _connection.names
    return names


def connect(names: Sequence[str], patience: float = PATIENCE) -> None:
    """Register other machines as devices of this process; do nothing if they already are.

    A worker that does not respond for `patience` seconds counts as lost. Calls that wait for it, and all later calls of
    llama.cpp, then raise TargetError, because a process cannot reconnect to a worker.

    Raises:
        ModelError: This build has no RPC backend, a name cannot be reached or is not a worker, or other workers are
            connected.
    """
    names = tuple(names)
    if names == _connection.names:
        return
    if _connection.watchdog is not None:
        raise ModelError(
            f"this process is connected to {', '.join(_connection.names) or 'no worker'}; start a new process"
        )
    bindings.init_backend()
    backend = registry()
    names_by_address: dict[tuple[str, int], str] = {}
    for name in names:
        address = _reach(name)
        if address in names_by_address:
            raise ModelError(
                f"{names_by_address[address]} and {name} are the same worker, which serves only one connection; list it"
                " once"
            )
        names_by_address[address] = name
    _connection.watchdog = watchdog = Watchdog(GREETING, _stranger)
    _ggml("ggml_set_abort_callback", ctypes.c_void_p, ctypes.c_void_p)(ctypes.cast(watchdog.on_abort, ctypes.c_void_p))
    servers = []
    for name in names:
        bindings.log_tail.clear()
        try:
            servers.append(watchdog(_reach_devices, backend, name))
        except TargetError as error:
            raise ModelError(f"{name} {error}") from None
    watchdog.patience, watchdog.explain = patience, lambda message: _loss(names, message, patience)
    watchdog.watch(llama, CALLS, FREES)
    watchdog.watch(devices, ("devices", "buffer_types"), ())
    _load_noisily()
    _connection.names = names
    # llama.cpp uses every registered device, and none can be removed. So register only after all workers have
    # responded.
    for server in servers:
        watchdog(_register, server)


def _load_noisily() -> None:
    """Make every load of a model report progress to the watchdog, because loading may take longer than its patience."""
    load = llama.llama_model_load_from_file

    @llama.llama_progress_callback  # type: ignore[untyped-decorator]
    def gets_on(_done: float, _data: Any) -> bool:
        alive()
        return True

    def loading(path: bytes, params: Any) -> Any:
        if not params.progress_callback:
            params.progress_callback = gets_on
        return load(path, params)

    llama.llama_model_load_from_file = loading


def alive() -> None:
    """Report that a long call makes progress, so that no worker counts as lost."""
    if _connection.watchdog is not None:
        _connection.watchdog.alive()


def wait_for_loss() -> str:
    """Wait until a worker is lost, or forever if there are no workers, and return the message for the user."""
    if _connection.watchdog is None:
        threading.Event().wait()
    _connection.watchdog.lost.wait()
    return str(_connection.watchdog.reason)


def registry() -> int:
    """Return ggml's handle of the RPC backend.

    Raises:
        ModelError: This build has no RPC backend.
    """
    try:
        handle = _ggml("ggml_backend_reg_by_name", ctypes.c_void_p, ctypes.c_char_p)(b"RPC")
    except AttributeError:
        handle = None
    if not handle:
        raise ModelError(f"this llama-cpp-python was built without -DGGML_RPC=on; add it to your build flags: {BUILD}")
    return int(handle)


def _load_function(backend: int, name: str, result: Any, *arguments: Any) -> Any:
    """Return a function that only the RPC backend exports, with these types of its result and arguments."""
    find = _ggml("ggml_backend_reg_get_proc_address", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)
    return ctypes.CFUNCTYPE(result, *arguments)(find(backend, name.encode()))


def _reach_devices(backend: int, name: str) -> int:
    """Return ggml's handle of a worker's devices."""
    server = _load_function(backend, "ggml_backend_rpc_add_server", ctypes.c_void_p, ctypes.c_char_p)(name.encode())
    if not server:
        raise ModelError(f"{name} offers no device")
    return int(server)


def _register(server: int) -> None:
    _ggml("ggml_backend_register", None, ctypes.c_void_p)(server)
    device = _ggml("ggml_backend_reg_dev_get", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(server, 0)
    # The backend keeps the connection open. Without it, other processes could use the worker until the model is loaded.
    _ggml("ggml_backend_dev_init", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(device, None)


def _address(host: str, port: int) -> str:
    """Return the IPv4 address of a host. Raises OSError if it is unknown, UnicodeError if its name is invalid."""
    return str(socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])


def _reach(name: str, seconds: float = REACHING) -> tuple[str, int]:
    """Connect to a worker and return its address."""
    host, _, port = name.rpartition(":")
    try:
        address = _address(host, int(port)), int(port)
        socket.create_connection(address, seconds).close()
    except (OSError, UnicodeError) as error:
        raise ModelError(
            f"RPC worker {name} cannot be reached ({get_reason(error)}); start ngramspec rpc-worker on its machine"
        ) from error
    return address


def _is_listening(name: str) -> bool:
    try:
        _reach(name, ASKING)
    except ModelError:
        return False
    return True


def _stranger(message: str | None) -> str:
    """Return why a program with this error message, or `None` without a response, is not a worker for this build."""
    if message is None:
        return (
            f"accepts connections, but did not respond for {GREETING:g} s: it is serving another process, or it is not"
            " an RPC worker"
        )
    mismatch = next((text for _, text in bindings.log_tail if "version mismatch" in text), None)
    if mismatch is not None:
        theirs = mismatch.rpartition(" ")[2]
        return (
            f"uses version {theirs} of llama.cpp's RPC protocol, and this build another; use the same release on both"
        )
    return "is not an RPC worker, or uses another version of llama.cpp: its response is invalid"


def _loss(names: Sequence[str], message: str | None, patience: float) -> str:
    """Describe the lost worker and the cause as far as known, given ggml's message; `None` means no response."""
    for _ in range(ENDING if message else 1):
        time.sleep(0.2)
        if missing := [name for name in names if not _is_listening(name)]:
            return f"no RPC worker is listening at {', '.join(missing)}; restart it, then this program"
    who = f"one of the RPC workers {', '.join(names)}" if len(names) > 1 else f"the RPC worker {names[0]}"
    how = (
        "closed the connection"
        if message
        else f"did not respond for {patience:g} s (raise --rpc-timeout to wait longer)"
    )
    return f"{who} {how}; restart it, then this program"


# --------------------------------------------------------------------------- a worker


def listening_address(host: str, port: int) -> str:
    """Return the address to listen on as ADDRESS:PORT.

    Raises:
        ModelError: The address cannot be used, or this build has no RPC backend.
    """
    bindings.init_backend()
    registry()
    try:
        address = _address(host, port)
        with socket.socket() as trial:
            # llama.cpp sets this option too; without it, a port stays busy for a while after its last use.
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind((address, port))
    except (OSError, UnicodeError) as error:
        raise ModelError(
            f"cannot listen on {host}:{port}: {get_reason(error)};"
            " use another --port, or this machine's IPv4 address as --host"
        ) from error
    return f"{address}:{port}"


def list_lent_devices() -> list[tuple[int, str]]:
    """Return ggml's handles and descriptions of the devices that a worker lends: its GPUs, or its CPU without any."""
    lent = [device for device in devices.devices() if device.is_gpu]
    lent = lent or [device for device in devices.devices() if device.backend == "CPU"]
    handles = devices.device_handles()
    return [(handles[device.name], device.description) for device in lent]


def serve(address: str, threads: int, cache: Path | None) -> None:
    """Listen and compute for one client at a time; return only if listening fails.

    Args:
        address: ADDRESS:PORT to listen on.
        threads: Number of CPU threads.
        cache: Folder in which large tensors are stored, so that the next load need not send them; `None` means none.
    """
    types = ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p
    start = _load_function(registry(), "ggml_backend_rpc_start_server", None, *types)
    handles = [device for device, _ in list_lent_devices()]
    array = (ctypes.c_void_p * len(handles))(*handles)
    start(address.encode(), os.fsencode(cache) if cache else None, threads, len(handles), array)
