"""Tests that no constraint is ignored: it reaches the engine, or the response is a 400 that names the field.

Ollama's `options` are an exception, because unknown ones are ignored: `test_ollama.py` tests their values.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.fake_service import FakeService, Script
from support.http import BODIES, allows, ask, get_error, thinking_vocabulary

CHATS, TEXTS, NATIVE = "/v1/chat/completions", "/v1/completions", "/completion"
PATHS = [path for path in BODIES if not path.startswith("/api/")]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORM = {"type": "json_schema", "name": "n", "schema": SCHEMA, "json_schema": {"schema": SCHEMA}}


def engine_of(path: str, more: dict[str, Any]) -> FakeService:
    return ask(path, BODIES[path] | more, Script(ends=False))[1]


@pytest.mark.parametrize("path", PATHS)
def test_guided_and_structured_outputs_become_a_grammar(path: str) -> None:
    digits = ["123-ab", "12-a", "x123-a", "123-ac"]
    cases: list[tuple[dict[str, Any], list[str]]] = [
        *(({"guided_json": schema}, ['{"a": 5}', '{"a": "x"}']) for schema in (SCHEMA, json.dumps(SCHEMA))),
        ({"structured_outputs": {"json": SCHEMA}}, ['{"a": 5}', '{"a": "x"}']),
        ({"guided_choice": ['a "b"', "c"]}, ["c", "d"]),
        ({"structured_outputs": {"choice": ['a "b"', "c"]}}, ['a "b"', "d"]),
        ({"guided_regex": r"5\$"}, ["5$", "5"]),
        ({"guided_regex": r"\d{3}-(?:a|b)+"}, digits),
        ({"structured_outputs": {"regex": r"^\d{3}-[ab]+$"}}, digits),
        ({"guided_grammar": 'root ::= "a"'}, ["a", "b"]),
    ]
    if path in (CHATS, TEXTS):
        cases += [({"response_format": {"type": "json_object"}}, ["{}", "a"])]
        cases += [({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, ['{"a": 5}', "{}"])]
    for more, (good, *bad) in cases:
        service = engine_of(path, more)
        assert [allows(service, text) for text in (good, *bad)] == [True, *[False] * len(bad)], more
    for nothing in ({"structured_outputs": None, "guided_json": None}, {"guided_json_object": False}):
        assert engine_of(path, nothing).requests[0].sampling.grammar is None


@pytest.mark.parametrize("path", [path for path in PATHS if path not in (TEXTS, NATIVE)])
def test_guided_json_allows_reasoning_before_json(path: str) -> None:
    vocabulary = thinking_vocabulary()
    for more in ({"guided_json": SCHEMA}, {"structured_outputs": {"json_object": True}}):
        _, service = ask(path, BODIES[path] | more, vocabulary=vocabulary)
        texts = ('{"a": 5}', '<think>\nhm</think>\n{"a": 5}', "<think>\nhm</think>\nfive", "hm")
        assert [allows(service, text) for text in texts] == [True, True, False, False]
    for where in ({"output_config": {"format": FORM}}, {"text": {"format": FORM}}, {"response_format": FORM}):
        known = {"/v1/messages": "output_config", "/v1/responses": "text", CHATS: "response_format"}[path]
        if known in where:
            message = get_error(path, BODIES[path] | where | {"guided_json": SCHEMA})["message"]
            assert message.startswith("guided_json cannot be combined with")
