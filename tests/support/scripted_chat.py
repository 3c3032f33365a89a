"""A server whose chat answers are written beforehand: as a real one streams them, and as slowly as a test wants."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ngramspec.server.page import page

WAIT = object()
"""In a script: nothing more comes before the test lets it."""


@dataclass
class ScriptedChat:
    """What the next questions are answered with, and what was asked.

    Attributes:
        scripts: for each answer its events: chunks, or WAIT.
        refusals: status and body of what is refused before anything is answered; taken first.
        go: set by the test to let a script go on after WAIT.
        asked: the requests: their bodies.
        keys: their Authorization headers.
        left: set when a client went before its answer's end.
    """

    scripts: list[list[Any]] = field(default_factory=list)
    refusals: list[tuple[int, Any]] = field(default_factory=list)
    go: threading.Event = field(default_factory=threading.Event)
    asked: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    left: threading.Event = field(default_factory=threading.Event)

    async def chat(self, request: Request) -> Response:
        self.asked.append(await request.json())
        self.keys.append(request.headers.get("authorization"))
        if self.refusals:
            status, body = self.refusals.pop(0)
            return JSONResponse(body, status)
        return StreamingResponse(self.stream(self.scripts.pop(0)), media_type="text/event-stream")

    async def stream(self, script: list[Any]) -> AsyncIterator[bytes]:
        try:
            yield b": a comment, as servers send them in silence\n\n"
            for event in script:
                if event is WAIT:
                    while not self.go.is_set():
                        await asyncio.sleep(0.01)
                    self.go.clear()
                else:
                    # In two writes, as a network may deliver it.
                    data = f"data: {event if isinstance(event, str) else json.dumps(event, ensure_ascii=False)}\n\n".encode()
                    yield data[: len(data) // 2]
                    yield data[len(data) // 2 :]
        except asyncio.CancelledError:
            self.left.set()
            raise

    async def models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "scripted-model", "object": "model"}]})

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/", page),
                Route("/v1/models", self.models),
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
            ]
        )


def said(text: str, drafted: list[list[int]] | None = None, *, name: str = "content", **more: Any) -> dict[str, Any]:
    """A chunk with a piece of an answer, and the spans of it that were drafted."""
    choice = {"index": 0, "delta": {name: text}, "finish_reason": None}
    return {"choices": [choice | ({"drafted": drafted} if drafted is not None else {})], **more}


def ended(reason: str = "stop", **timings: Any) -> list[Any]:
    """How an answer ends: the reason, the usage with timings, and the mark of the end."""
    usage = {
        "prompt_tokens": 20,
        "completion_tokens": 12,
        "total_tokens": 32,
        "prompt_tokens_details": {"cached_tokens": 15},
    }
    measured = {"predicted_n": 12, "predicted_per_second": 34.56, "draft_n": 8, "draft_n_accepted": 5, "gain": 1.42}
    return [
        {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]},
        {"choices": [], "usage": usage, "timings": measured | timings},
        "[DONE]",
    ]


@contextmanager
def serving(app: Starlette) -> Iterator[str]:
    """Serve on a free port of this machine; gives the address."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        threading.Event().wait(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/"
    finally:
        server.should_exit = True
        thread.join()
