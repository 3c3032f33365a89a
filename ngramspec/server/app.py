"""The server as a Starlette application, with all its endpoints and a log; and the reading of requests."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers, QueryParams
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ngramspec.data import NGramSpecError
from ngramspec.server import anthropic, embeddings, native, ollama, openai_completions, page, status
from ngramspec.server.access import Access, CrossOrigin
from ngramspec.server.body import B, Body, parse
from ngramspec.server.chat import answer_chat, count_tokens
from ngramspec.server.embeddings import EmbeddingsBody
from ngramspec.server.json_text import ApiError, error_body, to_api_error
from ngramspec.server.limits import LARGE_JSON, MAX_DIGITS, MAX_PATH, MAX_VALUES
from ngramspec.server.openai_chat import ChatBody, ChatReply
from ngramspec.server.responses import ResponseReply, ResponsesBody
from ngramspec.server.state import COUNTERS, FORMAT, Call, Counters, Server, error_response

Log = Callable[[Counters], None]


def log_requests(app: ASGIApp, log: Log | None) -> ASGIApp:
    async def handle(scope: Scope, receive: Receive, send: Send) -> None:
        counters, started_at = Counters(), time.monotonic()

        async def send_and_note_status(message: Message) -> None:
            if message["type"] == "http.response.start":
                counters.status = message["status"]
            await send(message)

        try:
            shared = {COUNTERS: counters, FORMAT: find_error_format(scope.get("path", ""))}
            await app({**scope, **shared}, receive, send_and_note_status)
        finally:
            if log is not None and scope["type"] == "http":
                counters.method, counters.duration_seconds = scope["method"], time.monotonic() - started_at
                counters.path = scope["path"][:MAX_PATH].encode("unicode_escape").decode()
                log(counters)

    return handle


@dataclass(frozen=True)
class Endpoint:
    paths: tuple[str, ...]
    # Function that answers a call. It raises an ApiError or NGramSpecError for an invalid request; other exceptions are
    # defects of the server.
    handler: Callable[[Call[Any]], Awaitable[Response]]
    body: type[Body] | None = None  # model of the JSON of a request; `None` if its method is GET

    @property
    def method(self) -> str:
        return "GET" if self.body is None else "POST"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            raw = await _read_body(Request(scope, receive), scope["app"].state.server.max_body_bytes)
        except ClientDisconnect:
            return
        work = asyncio.ensure_future(self._respond(raw, scope, receive, send))
        disconnect = asyncio.ensure_future(_wait_for_disconnect(receive))
        try:
            await asyncio.wait({work, disconnect}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            work.cancel()
            disconnect.cancel()
            await asyncio.gather(work, disconnect, return_exceptions=True)

    async def _respond(self, raw: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            query = {**QueryParams(scope["query_string"]), **scope.get("path_params", {})}
            # The body may be empty, such as in POST /slots/N?action=erase.
            body, data = await _read_json(raw if raw and self.body else b"{}", self.body or Body)
            server: Server = scope["app"].state.server
            call = Call(server, body, data, scope[COUNTERS], query, Headers(scope=scope), scope[FORMAT])
            response = await self.handler(call)
        except (ApiError, NGramSpecError):
            raise
        except Exception:
            await error_response(ApiError(500, "internal error"), scope)(scope, receive, send)
            raise
        await response(scope, receive, send)


_COUNT = partial(count_tokens, object="response.input_tokens")

ENDPOINTS = (
    Endpoint(("/health", "/v1/health"), status.health),
    Endpoint(("/v1/models", "/models"), status.models),
    Endpoint(("/v1/models/{id:path}", "/models/{id:path}"), status.model),
    Endpoint(("/props",), status.props),
    Endpoint(("/lora-adapters",), status.lora_adapters),
    Endpoint(("/lora-adapters",), status.scale_lora_adapters, status.AdaptersBody),
    Endpoint(("/slots",), status.slots),
    Endpoint(("/slots/{id_slot}",), status.slot_action, status.SlotBody),
    Endpoint(("/metrics",), status.metrics),
    Endpoint(("/v1/chat/completions", "/chat/completions"), partial(answer_chat, make_reply=ChatReply), ChatBody),
    Endpoint(("/v1/chat/completions/input_tokens", "/chat/completions/input_tokens"), _COUNT, ChatBody),
    Endpoint(("/v1/completions",), openai_completions.completions, openai_completions.CompletionBody),
    Endpoint(("/completion", "/completions"), native.completion, native.PromptBody),
    Endpoint(("/infill",), native.infill, native.InfillBody),
    Endpoint(("/v1/embeddings", "/embeddings"), embeddings.embeddings, EmbeddingsBody),
    Endpoint(("/embedding",), embeddings.embedding, EmbeddingsBody),
    Endpoint(("/",), page.page),
    Endpoint(("/markdown",), page.markdown, page.MarkdownBody),
    Endpoint(("/tokenize",), native.tokenize, native.TokenizeBody),
    Endpoint(("/detokenize",), native.detokenize, native.DetokenizeBody),
    Endpoint(("/apply-template",), native.apply_template, ChatBody),
    Endpoint(("/v1/messages",), partial(answer_chat, make_reply=anthropic.MessageReply), anthropic.MessageBody),
    Endpoint(("/v1/messages/count_tokens",), count_tokens, anthropic.ConversationBody),
    Endpoint(("/v1/responses", "/responses"), partial(answer_chat, make_reply=ResponseReply), ResponsesBody),
    Endpoint(("/v1/responses/input_tokens",), _COUNT, ResponsesBody),
    Endpoint(("/api/chat",), ollama.chat, ollama.ChatBody),
    Endpoint(("/api/generate",), ollama.generate_text, ollama.GenerateBody),
    Endpoint(("/api/embed",), embeddings.ollama_embed, EmbeddingsBody),
    Endpoint(("/api/embeddings",), embeddings.ollama_embeddings, EmbeddingsBody),
    Endpoint(("/api/tags",), ollama.tags),
    Endpoint(("/api/ps",), ollama.processes),
    Endpoint(("/api/show",), ollama.show, Body),
    Endpoint(("/api/version",), ollama.version),
)


def find_error_format(path: str) -> Callable[[ApiError], dict[str, Any]]:
    """Return the function that makes the JSON of an error in the format of the API at a path."""
    if path.startswith("/api/"):
        return ollama.error_body
    return anthropic.error_body if path in ("/v1/messages", "/v1/messages/count_tokens") else error_body


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
    keys: Sequence[str] = (),  # API keys, of which a request must have one; empty means that none is required
    origins: Collection[str] = (),  # allowed origins of web pages, in addition to those of this machine; "*": all
    hosts: Collection[str] = (),  # names of this server, in addition to localhost and IP addresses
    log: Log | None = None,
) -> Starlette:
    """Return the application of a server, whose model may be loaded later; `log` is called after every request."""
    routes = [Route(path, target, methods=[target.method]) for target in ENDPOINTS for path in target.paths]
    middleware = [Middleware(log_requests, log=log)]
    middleware.append(Middleware(CrossOrigin, origins=origins))
    middleware.append(Middleware(Access, keys=keys, origins=origins, hosts=hosts))

    async def handle_error(request: Request, error: Exception) -> Response:
        return error_response(to_api_error(error), request.scope)

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
        response = error_response(api_error, request.scope)
        response.headers.update(error.headers or {})
        return response

    handlers = {HTTPException: handle_http_error, ApiError: handle_error, NGramSpecError: handle_error}
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)
    app.state.server = server
    return app


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _read_body(request: Request, max_bytes: int) -> bytes:
    """Read the body; raise an ApiError if it is too large, or ClientDisconnect if the client disconnects."""
    too_large = ApiError(413, f"the request is larger than the maximum of {max_bytes / 2**20:g} MiB")
    lengths = request.headers.getlist("content-length")
    if any(not value.isdecimal() or len(value) > 15 or int(value) > max_bytes for value in lengths):
        raise too_large
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > max_bytes:
            raise too_large
    return bytes(body)


_VALUES = re.compile(rb'"[^"\\]*(?:\\.?[^"\\]*)*(?:"|\Z)|[,\[{]', re.DOTALL)
"""Strings, and the character before each other value except the first of an array or object."""


def _has_many_values(raw: bytes) -> bool:
    values = (1 for match in _VALUES.finditer(raw) if not match[0].startswith(b'"'))
    return sum(islice(values, MAX_VALUES + 1)) > MAX_VALUES


async def _read_json(raw: bytes, model: type[B]) -> tuple[B, dict[str, Any]]:
    if sum(map(raw.count, (b",", b"[", b"{"))) > MAX_VALUES and await asyncio.to_thread(_has_many_values, raw):
        raise ApiError(413, f"the request contains more than {MAX_VALUES:,} values")
    try:
        if len(raw) < LARGE_JSON:
            return _parse(raw, model)
        return await asyncio.to_thread(_parse, raw, model)
    except ApiError:  # which may be a ValueError
        raise
    except RecursionError:
        raise ApiError(400, "the request's JSON is nested too deeply") from None
    except UnicodeEncodeError:
        raise ApiError(400, "the request contains an unpaired surrogate, which is not valid text") from None
    except ValueError as error:  # not JSON, not UTF-8, or a number with too many digits
        raise ApiError(400, f"the request is not valid JSON: {error}") from error


def _parse(raw: bytes, model: type[B]) -> tuple[B, dict[str, Any]]:
    """Parse JSON. Raises ValueError, UnicodeEncodeError for unpaired surrogates, RecursionError, or ApiError."""
    text = raw.decode("utf-8-sig")
    data: Any = json.loads(text, parse_constant=_refuse_constant, parse_int=_read_whole_number)
    if "\\ud" in text.lower():  # there is no other way to write half a surrogate pair
        json.dumps(data, ensure_ascii=False).encode()
    if not isinstance(data, list if model.list_field else dict):
        raise ApiError(400, f"the request must be a JSON {'list' if model.list_field else 'object'}")
    fields: Any = {model.list_field: data} if model.list_field else data
    return parse(model, fields), fields


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not part of JSON")


def _read_whole_number(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number has more than {MAX_DIGITS:,} digits")
    return int(digits)
