"""Tests that requests reach the engine, and that responses come back, as in `recorded/`.

An exchange has a request, the script of the engine, and what the test adds: the requests to the engine, the status and
the lines of the response. `RECORD=1 pytest tests/server/test_recorded.py` adds it again, also for new requests. So the
changes of these files are what clients can notice. In chats, the prompt is what the chat template receives. An answer
that ends before the script has one step, because otherwise the engine may have taken more.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from support.fake_embedder import CountingEmbedder
from support.fake_service import Script
from support.http import make_server, send, vocabulary_with
from support.templates import CHAT_VALUES

from ngramspec.request import Request
from ngramspec.sampling.settings import Sampling, TextRules
from ngramspec.server import answer
from ngramspec.server.answer import EventQueue

FILES = sorted(Path(__file__).with_name("recorded").glob("*.json"))
RANDOM = re.compile(r"(?<![\w-])(?:chatcmpl|cmpl|msg|resp|rs|fc|ctc|call)[-_][\w-]{9,}")
VARIABLE = re.compile(
    r'("(?:created|created_at|completed_at|modified_at|expires_at|total_duration|digest|build_info|system_fingerprint)"'
    r':)(?:"[^"]*"|\d+)'
)


def find_changes(value: Any, default: Any) -> dict[str, Any]:
    """Return the fields that differ from those of a default, without the text of a grammar."""
    changes = {f.name: getattr(value, f.name) for f in fields(value)}
    changes = {name: found for name, found in changes.items() if found != getattr(default, name)}
    return changes | {name: bool(changes[name]) for name in ("grammar",) if name in changes}


def describe(request: Request, prompt: str) -> dict[str, Any]:
    """Return what reached the engine, as far as it is not the default."""
    found = find_changes(request, Request((), 600))
    for name, default in (("sampling", Sampling(0.8, seed=7)), ("rules", TextRules())):
        if name in found:
            found[name] = find_changes(found[name], default)
    found.pop("controls", None)
    return {name: value for name, value in found.items() if value != {}} | {"prompt": prompt}


def normalize(text: str) -> list[str]:
    """Return the lines of a response with numbered ids instead of random ones, and without times and versions."""
    ids = dict[str, str]()
    text = RANDOM.sub(lambda match: ids.setdefault(match[0], f"id{len(ids) + 1}"), text)
    return VARIABLE.sub(r"\1null", text).split("\n")


def replay(exchange: Mapping[str, Any]) -> dict[str, Any]:
    script, method = exchange.get("script", {}), exchange.get("method", "POST")
    embedder = CountingEmbedder() if "embed" in exchange["path"] else None
    server, engine = make_server(
        Script(**script), vocabulary=vocabulary_with(CHAT_VALUES), n_ctx=600, embedder=embedder
    )
    server.seed = 7
    response = send(server, exchange["path"], exchange.get("body"), method)
    requests = [describe(request, engine.prompt_text(i)) for i, request in enumerate(engine.requests)]
    kind = response.headers["content-type"]
    found = {
        "engine": json.loads(json.dumps(sorted(requests, key=repr), default=str)),
        "status": " ".join([str(response.status_code), *sorted(response.headers.get("allow", kind).split(", "))]),
        "response": normalize(response.text),
    }
    return {name: value for name, value in exchange.items() if name not in found} | found


def encode(exchange: Mapping[str, Any]) -> str:
    """Return JSON in which each field and each item of a list is on a new line."""
    fields = list[str]()
    for name, value in exchange.items():
        text = json.dumps(value, ensure_ascii=False)
        if isinstance(value, list):
            text = "[" + ",".join(f"\n  {json.dumps(item, ensure_ascii=False)}" for item in value) + "]"
        fields.append(f"{json.dumps(name)}: {text}")
    return "{" + ",\n ".join(fields) + "}"


@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_exchanges_are_as_recorded(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Each step becomes a chunk, however busy the event loop is.
    def make_queue(ping_seconds: float, *, wakes_always: bool, merges: bool) -> EventQueue:
        return EventQueue(ping_seconds, wakes_always=wakes_always, merges=False)

    monkeypatch.setattr(answer, "EventQueue", make_queue)
    exchanges = json.loads(file.read_text("utf-8"))
    found = [replay(exchange) for exchange in exchanges]
    if os.environ.get("RECORD"):
        file.write_text("[\n" + ",\n".join(map(encode, found)) + "\n]\n", "utf-8")
    for new, exchange in zip(found, exchanges, strict=True):
        assert new == exchange
