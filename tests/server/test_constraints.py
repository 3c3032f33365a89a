"""Tests that no constraint is ignored: it becomes a grammar; `test_invalid_fields` tests those that are rejected."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.http import BODIES, allows, ask, thinking_vocabulary

CHATS, TEXTS, NATIVE = "/v1/chat/completions", "/v1/completions", "/completion"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize("path", BODIES)
def test_constraint_becomes_a_grammar(path: str) -> None:
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
    nothing: list[dict[str, Any]] = [{"structured_outputs": None, "guided_json": None}, {"guided_json_object": False}]
    if path.startswith("/api/"):  # unsupported keywords are ignored, as in Ollama
        nothing = [{}, {"format": ""}]
        forms = ({"format": SCHEMA}, {"format": SCHEMA | {"propertyNames": {"pattern": "b"}}})
        cases = [(form, ['{"a": 1}', '{"b": 1}']) for form in forms]
        cases += [(more | {"format": "json"}, ['{"b": 1}', "5"]) for more in ({}, {"raw": True})]
    for more, (good, *bad) in cases:
        _, service = ask(path, BODIES[path] | more)
        assert [allows(service, text) for text in (good, *bad)] == [True, *[False] * len(bad)], more
    for more in nothing:
        assert ask(path, BODIES[path] | more)[1].requests[0].sampling.grammar is None


@pytest.mark.parametrize("path", [CHATS, "/v1/messages", "/v1/responses"])
def test_guided_json_allows_reasoning_before_json(path: str) -> None:
    vocabulary = thinking_vocabulary()
    for more in ({"guided_json": SCHEMA}, {"structured_outputs": {"json_object": True}}):
        _, service = ask(path, BODIES[path] | more, vocabulary=vocabulary)
        texts = ('{"a": 5}', '<think>\nhm</think>\n{"a": 5}', "<think>\nhm</think>\nfive", "hm")
        assert [allows(service, text) for text in texts] == [True, True, False, False]
