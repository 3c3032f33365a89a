"""Tests of the prediction route of Vertex AI."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import httpx
import pytest
from support.fake_service import SLOTS, Script
from support.http import make_server, open_client, send

from ngramspec.errors import NGramSpecError
from ngramspec.server.app import make_app
from ngramspec.server.vertex import MAX_INSTANCES, VertexRoutes

MODE = {"AIP_MODE": "PREDICTION"}
CHAT = {"@requestFormat": "chatCompletions", "messages": [{"role": "user", "content": "hi"}]}


def routes(**variables: str) -> VertexRoutes:
    found = VertexRoutes.from_environment(MODE | variables)
    assert found is not None
    return found


def request(method: str, path: str, body: Any = None, **variables: str) -> httpx.Response:
    settings = {"vertex": routes(**variables), "keys": ["k"]}
    headers = {"Authorization": "Bearer k"} if body is not None else {}
    return send(make_server()[0], path, body, method, settings=settings, headers=headers)


def predict(*instances: Any) -> list[Any]:
    response = request("POST", "/predict", {"instances": instances})
    assert response.status_code == 200, response.text
    found: list[Any] = response.json()["predictions"]
    return found


def test_vertex_predict_returns_predictions_of_several_formats_in_order() -> None:
    chat, completion, tokens, messages, ollama = predict(
        CHAT | {"stream": True},
        {"@requestFormat": "/completion", "prompt": "x"},
        {"@requestFormat": "tokenize", "content": "a"},
        {"@requestFormat": "messages", "max_tokens": 9, "messages": CHAT["messages"]},
        {"@requestFormat": "apiChat", "messages": CHAT["messages"]},
    )
    assert chat["choices"][0]["message"]["content"] == completion["content"] == "Hello, world"
    assert tokens["tokens"]
    assert messages["type"] == "message"
    assert ollama["done"]


def test_vertex_predict_returns_error_of_an_instance_in_its_place() -> None:
    unnamed, unknown, invalid, chat = predict({}, {"@requestFormat": "predict"}, CHAT | {"n": 0}, CHAT)
    assert unnamed["error"]["param"] == "instances[0].@requestFormat"
    assert unknown["error"]["param"] == "instances[1].@requestFormat"
    assert invalid["error"]["param"] == "n"
    assert chat["choices"]


def test_vertex_predict_runs_one_instance_per_slot_at_once() -> None:
    async def run() -> None:
        server, service = make_server(Script(begin=(begin := threading.Event())))
        async with open_client(server, vertex=routes()) as client:
            answer = asyncio.create_task(client.post("/predict", json={"instances": [CHAT] * 9}))
            while len(service.requests) < SLOTS:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            assert len(service.requests) == SLOTS
            begin.set()
            assert len((await answer).json()["predictions"]) == len(service.requests) == 9

    asyncio.run(run())


@pytest.mark.parametrize("body", [{}, {"instances": "x"}, {"instances": [CHAT] * (MAX_INSTANCES + 1)}])
def test_vertex_predict_rejects_invalid_instances(body: Any) -> None:
    response = request("POST", "/predict", body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "instances")


def test_vertex_routes_use_paths_of_environment() -> None:
    variables = {"AIP_PREDICT_ROUTE": "ask", "AIP_HEALTH_ROUTE": "/alive", "AIP_HTTP_PORT": "8081"}
    assert routes(**variables).port == 8081
    assert request("GET", "/alive", **variables).status_code == 200
    assert request("POST", "/ask", {"instances": [CHAT]}, **variables).json()["predictions"][0]["choices"]
    assert request("POST", "/predict", {"instances": []}, **variables).status_code == 404
    assert request("GET", "/health", AIP_HEALTH_ROUTE="/health").status_code == 200


def test_vertex_routes_outside_of_vertex_ai_are_absent() -> None:
    assert VertexRoutes.from_environment({"AIP_PREDICT_ROUTE": "/ask", "AIP_HTTP_PORT": "x"}) is None


def test_vertex_routes_reject_invalid_environment() -> None:
    with pytest.raises(NGramSpecError, match="AIP_HTTP_PORT must be a port number, got 'x'"):
        routes(AIP_HTTP_PORT="x")
    with pytest.raises(NGramSpecError, match=r"AIP_PREDICT_ROUTE .* got /completion"):
        make_app(make_server()[0], vertex=routes(AIP_PREDICT_ROUTE="completion"))
