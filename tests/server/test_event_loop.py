"""Tests that a large response does not keep the event loop, or Python's lock, from other clients for long."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from typing import Any

import pytest
from support.fake_embedder import CountingEmbedder
from support.fake_service import Script
from support.http import BODIES, ask, make_server, open_client, send

from ngramspec.server.answer import Answer

TOP = {"logprobs": True, "top_logprobs": 20}
LOGPROBS: dict[str, Any] = {
    "/completion": {"prompt": "x", "n_probs": 20},
    "/v1/completions": {"prompt": [7] * 400, "logprobs": 20, "echo": True, "max_tokens": 1},
    "/v1/chat/completions": BODIES["/v1/chat/completions"] | TOP,
    "/v1/responses": {"input": "x", "top_logprobs": 20},
    "/api/chat": BODIES["/api/chat"] | TOP,
    "/api/generate": {"prompt": "x"} | TOP,
}
CASES = [
    *((path, body | {"stream": stream}) for path, body in LOGPROBS.items() for stream in (False, True)),
    ("/tokenize", {"content": "a b c d " * 100, "with_pieces": True}),
]
EMBEDDINGS = [
    ("/v1/embeddings", {"input": ["a"] * 200}),
    ("/embedding", {"input": ["a"] * 200}),
    ("/api/embed", {"input": ["a"] * 200}),
]
SCRIPT = Script("Hello, world. " * 40, step=3)


@pytest.mark.parametrize(("path", "body"), CASES)
def test_large_response_is_formatted_on_a_thread(path: str, body: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server, service = make_server(SCRIPT)
    threads, show = set[int](), service.vocabulary.display_piece

    def display_piece(token: int) -> bytes:
        threads.add(threading.get_ident())
        return show(token)

    monkeypatch.setattr(service.vocabulary, "display_piece", display_piece)
    response = send(server, path, body)
    assert (response.status_code, bool(threads)) == (200, True)
    assert threading.get_ident() not in threads


@pytest.mark.parametrize(("path", "body"), CASES + EMBEDDINGS)
def test_large_response_is_encoded_in_small_parts(path: str, body: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The encoder keeps Python's lock until an object is complete."""
    sizes, encode = list[int](), json.JSONEncoder.encode

    def measure(encoder: json.JSONEncoder, data: Any) -> str:
        text = encode(encoder, data)
        sizes.append(len(text))
        return text

    monkeypatch.setattr(json.JSONEncoder, "encode", measure)
    server, _ = make_server(SCRIPT, embedder=CountingEmbedder())
    content = json.dumps(body).encode()
    sizes.clear()
    response = send(server, path, content=content)
    assert response.status_code == 200, response.text
    assert 0 < max(sizes) < len(response.content) / 3


def test_waiting_events_of_a_response_leave_turns_to_other_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    turns, written, write = 0, Counter[int](), Answer.write

    def count(answer: Answer, steps: Any) -> None:
        written[turns] += len(steps)
        write(answer, steps)

    async def take_turns() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async def run() -> None:
        async with open_client(make_server(Script("Hello, world. " * 90))[0]) as client:
            others = asyncio.create_task(take_turns())
            assert (await client.post("/completion", json={"prompt": "x"})).status_code == 200
            others.cancel()

    monkeypatch.setattr(Answer, "write", count)
    asyncio.run(run())
    assert written.total() > 400
    assert max(written.values()) < 100


def test_messages_of_one_role_are_joined_in_linear_time() -> None:
    """The limit on the processor time of a test would end a join of all texts so far for each message."""
    messages = [{"role": "user", "content": "x " * 700}] * 10_000
    for path in ("/v1/messages", "/api/chat"):
        response = send(make_server()[0], path, {"messages": messages, "max_tokens": 1})
        assert "exceeds the available context size" in response.text


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_usage_counts_long_prediction_in_linear_time(path: str) -> None:
    text = "x " * 8000
    body = BODIES[path] | {"prediction": {"type": "content", "content": f"y {text}"}}
    answer, service = ask(path, body, Script(text, step=100), n_ctx=40_000)
    usage = answer["usage"]
    details = usage.get("completion_tokens_details") or usage["output_tokens_details"]
    assert details["rejected_prediction_tokens"] <= 3
    assert sum(details.values()) == len(service.requests[0].prediction)
