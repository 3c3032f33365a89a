"""Tests of Anthropic's Messages API over HTTP: messages in the chat template, and whole and streamed responses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter
from support.fake_service import Script
from support.http import format_tool_call, parse_chunks
from support.json_chat import Chat

from ngramspec.data import ShutdownError, TargetError

EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
USER = {"role": "user", "content": "hi"}
API = Chat("/v1/messages", model="m", max_tokens=400, messages=[USER])
LOOK = {"name": "look", "description": "Looks.", "input_schema": {"type": "object", "properties": {}}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
FORM = {"type": "json_schema", "schema": SCHEMA}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def turn(role: str, *blocks: Any) -> dict[str, Any]:
    return {"role": role, "content": [*blocks]}


def whole(script: Any, **fields: Any) -> dict[str, Any]:
    """Return a message without its random fields."""
    return fixed(Message.model_validate(API.get_response(script, **fields).json()).model_dump(exclude_none=True))


def streamed(script: Any, **fields: Any) -> list[dict[str, Any]]:
    return parse_chunks(API.get_response(script, stream=True, **fields).text)


def accumulated(sent: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that Anthropic's client builds from a stream."""
    snapshot: Any = None
    parts: dict[int, bytes] = {}
    for event in sent:
        snapshot = accumulate_event(event=EVENT.validate_python(event), current_snapshot=snapshot, json_bufs=parts)
    return fixed(Message.model_validate(snapshot.model_dump()).model_dump(exclude_none=True))


def fixed(message: dict[str, Any]) -> dict[str, Any]:
    """Replace random ids."""
    for block in [message, *message["content"]]:
        if "id" in block:
            block["id"] = "id"
    return message


def system(content: str) -> dict[str, Any]:
    return {"role": "system", "content": content}


BILLING = "x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch={};"
CALLED = turn(
    "assistant",
    {"type": "thinking", "thinking": "hm", "signature": "unsigned"},
    {"type": "redacted_thinking", "data": "x"},
    text("I look."),
    {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "é", "n": 1}},
    {"type": "tool_use", "id": "t2", "name": "list", "input": {}},
)
RESULTS = turn(
    "user",
    text("continue"),
    {"type": "tool_result", "tool_use_id": "t1", "content": "seen"},
    {"type": "tool_result", "tool_use_id": "t2", "is_error": True, "content": [text("no"), text("way")]},
    {"type": "tool_result", "tool_use_id": "t3"},
)
DOCUMENTS = (
    {"type": "document", "title": "name", "source": {"type": "text", "media_type": "text/plain", "data": "body"}},
    {"type": "document", "source": {"type": "content", "content": [text("part")]}},
    {"type": "search_result", "title": "T", "source": "S", "content": [text("x")]},
)
QUOTED = f"The file says:\n{BILLING.format(1)}"
LATE = turn("system", text("Agents: none."))


def call(id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


REQUESTS: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "neighbouring turns are joined": (
        {
            "system": [text("Be brief.") | {"cache_control": {"type": "ephemeral"}}],
            "messages": [
                turn("user", text("a"), text("b")),
                USER,
                *({"role": "assistant", "content": words} for words in ("c", "d")),
                USER,
            ],
        },
        [
            system("Be brief."),
            {"role": "user", "content": "a\nb\nhi"},
            {"role": "assistant", "content": "c\nd"},
            USER,
        ],
    ),
    "calls, results and thoughts": (
        {"messages": [USER, CALLED, RESULTS]},
        [
            USER,
            {
                "role": "assistant",
                "content": "I look.",
                "reasoning_content": "hm",
                "tool_calls": [call("t1", "look", {"at": "é", "n": 1}), call("t2", "list", {})],
            },
            {"role": "tool", "tool_call_id": "t1", "content": "seen", "name": "look"},
            {"role": "tool", "tool_call_id": "t2", "content": "Error: no\nway", "name": "list"},
            {"role": "tool", "tool_call_id": "t3", "content": ""},
            {"role": "user", "content": "continue"},
        ],
    ),
    # Claude Code's first line differs in every request; two requests must have the same prompt.
    "a billing line": ({"system": f"{BILLING.format('fa690')}\nYou are.\nMore."}, [system("You are.\nMore."), USER]),
    "a billing line after an end of line": (
        {"system": f"\n{BILLING.format('0aaa9')}\nYou are."},
        [system("You are."), USER],
    ),
    "a billing block": ({"system": [text(BILLING.format("0")), text("You are.")]}, [system("You are."), USER]),
    "nothing but a billing line": ({"system": BILLING.format(1)}, [USER]),
    "a quoted billing line": ({"system": QUOTED}, [system(QUOTED), USER]),
    "a billing line of the user": (
        {"messages": [{"role": "user", "content": BILLING.format(1)}]},
        [{"role": "user", "content": BILLING.format(1)}],
    ),
    # Most templates allow no later system messages, and the prompt before them must stay the same.
    "a late system message": (
        {"system": "S", "messages": [USER, LATE, turn("system")]},
        [system("S"), {"role": "user", "content": "hi\n<system>\nAgents: none.\n</system>"}],
    ),
    "an early system message": ({"system": "S", "messages": [LATE, USER]}, [system("S\nAgents: none."), USER]),
    "documents": (
        {"messages": [turn("user", *DOCUMENTS)]},
        [{"role": "user", "content": "name\nbody\npart\nT\nS\nx"}],
    ),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_anthropic_messages_reach_the_chat_template(name: str) -> None:
    fields, expected = REQUESTS[name]
    assert API.messages(**fields) == expected


def test_anthropic_server_tools_are_ignored() -> None:
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
    assert [tool["name"] for tool in API.tools(tools=[search, LOOK | {"type": "custom"}])] == ["look"]
    API.get_error("tool_choice.name", tools=[search], tool_choice={"type": "tool", "name": "web_search"})
    API.get_error("tool_choice", tools=[search], tool_choice={"type": "any"})


ONE = format_tool_call("look")


def test_anthropic_thinking_effort_and_format_reach_the_request() -> None:
    assert API.template_values(thinking={"type": "disabled"})["enable_thinking"] is False
    assert API.template_values(thinking={"type": "enabled", "budget_tokens": 2048})["enable_thinking"] is True
    assert API.template_values(output_config={"effort": "max"})["reasoning_effort"] == "high"
    assert (API.template_values()["enable_thinking"], API.template_values()["reasoning_effort"]) == (True, None)
    for fields in ({"output_config": {"format": FORM}}, {"output_format": FORM}):
        _, engine = API.ask(**fields)
        assert engine.requests[0].sampling.grammar is not None


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


LISTED = format_tool_call("list", '{"at": "x", "n": [1]}')


def test_anthropic_response_contains_usage_and_omits_hidden_reasoning() -> None:
    script = Script(f"<think>\nhm\n</think>\n\nI look.\n{LISTED}\n{ONE}", step=3, n_cached=5)
    asked = {"tools": [LOOK, LOOK | {"name": "list"}]}
    response, engine = API.ask(script, **asked)
    usage = response.json()["usage"]
    assert 0 < usage.pop("output_tokens_details")["thinking_tokens"] < usage["output_tokens"]
    assert usage == {
        "input_tokens": len(engine.requests[0].prompt) - 5,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 5,
        "output_tokens": len(engine.vocabulary.tokenize(script.text, add_bos=False)) + 1,
    }
    hides = asked | {"thinking": {"type": "adaptive", "display": "omitted"}}
    hidden = {"type": "thinking", "thinking": "", "signature": "unsigned"}
    assert whole(script, **hides)["content"][0] == accumulated(streamed(script, **hides))["content"][0] == hidden


@pytest.mark.parametrize(
    ("script", "fields", "reason", "sequence"),
    [
        (Script("x"), {}, "end_turn", None),
        (Script("x END"), {"stop_sequences": ["END"]}, "stop_sequence", "END"),
        (Script("x ", ends=False), {"max_tokens": 9}, "max_tokens", None),
        (Script("x ", ends=False), {"max_tokens": 400, "n_ctx": 150}, "model_context_window_exceeded", None),
        (Script(ONE), {"tools": [LOOK]}, "tool_use", None),
        # Clients ignore truncated arguments.
        (Script(ONE[:-18] + '"text": "rm ' * 9, ends=False), {"tools": [LOOK], "max_tokens": 40}, "max_tokens", None),
    ],
)
def test_anthropic_response_reports_stop_reason(
    script: Script, fields: dict[str, Any], reason: str, sequence: str | None
) -> None:
    for answer in (whole(script, **fields), accumulated(streamed(script, **fields))):
        assert (answer["stop_reason"], answer.get("stop_sequence")) == (reason, sequence)
        assert all(block["input"] == {} for block in answer["content"] if block["type"] == "tool_use")


def test_anthropic_errors_have_expected_types() -> None:
    for wrong, status, kind in ((TargetError("no"), 500, "api_error"), (ShutdownError("bye"), 503, "overloaded_error")):
        response, _ = API.ask(Script(start_error=wrong))
        answer = response.json()
        assert (response.status_code, answer["type"], answer["error"]["type"]) == (status, "error", kind)
