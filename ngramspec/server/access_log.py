"""`Entry`: what the log says of a request; nothing in it was written by a user or a model."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ngramspec.server import tally
from ngramspec.server.tally import Tally


class Entry(NamedTuple):
    """A request that ended.

    Attributes:
        method, path: what was asked; the path is "?" where there is no such address.
        status: of HTTP; 499 where the client left before there was one.
        seconds: from the request's first byte to the answer's last.
        tally: what it cost.
    """

    method: str
    path: str
    status: int
    seconds: float
    tally: Tally


Log = Callable[[Entry], None]

CLIENT_LEFT = 499


class Logged:
    """An ASGI application whose requests are counted, and told to a log when they end."""

    def __init__(self, app: ASGIApp, paths: frozenset[str], log: Log | None) -> None:
        self._app, self._paths, self._log = app, paths, log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        counted, status, began = Tally(), CLIENT_LEFT, time.monotonic()

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        before = tally.current.set(counted)
        try:
            await self._app(scope, receive, noted)
        finally:
            tally.current.reset(before)
            counted.cancel()
            if self._log is not None:
                path = scope["path"] if scope["path"] in self._paths else "?"
                self._log(Entry(scope["method"], path, status, time.monotonic() - began, counted))
