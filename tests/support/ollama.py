"""Requests to a scripted server in Ollama's format."""

from __future__ import annotations

import json
from typing import Any

from support.fake_service import FakeService
from support.http import make_server, send


def ask(path: str, body: Any, script: Any = None, **settings: Any) -> tuple[list[dict[str, Any]], FakeService]:
    """Return the JSON objects of a response, one or a stream of them, and the engine."""
    server, service = make_server(script, **settings)
    response = send(server, path, body)
    assert response.status_code == 200, response.text
    is_stream = response.headers["content-type"] == "application/x-ndjson"
    assert is_stream or response.headers["content-type"] == "application/json"
    return [json.loads(line) for line in response.text.splitlines()], service


def get_error(path: str, body: Any, status: int = 400, method: str = "POST", **settings: Any) -> str:
    """Return the message of an error; the engine gets no request."""
    server, service = make_server(**settings)
    response = send(server, path, body, method)
    assert (response.status_code, service.tickets) == (status, []), response.text
    content = response.json()
    assert list(content) == ["error"]
    assert isinstance(content["error"], str)
    return content["error"]
