"""The HTTP server over answers that are written down, listening on a port."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import uvicorn

from ngramspec.chat_prompt import ChatPrompt
from ngramspec.server import anthropic, responses
from ngramspec.server.app import make_app
from ngramspec.server.dialogue import ChatDelta, ChatTask
from ngramspec.server.served import ServedModel, Server
from ngramspec.tool_calls.deltas import Tool


class Words:
    """A vocabulary whose tokens are characters."""

    n_vocab = 256

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Tool] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> ChatPrompt:
        """The texts and the names of the tools, one after the other."""
        text = "".join([*(tool.name for tool in tools), *(message["content"] for message in messages)])
        return ChatPrompt([ord(c) % 256 for c in text], text, "")

    def piece(self, token: int) -> bytes:
        return bytes([token])

    shown = piece

    def is_eog(self, token: int) -> bool:
        return token == 0


class Script:
    """What the model answers next, and the tasks that it was given.

    Attributes:
        deltas: of the next answers; an error among them is raised there, and a number is a pause in seconds.
        tasks: so far.
        closed: set when an answer has ended or was given up.
    """

    def __init__(self) -> None:
        self.deltas: Iterable[ChatDelta | Exception | float] = ()
        self.tasks: list[ChatTask] = []
        self.closed = threading.Event()

    async def run_chat(self, model: ServedModel, task: ChatTask) -> AsyncGenerator[ChatDelta, None]:
        self.tasks.append(task)
        self.closed.clear()
        try:
            for delta in self.deltas:
                if isinstance(delta, Exception):
                    raise delta
                if isinstance(delta, float):
                    await asyncio.sleep(delta)
                else:
                    yield delta
        finally:
            self.closed.set()


@contextmanager
def scripted_server(keys: Sequence[str] = (), ping: float = 15.0) -> Iterator[tuple[str, Script]]:
    """The server's address, and the script of its model."""
    script = Script()
    service: Any = None
    server = Server(model=ServedModel(service, Words(), "scripted"), ping_seconds=ping)
    with pytest.MonkeyPatch.context() as patch, listening(make_app(server, keys=keys)) as address:
        for module in (anthropic, responses):
            patch.setattr(module, "run_chat", script.run_chat)
        yield address, script


@contextmanager
def listening(app: Any) -> Iterator[str]:
    """The address of an application, served by a thread."""
    served = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="off"))
    thread = threading.Thread(target=served.run)
    thread.start()
    try:
        while not served.started:
            thread.join(0.01)
            assert thread.is_alive()
        yield f"http://127.0.0.1:{served.servers[0].sockets[0].getsockname()[1]}"
    finally:
        served.should_exit = True
        thread.join()
