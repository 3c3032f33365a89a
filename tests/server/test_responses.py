"""OpenAI's Responses API: requests as chat tasks, and answers as OpenAI's own client reads them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from support.chat_scripts import answers, broken, finish, played, refused

from ngramspec.sampling.logprobs import Logprobs
from ngramspec.sampling.settings import Sampling
from ngramspec.server.dialogue import ChatDelta, ChatTask, Likely
from ngramspec.server.errors import ApiError, overflow
from ngramspec.server.fields import Fields
from ngramspec.server.responses_answer import Answer
from ngramspec.server.responses_request import Asked, read_request
from ngramspec.tool_calls.deltas import CallArguments, CallBegin, Content, Reasoning

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
LOOK = {"type": "function", "name": "look", "description": "Looks.", "parameters": {"type": "object"}, "strict": False}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}
SERVER = {"type": "namespace", "name": "mcp__db", "description": "", "tools": [LOOK, PATCH]}


def asked(**fields: Any) -> Asked:
    return read_request(Fields({"model": "m", "input": "hi"} | fields), Sampling())


def task(**fields: Any) -> ChatTask:
    return asked(**fields).task


def refusal(**fields: Any) -> ApiError:
    return refused(task, **fields)


def spell(one: Logprobs) -> dict[str, Any]:
    return {"token": chr(one.token), "bytes": [one.token], "logprob": one.logprob, "top_logprobs": []}


def answering(request: Asked) -> Answer:
    return Answer(request, "resp_1", "m", spell, lambda: 1e9)


def streamed(deltas: Sequence[ChatDelta | None], request: Asked | None = None) -> list[dict[str, Any]]:
    answer = answering(request or asked())

    async def collect() -> list[dict[str, Any]]:
        return [event async for event in answer.events(played(deltas))]

    return asyncio.run(collect())


def whole(deltas: list[ChatDelta], request: Asked | None = None) -> dict[str, Any]:
    return asyncio.run(answering(request or asked()).whole(played(deltas)))


# --------------------------------------------------------------------------- requests


def test_text_and_instructions() -> None:
    assert task(instructions="Be brief.").messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
    ]
    assert task(input=[]).messages == task(input="").messages == [{"role": "user", "content": ""}]


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

    assert got.messages == [
        {"role": "system", "content": "You are Codex.\npermissions"},
        {"role": "user", "content": "environment\nfix it"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "hm\nso",
            "tool_calls": [call("c1", "look", '{"at": 1}')],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "seen", "name": "look"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [call("c2", "apply_patch", '{"input": "*** Begin"}'), call("c3", "mcp__db__look", "{}")],
        },
        {"role": "tool", "tool_call_id": "c2", "content": "permissions", "name": "apply_patch"},
        {"role": "tool", "tool_call_id": "c3", "content": "", "name": "mcp__db__look"},
        {"role": "user", "content": "<system>\nlate\n</system>"},
    ]


def test_what_an_answer_holds_can_be_sent_back() -> None:
    """Clients append the output to the next input as it is."""
    deltas = [Reasoning("hm"), Content("I look."), CallBegin(0, "c0", "look"), CallArguments(0, "{}")]
    request = asked(tools=[LOOK, PATCH])
    output = whole([*deltas, CallBegin(1, "c1", "apply_patch"), finish("tool_calls")], request)["output"]
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


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ("auto", 3)),
        ("auto", ("auto", 3)),
        ("none", ("none", 3)),
        ("required", ("required", 3)),
        ({"type": "function", "name": "look"}, ("look", 3)),
        ({"type": "function", "name": "look", "namespace": "mcp__db"}, ("mcp__db__look", 3)),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "look"}]},
            ("required", 1),
        ),
    ],
)
def test_tool_choice(choice: Any, expected: tuple[str, int]) -> None:
    got = task(tools=[LOOK, SERVER], tool_choice=choice, parallel_tool_calls=False)
    assert (got.tool_choice, len(got.tools), got.parallel) == (*expected, False)


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
    assert (got.max_tokens, got.schema, got.logprobs) == (16, schema, 0)
    assert got.variables == {"enable_thinking": True, "reasoning_effort": "low"}
    assert task(reasoning={"effort": "none"}).variables["enable_thinking"] is False
    assert (task().schema, task().logprobs, task().variables) == (None, None, {})
    assert task(text={"format": {"type": "json_object"}}).schema == {"type": "object"}
    assert task(top_logprobs=3).logprobs == 3


PICTURE = [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("input", {"input": None}),
        ("input", {"input": 3}),
        ("input", {"input": ["x"]}),
        ("input[0].role", {"input": [{"content": "x"}]}),
        ("input[0].role", {"input": [{"role": "tool", "content": "x"}]}),
        ("input[0].content", {"input": [{"role": "user"}]}),
        ("input[0].content[0].type", {"input": PICTURE}),
        ("input[0].call_id", {"input": [{"type": "function_call", "name": "x", "arguments": "{}"}]}),
        ("input[0].output", {"input": [{"type": "function_call_output", "call_id": "c"}]}),
        ("input[0].id", {"input": [{"type": "item_reference", "id": "msg_1"}]}),
        ("input[0].type", {"input": [{"type": "mystery"}]}),
        ("previous_response_id", {"previous_response_id": "resp_0"}),
        ("conversation", {"conversation": "conv_0"}),
        ("prompt", {"prompt": {"id": "pmpt_0"}}),
        ("background", {"background": True}),
        ("truncation", {"truncation": "auto"}),
        ("max_output_tokens", {"max_output_tokens": 0}),
        ("instructions", {"instructions": ["x"]}),
        ("tools[0].type", {"tools": [{"name": "x"}]}),
        ("tools[0].name", {"tools": [{"type": "function", "function": {"name": "x"}}]}),
        ("tools[1].name", {"tools": [LOOK, LOOK]}),
        ("tool_choice", {"tool_choice": "required"}),
        ("tool_choice", {"tool_choice": "some"}),
        ("tool_choice.name", {"tools": [LOOK], "tool_choice": {"type": "function", "name": "other"}}),
        ("tool_choice.type", {"tool_choice": {"type": "web_search"}}),
        ("text.format.type", {"text": {"format": {}}}),
        ("text.format.schema", {"text": {"format": {"type": "json_schema", "name": "n"}}}),
        ("reasoning.effort", {"reasoning": {"effort": "all"}}),
        ("top_logprobs", {"top_logprobs": 21}),
    ],
)
def test_impossible_values_are_named(field: str, fields: dict[str, Any]) -> None:
    assert refusal(**fields).param == field


def rich() -> dict[str, Any]:
    """A request with a bit of everything."""
    text = [{"type": "input_text", "text": "a"}]
    return {
        "model": "m",
        "instructions": "I",
        "input": [
            {"type": "message", "role": "developer", "content": text},
            {"role": "user", "content": "a"},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}], "content": None},
            {"type": "function_call", "call_id": "c", "name": "look", "namespace": "mcp__db", "arguments": "{}"},
            {"type": "custom_tool_call", "call_id": "d", "name": "apply_patch", "input": "x"},
            {"type": "local_shell_call", "call_id": "e", "action": {"type": "exec", "command": ["ls"]}},
            {"type": "function_call_output", "call_id": "c", "output": text},
            {"type": "local_shell_call_output", "id": "e", "output": "x"},
            {"type": "additional_tools", "tools": []},
        ],
        "tools": [LOOK, PATCH, SERVER, {"type": "web_search"}],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "look"}]},
        "max_output_tokens": 9,
        "metadata": {"a": "b"},
        "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
        "truncation": "disabled",
        "background": False,
        "store": False,
    }


@settings(deadline=None)
@given(broken(rich()))
def test_a_broken_request_is_read_or_refused(body: dict[str, Any]) -> None:
    refused = None
    try:
        read_request(Fields(body), Sampling())
    except ApiError as error:
        refused = error
    assert refused is None or (refused.status == 400 and refused.message.startswith(refused.param or "?"))


# --------------------------------------------------------------------------- answers


@settings(deadline=None)
@given(answers(["look", "apply_patch", "mcp__db__look", "made_up"]), st.booleans())
def test_any_answer_streams_as_what_it_is_whole(deltas: list[ChatDelta], tools: bool) -> None:
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
    sent = streamed([Reasoning("hm"), Content("a"), Content("b"), CallBegin(0, "c0", "look"), finish("tool_calls")])
    assert [event["type"].removeprefix("response.") for event in sent] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    assert all(event["content_index"] == 0 for event in sent if "content_part" in event["type"])


def test_calls_go_back_to_the_tool_they_came_from() -> None:
    deltas = [
        CallBegin(0, "c0", "mcp__db__look"),
        CallArguments(0, '{"at": 1}'),
        CallBegin(1, "c1", "apply_patch"),
        CallArguments(1, json.dumps({"input": "*** Begin\n+é"})),
        finish("tool_calls"),
    ]
    first, second = whole(deltas, asked(tools=[PATCH, SERVER]))["output"]
    assert (first["type"], first["name"], first["namespace"]) == ("function_call", "look", "mcp__db")
    assert (first["arguments"], first["call_id"], first["status"]) == ('{"at": 1}', "c0", "completed")
    assert (second["type"], second["name"], second["input"]) == ("custom_tool_call", "apply_patch", "*** Begin\n+é")
    assert "namespace" not in second


def test_an_answer_that_was_cut() -> None:
    answer = whole([Reasoning("hm"), Content("a"), finish("length")])
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [item["status"] for item in answer["output"]] == ["completed", "incomplete"]


def test_usage_and_what_is_repeated() -> None:
    answer = whole([Content("a"), finish()], asked(tools=[LOOK], instructions="I", metadata={"a": "b"}))
    assert answer["usage"] == {
        "input_tokens": 20,
        "input_tokens_details": {"cached_tokens": 5, "cache_write_tokens": 0},
        "output_tokens": 7,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 27,
    }
    assert (answer["tools"], answer["instructions"], answer["metadata"]) == ([LOOK], "I", {"a": "b"})
    assert (answer["store"], answer["status"], answer["created_at"]) == (False, "completed", 10**9)


def test_logprobs_are_told_with_the_text() -> None:
    a, b = Logprobs(97, -0.5, ()), Logprobs(98, -1.0, ())
    deltas: list[ChatDelta] = [Likely((a,)), Content("a"), Content("b"), Likely((b,)), finish()]
    told = [one for event in streamed(deltas) if event["type"].endswith("text.delta") for one in event["logprobs"]]
    (part,) = whole(deltas)["output"][0]["content"]
    assert told == part["logprobs"] == [spell(a), spell(b)]


def test_a_failure_ends_the_stream() -> None:
    created, _, failed = (
        EVENT.validate_python(event) for event in answering(asked()).failed(ApiError(500, "it broke"))
    )
    assert (created.type, created.response.status) == ("response.created", "in_progress")
    assert (failed.type, failed.response.status, failed.sequence_number) == ("response.failed", "failed", 2)
    assert (failed.response.error.code, failed.response.error.message) == ("server_error", "it broke")
    assert answering(asked()).failed(overflow(9, 8))[-1]["response"]["error"]["code"] == "context_length_exceeded"


def test_silence_is_told() -> None:
    """Codex counts the seconds between events, whose comments are none to it."""
    kinds = [event["type"] for event in streamed([None, Content("a"), None, finish()])]
    assert kinds[:3] == ["response.created", "response.in_progress", "keepalive"]
    assert kinds.count("keepalive") == 2
