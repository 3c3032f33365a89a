"""`ngramspec serve`: an HTTP server for a model with the APIs of common clients.

The HTTP server has its own thread. The thread of the engine also loads the model. The main thread waits for signals,
and after one for running requests.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import webbrowser
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import psutil

from ngramspec.batching.engine import Engine
from ngramspec.batching.writer import choose_sizes
from ngramspec.chat.template import large_worker as large_template_worker
from ngramspec.chat.template import worker as template_worker
from ngramspec.cost.store import StoredTimes
from ngramspec.data import ModelError
from ngramspec.grammars.worker import worker as grammar_worker
from ngramspec.llama.embedder import open_embedder
from ngramspec.llama.placement import MICRO_BATCH
from ngramspec.loading.load import find, open_resolved
from ngramspec.loading.settings import LOADING, LoadSettings
from ngramspec.model_settings import MAX_DRAFT
from ngramspec.models.find import ModelSource
from ngramspec.sampling.settings import Sampling, allow_range, option, options
from ngramspec.server.state import EUCLIDEAN, ServedModel, Server

from .console import INTERRUPTED, TERMINATED, Terminated, fail, note, print_error, usage_error
from .llama_options import NoEffect
from .options import DISPLAY, Model
from .reasoning_options import ReasoningOptions
from .sampling_options import CHAT_TEMPERATURE, SamplingOptions, setting
from .serve_options import MAX_EMBEDDED, ServeOptions

if TYPE_CHECKING:
    from ngramspec.server.state import Counters

DRAIN_SECONDS = 8.0
"""Maximum time for running requests after a signal; docker kills a container after 10 s."""

EXIT_SECONDS = 4.0
"""Maximum time for the rest of the shutdown; afterwards the process ends even if a thread does not."""

SWITCH_SECONDS = 0.0005
"""Time after which a Python thread yields to another thread; Python's default is 0.005 s.

The thread of the engine needs Python's global lock hundreds of times per second. While other threads read large
requests, it waits for this time on each occasion.
"""

_WORKERS = (grammar_worker, template_worker, large_template_worker)

_LOAD = (
    (
        *LOADING,
        *("draft_model", "gpu_layers_draft", "device_draft", "threads_draft", "mtp"),
        *("no_draft", "drafter", "draft_max", "memory", "no_memory"),
    ),
    {
        "ctx_size": "Context size of each request in tokens (llama-server: of all together); default or 0: the"
        " model's own, if memory allows.",
        "draft_max": f"Maximum draft length in tokens; default: {MAX_DRAFT}.",
        "no_memory": "Draft from a request's own context only, without other responses, a memory or draft statistics.",
    },
)

_SAMPLING = (
    tuple(options(Sampling)),
    {
        "temperature": setting("temperature", CHAT_TEMPERATURE),
        "seed": option(
            -1, "-s", "--seed", help="Random seed; -1: a random one for each request.", allowed=allow_range(-1)
        ),
    },
)


def serve(
    load: Annotated[LoadSettings, _LOAD[0], _LOAD[1]],
    serving: ServeOptions,
    reasoning: ReasoningOptions,
    sampling: Annotated[SamplingOptions, _SAMPLING[0], _SAMPLING[1]],
    model: Model = None,
    open_page: bool = option(False, "--open", help="Open the chat page in a browser."),
    *,
    no_effect: NoEffect,
) -> None:
    """Serve a model over HTTP.

    Example: ngramspec serve model.gguf (chat page: http://127.0.0.1:8080/)

    The server implements OpenAI's chat completions, completions and responses, Anthropic's messages, Ollama's API,
    llama-server's endpoints and /infill for editors, and serves a chat page at /. Requests are batched. /health returns
    503 while the model is loading. The sampling options are defaults for requests that do not set them.

    Command lines of llama-server work with one difference: -c is the context size of each request, not of all
    together. llama-server's -c 8192 -np 4 is -c 2048 -np 4 here. Options of llama-server that have no effect here
    are accepted with a note; those that cannot be supported are rejected with the reason.

    After SIGTERM or Ctrl-C, running requests have a few seconds to finish; a second Ctrl-C stops immediately. The log
    on stderr has one entry per request and contains no text of requests or responses.
    """
    try:
        import httptools  # noqa: F401
        import uvicorn  # noqa: F401

        from ngramspec.server.app import make_app
    except ImportError:
        fail("serve requires packages that are not installed: pip install 'ngramspec[server]'")
    no_effect.report()
    if serving.batch_size is not None and serving.batch_size < (load.ubatch_size or MICRO_BATCH):
        load = replace(load, ubatch_size=max(serving.batch_size, MAX_DRAFT + 1))
    if load.ctx_size and serving.parallel > 1:
        per_request = max(16, load.ctx_size // serving.parallel)
        each = f"-c {load.ctx_size} is the context size of each of {serving.parallel} requests"
        note(f"{each}; llama-server divides it among them (equivalent to -c {per_request} here)")
    try:
        defaults = sampling.settings({"seed": max(0, sampling.seed)})
    except ValueError as error:
        usage_error(str(error))
    keys = serving.keys
    source = find(model, load, DISPLAY)
    server = Server(
        defaults,
        None if sampling.seed == -1 else sampling.seed,
        is_verbose=serving.verbose,
        has_slots=not serving.no_slots,
        has_page=not serving.no_ui,
        has_metrics=serving.metrics,
        slot_folder=serving.slot_save_path,
    )
    hosts = [*serving.hosts, *(serving.allow_host or ())]
    app = make_app(server, keys=keys, origins=serving.origins, hosts=hosts, log=log)
    with ExitStack() as stack:
        stack.callback(sys.setswitchinterval, sys.getswitchinterval())
        sys.setswitchinterval(SWITCH_SECONDS)
        listeners = _open_listeners(stack, serving.hosts, serving.port)
        for worker in _WORKERS:
            stack.enter_context(worker.session())
        stop_answering = _serve_requests(stack, app, listeners, serving)
        address = _address(serving, listeners[0].getsockname()[1])
        note(f"listening on {address}")
        if not keys and not all(host.startswith(("127.", "::1", "localhost")) for host in serving.hosts):
            note("warning: anyone who can reach this address can use the model; set --api-key-file to require a key")
        if open_page:
            webbrowser.open(address)
        try:
            server.model = served_model = open_served_model(load, serving, source, defaults.grammar, reasoning)
            with suppress(KeyboardInterrupt, Terminated):
                note(f"drafts: {served_model.drafter or 'off'}")
                room = f"{serving.parallel} requests at once, {served_model.n_ctx} tokens each"
                note(f"{served_model.name} is ready: {room}, --exact {'on' if served_model.exact else 'off'}")
                wait_for_signal()
            _shut_down(stack, server, served_model, stop_answering)
        except (KeyboardInterrupt, Terminated) as signal:
            # Python would wait for the engine's thread, which loads the model or runs a decode call.
            os._exit(TERMINATED if isinstance(signal, Terminated) else INTERRUPTED)


def _shut_down(stack: ExitStack, server: Server, model: ServedModel, stop_answering: Callable[[], None]) -> None:
    """Wait for running requests, but not longer than the time for them."""
    timer = threading.Timer(DRAIN_SECONDS + EXIT_SECONDS, _exit_late)
    timer.daemon = True
    timer.start()
    stack.callback(timer.cancel)
    limit = f"waiting up to {DRAIN_SECONDS:g} s for running requests"
    note(f"shutting down: {limit}; press Ctrl-C again to stop now")
    server.draining = True
    for worker in _WORKERS:
        worker.close()
    model.service.stop(DRAIN_SECONDS)
    stop_answering()


def _exit_late() -> None:
    """End the process even if threads do not end."""
    text = f"warning: a request did not end within {DRAIN_SECONDS + EXIT_SECONDS:g} s; exiting without it"
    # Writing to stderr does not return if the reader of a pipe has stopped reading.
    writer = threading.Thread(target=note, args=(text,), daemon=True)
    writer.start()
    writer.join(0.5)
    os._exit(0)


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
    display = replace(DISPLAY, guard=nullcontext)
    loaded_model = executor.submit(open_resolved, source, load, display, texts=options.parallel).result()
    target, drafter = loaded_model.target, loaded_model.drafter
    if options.template is not None:
        target.vocabulary.use_chat_template(options.template)
    else:
        try:
            target.vocabulary.chats.check()
        except ModelError as error:
            note(f"warning: {error}; chats return status 400 unless you set --chat-template or --chat-template-file")
    reasoning.check(target.vocabulary.chat_template)
    if grammar is not None:
        target.vocabulary.grammar(grammar)  # an invalid grammar makes the start fail, not every request
    size = min(target.n_ctx, MAX_EMBEDDED)
    embedder = executor.submit(open_embedder, target, options.pooling, size).result() if options.embeddings else None
    if embedder is not None:
        note(f"embeddings: pooling {embedder.pooling}, texts of up to {embedder.n_ctx} tokens, in a separate context")
        if embedder.pooling == "none":
            note(
                "warning: /v1/embeddings requires pooling; set --pooling mean (/embedding returns one vector per token)"
            )
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


def wait_for_signal() -> None:
    threading.Event().wait()  # the handlers of signals raise exceptions


# --------------------------------------------------------------------------- HTTP


def _open_listeners(stack: ExitStack, hosts: Sequence[str], port: int) -> list[socket.socket]:
    """Listen on one port of several addresses; ends the program if the port is taken or an address is unknown."""
    listeners: list[socket.socket] = []
    for host in hosts:
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
                0
            ]
            listeners.append(stack.enter_context(socket.create_server(address[:2], family=family, backlog=2048)))
        except OSError as error:
            # Python adds the address to the system's message, so the message comes from the error number.
            reason = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
            fail(f"cannot listen on {host}:{port}: {reason}; choose another --port or --host")
        port = listeners[0].getsockname()[1]  # with --port 0, the first address gets a free port
    return listeners


def _address(options: ServeOptions, port: int) -> str:
    host, scheme = options.hosts[0], "http" if options.ssl_cert_file is None else "https"
    name = "127.0.0.1" if host == "0.0.0.0" else f"[{host if host != '::' else '::1'}]" if ":" in host else host
    return f"{scheme}://{name}:{port}"


def _serve_requests(
    stack: ExitStack, app: object, listeners: Sequence[socket.socket], options: ServeOptions
) -> Callable[[], None]:
    """Answer requests on a thread until `stack` ends; the returned function waits for its end."""
    import uvicorn

    from ngramspec.server.connection import Connection, HttpServer

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

    stack.callback(setattr, http_server, "should_exit", True)
    return stop


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
