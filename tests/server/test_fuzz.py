"""Tests that malformed requests get a response other than 5xx and do not stop the server."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from support.fake_embedder import CountingEmbedder
from support.fake_service import Script
from support.http import make_server, open_client
from support.malformed_requests import BODIES, MESSAGES, make_request

from ngramspec.server.app import ENDPOINTS


def test_fuzz_bodies_cover_every_post_endpoint() -> None:
    known = {path for endpoint in ENDPOINTS if endpoint.method == "POST" for path in endpoint.paths}
    handlers = {id(endpoint.handler) for endpoint in ENDPOINTS if endpoint.method == "POST"}
    tried = {id(e.handler) for e in ENDPOINTS if e.method == "POST" and set(e.paths) & set(BODIES)}
    assert set(BODIES) <= known
    assert handlers == tried


@pytest.mark.parametrize("count", [400, pytest.param(5000, marks=pytest.mark.exhaustive)])
def test_serve_with_malformed_requests_returns_no_5xx_and_keeps_running(count: int, tmp_path: Path) -> None:
    rng = random.Random(count)
    seen: dict[int, int] = {}

    async def run() -> None:
        server, service = make_server(Script(step=2), n_ctx=600, embedder=CountingEmbedder())
        server.slot_folder = tmp_path
        async with open_client(server) as client:
            for _ in range(count):
                method, path, raw = make_request(rng)
                response = await client.request(method, path, content=raw)
                seen[response.status_code] = seen.get(response.status_code, 0) + 1
                assert response.status_code < 500, (method, path, raw, response.text)
                if response.status_code >= 400 and method != "HEAD":
                    error = response.json()["error"]
                    assert error if path.startswith("/api/") else error["message"], (method, path, raw)
            answer = await client.post("/v1/chat/completions", json={"messages": MESSAGES})
            assert answer.json()["choices"][0]["message"]["content"] == "Hello, world"
        for ticket in service.tickets:
            assert ticket.end.wait(20)

    asyncio.run(run())
    assert seen[200] > count / 20
    assert seen[400] > count / 2
