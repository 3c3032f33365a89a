"""`ngramspec serve`: an HTTP server for a model with the APIs of common clients."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from ngramspec.llama.placement import MICRO_BATCH
from ngramspec.loading.settings import LOADING, LoadSettings
from ngramspec.model_settings import MAX_DRAFT
from ngramspec.sampling.settings import Sampling, allow_range, option, options

from .console import fail, note, usage_error
from .llama_options import NoEffect
from .options import Model
from .reasoning_options import ReasoningOptions
from .sampling_options import CHAT_TEMPERATURE, SamplingOptions, setting
from .serve_options import ServeOptions

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
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError:
        fail("serve requires packages that are not installed: pip install 'ngramspec[server]'")
    from .serve_run import run

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
    seed = None if sampling.seed == -1 else sampling.seed
    run(load, serving, defaults, seed, model, reasoning, open_page=open_page)
