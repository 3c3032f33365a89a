"""Streams over a real connection: what is silent lives, who leaves stops costing, and nobody ends anybody else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from support.fake_service import FakeService, Script
from support.http import chunks, scripted
from support.scripted_server import listening

from ngramspec.batching.request import Request
from ngramspec.server.app import make_app

BODY = {"prompt": "x", "stream": True}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "stream": True}


def endless() -> Script:
    return Script(ends=False, go=threading.Semaphore(3))


@asynccontextmanager
async def connected(
    script: Any, ping: float = 15.0, **settings: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, FakeService]]:
    server, service = scripted(script, **settings)
    server.ping_seconds = ping
    with listening(make_app(server)) as address:
        async with httpx.AsyncClient(base_url=address, timeout=120) as client:
            try:
                yield client, service
            finally:
                for ticket in service.tickets:  # or a server that does not stop them would never end
                    ticket.cancel()


async def until(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, 120)


@pytest.mark.parametrize("path", ["/completion", "/v1/completions", "/v1/chat/completions"])
def test_a_client_that_leaves_a_stream_stops_its_request(path: str) -> None:
    async def run() -> None:
        async with connected(endless()) as (client, service):
            body = CHAT if "chat" in path else BODY
            async with client.stream("POST", path, json=body) as response:
                async for line in response.aiter_lines():
                    if line.startswith("data"):
                        break
            await until(service.tickets[0].cancelled)
            await until(service.tickets[0].ended)

    asyncio.run(run())


@pytest.mark.parametrize(
    "path", ["/completion", "/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"]
)
def test_a_client_that_leaves_before_the_answer_stops_its_request(path: str) -> None:
    async def run() -> None:
        script = endless()
        script.begin = threading.Event()
        async with connected(script) as (client, service):
            said = {"input": "x"} if "responses" in path else {"prompt": "x"}
            body = said | {"max_tokens": 9, "messages": CHAT["messages"]}
            asked = asyncio.create_task(client.post(path, json=body))
            while not service.tickets:
                assert not asked.done(), asked.result().text
                await asyncio.sleep(0.01)
            asked.cancel()
            await until(service.tickets[0].cancelled)

    asyncio.run(run())


def test_all_answers_of_a_request_stop_with_it() -> None:
    async def run() -> None:
        async with connected(lambda _: endless()) as (client, service):
            seen = set[int]()
            async with client.stream("POST", "/v1/chat/completions", json=CHAT | {"n": 3}) as response:
                async for line in response.aiter_lines():
                    seen |= {choice["index"] for chunk in chunks(line) for choice in chunk["choices"]}
                    if len(seen) == 3:
                        break
            for ticket in service.tickets:
                await until(ticket.cancelled)

    asyncio.run(run())


def test_a_request_ends_no_other() -> None:
    async def run() -> None:
        first = Script("first answer", go=threading.Semaphore(2))
        scripts = iter([first, Script("second"), Script(wrong=ValueError("third"))])

        def script(_: Request) -> Script:
            return next(scripts)

        async with connected(script) as (client, service):
            async with client.stream("POST", "/completion", json=BODY) as response:
                lines = response.aiter_lines()
                assert (await anext(lines)).startswith("data")
                second = await client.post("/completion", json={"prompt": "x"})
                assert second.json()["content"] == "second"
                assert (await client.post("/completion", json={"prompt": "x"})).status_code == 400
                assert not service.tickets[0].cancelled.is_set()
                assert first.go is not None
                first.go.release(100)
                rest = "\n".join([line async for line in lines])
            assert chunks(rest)[-1]["stop_type"] == "eos"

    asyncio.run(run())


def test_silence_is_broken_by_comments_before_the_first_token_and_after_it() -> None:
    async def run() -> None:
        script = Script(begin=threading.Event(), go=threading.Semaphore(1))
        async with connected(script, ping=0.02) as (client, _):  # noqa: SIM117
            async with client.stream("POST", "/v1/chat/completions", json=CHAT) as response:
                assert response.status_code == 200
                lines = response.aiter_lines()
                seen = [await anext(lines)]
                script.begin.set()  # type: ignore[union-attr]
                while not any(chunk["choices"][0]["delta"].get("content") for chunk in chunks("\n".join(seen))):
                    seen.append(await anext(lines))
                seen.append("first token")
                while seen[-1] != ":":
                    seen.append(await anext(lines))
                script.go.release(100)  # type: ignore[union-attr]
                seen += [line async for line in lines]
        at = seen.index("first token")
        assert seen[0] == ":"
        assert ":" in seen[at:]
        assert "data: [DONE]" in seen[at:]

    asyncio.run(run())


def test_without_silence_there_are_no_comments() -> None:
    async def run() -> None:
        async with connected(Script()) as (client, _):
            response = await client.post("/completion", json=BODY)
            assert ":" not in response.text.splitlines()

    asyncio.run(run())


def test_an_error_after_a_long_silence_is_a_chunk() -> None:
    async def run() -> None:
        script = Script(begin=threading.Event(), fails=ValueError("defect"), after=0)
        async with connected(script, ping=0.02) as (client, _):  # noqa: SIM117
            async with client.stream("POST", "/completion", json=BODY) as response:
                assert response.status_code == 200
                lines = response.aiter_lines()
                assert await anext(lines) == ":"
                script.begin.set()  # type: ignore[union-attr]
                rest = "\n".join([line async for line in lines])
        assert chunks(rest) == [{"error": {"code": 500, "message": "defect", "type": "server_error"}}]

    asyncio.run(run())


def test_a_server_that_stops_tells_streams_and_refuses_others() -> None:
    async def run() -> None:
        async with connected(endless()) as (client, service):
            async with client.stream("POST", "/completion", json=BODY) as response:
                lines = response.aiter_lines()
                await anext(lines)
                await asyncio.to_thread(service.stop)
                rest = "\n".join([line async for line in lines])
            assert chunks(rest)[-1]["error"]["type"] == "unavailable_error"

    asyncio.run(run())


def test_a_body_that_ends_early_is_forgotten() -> None:
    async def run() -> None:
        async with connected(Script()) as (client, service):
            host, port = client.base_url.host, client.base_url.port
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(b"POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
            await writer.drain()
            writer.close()
            await writer.wait_closed()
            assert (await client.get("/health")).json() == {"status": "ok"}
            assert service.tickets == []
            del reader

    asyncio.run(run())
