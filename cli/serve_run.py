"""A server's life: it listens, loads its model, answers until a signal comes, and lets running requests end.

The HTTP server has a thread of its own, and the engine another, which also loads the model; the main thread waits for
signals.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import webbrowser
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import uvicorn

from ngramspec.drafting.mixture.learnt import file_of
from ngramspec.llama.rpc import wait_for_loss
from ngramspec.llama.shared import SharedTarget
from ngramspec.models.find import ModelSource
from ngramspec.server.access_log import Entry
from ngramspec.server.app import make_app
from ngramspec.server.opening import open_engine
from ngramspec.server.sampling_fields import SamplingDefaults
from ngramspec.server.served import ServedModel, Server

from .console import INTERRUPTED, Terminated, complain, fail, note, signals_deferred
from .draft_model import SecondModelOptions
from .memory_option import open_memory
from .options import LoadOptions
from .serve_options import LONGEST_DRAFT, AccessOptions, EngineOptions

DRAIN_SECONDS = 8.0
"""How long running requests may go on after a signal: less than the 10 s after which docker kills."""

_LOOPBACK = ("127.", "::1", "localhost")


def run(
    load: LoadOptions,
    access: AccessOptions,
    options: EngineOptions,
    draft_model: SecondModelOptions,
    defaults: SamplingDefaults,
    model: str | None,
    alias: str | None,
    open_page: bool,
) -> None:
    """Serve until a signal comes."""
    source = load.find(model)
    small = draft_model.find_draft_model()
    load = load.tuned(source)
    server = Server(defaults=defaults)
    app = make_app(
        server,
        keys=[access.api_key] if access.api_key is not None else [],
        origins=access.cors or (),
        hosts=[access.host, *(access.allow_host or ())],
        log=log,
    )
    with _listening(access.host, access.port) as listener:
        address = _address(access.host, listener.getsockname()[1])
        with _answering(app, listener) as stop_answering:
            note(f"listening on {address}")
            if access.api_key is None and not access.host.startswith(_LOOPBACK):
                note("anybody who can reach this address can use the model; --api-key asks for a key")
            if open_page:
                webbrowser.open(address)
            server.model = _load(load, options, source, alias, draft_model, small)
            room = f"{options.parallel} requests at once, {server.model.n_ctx} tokens each"
            note(f"{server.model.name} is ready: {room}, --exact {'on' if server.model.exact else 'off'}")
            try:
                lost: str | None = wait_for_loss()
            except (KeyboardInterrupt, Terminated):
                lost = None
                note(f"stopping: running requests have {DRAIN_SECONDS:g} s to end; again: at once")
            _drain(server)
            stop_answering()
            if lost is not None:
                fail(lost)


def _load(
    load: LoadOptions,
    options: EngineOptions,
    source: ModelSource,
    alias: str | None,
    draft_model: SecondModelOptions,
    small: ModelSource | None,
) -> ServedModel:
    """The model, ready to answer, and a small one that drafts for it, if there is one.

    The thread that opens them is the engine's, for the reason that `Engine` gives.
    """
    executor = ThreadPoolExecutor(1, "engine")
    with signals_deferred():
        settings = {"lanes": options.parallel, **load.settings(options.longest)}
        shared = executor.submit(SharedTarget, source.path, **settings, exact=load.exact).result()
    for line in shared.notes:
        note(line)
    drafts = not options.no_draft and shared.can_rollback
    if not options.no_draft and not drafts:
        note("this model's memory cannot be taken back (recurrent or hybrid), so drafting is off")
    asked = None
    if drafts and small is not None:
        with signals_deferred():
            asked = executor.submit(draft_model.load_asked, shared, small).result()
    memory = open_memory(options.memory, shared, keep=False) if drafts and not options.no_memory else None
    starting = executor.submit(
        open_engine,
        shared,
        drafts=drafts,
        draft_max=options.draft_max or LONGEST_DRAFT,
        model=asked,
        memory=memory,
        kept=file_of(shared.vocabulary_hash) if drafts and not options.no_memory else None,
        cache_room=options.cache_room,
        crashed=lambda error: complain(f"the engine failed: {type(error).__name__}: {error}"),
        executor=executor,
    )
    engine = starting.result()
    meta = {"n_ctx_train": shared.n_ctx_train, "size": source.path.stat().st_size}
    name, exact = alias or source.path.stem, shared.exact == "on"
    return ServedModel(engine, shared, name, str(source.path), meta, drafts, options.spm_infill, exact)


def _drain(server: Server) -> None:
    """Let running requests end, which they do at their next pass if a worker is lost; a signal ends the program."""
    server.draining = True
    assert server.model is not None
    try:
        server.model.service.stop(DRAIN_SECONDS)
    except (KeyboardInterrupt, Terminated):
        os._exit(INTERRUPTED)  # the engine's thread is in the middle of a pass


# --------------------------------------------------------------------------- HTTP


@contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    """A socket that listens; ends the program if the port is taken or there is no such address."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        # Python adds the address to what the system says.
        reason = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        fail(f"cannot listen on {host}:{port}: {reason}; choose another --port or --host")
    with listener:
        yield listener


def _address(host: str, port: int) -> str:
    """Where a browser on this machine finds the server."""
    name = "127.0.0.1" if host == "0.0.0.0" else f"[{host if host != '::' else '::1'}]" if ":" in host else host
    return f"http://{name}:{port}"


@contextmanager
def _answering(app: object, listener: socket.socket) -> Iterator[Callable[[], None]]:
    """Answer requests on a thread until the block ends."""
    config = uvicorn.Config(
        app,  # type: ignore[arg-type]
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=2,
    )
    served = uvicorn.Server(config)
    thread = threading.Thread(target=served.run, kwargs={"sockets": [listener]}, name="http", daemon=True)
    thread.start()
    while not served.started and thread.is_alive():
        time.sleep(0.01)

    def stop() -> None:
        served.should_exit = True
        thread.join()

    try:
        yield stop
    finally:
        served.should_exit = True


def log(entry: Entry) -> None:
    """A line for a request that asked for work or was wrong; who only looks, as monitors do, is left out."""
    if entry.method == "GET" and (entry.status < 400 or entry.status == 503):
        return
    cost = entry.tally
    told = [f"{entry.method} {entry.path} {entry.status}", f"{entry.seconds:.2f} s"]
    if cost.prompt_tokens:
        told.append(f"prompt {cost.prompt_tokens} ({cost.cached} cached)")
    if cost.tokens:
        told.append(f"{cost.tokens} tokens" + (f" at {cost.tokens / cost.seconds:.1f}/s" if cost.seconds else ""))
    if cost.drafted:
        told.append(f"drafted {cost.drafted}, accepted {cost.accepted}")
    note(", ".join(told))
