"""Tests of OpenAI's Responses API over HTTP: messages in the chat template, and whole and streamed responses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from support.fake_service import Script
from support.http import allows, format_tool_call, parse_chunks
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


def test_responses_api_formats_codex_conversation_for_template() -> None:
    """Developer messages come first, calls come before their text, and reasoning is kept."""
    text = [{"type": "input_text", "text": "permissions"}]
    messages = API.messages(
        instructions="You are Codex.",
        input=[
            {"type": "message", "role": "developer", "content": text},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "environment"}]},
            {"role": "user", "content": "fix it"},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "reasoning", "id": "rs_2", "summary": [], "encrypted_content": "gAAA"},
            {"type": "reasoning", "id": "rs_3", "summary": [{"type": "summary_text", "text": "so"}]},
            {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "look", "arguments": '{"at": 1}'},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
            {"type": "function_call_output", "call_id": "c1", "output": "seen"},
            {"type": "web_search_call", "id": "ws_1", "status": "completed"},
            {"type": "custom_tool_call", "call_id": "c2", "name": "apply_patch", "input": "*** Begin"},
            {"type": "function_call", "call_id": "c3", "name": "look", "namespace": "mcp__db", "arguments": ""},
            {"type": "custom_tool_call_output", "call_id": "c2", "output": text},
            {"type": "function_call_output", "call_id": "c3", "output": ""},
            {"type": "message", "role": "developer", "content": "late"},
        ],
    )

    def call(id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}

    looked, patched = call("c1", "look", {"at": 1}), call("c2", "apply_patch", {"input": "*** Begin"})
    asked_the_base = call("c3", "mcp__db__look", {})
    assert messages == [
        {"role": "system", "content": "You are Codex.\npermissions"},
        {"role": "user", "content": "environment\nfix it"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "hm\nso", "tool_calls": [looked]},
        {"role": "tool", "tool_call_id": "c1", "content": "seen", "name": "look"},
        {"role": "assistant", "content": "", "tool_calls": [patched, asked_the_base]},
        {"role": "tool", "tool_call_id": "c2", "content": "permissions", "name": "apply_patch"},
        {"role": "tool", "tool_call_id": "c3", "content": "", "name": "mcp__db__look"},
        {"role": "user", "content": "<system>\nlate\n</system>"},
    ]
    for nothing in ("", []):
        assert API.messages(input=nothing) == [{"role": "user", "content": ""}]


def test_responses_api_accepts_own_tool_types_and_omits_hosted_tools() -> None:
    """Tools that only OpenAI's servers run are omitted, since Codex always sends some."""
    hosted = [{"type": kind} for kind in ("web_search", "image_generation", "local_shell", "tool_search")]
    tools = API.tools(tools=[*hosted, LOOK, PATCH, SERVER, {"type": "namespace", "name": "functions", "tools": []}])
    assert [tool["name"] for tool in tools] == ["look", "apply_patch", "mcp__db__look", "mcp__db__apply_patch"]
    assert tools[0]["parameters"] == {"type": "object"}
    assert "start: /.+/" in tools[1]["description"]
    for name, expected in (("functions", "look"), ("mcp__db__", "mcp__db__look")):
        (tool,) = API.tools(tools=[{"type": "namespace", "name": name, "tools": [LOOK]}])
        assert tool["name"] == expected
    (tool,) = API.tools(input=[{"type": "additional_tools", "role": "developer", "tools": [LOOK]}])
    assert tool["name"] == "look"


OPEN = {"parameters": {"type": "object", "properties": {}}}


def test_responses_api_settings_reach_the_engine() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    form = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    fields: dict[str, Any] = {
        "max_output_tokens": 16,
        "text": {"format": form, "verbosity": "low"},
        "reasoning": {"effort": "minimal", "summary": "auto"},
        "include": ["reasoning.encrypted_content", "message.output_text.logprobs"],
        "prompt_cache_key": "k",
        "client_metadata": {},
    }
    _, engine = API.ask(**fields)
    assert (engine.requests[0].max_tokens, engine.requests[0].logprobs) == (16, 0)
    assert [allows(engine, text) for text in ('{"a": "b"}', '{"b": 1}', "a")] == [True, False, False]
    received = API.template_values(**fields)
    assert (received["enable_thinking"], received["reasoning_effort"]) == (True, "low")
    assert API.template_values(reasoning={"effort": "none"})["enable_thinking"] is False
    _, engine = API.ask(text={"format": {"type": "json_object"}})
    assert [allows(engine, text) for text in ('{"b": 1}', "a")] == [True, False]
    _, engine = API.ask(top_logprobs=3)
    assert (engine.requests[0].logprobs, engine.requests[0].sampling.grammar) == (3, None)


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


THOUGHT = "<think>\nhm\n</think>\n\n"


def test_responses_api_stream_sends_events_in_expected_order() -> None:
    sent = streamed(Script(f"{THOUGHT}I look.\n{format_tool_call('look')}", step=100), tools=[LOOK])
    order = """
        created in_progress
        output_item.added content_part.added reasoning_text.delta
        reasoning_text.done content_part.done output_item.done
        output_item.added content_part.added output_text.delta
        output_text.done content_part.done output_item.done
        output_item.added function_call_arguments.delta function_call_arguments.done output_item.done
        completed
    """
    assert [event["type"] for event in sent] == [f"response.{kind}" for kind in order.split()]
    assert all(event["content_index"] == 0 for event in sent if "content_part" in event["type"])
    assert not any(event["part"]["text"] for event in sent if event["type"] == "response.content_part.added")


def test_responses_api_calls_name_their_tool_and_are_accepted_as_input() -> None:
    patch = json.dumps({"input": "*** Begin\n+é"}, ensure_ascii=False)
    look = format_tool_call("mcp__db__look", json.dumps({"at": 1}))
    text = f"{THOUGHT}I look.\n{look}\n{format_tool_call('apply_patch', patch)}"
    output = whole(Script(text), tools=[PATCH, SERVER])["output"]
    _, _, first, second = output
    assert (first["type"], first["name"], first["namespace"]) == ("function_call", "look", "mcp__db")
    assert (first["arguments"], first["status"]) == ('{"at": 1}', "completed")
    assert (second["type"], second["name"], second["input"]) == ("custom_tool_call", "apply_patch", "*** Begin\n+é")
    assert "namespace" not in second
    # Clients append the unchanged output to the next input.
    results = [
        {"type": f"{item['type']}_output", "call_id": item["call_id"], "output": "seen"} for item in (first, second)
    ]
    message = API.messages(input=[*output, *results])[0]
    assert (message["content"], message["reasoning_content"]) == ("I look.", "hm")
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["mcp__db__look", "apply_patch"]


def test_responses_api_response_at_token_limit_is_incomplete() -> None:
    answer = whole(Script(f"{THOUGHT}a b c ", ends=False), max_output_tokens=20)
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [item["status"] for item in answer["output"]] == ["completed", "incomplete"]


def test_responses_api_response_contains_usage_and_repeats_fields() -> None:
    script = Script("Hello, world", n_cached=5)
    response, engine = API.ask(script, tools=[LOOK], instructions="I", metadata={"a": "b"})
    answer, usage = response.json(), response.json()["usage"]
    count, prompt = len(engine.vocabulary.tokenize(script.text, add_bos=False)) + 1, len(engine.requests[0].prompt)
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (prompt, count, prompt + count)
    assert usage["input_tokens_details"] == {"cached_tokens": 5, "cache_write_tokens": 0}
    assert (answer["tools"], answer["instructions"], answer["metadata"]) == ([LOOK], "I", {"a": "b"})
    assert (answer["store"], answer["status"]) == (False, "completed")
