"""Tests of the work for a request and for a streamed token: function calls, and steps that wait for a busy loop."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from statistics import median
from types import FrameType
from typing import Any

import pytest
from support.cli_runner import PATIENCE
from support.fake_service import FakeService, Script
from support.http import BODIES, CHAT, ask, make_server, parse_chunks, send

from ngramspec.server.app import make_app
from ngramspec.server.state import Server

MAX_CALLS = 50
"""Maximum number of calls of Python functions on the event loop for a streamed token, including asyncio's."""

MAX_CALLS_TO_PREPARE = 300
"""Maximum number of calls of Python functions for the prompt and the settings of a request."""

CHATS = "/v1/chat/completions"
LOOK = {"type": "function", "function": {"name": "look"}}


class Turns:
    """Callback that lets the engine take its next step after each chunk, and counts the function calls in between."""

    def __init__(self) -> None:
        self.calls = 0
        self.at_chunks: list[int] = []  # number of calls before each chunk
        self._may_step = threading.Lock()

    def acquire(self, blocking: bool, timeout: float) -> bool:
        return self._may_step.acquire(blocking, timeout)

    def profile(self, frame: FrameType, event: str, argument: object) -> None:
        self.calls += event == "call"

    def on_chunk(self, _: bytes) -> None:
        self.at_chunks.append(self.calls)
        if self._may_step.locked():
            self._may_step.release()


def stream(server: Server, path: str, body: Any, on_chunk: Callable[[bytes], None], profile: Any = None) -> str:
    """Return the body of a streamed response to a direct call of the application; `profile` is for the event loop."""
    app, raw, parts = make_app(server), json.dumps(body | {"stream": True}).encode(), list[bytes]()
    headers = [(b"host", b"localhost"), (b"content-length", str(len(raw)).encode())]
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}
    messages = [{"type": "http.request", "body": raw}]

    async def receive() -> Any:
        return messages.pop() if messages else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            parts.append(message["body"])
            on_chunk(message["body"])

    async def run() -> None:
        sys.setprofile(profile)
        try:
            await app(scope, receive, send)
        finally:
            sys.setprofile(None)

    asyncio.run(run())
    return b"".join(parts).decode()


@pytest.fixture
def threads_alternate() -> Iterator[None]:
    """Run the engine's thread only while the event loop waits, however slow the machine is."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(PATIENCE)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("threads_alternate")
@pytest.mark.parametrize("path", BODIES)
def test_stream_of_one_token_takes_few_function_calls(path: str) -> None:
    turns = Turns()
    server, _ = make_server(Script(" and so on" * 10, go=turns))  # type: ignore[arg-type]
    tools = {"tools": [LOOK]} if path == CHATS else {}
    stream(server, path, BODIES[path] | tools, turns.on_chunk, turns.profile)
    # The median leaves out tokens during which a timer of the loop ran.
    calls = [after - before for before, after in pairwise(turns.at_chunks[5:26])]
    assert median(calls) <= MAX_CALLS, calls


@pytest.mark.parametrize("path", BODIES)
def test_request_is_prepared_in_few_function_calls(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    turns, counts, to_thread = Turns(), list[int](), asyncio.to_thread

    async def count_calls(function: Any, *arguments: Any) -> Any:
        def run() -> Any:
            sys.setprofile(turns.profile)
            try:
                return function(*arguments)
            finally:
                sys.setprofile(None)
                counts.append(turns.calls)

        return await to_thread(run)

    server, _ = make_server(Script("Hello"))
    send(server, path, BODIES[path])  # what depends only on the model is computed once
    monkeypatch.setattr(asyncio, "to_thread", count_calls)
    send(server, path, BODIES[path])
    assert counts[0] <= MAX_CALLS_TO_PREPARE


@pytest.fixture
def wakes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list of the calls by which engines wake the event loop."""
    calls, schedule = list[Any](), asyncio.BaseEventLoop.call_soon_threadsafe

    def call_soon_threadsafe(loop: Any, call: Any, *arguments: Any, **options: Any) -> Any:
        if getattr(call, "__name__", "") == "_wake":
            calls.append(call)
        return schedule(loop, call, *arguments, **options)

    monkeypatch.setattr(asyncio.BaseEventLoop, "call_soon_threadsafe", call_soon_threadsafe)
    return calls


@pytest.mark.parametrize("path", BODIES)
def test_response_without_stream_wakes_event_loop_at_most_once(path: str, wakes: list[Any]) -> None:
    ask(path, BODIES[path] | {"stream": False}, Script("Hello, world: all of it"))
    assert len(wakes) <= 1


def late(path: str, body: dict[str, Any], script: Script) -> tuple[str, FakeService]:
    """Run a stream whose loop is busy from the first chunk until the engine has taken all steps."""
    script.go = threading.Semaphore(1)
    server, service = make_server(script)

    def busy(_: bytes) -> None:
        for _ in service.requests:
            script.go.release(100)  # type: ignore[union-attr]
        for ticket in service.tickets:
            ticket.end.wait(PATIENCE)

    return stream(server, path, body, busy), service


@pytest.mark.parametrize("path", BODIES)
def test_stream_with_busy_loop_joins_waiting_steps_into_one_chunk(path: str, wakes: list[Any]) -> None:
    text = "Hello, world: all of it"
    told, _ = late(path, BODIES[path], Script(text, step=2))
    assert len(wakes) <= 3
    assert sum('"lo, world: all of it"' in line for line in told.splitlines()) == 1


def test_stream_chunk_of_several_steps_contains_all_tokens_and_drafts() -> None:
    text = "Hello, world: all of it"
    told, service = late("/completion", BODIES["/completion"], Script(text))
    tokens = [token for chunk in parse_chunks(told) for token in chunk["tokens"]]
    assert len(parse_chunks(told)) == 3
    assert bytes(b"".join(map(service.vocabulary.piece, tokens))).decode() == text
    told, _ = late(CHATS, CHAT | {"return_drafts": True}, Script(text, step=3))
    drafted = content = ""
    for chunk in parse_chunks(told):
        choice = chunk["choices"][0]
        piece = choice["delta"].get("content") or ""
        content += piece
        drafted += "".join(piece[a:b] for a, b in choice.get("drafted", ()))
    assert content == text
    assert 0 < len(drafted) < len(text)


@pytest.mark.parametrize("fields", [{"logprobs": True}, {"timings_per_token": True}])
def test_stream_with_fields_per_token_sends_one_chunk_per_token(fields: dict[str, Any]) -> None:
    told, service = late(CHATS, CHAT | fields, Script("Hello, world: all of it"))
    parts = [chunk for chunk in parse_chunks(told)[1:-1] if chunk["choices"][0]["delta"]]
    assert len(parts) == service.stats.generated - 1  # The last token ends the text.
    if "logprobs" in fields:
        assert all(len(part["choices"][0]["logprobs"]["content"]) == 1 for part in parts)
    else:
        assert [part["timings"]["predicted_n"] for part in parts] == list(range(1, len(parts) + 1))


def test_stream_error_follows_waiting_steps() -> None:
    told, _ = late("/completion", {"prompt": "x"}, Script("Hello, world", error=ValueError("defect"), after=3))
    *parts, error = parse_chunks(told)
    assert "".join(part["content"] for part in parts)
    assert sum(len(part["tokens"]) for part in parts) == 3
    assert error["error"]["message"] == "defect"
