"""Helpers that send requests to a server with a scripted engine, in this process or on a separate port."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import cache
from typing import Any

import httpx
import uvicorn
from support.cli_runner import DEMO
from support.fake_service import FakeService, Script

from ngramspec.llama.vocabulary import Vocabulary
from ngramspec.server.app import make_app
from ngramspec.server.connection import Connection, HttpServer
from ngramspec.server.state import ServedModel, Server

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
BODIES: dict[str, dict[str, Any]] = {
    "/completion": {"prompt": "x"},
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": CHAT,
    "/v1/messages": CHAT | {"max_tokens": 99},
    "/v1/responses": {"input": "x"},
    "/api/chat": CHAT,
    "/api/generate": {"prompt": "x"},
}
"""The smallest request to each endpoint that generates text."""


@cache
def demo_vocabulary() -> Vocabulary:
    """Return the vocabulary of the demo model."""
    return Vocabulary(DEMO)


@cache
def vocabulary_with(template: str) -> Vocabulary:
    """Return the vocabulary of the demo model with another chat template."""
    vocabulary = Vocabulary(DEMO)
    vocabulary.use_chat_template(template)
    return vocabulary


def thinking_vocabulary() -> Vocabulary:
    """Return a vocabulary whose chat template also contains the markers of reasoning."""
    return vocabulary_with(f"{demo_vocabulary().chat_template}{{# <think> </think> #}}")


def make_server(
    script: Any = None, *, vocabulary: Vocabulary | None = None, n_ctx: int = 512, **model: Any
) -> tuple[Server, FakeService]:
    """Return a server with a scripted engine, and the engine; `model` contains further settings of `ServedModel`."""
    vocabulary = vocabulary or demo_vocabulary()
    service = FakeService(vocabulary, script or Script(), n_ctx=n_ctx)
    return Server(model=ServedModel(service, vocabulary, "demo", **model)), service


@asynccontextmanager
async def open_client(server: Server, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client of a server in this process; `settings` are arguments of `make_app`."""
    transport = httpx.ASGITransport(make_app(server, **settings))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        yield client


def send(
    server: Server, path: str, body: Any = None, method: str = "POST", *, settings: Any = None, **request: Any
) -> httpx.Response:
    """Return the response of a server in this process; `settings` are arguments of `make_app`, `request` of httpx."""

    async def run() -> httpx.Response:
        async with open_client(server, **settings or {}) as client:
            return await client.request(method, path, json=body, **request)

    return asyncio.run(run())


def ask(path: str, body: Any = None, script: Any = None, **settings: Any) -> tuple[Any, FakeService]:
    """Return the JSON of a scripted server's response, or its chunks if it is a stream; and the engine."""
    server, service = make_server(script, **settings)
    response = send(server, path, body)
    assert response.status_code == 200, response.text
    is_json = response.headers["content-type"] == "application/json"
    return (response.json() if is_json else parse_chunks(response.text)), service


def get_error(path: str, body: Any, status: int = 400, method: str = "POST", **settings: Any) -> Any:
    """Return the error of a request that a scripted server rejects before the engine receives it."""
    server, service = make_server(**settings)
    response = send(server, path, body, method)
    assert (response.status_code, service.tickets) == (status, []), (body, response.text)
    return response.json()["error"]


def allows(service: FakeService, text: str, number: int = -1) -> bool:
    """Return True if the grammar of a request allows the complete text; by default it is the latest request."""
    vocabulary, tokens = service.vocabulary, service.vocabulary.tokenize(text, add_bos=False)
    grammar = vocabulary.sampler(service.requests[number].sampling).grammar
    assert grammar is not None
    end = next(token for token in range(vocabulary.n_vocab) if vocabulary.is_eog(token))
    return grammar.count_allowed([*tokens, end]) == len(tokens) + 1


def format_tool_call(name: str, arguments: str = "{}") -> str:
    """Return the text of a tool call."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def parse_chunks(text: str) -> list[Any]:
    """Return the objects of a stream, of events or of lines."""
    lines = [line.removeprefix("data: ") for line in text.splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


@contextmanager
def run_server(server: Server, **settings: Any) -> Iterator[str]:
    """Run a server in a thread and yield its address; `settings` are arguments of `make_app`."""
    app = make_app(server, **settings)
    options: dict[str, Any] = {"log_level": "critical", "lifespan": "off", "timeout_graceful_shutdown": 3}
    config = uvicorn.Config(app, http=Connection, host="127.0.0.1", port=0, **options)
    http_server = HttpServer(config)
    thread = threading.Thread(target=http_server.run)
    thread.start()
    try:
        while not http_server.started:
            thread.join(0.01)
            assert thread.is_alive()
        yield f"http://127.0.0.1:{http_server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        http_server.should_exit = True
        thread.join()
