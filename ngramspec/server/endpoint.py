"""Endpoint of the server, which reads the request and cancels its work when the client disconnects (`Endpoint`)."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, Literal, cast, get_args, get_type_hints

from starlette.datastructures import Headers, QueryParams
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ngramspec.data import NGramSpecError
from ngramspec.server.body import B, Body, parse
from ngramspec.server.errors import ApiError, error_body, ollama_error_body, to_api_error
from ngramspec.server.json_text import JsonResponse
from ngramspec.server.limits import LARGE_JSON, MAX_DIGITS, MAX_VALUES
from ngramspec.server.state import COUNTERS, Call, Counters, Server


@dataclass(frozen=True)
class Endpoint:
    """An endpoint as an ASGI application; the server is the `state.server` of the application in the scope."""

    paths: tuple[str, ...]  # paths of the endpoint
    # Function that answers a call. It raises an ApiError or NGramSpecError for an invalid request; other exceptions are
    # defects of the server.
    handler: Callable[[Call[Any]], Awaitable[Response]]
    method: Literal["GET", "POST"] = "POST"
    format_error: Callable[[ApiError], dict[str, Any]] = error_body  # function that returns the JSON of an error
    list_field: str = ""  # field that contains the JSON of a request if it is a list
    public: bool = False  # whether the endpoint requires no API key

    @cached_property
    def body(self) -> type[Body]:
        """Model of the JSON of a request, from the annotation of the handler."""
        (model,) = get_args(get_type_hints(self.handler)["call"])
        return cast(type[Body], model)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        server: Server = scope["app"].state.server
        try:
            raw = await _read_body(Request(scope, receive), server.max_body_bytes)
        except ApiError as error:
            await error_response(error, self, scope)(scope, receive, send)
            return
        except ClientDisconnect:
            return
        work = asyncio.ensure_future(self._respond(server, raw, scope, receive, send))
        disconnect = asyncio.ensure_future(_wait_for_disconnect(receive))
        try:
            await asyncio.wait({work, disconnect}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            work.cancel()
            disconnect.cancel()
            await asyncio.gather(work, disconnect, return_exceptions=True)

    async def _respond(self, server: Server, raw: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        counters: Counters = scope[COUNTERS]
        try:
            query = {**QueryParams(scope["query_string"]), **scope.get("path_params", {})}
            # The body may be empty, such as in POST /slots/N?action=erase.
            body, data = await _read_json(raw if raw and self.method == "POST" else b"{}", self.body, self.list_field)
            response = await self.handler(Call(server, body, data, counters, query, Headers(scope=scope)))
        except (ApiError, NGramSpecError) as error:
            response = error_response(to_api_error(error), self, scope)
        except Exception:
            await error_response(ApiError(500, "internal error"), self, scope)(scope, receive, send)
            raise
        await response(scope, receive, send)


def error_response(error: ApiError, endpoint: Endpoint | None, scope: Scope) -> Response:
    """Return an error as a response in the format of its API, which depends on the path if there is no endpoint."""
    counters: Counters = scope[COUNTERS]
    counters.error, counters.field = error.type, error.param or (error.code if isinstance(error.code, str) else "")
    default_format = ollama_error_body if scope["path"].startswith("/api/") else error_body
    response = JsonResponse((default_format if endpoint is None else endpoint.format_error)(error), error.status)
    if error.is_final:
        response.headers["X-Should-Retry"] = "false"  # the clients of OpenAI and Anthropic obey it
    return response


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


async def _read_json(raw: bytes, model: type[B], list_field: str) -> tuple[B, dict[str, Any]]:
    """Return a body and its JSON; raise an ApiError if it is invalid or too large."""
    if sum(map(raw.count, (b",", b"[", b"{"))) > MAX_VALUES and await asyncio.to_thread(_has_many_values, raw):
        raise ApiError(413, f"the request contains more than {MAX_VALUES:,} values")
    try:
        if len(raw) < LARGE_JSON:
            return _parse(raw, model, list_field)
        return await asyncio.to_thread(_parse, raw, model, list_field)
    except RecursionError:
        raise ApiError(400, "the request's JSON is nested too deeply") from None
    except UnicodeEncodeError:
        raise ApiError(400, "the request contains an unpaired surrogate, which is not valid text") from None
    except ValueError as error:  # not JSON, not UTF-8, or a number with too many digits
        raise ApiError(400, f"the request is not valid JSON: {error}") from error


def _parse(raw: bytes, model: type[B], list_field: str) -> tuple[B, dict[str, Any]]:
    """Parse JSON. Raises ValueError, UnicodeEncodeError for unpaired surrogates, RecursionError, or ApiError."""
    text = raw.decode("utf-8-sig")
    data: Any = json.loads(text, parse_constant=_refuse, parse_int=_read_whole_number)
    if "\\ud" in text.lower():  # there is no other way to write half a surrogate pair
        json.dumps(data, ensure_ascii=False).encode()
    if not isinstance(data, list if list_field else dict):
        raise ApiError(400, f"the request must be a JSON {'list' if list_field else 'object'}")
    fields: Any = {list_field: data} if list_field else data
    return parse(model, fields), fields


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not part of JSON")


def _read_whole_number(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number has more than {MAX_DIGITS:,} digits")
    return int(digits)
