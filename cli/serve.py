"""`ngramspec serve`: the model behind the HTTP API that clients speak."""

from __future__ import annotations

from typing import Annotated

import typer

from .console import fail, usage_error
from .draft_model import SecondModelOptions
from .options import LoadOptions, Model
from .serve_options import AccessOptions, DefaultSampling, EngineOptions


def serve(
    load: LoadOptions,
    access: AccessOptions,
    engine: EngineOptions,
    draft_model: SecondModelOptions,
    sampling: DefaultSampling,
    model: Model = None,
    alias: Annotated[
        str | None, typer.Option("-a", "--alias", metavar="NAME", help="Name of the model; default: the file's.")
    ] = None,
    open_page: Annotated[bool, typer.Option("--open", help="Open the chat page in a browser.")] = False,
) -> None:
    """Serve a model over HTTP: ngramspec serve model.gguf (then http://127.0.0.1:8080/ shows a chat page)

    OpenAI's chat completions, completions and responses, Anthropic's messages, llama-server's own endpoints, editors'
    /infill, and a page at /. Several requests share each pass of the model. /health answers 503 while the model loads.
    The sampling options are what a request gets that does not say otherwise.

    SIGTERM and Ctrl-C let running requests end for some seconds; a second Ctrl-C ends at once. The log on stderr has
    a line for each request, and no text of anybody's.
    """
    draft_model.check_second_model()
    if draft_model.draft_model is not None and engine.no_draft:
        usage_error("-md is for drafts; leave out --no-draft")
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError:
        fail("serve needs packages that are not installed: pip install 'ngramspec[server]'")
    from .serve_run import run

    run(load, access, engine, draft_model, sampling.defaults(), model, alias, open_page)
