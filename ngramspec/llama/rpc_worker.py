"""A worker: it lends this machine's devices to one process at a time, through llama.cpp's RPC server."""

from __future__ import annotations

import ctypes
import os
import socket
from pathlib import Path

from ngramspec.errors import ModelError
from ngramspec.llama import log
from ngramspec.llama.rpc import exported, ggml, registry

_CPU, _GPU, _INTEGRATED = 0, 1, 2  # ggml-backend.h, enum ggml_backend_dev_type


def check(host: str, port: int) -> str:
    """The address to listen on as llama.cpp wants it, ADDRESS:PORT.

    Raises:
        ModelError: this build has no RPC backend, or that address cannot be listened on.
    """
    log.init_backend()
    registry()
    try:
        address = str(socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
        with socket.socket() as trial:
            # As llama.cpp does, so that a port is free again at once.
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind((address, port))
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ModelError(
            f"cannot listen on {host}:{port}: {reason}; choose another --port, or this machine's IPv4 address as --host"
        ) from error
    return f"{address}:{port}"


def lent() -> list[tuple[int, str]]:
    """The devices that a worker lends, ggml's handles and what they are: its GPUs; without any, its CPU."""
    get = ggml("ggml_backend_dev_get", ctypes.c_void_p, ctypes.c_size_t)
    kind = ggml("ggml_backend_dev_type", ctypes.c_int, ctypes.c_void_p)
    about = ggml("ggml_backend_dev_description", ctypes.c_char_p, ctypes.c_void_p)
    found = [get(i) for i in range(ggml("ggml_backend_dev_count", ctypes.c_size_t)())]
    chosen = [d for d in found if kind(d) in (_GPU, _INTEGRATED)] or [d for d in found if kind(d) == _CPU]
    return [(device, about(device).decode(errors="replace")) for device in chosen]


def serve(address: str, threads: int, cache: Path | None) -> None:
    """Listen and compute for whoever connects, one at a time; returns only if listening fails.

    Args:
        address: as `check` gives it.
        threads: of the CPU.
        cache: a folder in which large tensors are kept, so that the next load need not send them; None: nowhere.
    """
    start = exported(
        registry(),
        "ggml_backend_rpc_start_server",
        None,
        ctypes.c_char_p,
        ctypes.c_char_p,
        ctypes.c_size_t,
        ctypes.c_size_t,
        ctypes.c_void_p,
    )
    handles = [device for device, _ in lent()]
    devices = (ctypes.c_void_p * len(handles))(*handles)
    start(address.encode(), None if cache is None else os.fsencode(cache), threads, len(handles), devices)
