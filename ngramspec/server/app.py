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

from ngramspec.server import anthropic, responses
from ngramspec.server.access import Access
from ngramspec.server.access_log import Log, Logged
from ngramspec.server.chat_completions import chat_completions
from ngramspec.server.completions import completions
from ngramspec.server.endpoint import Endpoint, EndpointApp
from ngramspec.server.errors import ApiError, worded
from ngramspec.server.health import health, models, props, slots
from ngramspec.server.infill import infill
from ngramspec.server.json_text import JsonAnswer
from ngramspec.server.metrics import metrics
from ngramspec.server.native import completion
from ngramspec.server.page import page
from ngramspec.server.served import Server
from ngramspec.server.tokens_api import apply_template, detokenize, tokenize

ENDPOINTS = (
    Endpoint(("/health", "/v1/health"), health, "GET", public=True),
    Endpoint(("/v1/models", "/models"), models, "GET"),
    Endpoint(("/props",), props, "GET"),
    Endpoint(("/slots",), slots, "GET"),
    Endpoint(("/metrics",), metrics, "GET"),
    Endpoint(("/v1/chat/completions", "/chat/completions"), chat_completions),
    Endpoint(("/v1/completions",), completions),
    Endpoint(("/completion", "/completions"), completion),
    Endpoint(("/infill",), infill),
    # Whoever needs an API key enters it there.
    Endpoint(("/",), page, "GET", public=True),
    Endpoint(("/tokenize",), tokenize),
    Endpoint(("/detokenize",), detokenize),
    Endpoint(("/apply-template",), apply_template),
    *anthropic.ENDPOINTS,
    *responses.ENDPOINTS,
)


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
        told = ApiError(error.status_code, messages.get(error.status_code, error.detail))
        endpoint = by_path.get(request.url.path)
        response = JsonAnswer((worded if endpoint is None else endpoint.wording)(told), told.status)
        response.headers.update(error.headers or {})
        return response

    return Starlette(routes=routes, middleware=middleware, exception_handlers={HTTPException: refused})
