"""`Endpoint`: an address of the server, and what all addresses have in common.

A request is read and checked, handed to the endpoint's handler, and given up as soon as its client leaves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from starlette.datastructures import QueryParams
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ngramspec.errors import NGramSpecError
from ngramspec.server import tally
from ngramspec.server.body import GoneError, read_body, read_json
from ngramspec.server.errors import ApiError, Wording, of_failure, worded
from ngramspec.server.fields import Fields
from ngramspec.server.json_text import JsonAnswer
from ngramspec.server.served import Server

Handler = Callable[[Server, Fields], Awaitable[Response]]
"""Answers a request, given the fields of its JSON (of its query, for GET). Raises ApiError or NGramSpecError
for what is wrong with the request; anything else is a defect of the server."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An address.

    Attributes:
        paths: its names.
        handler: what answers.
        method: of HTTP.
        wording: its errors as JSON.
        public: whether it answers without an API key.
    """

    paths: tuple[str, ...]
    handler: Handler
    method: Literal["GET", "POST"] = "POST"
    wording: Wording = worded
    public: bool = False

    def told(self, error: ApiError) -> Response:
        return JsonAnswer(self.wording(error), error.status)


class EndpointApp:
    """An endpoint of a server, as ASGI has it."""

    def __init__(self, endpoint: Endpoint, server: Server) -> None:
        self._endpoint, self._server = endpoint, server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            raw = await read_body(scope, receive, self._server.most_bytes)
        except ApiError as error:
            await self._endpoint.told(error)(scope, receive, send)
            return
        except GoneError:
            return
        work = asyncio.ensure_future(self._respond(raw, scope, receive, send))
        gone = asyncio.ensure_future(_until_gone(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            if (counted := tally.current.get()) is not None:
                counted.cancel()
            work.cancel()
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    async def _respond(self, raw: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if self._endpoint.method == "POST":
                given = Fields(read_json(raw))
            else:
                given = Fields(dict(QueryParams(scope["query_string"])))
            response = await self._endpoint.handler(self._server, given)
        except (ApiError, NGramSpecError) as error:
            response = self._endpoint.told(of_failure(error))
        except Exception:
            await self._endpoint.told(ApiError(500, "internal error"))(scope, receive, send)
            raise
        await response(scope, receive, send)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
