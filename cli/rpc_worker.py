"""`ngramspec rpc-worker`: this machine's devices for a model that is run from another one."""

from __future__ import annotations

import os
import sys
import threading

from ngramspec.cpu.cores import usable_cores
from ngramspec.llama import rpc
from ngramspec.llama.target import THREADS
from ngramspec.sampling.option import between, option
from ngramspec.storage import cache_folder

from .console import FAILED, INTERRUPTED, TERMINATED, Terminated, complain, note


def rpc_worker(
    host: str = option("127.0.0.1", help="IPv4 address to listen on: this machine's, in a network you trust."),
    port: int = option(50052, help="Port.", allowed=between(1, 65535)),
    threads: int | None = option(
        None, "-t", "--threads", help="CPU threads; default: the physical cores.", allowed=THREADS
    ),
    cache: bool = option(False, help="Keep large tensors on this disk, so that they are sent once."),
) -> None:
    """Lend this machine to a model run elsewhere: ngramspec rpc-worker --host 10.0.0.2

    There: ngramspec chat model.gguf --rpc 10.0.0.2:50052. GPUs are lent if there are any, else the CPU, to one process
    at a time. It is llama.cpp's RPC server; llama.cpp's own ggml-rpc-server of the same release serves as well.

    llama.cpp calls it a proof of concept, fragile and insecure, and says never to run it on an open network or in a
    sensitive environment: there is no password and no encryption, and whoever connects can use it as they like.
    """
    address = rpc.listening_address(host, port)
    folder = None
    if cache:
        folder = cache_folder("rpc")
        folder.mkdir(parents=True, exist_ok=True)
    note(f"lending {', '.join(name for _, name in rpc.lent())} at {address}; Ctrl-C ends it")
    if not address.startswith("127."):
        note(
            "anybody who can reach this address can use it, and llama.cpp calls its RPC server fragile and insecure:"
            " trusted networks only"
        )
    # What llama.cpp prints is no answer.
    sys.stdout.flush()
    os.dup2(2, 1)
    ended = threading.Event()

    def serve() -> None:
        rpc.serve(address, threads or usable_cores(), folder)
        ended.set()

    threading.Thread(target=serve, daemon=True).start()
    # The thread is in the middle of llama.cpp, and cannot be asked to end.
    try:
        ended.wait()
    except KeyboardInterrupt:
        os._exit(INTERRUPTED)
    except Terminated:
        os._exit(TERMINATED)
    complain(f"llama.cpp's RPC server could not listen on {address}")
    os._exit(FAILED)
