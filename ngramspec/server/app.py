"""`make_app`: the server as a Starlette application. `Access` says who may ask; an `Endpoint` reads a request, hands it
on as a `Call`, and gives it up as soon as its client leaves; `logged` counts it.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import re
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from starlette.applications import Starlette
from starlette.datastructures import Headers, QueryParams
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ngramspec.errors import NGramSpecError
from ngramspec.server import anthropic, ollama, openai_chat, responses
from ngramspec.server.call import LIST, ApiError, Call, Counters, Fields, Server, json_answer, of_failure, worded
from ngramspec.server.embeddings import embedding, embeddings, ollama_embed, ollama_embeddings
from ngramspec.server.llama_server import apply_template, completion, detokenize, infill, tokenize
from ngramspec.server.metrics import metrics
from ngramspec.server.ollama_info import processes, show, tags, version
from ngramspec.server.openai_chat import chat_completions
from ngramspec.server.openai_completions import completions
from ngramspec.server.page import markdown, page
from ngramspec.server.status import (
    health,
    lora_adapters,
    model,
    models,
    props,
    scale_lora_adapters,
    slot_action,
    slots,
)

_SLOT = re.compile("/slots/[0-9]{1,4}")
_LOCAL_PAGE = re.compile(r"https?://(localhost|127\.0\.0\.1|\[::1\])(:[0-9]{1,5})?")
_COUNTERS = "ngramspec.counters"  # where a request's scope holds them


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An address of the server that is its application's `state.server`, as ASGI has it."""

    paths: tuple[str, ...]  # its names
    # Raises ApiError or NGramSpecError for what is wrong with a request; anything else is a defect of the server.
    handler: Callable[[Call], Awaitable[Response]]
    method: Literal["GET", "POST"] = "POST"
    wording: Callable[[ApiError], dict[str, Any]] = worded  # its errors as JSON
    takes_list: bool = False  # True if the JSON of its requests is a list
    public: bool = False  # whether it answers without an API key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        server: Server = scope["app"].state.server
        try:
            raw = await _read_body(Request(scope, receive), server.most_bytes)
        except ApiError as error:
            await refusal(error, self)(scope, receive, send)
            return
        except ClientDisconnect:
            return
        work = asyncio.ensure_future(self._respond(server, raw, scope, receive, send))
        gone = asyncio.ensure_future(_until_gone(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            work.cancel()
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    async def _respond(self, server: Server, raw: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        counters: Counters = scope[_COUNTERS]
        try:
            query = Fields({**QueryParams(scope["query_string"]), **scope.get("path_params", {})})
            # The body may be empty: POST /slots/N?action=erase needs none.
            fields = Fields(await _read_json(raw or b"{}", self.takes_list)) if self.method == "POST" else query
            response = await self.handler(Call(server, fields, counters, query, Headers(scope=scope)))
        except (ApiError, NGramSpecError) as error:
            told = of_failure(error)
            counters.field = told.param or (told.code if isinstance(told.code, str) else "")
            response = refusal(told, self)
        except Exception:
            await refusal(ApiError(500, "internal error"), self)(scope, receive, send)
            raise
        await response(scope, receive, send)


def refusal(error: ApiError, endpoint: Endpoint | None, path: str = "") -> Response:
    """Return an error as a response in the format of its API, which the path tells if there is no endpoint."""
    other = ollama.worded if path.startswith("/api/") else worded
    return json_answer((other if endpoint is None else endpoint.wording)(error), error.status)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


Log = Callable[[Counters], None]


def logged(app: ASGIApp, paths: frozenset[str], log: Log | None) -> ASGIApp:
    """An ASGI application whose requests are counted, and told to a log when they end."""

    async def asked(scope: Scope, receive: Receive, send: Send) -> None:
        counters, began = Counters(), time.monotonic()

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                counters.status = message["status"]
                # Names of headers have no case, but some clients compare them with llama-server's.
                message["headers"] = [(name.title(), value) for name, value in message.get("headers", ())]
            await send(message)

        try:
            await app({**scope, _COUNTERS: counters}, receive, noted)
        finally:
            if log is not None and scope["type"] == "http":
                counters.method, counters.took = scope["method"], time.monotonic() - began
                if scope["path"] in paths or _SLOT.fullmatch(scope["path"]):
                    counters.path = scope["path"]
                log(counters)

    return asked


async def _read_body(request: Request, most: int) -> bytes:
    """The body of a request. Raises ApiError beyond `most` bytes, ClientDisconnect where its client left before."""
    too_large = ApiError(413, f"the request is larger than the maximum of {most / 2**20:g} MiB")
    lengths = request.headers.getlist("content-length")
    if any(not value.isdecimal() or len(value) > 15 or int(value) > most for value in lengths):
        raise too_large
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > most:
            raise too_large
    return bytes(body)


MAX_VALUES = 400_000
"""Maximum number of values in the JSON of a request: the other requests wait while it is read."""

_VALUES = re.compile(rb'"[^"\\]*(?:\\.?[^"\\]*)*(?:"|\Z)|[,\[{]', re.DOTALL)
"""Strings, and what comes before each other value but the first of an array or object."""


def _has_many_values(raw: bytes) -> bool:
    found = (1 for match in _VALUES.finditer(raw) if not match[0].startswith(b'"'))
    return sum(islice(found, MAX_VALUES + 1)) > MAX_VALUES


async def _read_json(raw: bytes, takes_list: bool = False) -> dict[str, Any]:
    """Return the JSON object of a body, or its list in a field.

    Raises:
        ApiError: it is not one, has too many values, or contains a nan, an infinity or an unpaired surrogate.
    """
    if sum(map(raw.count, (b",", b"[", b"{"))) > MAX_VALUES and await asyncio.to_thread(_has_many_values, raw):
        raise ApiError(413, f"the request contains more than {MAX_VALUES:,} values")
    try:
        text = raw.decode("utf-8-sig")
        data = json.loads(text, parse_constant=_refuse)
        if "\\ud" in text.lower():  # there is no other way to write half a surrogate pair
            json.dumps(data, ensure_ascii=False).encode()
    except RecursionError:
        raise ApiError(400, "the request's JSON is nested too deeply") from None
    except UnicodeEncodeError:
        raise ApiError(400, "the request contains an unpaired surrogate, which is not valid text") from None
    except ValueError as error:  # not JSON, not UTF-8, or a number of thousands of digits
        raise ApiError(400, f"the request is not valid JSON: {error}") from error
    if takes_list and isinstance(data, list):
        return {LIST: data}
    if takes_list or not isinstance(data, dict):
        raise ApiError(400, f"the request must be a JSON {'list' if takes_list else 'object'}")
    return data


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not part of JSON")


# --------------------------------------------------------------------------- who may ask


class Access:
    """Middleware that lets through who may ask: a web page in a browser must not reach a model on the same machine.

    - DNS rebinding: a page of evil.example whose name is made to mean 127.0.0.1 is the same origin as this server to
      the browser. Its requests still name evil.example as their host, which is refused. An address in digits names no
      page of anybody else, so any is fine.
    - Another page's requests carry its origin. One that was not allowed is refused, though it could not read the
      answer: an answer costs minutes of the machine. Pages of this machine, on any port, are allowed: only a program
      of the user's can serve them, and such a program needs no browser to reach this server.
    - With API keys, one of them must be shown. Then containers may call this machine host.docker.internal, too: a page
      that has this name has no key.
    - Health checks of HTTP/1.0 name no host; browsers always do.
    """

    def __init__(
        self,
        app: ASGIApp,
        endpoints: Mapping[str, Endpoint],
        keys: Sequence[str],
        origins: Collection[str],
        hosts: Collection[str],
    ) -> None:
        self._app = app
        self._endpoints = endpoints
        self._keys = [key.encode() for key in keys]
        self._origins = set(origins)
        self._hosts = {"localhost", *(host.lower() for host in hosts), *(["host.docker.internal"] if keys else ())}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            endpoint = self._endpoints.get(scope["path"])
            old = scope.get("http_version") == "1.0"
            error = self._refusal(Headers(scope=scope), endpoint is not None and endpoint.public, old)
            if error is not None:
                await refusal(error, endpoint, scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refusal(self, headers: Headers, public: bool, old: bool) -> ApiError | None:
        host = headers.get("host", "")
        if len(headers.getlist("host")) > 1:
            return ApiError(400, "the request has more than one Host header")
        if not self._known(host) and not (public and old and "host" not in headers):
            return ApiError(403, f"unknown host name {host[:80]!r}; start the server with --allow-host to accept it")
        origin = headers.get("origin")
        if origin is not None and not self._is_allowed(origin) and not _is_same(origin, host):
            return ApiError(
                403,
                f"requests from pages of {origin[:80]!r} are not allowed; start the server with --cors to allow them",
            )
        if self._keys and not public and not self._shown(headers):
            return ApiError(401, "Invalid API Key")
        return None

    def _is_allowed(self, origin: str) -> bool:
        return bool(self._origins & {origin, "*"} or _LOCAL_PAGE.fullmatch(origin))

    def _known(self, host: str) -> bool:
        name = _without_port(host).lower()
        if name in self._hosts:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def _shown(self, headers: Headers) -> bool:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        candidates = [headers.get("x-api-key", ""), token.strip() if scheme.lower() == "bearer" else ""]
        # Every key is compared to the end, or the time would tell how much of one is right.
        found = [hmac.compare_digest(raw.encode("latin-1"), key) for raw in candidates for key in self._keys]
        return any(found)


class CrossOrigin(CORSMiddleware):
    """Middleware that lets browsers read the responses to pages of allowed origins, and of this machine.

    Preflight requests of other origins get status 200 without permission, as llama-server answers them.
    """

    def __init__(self, app: ASGIApp, origins: Collection[str]) -> None:
        super().__init__(
            app,
            allow_origins=list(origins),
            allow_origin_regex=_LOCAL_PAGE.pattern,
            allow_methods=["GET", "POST", "OPTIONS"],
            allow_headers=["*"],
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code == 200:
            return response
        return Response(headers={"Vary": "Origin"})


_HOST = re.compile(r"(?:\[(?P<address>[0-9A-Fa-f:.]+)\]|(?P<name>[^\[\]:/?#@\s]*))(?::[0-9]{0,5})?")


def _without_port(host: str) -> str:
    """Return the name or address of a `Host`; "" if it is neither."""
    found = _HOST.fullmatch(host)
    return "" if found is None else found["address"] or found["name"] or ""


def _is_same(origin: str, host: str) -> bool:
    """Return True if pages of this origin come from a server with this `Host`."""
    scheme, _, name = origin.partition("://")
    return scheme in ("http", "https") and name == host


# --------------------------------------------------------------------------- addresses


ENDPOINTS = (
    Endpoint(("/health", "/v1/health"), health, "GET", public=True),
    Endpoint(("/v1/models", "/models"), models, "GET"),
    Endpoint(("/v1/models/{id:path}", "/models/{id:path}"), model, "GET"),
    Endpoint(("/props",), props, "GET"),
    Endpoint(("/lora-adapters",), lora_adapters, "GET"),
    Endpoint(("/lora-adapters",), scale_lora_adapters, takes_list=True),
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
    Endpoint(("/v1/messages",), anthropic.messages, wording=anthropic.worded),
    Endpoint(("/v1/messages/count_tokens",), anthropic.count_tokens, wording=anthropic.worded),
    Endpoint(("/v1/responses", "/responses"), responses.responses),
    Endpoint(("/v1/responses/input_tokens",), responses.input_tokens),
    Endpoint(("/api/chat",), ollama.chat, wording=ollama.worded),
    Endpoint(("/api/generate",), ollama.generate_text, wording=ollama.worded),
    Endpoint(("/api/embed",), ollama_embed, wording=ollama.worded),
    Endpoint(("/api/embeddings",), ollama_embeddings, wording=ollama.worded),
    Endpoint(("/api/tags",), tags, "GET", wording=ollama.worded),
    Endpoint(("/api/ps",), processes, "GET", wording=ollama.worded),
    Endpoint(("/api/show",), show, wording=ollama.worded),
    Endpoint(("/api/version",), version, "GET", wording=ollama.worded),
)

_RANKS = "this server does not support ranking"
_ONE_MODEL = "this server serves one model; to use another, restart it: ngramspec serve MODEL"

NOT_THERE = {
    **dict.fromkeys(("/v1/rerank", "/rerank", "/v1/reranking", "/reranking"), _RANKS),
    "/props": "settings cannot be changed after the server has started",
    "/v1/audio/transcriptions": "this server accepts only text",
    "/v1/audio/speech": "this server generates only text",
    "/v1/images/generations": "this server generates only text",
    "/v1/moderations": "this server does not support moderation",
    **{f"/api/{name}": _ONE_MODEL for name in ("pull", "push", "create", "copy", "delete", "blobs")},
}
"""Addresses of llama-server, OpenAI and Ollama that are answered with 501, and why."""


def make_app(
    server: Server,
    *,
    keys: Sequence[str] = (),
    origins: Collection[str] = (),
    hosts: Collection[str] = (),
    log: Log | None = None,
) -> Starlette:
    """The application of a server, whose model may be given to it later.

    Args:
        keys: API keys, of which a request must show one; none: it need not.
        origins: of web pages that may ask; "*": all.
        hosts: names of this server beside localhost and addresses in digits.
        log: told of every request that ended.
    """
    by_path = {path: endpoint for endpoint in ENDPOINTS for path in endpoint.paths}
    routes = [Route(path, one, methods=[one.method]) for one in ENDPOINTS for path in one.paths]
    middleware = [Middleware(logged, paths=frozenset(by_path), log=log)]
    middleware.append(Middleware(CrossOrigin, origins=origins))
    middleware.append(Middleware(Access, endpoints=by_path, keys=keys, origins=origins, hosts=hosts))

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        messages = {404: "File Not Found", 405: f"method {request.method} is not allowed"}
        path = request.url.path
        if (why := NOT_THERE.get("/api/blobs" if path.startswith("/api/blobs/") else path)) is not None:
            told = ApiError(501, why)
        else:
            told = ApiError(error.status_code, messages.get(error.status_code, error.detail))
        response = refusal(told, by_path.get(path), path)
        response.headers.update(error.headers or {})
        return response

    app = Starlette(routes=routes, middleware=middleware, exception_handlers={HTTPException: refused})
    app.state.server = server
    return app
