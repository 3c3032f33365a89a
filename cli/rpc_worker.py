"""`ngramspec rpc-worker`: devices of this machine for a model that runs on another machine."""

from __future__ import annotations

import os
import sys
import threading

from ngramspec.cpu.cores import usable_cores
from ngramspec.llama import rpc
from ngramspec.model_settings import THREADS
from ngramspec.sampling.settings import allow_int_range, option
from ngramspec.storage import FOLDERS

from .console import FAILED, Terminated, exit_code, note, print_error


def rpc_worker(
    host: str = option("127.0.0.1", help="IPv4 address of this machine to listen on, in a trusted network."),
    port: int = option(50052, help="Port.", allowed=allow_int_range(1, 65535)),
    threads: int | None = option(
        None, "-t", help="Number of CPU threads; default: the number of physical cores.", allowed=THREADS
    ),
    cache: bool = option(False, help="Cache large tensors on this machine, so that they are sent only once."),
) -> None:
    """Make this machine available to a model on another one.

    Example: ngramspec rpc-worker --host 10.0.0.2

    On the other machine, run ngramspec chat model.gguf --rpc 10.0.0.2:50052. The worker offers its GPUs to one
    process at a time, or the CPU if it has no GPU. It is llama.cpp's RPC server; ggml-rpc-server of the same llama.cpp
    release works too.

    llama.cpp calls this server a proof of concept, fragile and insecure, and warns against running it on an open
    network or in a sensitive environment. It has no password and no encryption, and anyone who can connect can use it.
    """
    address = rpc.listening_address(host, port)
    folder = None
    if cache:
        folder = FOLDERS.user_cache_path / "rpc"
        folder.mkdir(parents=True, exist_ok=True)
    lent = ", ".join(device.description for device in rpc.list_lent_devices())
    note(f"offering {lent} at {address}; press Ctrl-C to stop")
    if not address.startswith("127."):
        note(
            "warning: anyone who can reach this address can use it, and llama.cpp calls its RPC server fragile and"
            " insecure; use it in trusted networks only"
        )
    # Output of llama.cpp must not go to stdout.
    sys.stdout.flush()
    os.dup2(2, 1)
    end_event = threading.Event()

    def serve() -> None:
        rpc.serve(address, threads or usable_cores(), folder)
        end_event.set()

    threading.Thread(target=serve, daemon=True).start()
    # The thread runs llama.cpp code and cannot be asked to end.
    try:
        end_event.wait()
    except (KeyboardInterrupt, Terminated) as error:
        os._exit(exit_code(error))
    print_error(f"llama.cpp's RPC server could not listen on {address}")
    os._exit(FAILED)
