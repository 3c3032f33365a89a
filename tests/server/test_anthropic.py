"""Tests of Anthropic's Messages API over HTTP: server tools and errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from support.fake_service import Script
from support.json_chat import Chat

from ngramspec.data import ShutdownError, TargetError

USER = {"role": "user", "content": "hi"}
API = Chat("/v1/messages", model="m", max_tokens=400, messages=[USER])
LOOK = {"name": "look", "description": "Looks.", "input_schema": {"type": "object", "properties": {}}}


def turn(role: str, *blocks: Any) -> dict[str, Any]:
    return {"role": role, "content": [*blocks]}


def test_anthropic_server_tools_are_ignored() -> None:
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
    assert [tool["name"] for tool in API.tools(tools=[search, LOOK | {"type": "custom"}])] == ["look"]
    API.get_error("tool_choice.name", tools=[search], tool_choice={"type": "tool", "name": "web_search"})
    API.get_error("tool_choice", tools=[search], tool_choice={"type": "any"})


def wrong_requests() -> Iterator[tuple[str, dict[str, Any]]]:
    alone = {"max_tokens": [None, "9"], "messages": [None, "x"], "system": [3], "stop_sequences": [[""]]}
    yield from ((name, {name: value}) for name, values in alone.items() for value in values)
    contents: list[tuple[str, Any]] = [
        ("", 3),
        ("[0].type", [{"text": "x"}]),
        ("[0].source", [{"type": "document"}]),
        ("[0].text", [{"type": "text"}]),
    ]
    yield from ((f"messages[0].content{at}", {"messages": [{"role": "user", "content": c}]}) for at, c in contents)
    yield "messages[0].role", {"messages": [{"role": "tool", "content": "x"}]}
    yield "messages[0].content", {"messages": [{"role": "user"}]}
    yield "messages[0].content[0].input", {"messages": [turn("assistant", {"type": "tool_use"}), USER]}
    yield "tools[0].input_schema", {"tools": [{"name": "x"}]}
    yield "tools[0].name", {"tools": [{"input_schema": {}}]}
    yield "tools[1].name", {"tools": [LOOK, LOOK]}
    yield "tool_choice.type", {"tool_choice": {"type": "some"}}
    yield "tool_choice.type", {"tool_choice": {}}
    yield "tool_choice.name", {"tools": [LOOK], "tool_choice": {"type": "tool", "name": "other"}}
    yield "thinking.type", {"thinking": {"type": "perhaps"}}
    yield "output_config.effort", {"output_config": {"effort": "all"}}
    yield "output_config.format.schema", {"output_config": {"format": {"type": "json_schema"}}}


def test_anthropic_rejects_invalid_values_by_field_name() -> None:
    for field, fields in wrong_requests():
        assert API.get_error(field, **fields)["type"] == "invalid_request_error"


# --------------------------------------------------------------------------- answers


def test_anthropic_errors_have_expected_types() -> None:
    for wrong, status, kind in ((TargetError("no"), 500, "api_error"), (ShutdownError("bye"), 503, "overloaded_error")):
        response, _ = API.ask(Script(start_error=wrong))
        answer = response.json()
        assert (response.status_code, answer["type"], answer["error"]["type"]) == (status, "error", kind)
