"""Tests of streams over a real connection: silence, disconnected clients and independent requests.

A silent stream stays open, a request of a disconnected client ends, and no client ends the request of another."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from support.cli_runner import PATIENCE
from support.fake_service import FakeService, Script
from support.http import BODIES, make_server, parse_chunks, run_server

from ngramspec.server.state import Counters

pytestmark = pytest.mark.anyio

BODY = BODIES["/completion"] | {"stream": True}
CHAT = BODIES["/v1/chat/completions"] | {"stream": True}


@pytest.fixture
def anyio_backend() -> str:
    """Return the event loop that runs the coroutine tests."""
    return "asyncio"


def endless() -> Script:
    return Script(ends=False, go=threading.Semaphore(3))


@asynccontextmanager
async def connected(script: Any, ping: float = 15.0) -> AsyncIterator[tuple[httpx.AsyncClient, FakeService]]:
    server, service = make_server(script)
    server.ping_seconds = ping
    with run_server(server) as address:
        async with httpx.AsyncClient(base_url=address, timeout=PATIENCE) as client:
            try:
                yield client, service
            finally:
                for ticket in service.tickets:  # otherwise a server that does not stop them never ends
                    ticket.cancel()


@asynccontextmanager
async def streaming(script: Any, path: str, body: Any, ping: float = 15.0) -> AsyncIterator[tuple[Any, Any, Any]]:
    """Yield a client, the engine, and the lines of the stream in response to a request."""
    async with connected(script, ping) as (client, service), client.stream("POST", path, json=body) as response:
        assert response.status_code == 200
        yield client, service, response.aiter_lines()


async def until(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, PATIENCE)


@pytest.mark.parametrize("path", BODIES)
async def test_stream_of_disconnected_client_cancels_its_request(path: str) -> None:
    async with connected(endless()) as (client, service):
        async with client.stream("POST", path, json=BODIES[path] | {"stream": True}) as response:
            lines = response.aiter_lines()
            line = await anext(lines)
            assert line.startswith("event: ") == (path in ("/v1/messages", "/v1/responses"))
            while not line.startswith(("data", "{")):
                line = await anext(lines)
            assert not service.tickets[0].cancellation.is_set()
        await until(service.tickets[0].cancellation)
        await until(service.tickets[0].end)
    script = endless()
    script.begin = threading.Event()
    async with connected(script) as (client, service):
        asked = asyncio.create_task(client.post(path, json=BODIES[path] | {"stream": False}))
        while not service.tickets:
            assert not asked.done(), asked.result().text
            await asyncio.sleep(0.01)
        asked.cancel()  # before the response begins
        await until(service.tickets[0].cancellation)


async def test_stream_of_disconnected_client_logs_its_tokens() -> None:
    entries: list[Counters] = []
    server, service = make_server(endless())
    with run_server(server, log=entries.append) as address:
        async with httpx.AsyncClient(base_url=address, timeout=PATIENCE) as client:
            async with client.stream("POST", "/completion", json=BODY) as response:
                lines = response.aiter_lines()
                while '"tokens_predicted":3' not in await anext(lines):
                    pass
            await until(service.tickets[0].end)
    (entry,) = entries
    assert (entry.tokens, entry.prompt_tokens) == (3, len(service.requests[0].prompt))


async def test_stream_of_disconnected_client_cancels_all_choices() -> None:
    async with connected(lambda _: endless()) as (client, service):
        seen = set[int]()
        async with client.stream("POST", "/v1/chat/completions", json=CHAT | {"n": 3}) as response:
            async for line in response.aiter_lines():
                seen |= {choice["index"] for chunk in parse_chunks(line) for choice in chunk["choices"]}
                if len(seen) == 3:
                    break
        for ticket in service.tickets:
            await until(ticket.cancellation)


async def test_stream_continues_when_other_requests_end_or_fail() -> None:
    first = Script("first answer", go=threading.Semaphore(2))
    scripts = iter([first, Script("second"), Script(start_error=ValueError("third"))])
    async with streaming(lambda _: next(scripts), "/completion", BODY) as (client, service, lines):
        assert (await anext(lines)).startswith("data")
        second = await client.post("/completion", json={"prompt": "x"})
        assert second.json()["content"] == "second"
        assert (await client.post("/completion", json={"prompt": "x"})).status_code == 400
        assert not service.tickets[0].cancellation.is_set()
        first.go.release(100)
        rest = "\n".join([line async for line in lines])
    assert parse_chunks(rest)[-1]["stop_type"] == "eos"


SIGNS = {
    "/v1/chat/completions": ([":"], "data: .DONE."),
    "/v1/messages": (["event: message_start", "event: ping"], "event: message_stop"),
    "/v1/responses": (
        ["event: response.created", "event: response.in_progress", "event: keepalive"],
        "event: response.completed",
    ),
    "/api/chat": (['.*"content":"".*"done":false.*'], '.*"done":true.*'),
}
"""Patterns of the first events of a stream without tokens, of which the last is the sign of life, and of its end."""


@pytest.mark.parametrize("path", SIGNS)
async def test_stream_without_tokens_sends_signs_of_life(path: str) -> None:
    signs, end = SIGNS[path]
    begin, go, seen = threading.Event(), threading.Semaphore(1), list[str]()
    body = BODIES[path] | {"stream": True}
    async with streaming(Script(begin=begin, go=go), path, body, 0.02) as (_, _, lines):

        async def read_until(pattern: str) -> None:
            seen.append(await anext(lines))
            while not re.fullmatch(pattern, seen[-1]):
                seen.append(await anext(lines))

        await read_until(signs[-1])
        names = [line for line in seen if not line.startswith("data: ") and line]
        assert len(names) == len(signs)
        assert all(map(re.fullmatch, signs, names))
        begin.set()
        await read_until('.*"H.*')
        await read_until(signs[-1])
        go.release(100)
        seen += [line async for line in lines]
    assert any(re.fullmatch(end, line) for line in seen)


async def test_stream_without_silence_has_no_comments() -> None:
    async with connected(Script()) as (client, _):
        assert ":" not in (await client.post("/completion", json=BODY)).text.splitlines()


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("/completion", {"code": 500, "message": "defect", "type": "server_error"}),
        ("/api/chat", "defect"),
    ],
)
async def test_stream_error_after_signs_of_life_is_sent_as_chunk(path: str, error: Any) -> None:
    begin = threading.Event()
    script, body = Script(begin=begin, error=ValueError("defect"), after=0), BODIES[path] | {"stream": True}
    async with streaming(script, path, body, 0.02) as (_, _, lines):
        assert await anext(lines)
        begin.set()
        rest = [line async for line in lines if "error" in line]
    assert [json.loads(line.removeprefix("data: ")) for line in rest] == [{"error": error}]


@pytest.mark.parametrize("path", BODIES)
async def test_answer_ends_with_error_when_server_stops(path: str) -> None:
    """llama-server closes the connections, so its clients get no finish reason either."""
    async with connected(lambda _: endless()) as (client, service):
        whole = asyncio.create_task(client.post(path, json=BODIES[path] | {"stream": False}))
        async with client.stream("POST", path, json=BODIES[path] | {"stream": True}) as response:
            while service.stats.generated < 6:
                await asyncio.sleep(0.01)
            await asyncio.to_thread(service.stop)
            text = "\n".join([line async for line in response.aiter_lines()])
        assert (await whole).status_code == 503
    assert "the server is shutting down" in text
    assert not re.search('"(length|limit|incomplete|max_tokens)"', text)


async def test_serve_ignores_request_with_incomplete_body() -> None:
    async with connected(Script()) as (client, service):
        _, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        writer.write(b"POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        assert (await client.get("/health")).json() == {"status": "ok"}
        assert service.tickets == []
