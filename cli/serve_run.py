"""Start, operation and shutdown of the server, which waits for running requests after a signal.

The HTTP server has its own thread. The thread of the engine also loads the model. The main thread waits for signals.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import webbrowser
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace

import psutil
import uvicorn

from ngramspec.batching.engine import Engine
from ngramspec.batching.writer import choose_sizes
from ngramspec.chat.template import large_worker as large_template_worker
from ngramspec.chat.template import worker as template_worker
from ngramspec.cost.store import StoredTimes
from ngramspec.data import ModelError
from ngramspec.grammars.worker import worker as grammar_worker
from ngramspec.llama.embedder import Embedder, open_embedder
from ngramspec.llama.target import Target
from ngramspec.loading.load import find, open_resolved
from ngramspec.loading.settings import LoadSettings
from ngramspec.model_settings import MAX_DRAFT
from ngramspec.models.find import ModelSource
from ngramspec.sampling.settings import Sampling
from ngramspec.server.app import make_app
from ngramspec.server.call import Counters
from ngramspec.server.connection import Connection, HttpServer
from ngramspec.server.state import EUCLIDEAN, ServedModel, Server

from .console import INTERRUPTED, TERMINATED, Terminated, exit_on_timeout, fail, note, print_error
from .options import DISPLAY
from .reasoning_options import ReasoningOptions
from .serve_options import MAX_EMBEDDED, ServeOptions

DRAIN_SECONDS = 8.0
"""Maximum time for running requests after a signal; docker kills a container after 10 s."""

EXIT_SECONDS = 4.0
"""Maximum time for the rest of the shutdown; afterwards the process ends even if a thread does not."""

SWITCH_SECONDS = 0.0005
"""Time after which a Python thread yields to another thread; Python's default is 0.005 s.

The thread of the engine needs Python's global lock hundreds of times per second. While other threads read large
requests, it waits for this time on each occasion.
"""

_SHUTTING_DOWN = (
    f"shutting down: waiting up to {DRAIN_SECONDS:g} s for running requests; press Ctrl-C again to stop now"
)

_WORKERS = (grammar_worker, template_worker, large_template_worker)

_LOOPBACK = ("127.", "::1", "localhost")


def run(
    load: LoadSettings,
    options: ServeOptions,
    sampling: Sampling,
    seed: int | None,
    model: str | None,
    reasoning: ReasoningOptions,
    *,
    open_page: bool,
) -> None:
    """Serve until a signal arrives; `sampling` and `seed` are the defaults of requests."""
    keys = options.keys
    source = find(model, load, DISPLAY)
    server = Server(
        sampling,
        seed,
        is_verbose=options.verbose,
        has_slots=not options.no_slots,
        has_page=not options.no_ui,
        has_metrics=options.metrics,
        slot_folder=options.slot_save_path,
    )
    hosts = [*options.hosts, *(options.allow_host or ())]
    app = make_app(server, keys=keys, origins=options.origins, hosts=hosts, log=log)
    with _switch_fast(), ExitStack() as sessions, _open_listeners(options.hosts, options.port) as listeners:
        for worker in _WORKERS:
            sessions.enter_context(worker.session())
        address = _address(options, listeners[0].getsockname()[1])
        with _serve_requests(app, listeners, options) as stop_answering:
            note(f"listening on {address}")
            if not keys and not all(host.startswith(_LOOPBACK) for host in options.hosts):
                note(
                    "warning: anyone who can reach this address can use the model; set --api-key-file to require a key"
                )
            if open_page:
                webbrowser.open(address)
            try:
                server.model = served_model = open_served_model(load, options, source, sampling.grammar, reasoning)
                _wait(served_model, options)
                with exit_on_timeout(DRAIN_SECONDS + EXIT_SECONDS, 0):
                    note(_SHUTTING_DOWN)
                    server.draining = True
                    for worker in _WORKERS:
                        worker.close()
                    served_model.service.stop(DRAIN_SECONDS)
                    stop_answering()
            except (KeyboardInterrupt, Terminated) as signal:
                # Python would wait for the engine's thread, which loads the model or runs a decode call.
                os._exit(TERMINATED if isinstance(signal, Terminated) else INTERRUPTED)


@contextmanager
def _switch_fast() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def open_served_model(
    load: LoadSettings,
    options: ServeOptions,
    source: ModelSource,
    grammar: str | None = None,
    reasoning: ReasoningOptions | None = None,
) -> ServedModel:
    """Load the model, and its draft model if there is one; `grammar` is the default grammar of requests.

    The engine's thread loads them, for the reason documented in `Engine`.
    """
    executor, reasoning = ThreadPoolExecutor(1, "engine"), reasoning or ReasoningOptions()
    template_worker.start()
    note(f"loading {source.label}" + ("" if source.draft is None else f" and the draft model {source.draft.label}"))
    loaded_model = executor.submit(
        open_resolved, source, load, replace(DISPLAY, guard=nullcontext), texts=options.parallel
    ).result()
    target, drafter = loaded_model.target, loaded_model.decoder.drafter
    _prepare_template(target, options.template)
    reasoning.check(target.vocabulary.chat_template)
    if grammar is not None:
        target.vocabulary.grammar(grammar)  # an invalid grammar makes the start fail, not every request
    embedder = executor.submit(_open_embedder, target, options).result()
    exactness = executor.submit(choose_sizes, target, exact=target.exact == "on").result()
    stored = StoredTimes(target.sequences[0])
    ram = options.cache_ram
    cache_room = psutil.virtual_memory().available // 4 if ram is None else ram * 2**20
    engine = Engine(
        target,
        target.vocabulary,
        stored=stored,
        exactness=exactness,
        drafter=drafter,
        draft_max=load.draft_max or MAX_DRAFT,
        memory=loaded_model.memory,
        cache_room=cache_room,
        scales=[scale for _, scale in load.adapters],
        on_crash=lambda error: print_error(f"the engine failed: {type(error).__name__}: {error}"),
        executor=executor,
    )
    meta = {
        "n_ctx_train": target.weights.n_ctx_train,
        "n_params": target.weights.n_params,
        "size": target.weights.size_bytes,
        "ftype": target.weights.quantisation,
    }
    names = options.names or [source.label]
    drafts = "" if drafter is None else drafter.name
    if drafter is not None and drafter.prediction is None:
        note(f"the drafter {drafts} does not use the field prediction of requests")
    return ServedModel(
        engine,
        target.vocabulary,
        names[0],
        str(source.path),
        meta,
        speculative=drafter is not None,
        suffix_first=options.spm_infill,
        exact=target.exact == "on",
        drafter=drafts,
        predict=None if options.predict == -1 else options.predict,
        embedder=embedder,
        embd_normalize=EUCLIDEAN if options.embd_normalize is None else options.embd_normalize,
        threads=lambda: target.governor.state,
        placement=target.weights.plan.summary(target.weights.layers),
        adapters=[str(file) for file, _ in load.adapters],
        aliases=names,
        tags=options.labels,
        variables={**reasoning.variables, **options.variables},
        reasoning_budget=reasoning.reasoning_budget,
        reasoning_message=reasoning.reasoning_budget_message,
    )


def _prepare_template(target: Target, template: str | None) -> None:
    """Set a chat template in place of the model's, or warn if the model's own template does not work."""
    if template is not None:
        target.vocabulary.use_chat_template(template)
        return
    try:
        target.vocabulary.check_chat_template()
    except ModelError as error:
        note(f"warning: {error}; chats return status 400 unless you set --chat-template or --chat-template-file")


def _open_embedder(target: Target, options: ServeOptions) -> Embedder | None:
    if not options.embeddings:
        return None
    embedder = open_embedder(target, options.pooling, min(target.n_ctx, MAX_EMBEDDED))
    note(f"embeddings: pooling {embedder.pooling}, texts of up to {embedder.n_ctx} tokens, in a separate context")
    if embedder.pooling == "none":
        note("warning: /v1/embeddings requires pooling; set --pooling mean (/embedding returns one vector per token)")
    return embedder


def _wait(model: ServedModel, options: ServeOptions) -> None:
    """Report that the model is ready, and wait for a signal."""
    with suppress(KeyboardInterrupt, Terminated):
        note(f"drafts: {model.drafter or 'off'}")
        room = f"{options.parallel} requests at once, {model.n_ctx} tokens each"
        note(f"{model.name} is ready: {room}, --exact {'on' if model.exact else 'off'}")
        wait_for_signal()


def wait_for_signal() -> None:
    threading.Event().wait()  # the handlers of signals raise exceptions


# --------------------------------------------------------------------------- HTTP


@contextmanager
def _open_listeners(hosts: Sequence[str], port: int) -> Iterator[list[socket.socket]]:
    """Listen on one port of several addresses; ends the program if the port is taken or an address is unknown."""
    with ExitStack() as stack:
        listeners: list[socket.socket] = []
        for host in hosts:
            listeners.append(stack.enter_context(_listen(host, port)))
            port = listeners[0].getsockname()[1]  # with --port 0, the first address gets a free port
        yield listeners


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        # Python adds the address to the system's message, so the message comes from the error number.
        reason = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        fail(f"cannot listen on {host}:{port}: {reason}; choose another --port or --host")


def _address(options: ServeOptions, port: int) -> str:
    """Return the URL of the server for a browser on this machine."""
    host, scheme = options.hosts[0], "http" if options.ssl_cert_file is None else "https"
    name = "127.0.0.1" if host == "0.0.0.0" else f"[{host if host != '::' else '::1'}]" if ":" in host else host
    return f"{scheme}://{name}:{port}"


@contextmanager
def _serve_requests(
    app: object, listeners: Sequence[socket.socket], options: ServeOptions
) -> Iterator[Callable[[], None]]:
    """Answer requests on a thread until the block ends."""
    config = uvicorn.Config(
        app,  # type: ignore[arg-type]
        http=Connection,
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        ssl_keyfile=options.ssl_key_file,
        ssl_certfile=options.ssl_cert_file,
        timeout_graceful_shutdown=3,  # seconds; `HttpServer` ends the connections before
    )
    http_server = HttpServer(config)
    thread = threading.Thread(target=http_server.run, kwargs={"sockets": list(listeners)}, name="http", daemon=True)
    thread.start()
    while not http_server.started and thread.is_alive():
        time.sleep(0.01)

    def stop() -> None:
        http_server.should_exit = True
        thread.join()

    try:
        yield stop
    finally:
        http_server.should_exit = True


def log(entry: Counters) -> None:
    """Log a request that used the model or failed; other requests, such as those of monitors, are omitted."""
    is_probe = entry.method == "GET" or entry.path == "/markdown"
    if is_probe and (entry.status < 400 or entry.status == 503):
        return
    parts = [f"{entry.method} {entry.path} {entry.status}", f"{entry.duration_seconds:.2f} s"]
    parts += filter(None, (entry.error, entry.field))
    if entry.prompt_tokens:
        parts.append(f"prompt {entry.prompt_tokens} ({entry.cached_tokens} cached)")
    if entry.tokens:
        parts.append(f"{entry.tokens} token{'' if entry.tokens == 1 else 's'}")
        if entry.decoded_tokens and entry.decode_seconds:
            parts[-1] += f" at {entry.decoded_tokens / entry.decode_seconds:.1f}/s"
    if entry.draft_tokens:
        parts.append(f"drafted {entry.draft_tokens}, accepted {entry.accepted_tokens}")
    note(", ".join(parts))
