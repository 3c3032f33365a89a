"""Tests of grammars that hang other servers: the server still responds to other clients and ends at a signal."""

from __future__ import annotations

import json
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx
import pytest
from support.cli_runner import PATIENCE
from support.serving import serve

JSON = {"Content-Type": "application/json"}
SHORT = {"prompt": "Once upon a time", "n_predict": 2}

NESTED = '{"type": "array", "items": ' * 1000 + "{}" + "}" * 1000
"""Schema of 1,000 levels as JSON, which Python's own encoder cannot write."""


def match(pattern: str) -> dict[str, Any]:
    """Return the fields of a request for a text that matches a pattern."""
    return {"json_schema": {"type": "string", "pattern": pattern}}


def encode(attack: dict[str, Any]) -> str:
    """Return the body of a request."""
    return json.dumps(SHORT | attack).replace('"NESTED"', NESTED)


QUICK: dict[str, dict[str, Any]] = {
    "optional characters": match("^(a?){1000}a{1000}$"),
    "optional characters in GBNF": {"grammar": 'root ::= ("a"?){1000} "a"{1000}'},
    "left recursion": {"grammar": 'root ::= root "a" | "a"'},
    "cycle of references": {"json_schema": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}},
}
SLOW: dict[str, dict[str, Any]] = {
    "nullable repetitions": {"grammar": 'root ::= ((("a"?)*)*)* "b"'},
    "no end": {"grammar": 'root ::= "a" root'},
    "exponential pattern": match("^(([a-z]+)+)+$"),
    "exponential automaton": match("^(.*a.{40}){3}$"),
    "repeated repetitions": match("^(((a{1,200}){1,200}){1,200}){1,200}$"),
    "100,000 alternatives": {"json_schema": {"enum": [f"choice {i}" for i in range(100_000)]}},
    "1,000 levels": {"json_schema": "NESTED"},
    "1 MB": {"grammar": 'root ::= "a" | ' + " | ".join(f'"{"x" * 90}{i}"' for i in range(10_000))},
    "1,000 optional properties": {
        "json_schema": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1000)}}
    },
}
ATTACKS = [
    *(pytest.param(body, id=name) for name, body in QUICK.items()),
    *(pytest.param(body, id=name, marks=pytest.mark.exhaustive) for name, body in SLOW.items()),
]


@pytest.mark.parametrize("attack", ATTACKS)
def test_serve_during_hostile_grammar_answers_other_clients(env: dict[str, str], attack: dict[str, Any]) -> None:
    statuses = []

    def client(http: httpx.Client) -> None:
        with ThreadPoolExecutor() as pool:
            hostile = pool.submit(http.post, "/completion", content=encode(attack), headers=JSON)
            answered = 0
            while not hostile.done() or not answered:
                assert http.post("/completion", json=SHORT).status_code == 200
                assert http.get("/health").status_code == 200
                answered += 1
            response = hostile.result()
            statuses.append(response.status_code)
            assert "shutting down" not in response.text

    serve(env, client).ok()
    assert statuses in ([200], [400])


@pytest.mark.exhaustive
@pytest.mark.parametrize("attack", ATTACKS[:2])
def test_serve_during_hostile_grammar_exits_after_sigterm(env: dict[str, str], attack: dict[str, Any]) -> None:
    def client(http: httpx.Client) -> None:
        def send() -> None:
            # The server may close the connection when it ends.
            with suppress(httpx.HTTPError), httpx.Client(base_url=http.base_url, timeout=PATIENCE) as other:
                other.post("/completion", content=encode(attack), headers=JSON)

        threading.Thread(target=send, daemon=True).start()
        assert http.post("/completion", json=SHORT).status_code == 200
        signal.raise_signal(signal.SIGTERM)

    serve(env, client).ok()
