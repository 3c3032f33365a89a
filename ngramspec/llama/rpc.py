"""The layers of a model on other machines: llama.cpp's RPC backend, and what is said when one of them is lost.

    connect(workers("10.0.0.2:50052,10.0.0.3:50052"))   # once per process, before a model is loaded
    target = Target(path)                               # llama.cpp then spreads its layers over these machines too

llama.cpp knows devices by process, so every model that is loaded afterwards is spread. See `README.md` beside this.
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

from ngramspec.errors import ModelError, TargetError
from ngramspec.llama import bindings, devices
from ngramspec.llama.devices import CPU, GPU, INTEGRATED
from ngramspec.llama.watchdog import Watchdog

PATIENCE = 300.0
"""Seconds without an answer after which a worker counts as lost, unless others are asked for. A slow machine needs as
much for a piece of a prompt."""

GREETING, REACHING, ASKING = 10.0, 5.0, 1.0
"""Seconds that a worker may take to say who it is, to be connected to, and to be connected to when one is looked for
that was lost."""

BUILD = 'CMAKE_ARGS="-DGGML_RPC=on" pip install --force-reinstall --no-cache-dir llama-cpp-python'

CALLS = (
    "llama_model_load_from_file",
    "llama_init_from_model",
    "llama_adapter_lora_init",
    "llama_decode",
    "llama_encode",
    "llama_get_logits_ith",
    "llama_memory_clear",
    "llama_memory_seq_cp",
    "llama_state_get_data",
    "llama_state_get_size",
    "llama_state_set_data",
    "llama_state_seq_get_data_ext",
    "llama_state_seq_get_size_ext",
    "llama_state_seq_set_data_ext",
)
"""The functions of llama.cpp that may speak to a worker: those used in this room, and by llama-cpp-python's `Llama`."""

FREES = ("llama_free", "llama_model_free", "llama_adapter_lora_free")


_joined = SimpleNamespace(names=(), watchdog=None)
"""The workers of this process: what `connect` was given, and the `Watchdog` of the calls; None before."""

_ggml = partial(bindings.ggml_function, llama)


def workers(text: str) -> tuple[str, ...]:
    """The workers named in a list HOST:PORT,HOST:PORT,... Raises ValueError: one is not that, or is named twice."""
    found: list[str] = []
    for name in (part.strip() for part in text.split(",")):
        host, _, port = name.rpartition(":")
        if ":" in host or host.startswith("["):
            raise ValueError(
                f"{name!r}: llama.cpp's RPC supports only IPv4; pass an IPv4 address or a host name, HOST:PORT"
            )
        if not host or not port.isdecimal() or not port.isascii() or not 1 <= int(port[:6]) <= 65535:
            raise ValueError(f"{name!r} is not HOST:PORT, with a port from 1 to 65535")
        worker = f"{host}:{int(port)}"
        if worker in found:
            raise ValueError(f"{worker} is listed twice")
        found.append(worker)
    return tuple(found)


def joined() -> tuple[str, ...]:
    """The workers that this process is connected to."""
    names: tuple[str, ...] = _joined.names
    return names


def connect(names: Sequence[str], patience: float = PATIENCE) -> None:
    """Make other machines devices of this process; nothing happens if they are already.

    A worker without an answer for `patience` seconds counts as lost. Whatever waits for it, and whatever is asked of
    llama.cpp afterwards, then raises TargetError: a process cannot get a worker back.

    Raises:
        ModelError: this build has no RPC backend, a worker cannot be reached or is none, or others are connected.
    """
    names = tuple(names)
    if names == _joined.names:
        return
    if _joined.watchdog is not None:
        raise ModelError(f"this process is connected to {', '.join(_joined.names) or 'no worker'}; start a new process")
    bindings.init_backend()
    backend = registry()
    seen: dict[tuple[str, int], str] = {}
    for name in names:
        address = _reach(name)
        if address in seen:
            raise ModelError(
                f"{seen[address]} and {name} are the same worker, which serves only one connection; list it once"
            )
        seen[address] = name
    _joined.watchdog = watchdog = Watchdog(GREETING, _stranger)
    _ggml("ggml_set_abort_callback", ctypes.c_void_p, ctypes.c_void_p)(ctypes.cast(watchdog.on_abort, ctypes.c_void_p))
    servers = []
    for name in names:
        bindings.log_tail.clear()
        try:
            servers.append(watchdog(_reach_devices, backend, name))
        except TargetError as error:
            raise ModelError(f"{name} {error}") from None
    watchdog.patience, watchdog.explain = patience, lambda said: _loss(names, said, patience)
    watchdog.watch(llama, CALLS, FREES)
    watchdog.watch(devices, ("devices",), ())
    _load_noisily()
    _joined.names = names
    # llama.cpp uses every registered device, and none can be removed: all workers have answered before this.
    for server in servers:
        watchdog(_register, server)


def _load_noisily() -> None:
    """Have every model that is loaded say that it gets on, whoever loads it: that may take longer than patience."""
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
    """Say that a call which takes long gets on, and that no worker is lost."""
    if _joined.watchdog is not None:
        _joined.watchdog.alive()


def wait_for_loss() -> str:
    """Wait until a worker is lost, or for good if there are none; the line for the user."""
    if _joined.watchdog is None:
        threading.Event().wait()
    _joined.watchdog.lost.wait()
    return str(_joined.watchdog.reason)


def registry() -> int:
    """ggml's handle of the RPC backend. Raises ModelError if this build has none."""
    try:
        found = _ggml("ggml_backend_reg_by_name", ctypes.c_void_p, ctypes.c_char_p)(b"RPC")
    except AttributeError:
        found = None
    if not found:
        raise ModelError(f"this llama-cpp-python was built without -DGGML_RPC=on; add it to your build flags: {BUILD}")
    return int(found)


def _exported(backend: int, name: str, result: Any, *arguments: Any) -> Any:
    """A function that only the RPC backend has; `backend`: its handle."""
    find = _ggml("ggml_backend_reg_get_proc_address", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)
    return ctypes.CFUNCTYPE(result, *arguments)(find(backend, name.encode()))


def _reach_devices(backend: int, name: str) -> int:
    """Return ggml's handle of a worker's devices."""
    server = _exported(backend, "ggml_backend_rpc_add_server", ctypes.c_void_p, ctypes.c_char_p)(name.encode())
    if not server:
        raise ModelError(f"{name} offers no device")
    return int(server)


def _register(server: int) -> None:
    """Make the devices of a worker devices of this process."""
    _ggml("ggml_backend_register", None, ctypes.c_void_p)(server)
    device = _ggml("ggml_backend_reg_dev_get", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(server, 0)
    # Without a backend that holds it the connection is closed, and the worker free for others until the model comes.
    _ggml("ggml_backend_dev_init", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(device, None)


def _address(host: str, port: int) -> str:
    """The IPv4 address of a host. Raises OSError, or UnicodeError for what is no name."""
    return str(socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])


def _reach(name: str, seconds: float = REACHING) -> tuple[str, int]:
    """The address of a worker that can be connected to."""
    host, _, port = name.rpartition(":")
    try:
        address = _address(host, int(port)), int(port)
        socket.create_connection(address, seconds).close()
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ModelError(
            f"RPC worker {name} cannot be reached ({reason}); start ngramspec rpc-worker on its machine"
        ) from error
    return address


def _stranger(said: str | None) -> str:
    """Why a worker that can be connected to is none for this build; `said`: by ggml, None if nothing was heard."""
    if said is None:
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


def _loss(names: Sequence[str], said: str | None, patience: float) -> str:
    """Describe the lost worker and the cause, as far as known; `said` as above."""
    time.sleep(0.2)  # a process that ends closes what it has open one by one
    gone = []
    for name in names:
        try:
            _reach(name, ASKING)
        except ModelError:
            gone.append(name)
    if gone:
        return f"no RPC worker is listening at {', '.join(gone)}; restart it, then this program"
    who = f"one of the RPC workers {', '.join(names)}" if len(names) > 1 else f"the RPC worker {names[0]}"
    how = (
        "closed the connection" if said else f"did not respond for {patience:g} s (raise --rpc-timeout to wait longer)"
    )
    return f"{who} {how}; restart it, then this program"


# --------------------------------------------------------------------------- a worker


def listening_address(host: str, port: int) -> str:
    """The address to listen on, ADDRESS:PORT; ModelError if it cannot be, or this build has no RPC backend."""
    bindings.init_backend()
    registry()
    try:
        address = _address(host, port)
        with socket.socket() as trial:
            # As llama.cpp does, so that a port is free again at once.
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind((address, port))
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ModelError(
            f"cannot listen on {host}:{port}: {reason}; use another --port, or this machine's IPv4 address as --host"
        ) from error
    return f"{address}:{port}"


def lent() -> list[tuple[int, str]]:
    """The devices that a worker lends, ggml's handles and what they are: its GPUs; without any, its CPU."""
    get = _ggml("ggml_backend_dev_get", ctypes.c_void_p, ctypes.c_size_t)
    kind = _ggml("ggml_backend_dev_type", ctypes.c_int, ctypes.c_void_p)
    about = _ggml("ggml_backend_dev_description", ctypes.c_char_p, ctypes.c_void_p)
    found = [get(i) for i in range(_ggml("ggml_backend_dev_count", ctypes.c_size_t)())]
    chosen = [d for d in found if kind(d) in (GPU, INTEGRATED)] or [d for d in found if kind(d) == CPU]
    return [(device, about(device).decode(errors="replace")) for device in chosen]


def serve(address: str, threads: int, cache: Path | None) -> None:
    """Listen and compute for whoever connects, one at a time; returns only if listening fails.

    `cache`: a folder in which large tensors are kept, so that the next load need not send them.
    """
    types = ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p
    start = _exported(registry(), "ggml_backend_rpc_start_server", None, *types)
    handles = [device for device, _ in lent()]
    array = (ctypes.c_void_p * len(handles))(*handles)
    start(address.encode(), os.fsencode(cache) if cache else None, threads, len(handles), array)
