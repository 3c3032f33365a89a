"""`ngramspec serve`: the model behind the HTTP API that clients speak."""

from __future__ import annotations

from typing import Annotated

from ngramspec.loading.settings import LOADING, LoadSettings
from ngramspec.sampling.option import option, options, within
from ngramspec.sampling.settings import Sampling

from .console import fail, note, usage_error
from .options import Model
from .sampling_options import CHAT_TEMPERATURE, SamplingOptions, setting
from .serve_options import LONGEST_DRAFT, ServeOptions, Unneeded

_LOAD = (
    (
        *LOADING,
        *("draft_model", "gpu_layers_draft", "threads_draft", "mtp", "no_draft", "draft_max", "memory", "no_memory"),
    ),
    {
        "ctx_size": "Context of each request in tokens (llama-server: of all); default, as 0: the model's, if memory"
        " allows.",
        "draft_max": f"Most tokens in a draft; default: {LONGEST_DRAFT}.",
        "no_memory": "Draft from a request's own context alone, not from other answers, nor from what drafts have"
        " learnt.",
    },
)

_SAMPLING = (
    tuple(options(Sampling)),
    {
        "temperature": setting("temperature", CHAT_TEMPERATURE),
        "seed": option(-1, "-s", "--seed", help="Seed; -1: a random one for each request.", allowed=within(-1)),
    },
)


def serve(
    load: Annotated[LoadSettings, _LOAD[0], _LOAD[1]],
    serving: ServeOptions,
    sampling: Annotated[SamplingOptions, _SAMPLING[0], _SAMPLING[1]],
    model: Model = None,
    model_file: str | None = option(None, "-m", "--model", metavar="MODEL", help="The same as MODEL."),
    alias: str | None = option(None, "-a", "--alias", metavar="NAME", help="Name of the model; default: the file's."),
    open_page: bool = option(False, "--open", help="Open the chat page in a browser."),
    *,
    unneeded: Unneeded,
) -> None:
    """Serve a model over HTTP: ngramspec serve model.gguf (then http://127.0.0.1:8080/ shows a chat page)

    OpenAI's chat completions, completions and responses, Anthropic's messages, llama-server's own endpoints, editors'
    /infill, and a page at /. Several requests share each pass of the model. /health answers 503 while the model loads.
    The sampling options are what a request gets that does not say otherwise.

    A command line of llama-server's carries over, but for one thing: -c is the context of each request, not of all
    together; -c 8192 -np 4 there is -c 2048 -np 4 here.

    SIGTERM and Ctrl-C let running requests end for some seconds; a second Ctrl-C ends at once. The log on stderr has
    a line for each request, and no text of anybody's.
    """
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError:
        fail("serve needs packages that are not installed: pip install 'ngramspec[server]'")
    from .serve_run import run

    if model is not None and model_file is not None:
        usage_error(f"two models are named: {model} and, with -m, {model_file}; give one")
    unneeded.tell()
    if load.ctx_size and serving.parallel > 1:
        shared = max(16, load.ctx_size // serving.parallel)
        each = f"-c {load.ctx_size} is the context of each of {serving.parallel} requests"
        note(f"{each}; llama-server shares it among them (-c {shared} is that)")
    try:
        defaults = sampling.settings({"seed": max(0, sampling.seed)})
    except ValueError as error:
        usage_error(str(error))
    seed = None if sampling.seed == -1 else sampling.seed
    run(load, serving, defaults, seed, model or model_file, alias, open_page=open_page)
