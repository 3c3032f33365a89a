"""`ngramspec serve`: an HTTP server for a model with the APIs of common clients.

The HTTP server has its own thread. The thread of the engine also loads the model. The main thread waits for signals,
and after one for running requests.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import ssl
import sys
import threading
import time
import webbrowser
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import psutil

from ngramspec.batching.engine import Engine
from ngramspec.batching.writer import choose_sizes
from ngramspec.chat.template import check_variables
from ngramspec.chat.template import large_worker as large_template_worker
from ngramspec.chat.template import worker as template_worker
from ngramspec.cost.store import StoredTimes
from ngramspec.data import ModelError
from ngramspec.grammars.gbnf import worker as grammar_worker
from ngramspec.llama.chat_format import builtin_names
from ngramspec.llama.embedder import Embedder, Pooling
from ngramspec.llama.passes import MAX_EVALUATE
from ngramspec.llama.placement import MICRO_BATCH
from ngramspec.loading.load import find, open_resolved
from ngramspec.loading.settings import LoadSettings
from ngramspec.model_settings import MAX_DRAFT
from ngramspec.models.find import ModelSource
from ngramspec.sampling.settings import Sampling, allow_int_range, allow_range, option, options
from ngramspec.server.state import EUCLIDEAN, ServedModel, Server

from .console import Terminated, exit_code, fail, note, print_error, read_text, usage_error, usage_errors
from .options import CHAT_TEMPERATURE, DISPLAY, Model, NoEffect, SamplingOptions, predict_option, setting
from .reasoning_options import ReasoningOptions

if TYPE_CHECKING:
    from ngramspec.server.state import Counters

DRAIN_SECONDS = 8.0  # maximum time for running requests after a signal; docker kills a container after 10 s
EXIT_SECONDS = 4.0  # maximum time for the rest of the shutdown; then the process ends even if a thread does not

SWITCH_SECONDS = 0.0005
"""Time after which a Python thread yields to another thread; Python's default is 0.005 s.

The thread of the engine needs Python's global lock hundreds of times per second. While other threads read large
requests, it waits for this time on each occasion.
"""

BLOCK = 4 * 2**20  # bytes from which a freed block of memory is returned to the system, see `return_freed_blocks`

WORKERS = (grammar_worker, template_worker, large_template_worker)

_LOAD = {
    "ctx_size": "Context size of each request in tokens (llama-server: of all together); default or 0: the"
    " model's own, if memory allows.",
    "draft_max": f"Maximum draft length in tokens; default: {MAX_DRAFT}.",
    "no_memory": "Draft from a request's own context only, without other responses, a memory or draft statistics.",
}
_SAMPLING = {
    "temperature": setting("temperature", CHAT_TEMPERATURE),
    "seed": option(-1, "-s", "--seed", help="Random seed; -1: a random one for each request.", allowed=allow_range(-1)),
}


MAX_EMBEDDED = 8192  # tokens of an input to embed, as in OpenAI's models; a larger cache would surprise


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Address, access control, parallel requests and embeddings of the server."""

    alias: str | None = option(
        None,
        "-a",
        metavar="NAME,...",
        help="Model names for clients, the first one in the alphabet for responses; default: the file name.",
    )
    tags: str | None = option(None, metavar="TAG,...", help="Labels of the model, shown in /v1/models.")
    host: str = option(
        "127.0.0.1", metavar="ADDRESS,...", help="Addresses to listen on; 0.0.0.0: all IPv4 addresses of this machine."
    )
    port: int = option(8080, help="Port to listen on; 0: any free port.", allowed=allow_int_range(0, 65535))
    api_key: str | None = option(
        None, help="API key that requests must send, visible in the process list; default: $NGRAMSPEC_API_KEY."
    )
    api_key_file: Path | None = option(
        None, help="File with accepted API keys, one per line; unlike --api-key not visible to other users."
    )
    ssl_key_file: Path | None = option(None, help="Private key for HTTPS (PEM).")
    ssl_cert_file: Path | None = option(None, help="Certificate for HTTPS (PEM).")
    cors: list[str] | None = option(
        None,
        "--cors",
        "--cors-origins",
        metavar="ORIGIN,...",
        help="Allowed origins of web pages, such as https://example.org; *: all; repeatable;"
        " pages of this machine are always allowed.",
    )
    allow_host: list[str] | None = option(
        None, metavar="NAME", help="Additional accepted host name of this server; repeatable."
    )
    parallel: int = option(
        4, "-np", help="Maximum number of requests at once; others wait.", allowed=allow_int_range(1, MAX_EVALUATE)
    )
    cache_ram: int | None = option(
        None,
        "-cram",
        metavar="MIB",
        help="Prompt cache in MiB, for conversations evicted from their slot; default: a quarter of free RAM.",
        allowed=allow_range(0),
    )
    slot_save_path: Path | None = option(
        None, metavar="FOLDER", help="Folder for POST /slots/N?action=save|restore; default: saving is disabled."
    )
    predict: int = predict_option(-1, "Default for max_tokens of requests; -1: until the context is full.")
    chat_template: str | None = option(
        None, metavar="JINJA|NAME", help="Chat template, or the name of one of llama.cpp's, instead of the model's own."
    )
    chat_template_file: Path | None = option(None, help="File with a chat template, instead of the model's own.")
    chat_template_kwargs: str | None = option(
        None, metavar="JSON", help="Variables of the chat template as a JSON object, for requests that do not set them."
    )
    batch_size: int | None = option(
        None,
        "-b",
        help="Maximum number of prompt tokens per decode call; limits --ubatch-size.",
        allowed=allow_range(1),
    )
    verbose: bool = option(False, "-v", help="Add the prompt and all settings to responses, as __verbose.")
    metrics: bool = option(False, help="Enable /metrics for Prometheus.")
    no_slots: bool = option(False, help="Disable /slots, which shows the progress of running requests.")
    no_ui: bool = option(False, "--no-ui", "--no-webui", help="Disable the chat page.")
    spm_infill: bool = option(False, help="Use suffix-prefix-middle order for fill-in-the-middle prompts (Codestral).")
    embeddings: bool = option(
        False,
        "--embeddings",
        "--embedding",
        help=f"Enable /v1/embeddings; needs memory for one more context, of at most {MAX_EMBEDDED} tokens.",
    )
    pooling: Pooling | None = option(
        None,
        help="Pooling for embeddings: mean, cls (first token), last, or none (one vector per token);"
        " default: as set in the model file.",
    )
    embd_normalize: int | None = option(
        None,
        help="Normalization of embeddings: -1: none, 0: 16-bit integers, 2: length 1, p: p-norm 1; default: 2.",
        allowed=allow_range(-1),
    )

    def __post_init__(self) -> None:
        if self.api_key is not None and not self.api_key.strip():
            usage_error("--api-key must not be empty")
        if (self.ssl_key_file is None) != (self.ssl_cert_file is None):
            usage_error("--ssl-key-file and --ssl-cert-file must be used together")
        if self.ssl_key_file is not None and self.ssl_cert_file is not None:
            try:
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.ssl_cert_file, self.ssl_key_file)
            except (OSError, ssl.SSLError) as error:
                fail(f"cannot use the certificate {self.ssl_cert_file}: {error.strerror or error}")
        if self.slot_save_path is not None and not self.slot_save_path.is_dir():
            fail(f"--slot-save-path: no such folder: {self.slot_save_path}")
        if self.chat_template is not None and self.chat_template_file is not None:
            usage_error("--chat-template cannot be combined with --chat-template-file")
        name, names = self.chat_template, builtin_names()
        if name is not None and "{" not in name and name not in names:
            usage_error(f"--chat-template: {name!r} is neither a Jinja template nor one of: {', '.join(names)}")
        self.variables  # noqa: B018 - checks them
        if not self.embeddings and (self.pooling is not None or self.embd_normalize is not None):
            usage_error("--pooling and --embd-normalize require --embeddings")

    @property
    def hosts(self) -> list[str]:
        """Addresses to listen on; exits without one."""
        return _split(self.host) or usage_error("--host must not be empty")

    @property
    def keys(self) -> list[str]:
        """Accepted API keys; empty means that no key is required. Exits if the file cannot be used."""
        keys = [] if self.api_key is None else [self.api_key]
        if self.api_key_file is not None:
            lines = [line.strip() for line in read_text(self.api_key_file).splitlines()]
            if not any(lines):
                fail(f"{self.api_key_file} contains no key")
            keys += filter(None, lines)
        return keys

    @property
    def template(self) -> str | None:
        """Chat template that replaces the model's; `None` means the model's own. Exits if the file cannot be read."""
        return self.chat_template if self.chat_template_file is None else read_text(self.chat_template_file)

    @property
    def variables(self) -> Mapping[str, Any]:
        """Variables of the chat template. Exits if they cannot be used."""
        if self.chat_template_kwargs is None:
            return {}
        with usage_errors("--chat-template-kwargs is not valid JSON: ", (ValueError, RecursionError)):
            variables = json.loads(self.chat_template_kwargs)
        with usage_errors("--chat-template-kwargs: "):
            check_variables(variables)
        return cast(Mapping[str, Any], variables)


def _split(text: str | None) -> list[str]:
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def serve(
    load: Annotated[LoadSettings, tuple(name for name in options(LoadSettings) if name != "policy"), _LOAD],
    serving: ServeOptions,
    reasoning: ReasoningOptions,
    sampling: Annotated[SamplingOptions, tuple(options(Sampling)), _SAMPLING],
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
        each = f"each of {serving.parallel} requests has a context of {load.ctx_size} tokens"
        note(f"{each}; llama-server's -c {load.ctx_size} is -c {per_request} here, because it is divided among them")
    defaults = sampling.settings({"seed": max(0, sampling.seed)})
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
    origins = [name for text in serving.cors or () for name in _split(text) if name != "localhost"]
    app = make_app(server, keys=keys, origins=origins, hosts=hosts, log=log)
    with ExitStack() as stack:
        stack.callback(sys.setswitchinterval, sys.getswitchinterval())
        sys.setswitchinterval(SWITCH_SECONDS)
        return_freed_blocks()
        listeners = _open_listeners(stack, serving.hosts, serving.port)
        for worker in WORKERS:
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
        except (KeyboardInterrupt, Terminated) as error:
            # Python would wait for the engine's thread, which loads the model or runs a decode call.
            os._exit(exit_code(error))


def _shut_down(stack: ExitStack, server: Server, model: ServedModel, stop_answering: Callable[[], None]) -> None:
    timer = threading.Timer(DRAIN_SECONDS + EXIT_SECONDS, _exit_late)
    timer.daemon = True
    timer.start()
    stack.callback(timer.cancel)
    limit = f"waiting up to {DRAIN_SECONDS:g} s for running requests"
    note(f"shutting down: {limit}; press Ctrl-C again to stop now")
    server.draining = True
    for worker in WORKERS:
        worker.close()
    model.service.stop(DRAIN_SECONDS)
    stop_answering()


def _exit_late() -> None:
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
    """Load the models in the engine's thread, as `Engine` requires; `grammar` is the default grammar of requests."""
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
    embedder = executor.submit(Embedder, target, options.pooling, size).result() if options.embeddings else None
    if embedder is not None:
        note(f"embeddings: pooling {embedder.pooling}, texts of up to {embedder.n_ctx} tokens, in a separate context")
        if embedder.pooling == "none":
            note(
                "warning: /v1/embeddings requires pooling; set --pooling mean (/embedding returns one vector per token)"
            )
    exactness = executor.submit(choose_sizes, target, exact=target.exact == "on").result()
    ram = options.cache_ram
    cache_room = psutil.virtual_memory().available // 4 if ram is None else ram * 2**20
    engine = Engine(
        target,
        target.vocabulary,
        stored=StoredTimes(target.sequences[0]),
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
    names = sorted({*_split(options.alias)}) or [source.label]  # sorted as in llama-server
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
        tags=_split(options.tags),
        variables={**reasoning.variables, **options.variables},
        reasoning_budget=reasoning.reasoning_budget,
        reasoning_message=reasoning.reasoning_budget_message,
    )


def return_freed_blocks() -> None:
    """Return large blocks of memory to the system when they are freed, on Linux with glibc.

    By default, glibc takes blocks of up to 32 MiB from its heaps after the first one is freed. Saved states and large
    responses then leave gaps, and the memory of a server keeps growing.
    """
    if sys.platform == "linux":
        with suppress(AttributeError):  # other C libraries lack the function
            ctypes.CDLL(None).mallopt(-3, BLOCK)  # M_MMAP_THRESHOLD


def wait_for_signal() -> None:
    threading.Event().wait()  # the handlers of signals raise exceptions


def _open_listeners(stack: ExitStack, hosts: Sequence[str], port: int) -> list[socket.socket]:
    """Listen on one port of several addresses; ends the program if the port is taken or an address is unknown."""
    listeners: list[socket.socket] = []
    for host in hosts:
        try:
            family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
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
