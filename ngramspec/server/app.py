"""`make_app`: the server as a Starlette application, and the table of its addresses."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ngramspec.server import anthropic, openai_chat, responses
from ngramspec.server.access import Access
from ngramspec.server.embeddings import embedding, embeddings
from ngramspec.server.errors import ApiError, worded
from ngramspec.server.http import Endpoint, EndpointApp, JsonAnswer, Log, Logged
from ngramspec.server.infill import infill
from ngramspec.server.llama_server import apply_template, completion, detokenize, tokenize
from ngramspec.server.openai_chat import chat_completions
from ngramspec.server.openai_completions import completions
from ngramspec.server.page import markdown, page
from ngramspec.server.slot_files import slot_action
from ngramspec.server.state import Server
from ngramspec.server.status import health, metrics, model, models, props, slots

ENDPOINTS = (
    Endpoint(("/health", "/v1/health"), health, "GET", public=True),
    Endpoint(("/v1/models", "/models"), models, "GET"),
    Endpoint(("/v1/models/{id:path}", "/models/{id:path}"), model, "GET"),
    Endpoint(("/props",), props, "GET"),
    Endpoint(("/slots",), slots, "GET"),
    Endpoint(("/slots/{id_slot:int}",), slot_action),
    Endpoint(("/metrics",), metrics, "GET"),
    Endpoint(("/v1/chat/completions", "/chat/completions"), chat_completions),
    Endpoint(("/v1/chat/completions/input_tokens",), openai_chat.input_tokens),
    Endpoint(("/v1/completions",), completions),
    Endpoint(("/completion", "/completions"), completion),
    Endpoint(("/infill",), infill),
    Endpoint(("/v1/embeddings", "/embeddings"), embeddings),
    Endpoint(("/embedding",), embedding),
    # Whoever needs an API key enters it there.
    Endpoint(("/",), page, "GET", public=True),
    Endpoint(("/markdown",), markdown),
    Endpoint(("/tokenize",), tokenize),
    Endpoint(("/detokenize",), detokenize),
    Endpoint(("/apply-template",), apply_template),
    Endpoint(("/v1/messages",), anthropic.messages, wording=anthropic.worded),
    Endpoint(("/v1/messages/count_tokens",), anthropic.count_tokens, wording=anthropic.worded),
    Endpoint(("/v1/responses", "/responses"), responses.responses),
    Endpoint(("/v1/responses/input_tokens",), responses.input_tokens),
)

_RANKS = "this server generates text; it ranks no documents"

NOT_THERE = {
    **dict.fromkeys(("/v1/rerank", "/rerank", "/v1/reranking", "/reranking"), _RANKS),
    "/props": "settings are given when the server is started, and cannot be changed",
    "/lora-adapters": "this server loads no LoRA adapters",
    "/v1/audio/transcriptions": "this server reads only text",
    "/v1/audio/speech": "this server writes only text",
    "/v1/images/generations": "this server writes only text",
    "/v1/moderations": "this server generates text; it moderates none",
}
"""Addresses of llama-server and OpenAI that are answered with 501, and why."""


def make_app(
    server: Server,
    *,
    keys: Sequence[str] = (),
    origins: Collection[str] = (),
    hosts: Collection[str] = (),
    log: Log | None = None,
    endpoints: Sequence[Endpoint] = ENDPOINTS,
) -> Starlette:
    """The application of a server, whose model may be given to it later.

    Args:
        server: what requests share.
        keys: API keys, of which a request must show one; none: it need not.
        origins: of web pages that may ask; "*": all.
        hosts: names of this server beside localhost and addresses in digits.
        log: told of every request that ended.
        endpoints: the addresses.
    """
    by_path = {path: endpoint for endpoint in endpoints for path in endpoint.paths}
    routes = [Route(path, EndpointApp(one, server), methods=[one.method]) for path, one in by_path.items()]
    middleware = [Middleware(Logged, paths=frozenset(by_path), log=log)]
    if origins:
        cors: dict[str, Any] = {"allow_origins": list(origins), "allow_methods": ["*"], "allow_headers": ["*"]}
        middleware.append(Middleware(CORSMiddleware, **cors))
    middleware.append(Middleware(Access, endpoints=by_path, keys=keys, origins=origins, hosts=hosts))

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        messages = {404: "File Not Found", 405: f"{request.method} is not allowed here"}
        if (why := NOT_THERE.get(request.url.path)) is not None:
            told = ApiError(501, why)
        else:
            told = ApiError(error.status_code, messages.get(error.status_code, error.detail))
        endpoint = by_path.get(request.url.path)
        response = JsonAnswer((worded if endpoint is None else endpoint.wording)(told), told.status)
        response.headers.update(error.headers or {})
        return response

    return Starlette(routes=routes, middleware=middleware, exception_handlers={HTTPException: refused})
