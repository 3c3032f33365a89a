"""The server as a Starlette application, with all its endpoints and a log."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ngramspec.server import anthropic, ollama, openai_chat, responses
from ngramspec.server.access import Access, CrossOrigin
from ngramspec.server.embeddings import embedding, embeddings, ollama_embed, ollama_embeddings
from ngramspec.server.endpoint import Endpoint, error_response
from ngramspec.server.errors import ApiError, ollama_error_body
from ngramspec.server.limits import MAX_PATH
from ngramspec.server.llama_server import apply_template, completion, detokenize, infill, tokenize
from ngramspec.server.ollama import processes, show, tags, version
from ngramspec.server.openai_chat import chat_completions
from ngramspec.server.openai_completions import completions
from ngramspec.server.page import markdown, page
from ngramspec.server.slot_files import slot_action
from ngramspec.server.state import COUNTERS, Counters, Server
from ngramspec.server.status import health, lora_adapters, metrics, model, models, props, scale_lora_adapters, slots

Log = Callable[[Counters], None]


def log_requests(app: ASGIApp, log: Log | None) -> ASGIApp:
    """Return an ASGI application that counts its requests, and logs them when they end."""

    async def handle(scope: Scope, receive: Receive, send: Send) -> None:
        counters, started_at = Counters(), time.monotonic()

        async def send_and_note_status(message: Message) -> None:
            if message["type"] == "http.response.start":
                counters.status = message["status"]
            await send(message)

        try:
            await app({**scope, COUNTERS: counters}, receive, send_and_note_status)
        finally:
            if log is not None and scope["type"] == "http":
                counters.method, counters.duration_seconds = scope["method"], time.monotonic() - started_at
                counters.path = scope["path"][:MAX_PATH].encode("unicode_escape").decode()
                log(counters)

    return handle


# --------------------------------------------------------------------------- endpoints


ENDPOINTS = (
    Endpoint(("/health", "/v1/health"), health, "GET", public=True),
    Endpoint(("/v1/models", "/models"), models, "GET"),
    Endpoint(("/v1/models/{id:path}", "/models/{id:path}"), model, "GET"),
    Endpoint(("/props",), props, "GET"),
    Endpoint(("/lora-adapters",), lora_adapters, "GET"),
    Endpoint(("/lora-adapters",), scale_lora_adapters, list_field="adapters"),
    Endpoint(("/slots",), slots, "GET"),
    Endpoint(("/slots/{id_slot}",), slot_action),
    Endpoint(("/metrics",), metrics, "GET"),
    Endpoint(("/v1/chat/completions", "/chat/completions"), chat_completions),
    Endpoint(("/v1/chat/completions/input_tokens", "/chat/completions/input_tokens"), openai_chat.input_tokens),
    Endpoint(("/v1/completions",), completions),
    Endpoint(("/completion", "/completions"), completion),
    Endpoint(("/infill",), infill),
    Endpoint(("/v1/embeddings", "/embeddings"), embeddings),
    Endpoint(("/embedding",), embedding),
    # Users enter the API key on the page.
    Endpoint(("/",), page, "GET", public=True),
    Endpoint(("/markdown",), markdown),
    Endpoint(("/tokenize",), tokenize),
    Endpoint(("/detokenize",), detokenize),
    Endpoint(("/apply-template",), apply_template),
    Endpoint(("/v1/messages",), anthropic.messages, format_error=anthropic.error_body),
    Endpoint(("/v1/messages/count_tokens",), anthropic.count_tokens, format_error=anthropic.error_body),
    Endpoint(("/v1/responses", "/responses"), responses.responses),
    Endpoint(("/v1/responses/input_tokens",), responses.input_tokens),
    Endpoint(("/api/chat",), ollama.chat, format_error=ollama_error_body),
    Endpoint(("/api/generate",), ollama.generate_text, format_error=ollama_error_body),
    Endpoint(("/api/embed",), ollama_embed, format_error=ollama_error_body),
    Endpoint(("/api/embeddings",), ollama_embeddings, format_error=ollama_error_body),
    Endpoint(("/api/tags",), tags, "GET", format_error=ollama_error_body),
    Endpoint(("/api/ps",), processes, "GET", format_error=ollama_error_body),
    Endpoint(("/api/show",), show, format_error=ollama_error_body),
    Endpoint(("/api/version",), version, "GET", format_error=ollama_error_body),
)

_RANKS = "this server does not support ranking"
_ONE_MODEL = "this server serves one model; to use another, restart it: ngramspec serve MODEL"

UNSUPPORTED_PATHS = {
    **dict.fromkeys(("/v1/rerank", "/rerank", "/v1/reranking", "/reranking"), _RANKS),
    "/props": "settings cannot be changed after the server has started",
    "/v1/audio/transcriptions": "this server accepts only text",
    "/v1/audio/speech": "this server generates only text",
    "/v1/images/generations": "this server generates only text",
    "/v1/moderations": "this server does not support moderation",
    **{f"/api/{name}": _ONE_MODEL for name in ("pull", "push", "create", "copy", "delete", "blobs")},
}
"""Paths of llama-server, OpenAI and Ollama that return status 501, and the reasons."""


def make_app(
    server: Server,
    *,
    keys: Sequence[str] = (),
    origins: Collection[str] = (),
    hosts: Collection[str] = (),
    log: Log | None = None,
) -> Starlette:
    """Return the application of a server, whose model may be loaded later.

    Args:
        server: State that all requests share.
        keys: API keys, of which a request must have one; empty means that none is required.
        origins: Allowed origins of web pages, in addition to those of this machine; "*" means all.
        hosts: Names of this server, in addition to localhost and IP addresses.
        log: Function that is called after every request.
    """
    by_path = {path: endpoint for endpoint in ENDPOINTS for path in endpoint.paths}
    routes = [Route(path, target, methods=[target.method]) for target in ENDPOINTS for path in target.paths]
    middleware = [Middleware(log_requests, log=log)]
    middleware.append(Middleware(CrossOrigin, origins=origins))
    middleware.append(Middleware(Access, endpoints=by_path, keys=keys, origins=origins, hosts=hosts))

    async def handle_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        messages = {404: "File Not Found", 405: f"method {request.method} is not allowed"}
        path = request.url.path
        if (reason := UNSUPPORTED_PATHS.get("/api/blobs" if path.startswith("/api/blobs/") else path)) is not None:
            api_error = ApiError(501, reason)
        elif path == "/cors-proxy":
            api_error = ApiError(403, "this server does not forward requests to other servers")
        else:
            api_error = ApiError(error.status_code, messages.get(error.status_code, error.detail))
        response = error_response(api_error, by_path.get(path), request.scope)
        response.headers.update(error.headers or {})
        return response

    app = Starlette(routes=routes, middleware=middleware, exception_handlers={HTTPException: handle_http_error})
    app.state.server = server
    return app
