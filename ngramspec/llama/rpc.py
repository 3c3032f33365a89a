"""Layers of a model on other machines with llama.cpp's RPC backend.

    connect(workers("10.0.0.2:50052,10.0.0.3:50052"))   # once per process, before a model is loaded
    target = Target(path)                               # llama.cpp then spreads its layers over these machines too

llama.cpp registers devices per process, so it spreads every model that is loaded afterwards. It ends the process if a
worker is lost, and waits forever for one that does not respond.
"""

from __future__ import annotations

import ctypes
import os
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ngramspec.data import ModelError, get_reason
from ngramspec.llama import bindings, devices
from ngramspec.llama.bindings import ggml_function

GREETING, REACHING, ASKING = 10.0, 5.0, 1.0
"""Timeouts in seconds: of a worker's greeting, of connecting to it, and of connecting to find out which one is lost."""

_connected: list[str] = []  # workers of this process
_greeted: list[str] = []  # worker that is asked for its devices


def workers(text: str) -> tuple[str, ...]:
    """Return the workers named in a list HOST:PORT,HOST:PORT,..."""
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


def connect(names: Sequence[str]) -> None:
    """Register other machines as devices of this process; do nothing if they already are."""
    if _connected == list(names):
        return
    if _connected:
        raise ModelError(f"this process is connected to {', '.join(_connected)}; start a new process")
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
    ggml_function("ggml_set_abort_callback", ctypes.c_void_p, ctypes.c_void_p)(ctypes.cast(_on_abort, ctypes.c_void_p))
    # llama.cpp uses every registered device, and none can be removed. So register only after all workers have
    # responded.
    servers = [_find_devices(backend, name) for name in names]
    _connected[:] = names
    for server in servers:
        _register(server)


def registry() -> int:
    """Return ggml's handle of the RPC backend."""
    try:
        handle = ggml_function("ggml_backend_reg_by_name", ctypes.c_void_p, ctypes.c_char_p)(b"RPC")
    except AttributeError:
        handle = None
    if not handle:
        raise ModelError(
            "this llama-cpp-python was built without -DGGML_RPC=on; add it to your build flags:"
            ' CMAKE_ARGS="-DGGML_RPC=on" pip install --force-reinstall --no-cache-dir llama-cpp-python'
        )
    return int(handle)


def _load_function(backend: int, name: str, result: Any, *arguments: Any) -> Any:
    """Return a function that only the RPC backend exports, with these types of its result and arguments."""
    find = ggml_function("ggml_backend_reg_get_proc_address", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)
    return ctypes.CFUNCTYPE(result, *arguments)(find(backend, name.encode()))


def _find_devices(backend: int, name: str) -> int:
    bindings.log_tail.clear()
    _greeted[:] = [name]
    add = _load_function(backend, "ggml_backend_rpc_add_server", ctypes.c_void_p, ctypes.c_char_p)
    servers: list[int | None] = []
    # The call cannot be stopped, but its thread can be abandoned.
    thread = threading.Thread(target=lambda: servers.append(add(name.encode())), daemon=True)
    thread.start()
    thread.join(GREETING)
    _greeted.clear()
    if not servers:
        raise ModelError(
            f"{name} accepts connections, but did not respond for {GREETING:g} s: it is serving another process, or it"
            " is not an RPC worker"
        )
    if not servers[0]:
        raise ModelError(f"{name} offers no device")
    return servers[0]


def _register(server: int) -> None:
    pointer = ctypes.c_void_p
    ggml_function("ggml_backend_register", None, pointer)(server)
    device = ggml_function("ggml_backend_reg_dev_get", pointer, pointer, ctypes.c_size_t)(server, 0)
    # The backend keeps the connection open. Without it, other processes could use the worker until the model is loaded.
    ggml_function("ggml_backend_dev_init", pointer, pointer, ctypes.c_char_p)(device, None)


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


@ctypes.CFUNCTYPE(None, ctypes.c_char_p)  # type: ignore[untyped-decorator]
def _on_abort(message: bytes) -> None:
    """End the process with an error message if the RPC backend failed; after other failures, ggml ends it."""
    text = message.decode("utf-8", "replace")
    if "ggml-rpc" not in text:  # the name of the backend's source file
        os.write(2, f"{text}\n".encode())
        return
    os.write(2, f"ngramspec: {explain_abort()}\n".encode())
    os._exit(1)


def explain_abort() -> str:
    """Return why the RPC backend failed: what was asked is not a worker for this build, or a worker is lost."""
    if _greeted:
        mismatch = next((text for _, text in bindings.log_tail if "version mismatch" in text), None)
        if mismatch is None:
            why = "is not an RPC worker, or uses another version of llama.cpp: its response is invalid"
        else:
            why = f"uses version {mismatch.rpartition(' ')[2]} of llama.cpp's RPC protocol, and this build another"
            why += "; use the same release on both"
        return f"{_greeted[0]} {why}"
    time.sleep(ASKING)  # a worker that crashes keeps its sockets until it has ended
    missing = []
    for name in _connected:
        try:
            _reach(name, ASKING)
        except ModelError:
            missing.append(name)
    if missing:
        return f"no RPC worker is listening at {', '.join(missing)}; restart it, then this program"
    return f"an RPC worker closed the connection ({', '.join(_connected)}); restart it, then this program"


def listening_address(host: str, port: int) -> str:
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


def list_lent_devices() -> list[devices.Device]:
    """Return the devices that a worker lends: its GPUs, or its CPU without any."""
    found = devices.devices()
    return [device for device in found if device.is_gpu] or [device for device in found if device.backend == "CPU"]


def serve(address: str, threads: int, cache: Path | None) -> None:
    """Listen and compute for one client at a time; return only if listening fails. `cache` is a folder for tensors."""
    types = ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p
    start = _load_function(registry(), "ggml_backend_rpc_start_server", None, *types)
    handles = [device.handle for device in list_lent_devices()]
    array = (ctypes.c_void_p * len(handles))(*handles)
    start(address.encode(), os.fsencode(cache) if cache else None, threads, len(handles), array)
