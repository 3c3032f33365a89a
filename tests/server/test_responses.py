"""Tests of OpenAI's Responses API over HTTP: errors, names of tools, and streams that equal whole responses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from support.fake_service import Script
from support.http import parse_chunks
from support.json_chat import Chat, answers

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
API = Chat("/v1/responses", model="m", input="hi", store=False)
LOOK = {"type": "function", "name": "look", "description": "Looks.", "parameters": {"type": "object"}, "strict": False}
LARK = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Edits.", "format": LARK}
SERVER = {"type": "namespace", "name": "mcp__db", "description": "", "tools": [LOOK, PATCH]}


def whole(script: Script, **fields: Any) -> dict[str, Any]:
    answer: dict[str, Any] = API.get_response(script, **fields).json()
    return answer


def streamed(script: Script, **fields: Any) -> list[dict[str, Any]]:
    return parse_chunks(API.get_response(script, stream=True, **fields).text)


def wrong_requests() -> Iterator[tuple[str, dict[str, Any]]]:
    alone = {
        "input": [None, 3, ["x"]],
        "previous_response_id": ["resp_0"],
        "conversation": ["conv_0"],
        "prompt": [{"id": "pmpt_0"}],
        "background": [True],
        "truncation": ["auto"],
        "max_output_tokens": [0],
        "instructions": [["x"]],
        "tool_choice": ["required", "some"],
        "top_logprobs": [21],
    }
    yield from ((name, {name: value}) for name, values in alone.items() for value in values)
    items: list[tuple[str, dict[str, Any]]] = [
        ("role", {"content": "x"}),
        ("role", {"role": "tool", "content": "x"}),
        ("content", {"role": "user"}),
        ("call_id", {"type": "function_call", "name": "x", "arguments": "{}"}),
        ("output", {"type": "function_call_output", "call_id": "c"}),
        ("id", {"type": "item_reference", "id": "msg_1"}),
        ("type", {"type": "mystery"}),
    ]
    yield from ((f"input[0].{name}", {"input": [item]}) for name, item in items)
    yield "tools[0].type", {"tools": [{"name": "x"}]}
    yield "tools[0].name", {"tools": [{"type": "function", "function": {"name": "x"}}]}
    yield "tools[1].name", {"tools": [LOOK, LOOK]}
    yield "tool_choice.name", {"tools": [LOOK], "tool_choice": {"type": "function", "name": "other"}}
    yield "tool_choice.type", {"tool_choice": {"type": "web_search"}}
    yield "text.format.type", {"text": {"format": {}}}
    yield "text.format.schema", {"text": {"format": {"type": "json_schema", "name": "n"}}}
    yield "reasoning.effort", {"reasoning": {"effort": "all"}}


def test_responses_api_rejects_invalid_values_by_field_name() -> None:
    for field, fields in wrong_requests():
        assert API.get_error(field, **fields)["param"] == field


def test_responses_api_accepts_namespace_that_ends_with_separator() -> None:
    (tool,) = API.tools(tools=[SERVER | {"name": "mcp__db__", "tools": [LOOK]}])
    assert tool["name"] == "mcp__db__look"


# --------------------------------------------------------------------------- answers


def without_ids(value: Any) -> Any:
    """Replace random ids and times."""
    if isinstance(value, list):
        return [without_ids(one) for one in value]
    if isinstance(value, dict):
        random = {"id", "call_id", "item_id", "created_at", "completed_at"}
        return {name: "" if name in random else without_ids(one) for name, one in value.items()}
    return value


@given(answers("look", "apply_patch", "mcp__db__look", "made_up"), st.booleans())
def test_responses_api_stream_equals_whole_response(answer: tuple[Script, int], has_tools: bool) -> None:
    script, limit = answer
    asked = {"tools": [LOOK, PATCH, SERVER] if has_tools else [], "max_output_tokens": limit}
    sent = streamed(script, **asked)
    state: ResponseStreamState[Any] = ResponseStreamState(input_tools=[], text_format=omit)
    for number, event in enumerate(sent):
        assert event["sequence_number"] == number
        state.handle_event(EVENT.validate_python(event))
    assert [event["type"] for event in sent[:2]] == ["response.created", "response.in_progress"]
    response, last = whole(script, **asked), sent[-1]
    Response.model_validate(response)
    assert without_ids(last["response"]) == without_ids(response)
    assert last["type"] == f"response.{response['status']}"
    output = last["response"]["output"]
    assert [item for kind, item in items(sent) if kind == "done"] == output
    assert pieced(sent) == [text_of(item) for item in output]


def items(sent: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    """Return the items as they are added and done; each must be done before the next one is added."""
    found = [(event["type"].rpartition(".")[2], event) for event in sent if "output_item" in event["type"]]
    assert [kind for kind, _ in found] == ["added", "done"] * (len(found) // 2)
    assert [event["output_index"] for _, event in found] == [i // 2 for i in range(len(found))]
    return [(kind, event["item"]) for kind, event in found]


def pieced(sent: list[dict[str, Any]]) -> list[str]:
    """Return the text of each item, joined from the deltas that name it."""
    added = [item for kind, item in items(sent) if kind == "added"]
    assert not any(map(text_of, added)), "the contents of an item come in pieces"
    texts = ["" for _ in added]
    for event in sent:
        if event["type"].endswith(".delta"):
            assert event["item_id"] == added[event["output_index"]]["id"]
            texts[event["output_index"]] += event["delta"]
    return texts


def text_of(item: dict[str, Any]) -> str:
    if "content" in item:
        return "".join(part["text"] for part in item["content"])
    return str(item.get("arguments", item.get("input")))
