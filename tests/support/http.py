"""Requests to the server in this process, and the server on a port of its own."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import httpx
from support.fake_service import FakeService, Script

import ngramspec.demo
from ngramspec.llama.vocabulary import Vocabulary
from ngramspec.server.app import make_app
from ngramspec.server.served import ServedModel, Server

ADDRESS = "http://127.0.0.1"


@cache
def demo_vocabulary() -> Vocabulary:
    """The vocabulary of the demo model."""
    return Vocabulary(Path(ngramspec.demo.__file__).parent / "demo.gguf")


def scripted(script: Any = None, **settings: Any) -> tuple[Server, FakeService]:
    """A server of a scripted engine, and the engine."""
    service = FakeService(demo_vocabulary(), script or Script(), **settings)
    return Server(model=ServedModel(service, demo_vocabulary(), "demo")), service


@asynccontextmanager
async def asking(server: Server, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server in this process; `settings`: of `make_app`."""
    transport = httpx.ASGITransport(make_app(server, **settings))
    async with httpx.AsyncClient(transport=transport, base_url=ADDRESS) as client:
        yield client


def chunks(text: str) -> list[Any]:
    """The data of a stream of events; "[DONE]" as it is."""
    found = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [one if one == "[DONE]" else json.loads(one) for one in found]
