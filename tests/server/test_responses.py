"""OpenAI's Responses API: requests as chat tasks, and answers as OpenAI's own client reads them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from support import chat_scripts
from support.chat_scripts import Said, answers, finish, refused
from support.http import scripted

from ngramspec.request import Request
from ngramspec.sampling.distribution import Logprobs
from ngramspec.server import responses
from ngramspec.server.call import ApiError, Call, Fields, Server, overflow
from ngramspec.server.chat import ChatTask, Toolbox
from ngramspec.server.common_fields import Form
from ngramspec.server.reply import logprobs_content
from ngramspec.server.responses import ResponseReply, read_request
from ngramspec.tool_calls.deltas import Delta

Asked = tuple[ChatTask, Toolbox, dict[str, Any]]

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
LOOK = {"type": "function", "name": "look", "description": "Looks.", "parameters": {"type": "object"}, "strict": False}
LARK = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Edits.", "format": LARK}
SERVER = {"type": "namespace", "name": "mcp__db", "description": "", "tools": [LOOK, PATCH]}


def asked(**fields: Any) -> Asked:
    return read_request(Fields({"model": "m", "input": "hi"} | fields))


def task(**fields: Any) -> ChatTask:
    return asked(**fields)[0]


MODEL = scripted()[0].ready()


@pytest.fixture(scope="module", autouse=True)
def time_stands() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(responses, "time", SimpleNamespace(time=lambda: 1e9))
        yield


def answering(request: Asked | None) -> ResponseReply:
    _, toolbox, echo = request or asked()
    call = Call(Server(model=MODEL), Fields({}), requests=[Request([1], 9)])
    return ResponseReply(call, toolbox, echo, "resp_1", "m")


def streamed(said: list[Said], request: Asked | None = None) -> list[dict[str, Any]]:
    return chat_scripts.streamed(answering(request), said)


def whole(said: list[Said], request: Asked | None = None) -> dict[str, Any]:
    return chat_scripts.whole(answering(request), said)


def test_a_conversation_as_codex_sends_it() -> None:
    """Developer messages first, calls before the text that came with them, and thoughts."""
    text = [{"type": "input_text", "text": "permissions"}]
    got = task(
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

    def call(id: str, name: str, arguments: str) -> dict[str, Any]:
        return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}

    looked, patched = call("c1", "look", '{"at": 1}'), call("c2", "apply_patch", '{"input": "*** Begin"}')
    asked_the_base = call("c3", "mcp__db__look", "{}")
    assert got.messages == [
        {"role": "system", "content": "You are Codex.\npermissions"},
        {"role": "user", "content": "environment\nfix it"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "hm\nso", "tool_calls": [looked]},
        {"role": "tool", "tool_call_id": "c1", "content": "seen", "name": "look"},
        {"role": "assistant", "content": "", "tool_calls": [patched, asked_the_base]},
        {"role": "tool", "tool_call_id": "c2", "content": "permissions", "name": "apply_patch"},
        {"role": "tool", "tool_call_id": "c3", "content": "", "name": "mcp__db__look"},
        {"role": "user", "content": "<system>\nlate\n</system>"},
    ]


def test_what_an_answer_holds_can_be_sent_back() -> None:
    """Clients append the output to the next input as it is."""
    deltas = [
        Delta("thought", "hm"),
        Delta("text", "I look."),
        Delta("call", "", 0, "c0", "look"),
        Delta("arguments", "{}", 0),
    ]
    request = asked(tools=[LOOK, PATCH])
    output = whole([*deltas, Delta("call", "", 1, "c1", "apply_patch"), finish("tool_calls")], request)["output"]
    (got,) = task(input=output).messages
    assert (got["content"], got["reasoning_content"]) == ("I look.", "hm")
    assert [call["function"]["name"] for call in got["tool_calls"]] == ["look", "apply_patch"]


def test_tools_of_all_types() -> None:
    """What only OpenAI's servers run is left out: Codex always sends some."""
    hosted = [{"type": kind} for kind in ("web_search", "image_generation", "local_shell", "tool_search")]
    got = task(tools=[*hosted, LOOK, PATCH, SERVER, {"type": "namespace", "name": "functions", "tools": []}])
    assert [tool.name for tool in got.tools] == ["look", "apply_patch", "mcp__db__look", "mcp__db__apply_patch"]
    assert got.tools[0].parameters == {"type": "object"}
    assert "start: /.+/" in got.tools[1].description
    plain = {"type": "namespace", "name": "functions", "tools": [LOOK]}
    assert [tool.name for tool in task(tools=[plain]).tools] == ["look"]
    older = {"type": "namespace", "name": "mcp__db__", "tools": [LOOK]}
    assert [tool.name for tool in task(tools=[older]).tools] == ["mcp__db__look"]
    more = {"type": "additional_tools", "role": "developer", "tools": [LOOK]}
    assert [tool.name for tool in task(input=[more]).tools] == ["look"]


def test_tool_choice() -> None:
    look = {"type": "function", "name": "look"}
    for choice, expected, count in (
        (None, "auto", 3),
        ("auto", "auto", 3),
        ("none", "none", 3),
        ("required", "required", 3),
        (look, "look", 3),
        (look | {"namespace": "mcp__db"}, "mcp__db__look", 3),
        ({"type": "allowed_tools", "mode": "required", "tools": [look]}, "required", 1),
    ):
        got = task(tools=[LOOK, SERVER], tool_choice=choice, parallel_tool_calls=False)
        assert (got.tool_choice, len(got.tools), got.parallel) == (expected, count, False)


def test_settings_of_the_request() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    form = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    got = task(
        max_output_tokens=16,
        text={"format": form, "verbosity": "low"},
        reasoning={"effort": "minimal", "summary": "auto"},
        include=["reasoning.encrypted_content", "message.output_text.logprobs"],
        store=False,
        prompt_cache_key="k",
        client_metadata={},
    )
    assert (got.max_tokens, got.form, got.logprobs) == (16, Form(schema, "text.format.schema"), 0)
    assert got.variables == {"enable_thinking": True, "reasoning_effort": "low"}
    assert task(reasoning={"effort": "none"}).variables["enable_thinking"] is False
    assert (task().form, task().logprobs, task().variables) == (None, None, {})
    assert task(text={"format": {"type": "json_object"}}).form == Form({}, "text.format.schema", strict=False)
    assert task(top_logprobs=3).logprobs == 3
    assert task(input=[]).messages == task(input="").messages == [{"role": "user", "content": ""}]


def test_impossible_values_are_named() -> None:
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
    cases: list[tuple[str, dict[str, Any]]] = [
        *((name, {name: value}) for name, values in alone.items() for value in values),
        ("input[0].role", {"input": [{"content": "x"}]}),
        ("input[0].role", {"input": [{"role": "tool", "content": "x"}]}),
        ("input[0].content", {"input": [{"role": "user"}]}),
        ("input[0].call_id", {"input": [{"type": "function_call", "name": "x", "arguments": "{}"}]}),
        ("input[0].output", {"input": [{"type": "function_call_output", "call_id": "c"}]}),
        ("input[0].id", {"input": [{"type": "item_reference", "id": "msg_1"}]}),
        ("input[0].type", {"input": [{"type": "mystery"}]}),
        ("tools[0].type", {"tools": [{"name": "x"}]}),
        ("tools[0].name", {"tools": [{"type": "function", "function": {"name": "x"}}]}),
        ("tools[1].name", {"tools": [LOOK, LOOK]}),
        ("tool_choice.name", {"tools": [LOOK], "tool_choice": {"type": "function", "name": "other"}}),
        ("tool_choice.type", {"tool_choice": {"type": "web_search"}}),
        ("text.format.type", {"text": {"format": {}}}),
        ("text.format.schema", {"text": {"format": {"type": "json_schema", "name": "n"}}}),
        ("reasoning.effort", {"reasoning": {"effort": "all"}}),
    ]
    for field, fields in cases:
        refused(task, field, **fields)


@given(answers(["look", "apply_patch", "mcp__db__look", "made_up"]), st.booleans())
def test_any_answer_streams_as_what_it_is_whole(deltas: list[Said], tools: bool) -> None:
    request = asked(tools=[LOOK, PATCH, SERVER] if tools else [])
    sent = streamed(deltas, request)
    state: ResponseStreamState[Any] = ResponseStreamState(input_tools=[], text_format=omit)
    for number, event in enumerate(sent):
        assert event["sequence_number"] == number
        state.handle_event(EVENT.validate_python(event))
    assert [event["type"] for event in sent[:2]] == ["response.created", "response.in_progress"]
    answer = whole(deltas, request)
    Response.model_validate(answer)
    last = sent[-1]
    assert last["response"] == answer
    assert last["type"] == f"response.{answer['status']}"
    assert [item for kind, item in _items(sent) if kind == "done"] == answer["output"]
    assert _pieced(sent) == [_told(item) for item in answer["output"]]


def _items(sent: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    """Items as they are added and done, which must take turns."""
    found = [(event["type"].rpartition(".")[2], event) for event in sent if "output_item" in event["type"]]
    assert [kind for kind, _ in found] == ["added", "done"] * (len(found) // 2)
    assert [event["output_index"] for _, event in found] == [i // 2 for i in range(len(found))]
    return [(kind, event["item"]) for kind, event in found]


def _pieced(sent: list[dict[str, Any]]) -> list[str]:
    """The text of each item by its deltas alone, which name it."""
    items = [item for kind, item in _items(sent) if kind == "added"]
    assert not any(map(_told, items)), "what an item holds comes in pieces"
    texts = ["" for _ in items]
    for event in sent:
        if event["type"].endswith(".delta"):
            assert event["item_id"] == items[event["output_index"]]["id"]
            texts[event["output_index"]] += event["delta"]
    return texts


def _told(item: dict[str, Any]) -> str:
    if "content" in item:
        return "".join(part["text"] for part in item["content"])
    return str(item.get("arguments", item.get("input")))


def test_the_order_of_events() -> None:
    sent = streamed(
        [
            Delta("thought", "hm"),
            Delta("text", "a"),
            Delta("text", "b"),
            Delta("call", "", 0, "c0", "look"),
            finish("tool_calls"),
        ]
    )
    order = """
        created in_progress
        output_item.added content_part.added reasoning_text.delta
        reasoning_text.done content_part.done output_item.done
        output_item.added content_part.added output_text.delta output_text.delta
        output_text.done content_part.done output_item.done
        output_item.added function_call_arguments.done output_item.done
        completed
    """
    assert [event["type"] for event in sent] == [f"response.{kind}" for kind in order.split()]
    assert all(event["content_index"] == 0 for event in sent if "content_part" in event["type"])
    assert not any(event["part"]["text"] for event in sent if event["type"] == "response.content_part.added")


def test_calls_go_back_to_the_tool_they_came_from() -> None:
    patch = json.dumps({"input": "*** Begin\n+é"})
    deltas: list[Said] = [Delta("call", "", 0, "c0", "mcp__db__look"), Delta("arguments", '{"at": 1}', 0)]
    deltas += [Delta("call", "", 1, "c1", "apply_patch"), Delta("arguments", patch, 1), finish("tool_calls")]
    first, second = whole(deltas, asked(tools=[PATCH, SERVER]))["output"]
    assert (first["type"], first["name"], first["namespace"]) == ("function_call", "look", "mcp__db")
    assert (first["arguments"], first["call_id"], first["status"]) == ('{"at": 1}', "c0", "completed")
    assert (second["type"], second["name"], second["input"]) == ("custom_tool_call", "apply_patch", "*** Begin\n+é")
    assert "namespace" not in second


def test_an_answer_that_was_cut() -> None:
    answer = whole([Delta("thought", "hm"), Delta("text", "a"), finish("length")])
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [item["status"] for item in answer["output"]] == ["completed", "incomplete"]


def test_usage_and_what_is_repeated() -> None:
    answer = whole([Delta("text", "a"), finish()], asked(tools=[LOOK], instructions="I", metadata={"a": "b"}))
    usage = answer["usage"]
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (20, 7, 27)
    assert usage["input_tokens_details"] == {"cached_tokens": 5, "cache_write_tokens": 0}
    assert (answer["tools"], answer["instructions"], answer["metadata"]) == ([LOOK], "I", {"a": "b"})
    assert (answer["store"], answer["status"], answer["created_at"]) == (False, "completed", 10**9)


def test_logprobs_are_told_with_the_text() -> None:
    a, b = Logprobs(97, -0.5, ()), Logprobs(98, -1.0, ())
    deltas: list[Said] = [a, Delta("text", "a"), Delta("text", "b"), b, finish()]
    told = [one for event in streamed(deltas) if event["type"].endswith("text.delta") for one in event["logprobs"]]
    (part,) = whole(deltas)["output"][0]["content"]
    assert told == part["logprobs"] == logprobs_content(MODEL, [a, b])


def test_a_failure_ends_the_stream() -> None:
    sent = chat_scripts.data(answering(None).failed(ApiError(500, "it broke")))
    created, _, failed = (EVENT.validate_python(event) for event in sent)
    assert (created.response.status, failed.response.status) == ("in_progress", "failed")
    assert (failed.response.error.code, failed.response.error.message) == ("server_error", "it broke")
    last = chat_scripts.data(answering(None).failed(overflow(9, 8)))[-1]
    assert last["response"]["error"]["code"] == "context_length_exceeded"
