"""Anthropic's Messages API: requests as chat tasks, and answers as Anthropic's own client reads them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, RawMessageStreamEvent
from hypothesis import given, settings
from pydantic import TypeAdapter
from support.chat_scripts import answers, broken, finish, played, refused

from ngramspec.sampling.settings import Sampling
from ngramspec.server.anthropic_answer import events, message, worded
from ngramspec.server.anthropic_request import hides_thoughts, read_request
from ngramspec.server.dialogue import ChatDelta, ChatTask
from ngramspec.server.errors import ApiError, overflow
from ngramspec.server.fields import Fields
from ngramspec.tool_calls.deltas import CallArguments, CallBegin, Content, Reasoning, Tool

EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
USER = {"role": "user", "content": "hi"}
LOOK = {"name": "look", "description": "Looks.", "input_schema": {"type": "object", "properties": {}}}


def task(**fields: Any) -> ChatTask:
    body = {"model": "m", "max_tokens": 9, "messages": [USER]} | fields
    return read_request(Fields(body), Sampling())


def refusal(**fields: Any) -> ApiError:
    return refused(task, **fields)


def streamed(deltas: Sequence[ChatDelta | None], hide: bool = False) -> list[dict[str, Any]]:
    async def collect() -> list[dict[str, Any]]:
        return [event async for event in events(played(deltas), "msg_1", "m", hide)]

    return asyncio.run(collect())


def whole(deltas: list[ChatDelta], hide: bool = False) -> dict[str, Any]:
    return asyncio.run(message(played(deltas), "msg_1", "m", hide))


def accumulated(sent: list[dict[str, Any]]) -> dict[str, Any]:
    """What Anthropic's client makes of a stream."""
    snapshot: Any = None
    bufs: dict[int, bytes] = {}
    for event in sent:
        snapshot = accumulate_event(event=EVENT.validate_python(event), current_snapshot=snapshot, json_bufs=bufs)
    return Message.model_validate(snapshot.model_dump()).model_dump(exclude_none=True)


# --------------------------------------------------------------------------- requests


def test_system_and_turns_become_messages() -> None:
    got = task(
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": "c"},
            {"role": "user", "content": "d"},
        ],
    )
    assert got.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
    ]


def test_calls_their_results_and_thoughts() -> None:
    got = task(
        messages=[
            USER,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "unsigned"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "é", "n": 1}},
                    {"type": "tool_use", "id": "t2", "name": "list", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "go on"},
                    {"type": "tool_result", "tool_use_id": "t1", "content": "seen"},
                    {
                        "type": "tool_result",
                        "tool_use_id": "t2",
                        "is_error": True,
                        "content": [{"type": "text", "text": "no"}, {"type": "text", "text": "way"}],
                    },
                    {"type": "tool_result", "tool_use_id": "t3"},
                ],
            },
        ]
    )
    called = {"id": "t1", "type": "function", "function": {"name": "look", "arguments": '{"at": "é", "n": 1}'}}
    listed = {"id": "t2", "type": "function", "function": {"name": "list", "arguments": "{}"}}
    assert got.messages[1:] == [
        {"role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls": [called, listed]},
        {"role": "tool", "tool_call_id": "t1", "content": "seen", "name": "look"},
        {"role": "tool", "tool_call_id": "t2", "content": "Error: no\nway", "name": "list"},
        {"role": "tool", "tool_call_id": "t3", "content": ""},
        {"role": "user", "content": "go on"},
    ]


BILLING = "x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch={};"


def test_the_billing_line_never_reaches_the_prompt() -> None:
    """Two requests that differ only in it must have the same prompt."""
    for before in ("", "\n"):
        texts = [f"{before}{BILLING.format(x)}\nYou are Claude Code.\nMore." for x in ("fa690", "0aaa9")]
        first, second = (task(system=text).messages for text in texts)
        assert first == second == task(system="You are Claude Code.\nMore.").messages
    blocks = [{"type": "text", "text": BILLING.format("0")}, {"type": "text", "text": "You are Claude Code."}]
    assert task(system=blocks).messages[0]["content"] == "You are Claude Code."
    assert task(system=BILLING.format("1")).messages == [USER]


def test_what_only_quotes_the_billing_line_is_kept() -> None:
    quoted = f"The file says:\n{BILLING.format(1)}"
    assert task(system=quoted).messages[0]["content"] == quoted
    assert task(messages=[{"role": "user", "content": BILLING.format(1)}]).messages[0]["content"] == BILLING.format(1)


def test_a_late_system_message_stays_where_it_is() -> None:
    """Claude Code sends them after the first turn; most templates allow none there, and the prompt before must stay."""
    late = {"role": "system", "content": [{"type": "text", "text": "Agents: none."}]}
    got = task(system="S", messages=[USER, late, {"role": "system", "content": []}]).messages
    assert got == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "hi\n<system>\nAgents: none.\n</system>"},
    ]
    assert task(system="S", messages=[late, USER]).messages[0]["content"] == "S\nAgents: none."


def test_neighbouring_turns_of_one_side_are_one() -> None:
    said = [{"role": "assistant", "content": text} for text in "ab"]
    got = task(messages=[USER, USER, *said, USER])
    assert got.messages == [{"role": "user", "content": "hi\nhi"}, {"role": "assistant", "content": "a\nb"}, USER]


def test_documents_of_text_are_read() -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "body"}
    parts = {"type": "content", "content": [{"type": "text", "text": "part"}]}
    found = {"type": "search_result", "title": "T", "source": "S", "content": [{"type": "text", "text": "x"}]}
    content = [{"type": "document", "title": "name", "source": source}, {"type": "document", "source": parts}, found]
    got = task(messages=[{"role": "user", "content": content}])
    assert got.messages[0]["content"] == "name\nbody\npart\nT\nS\nx"


def test_settings_of_the_request() -> None:
    got = task(stop_sequences=["END"], tools=[LOOK], metadata={"user_id": "u"}, container=None, unknown=[1])
    assert (got.max_tokens, got.stop, got.tools) == (9, ("END",), (Tool("look", "Looks.", LOOK["input_schema"]),))
    assert (got.tool_choice, got.parallel, got.schema, dict(got.variables)) == ("auto", True, None, {})


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, ("auto", True)),
        ({"type": "any", "disable_parallel_tool_use": True}, ("required", False)),
        ({"type": "tool", "name": "look"}, ("look", True)),
        ({"type": "none"}, ("none", True)),
    ],
)
def test_tool_choice(choice: dict[str, Any], expected: tuple[str, bool]) -> None:
    got = task(tools=[LOOK], tool_choice=choice)
    assert (got.tool_choice, got.parallel) == expected


def test_tools_of_the_vendor_are_left_out() -> None:
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
    assert [tool.name for tool in task(tools=[search, LOOK | {"type": "custom"}]).tools] == ["look"]
    assert refusal(tools=[search], tool_choice={"type": "tool", "name": "web_search"}).param == "tool_choice.name"
    assert refusal(tools=[search], tool_choice={"type": "any"}).param == "tool_choice"


def test_thinking_effort_and_format() -> None:
    assert task(thinking={"type": "disabled"}).variables == {"enable_thinking": False}
    assert task(thinking={"type": "enabled", "budget_tokens": 2048}).variables == {"enable_thinking": True}
    assert task(output_config={"effort": "max"}).variables == {"reasoning_effort": "high"}
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    form = {"type": "json_schema", "schema": schema}
    assert task(output_config={"format": form}).schema == task(output_format=form).schema == schema
    assert hides_thoughts(Fields({"thinking": {"type": "adaptive", "display": "omitted"}}))
    assert not hides_thoughts(Fields({"thinking": {"type": "adaptive"}}))


def test_counting_needs_no_max_tokens() -> None:
    assert read_request(Fields({"messages": [USER]}), Sampling(), counting=True).messages == [USER]


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("max_tokens", {"max_tokens": None}),
        ("max_tokens", {"max_tokens": -1}),
        ("max_tokens", {"max_tokens": "9"}),
        ("messages", {"messages": []}),
        ("messages", {"messages": {"role": "user"}}),
        ("messages", {"messages": [USER, {"role": "assistant", "content": "The answer is"}]}),
        ("messages[0].role", {"messages": [{"role": "tool", "content": "x"}]}),
        ("messages[0].content", {"messages": [{"role": "user"}]}),
        ("messages[0].content", {"messages": [{"role": "user", "content": 3}]}),
        ("messages[0].content[0].type", {"messages": [{"role": "user", "content": [IMAGE]}]}),
        ("messages[0].content[0].type", {"messages": [{"role": "user", "content": [{"text": "x"}]}]}),
        ("messages[0].content[0].text", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}),
        (
            "messages[0].content[0].input",
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}, USER]},
        ),
        ("system[0].type", {"system": [IMAGE]}),
        ("system", {"system": 3}),
        ("stop_sequences", {"stop_sequences": [""]}),
        ("stop_sequences", {"stop_sequences": [3]}),
        ("tools[0].input_schema", {"tools": [{"name": "x"}]}),
        ("tools[0].name", {"tools": [{"input_schema": {}}]}),
        ("tools[1].name", {"tools": [LOOK, LOOK]}),
        ("tool_choice.type", {"tool_choice": {"type": "some"}}),
        ("tool_choice.type", {"tool_choice": {}}),
        ("tool_choice.name", {"tools": [LOOK], "tool_choice": {"type": "tool", "name": "other"}}),
        ("thinking.type", {"thinking": {"type": "perhaps"}}),
        ("output_config.effort", {"output_config": {"effort": "all"}}),
        ("output_config.format.schema", {"output_config": {"format": {"type": "json_schema"}}}),
    ],
)
def test_impossible_values_are_named(field: str, fields: dict[str, Any]) -> None:
    assert refusal(**fields).param == field


def rich() -> dict[str, Any]:
    """A request with a bit of everything."""
    content = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    call = {"type": "tool_use", "id": "t", "name": "look", "input": {"at": [1]}}
    result = {"type": "tool_result", "tool_use_id": "t", "is_error": False, "content": content}
    paper = {"type": "document", "title": "t", "source": {"type": "content", "content": content}}
    return {
        "model": "m",
        "max_tokens": 9,
        "system": content,
        "messages": [
            {"role": "user", "content": content},
            {"role": "assistant", "content": [thought, call]},
            {"role": "user", "content": [result, paper]},
            {"role": "system", "content": "s"},
        ],
        "tools": [LOOK, {"type": "web_search_20250305", "name": "web_search"}],
        "tool_choice": {"type": "tool", "name": "look", "disable_parallel_tool_use": True},
        "stop_sequences": ["END"],
        "thinking": {"type": "enabled", "budget_tokens": 2000, "display": "omitted"},
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}},
        "metadata": {"user_id": "u"},
    }


@settings(deadline=None)
@given(broken(rich()))
def test_a_broken_request_is_read_or_refused(body: dict[str, Any]) -> None:
    refused = None
    try:
        read_request(Fields(body), Sampling())
        hides_thoughts(Fields(body))
    except ApiError as error:
        refused = error
    assert refused is None or (refused.status == 400 and refused.message.startswith(refused.param or "?"))


# --------------------------------------------------------------------------- answers


@settings(deadline=None)
@given(answers())
def test_any_answer_streams_as_what_it_is_whole(deltas: list[ChatDelta]) -> None:
    sent = streamed(deltas)
    for event in sent:
        EVENT.validate_python(event)
    opened: list[int] = []
    for event in sent[1:-2]:
        if event["type"] == "content_block_start":
            assert event["index"] == len(opened)
            opened.append(event["index"])
            current = event["index"]
        else:
            assert event["index"] == current
            current = -1 if event["type"] == "content_block_stop" else current
    assert [sent[0]["type"], *(event["type"] for event in sent[-2:])] == [
        "message_start",
        "message_delta",
        "message_stop",
    ]
    answer = whole(deltas)
    assert accumulated(sent) == Message.model_validate(answer).model_dump(exclude_none=True)


def test_the_parts_of_an_answer() -> None:
    deltas: list[ChatDelta] = [
        Reasoning("h"),
        Reasoning("m"),
        Content("I "),
        Content("look."),
        CallBegin(0, "c0", "look"),
        CallArguments(0, '{"at": "x"'),
        CallArguments(0, ', "n": [1]}'),
        CallBegin(1, "c1", "list"),
        finish("tool_calls"),
    ]
    answer = whole(deltas)
    assert answer["content"] == [
        {"type": "thinking", "thinking": "hm", "signature": "unsigned"},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "c0", "name": "look", "input": {"at": "x", "n": [1]}},
        {"type": "tool_use", "id": "c1", "name": "list", "input": {}},
    ]
    assert answer["stop_reason"] == "tool_use"
    assert answer["usage"] == {
        "input_tokens": 15,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 5,
        "output_tokens": 7,
        "output_tokens_details": {"thinking_tokens": 2},
    }
    hidden = whole(deltas, hide=True)["content"][0]
    assert hidden == accumulated(streamed(deltas, hide=True))["content"][0]
    assert hidden == {"type": "thinking", "thinking": "", "signature": "unsigned"}


@pytest.mark.parametrize(
    ("end", "reason", "sequence"),
    [
        (finish("stop"), "end_turn", None),
        (finish("stop", "END"), "stop_sequence", "END"),
        (finish("length"), "max_tokens", None),
        (finish("length", full=True), "model_context_window_exceeded", None),
        (finish("tool_calls"), "tool_use", None),
    ],
)
def test_stop_reasons(end: Any, reason: str, sequence: str | None) -> None:
    answer = whole([Content("x"), end])
    assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, sequence)


def test_arguments_that_were_cut_are_not_acted_on() -> None:
    deltas = [CallBegin(0, "c", "write"), CallArguments(0, '{"path": "/a", "text": "rm'), finish("length")]
    answer = whole(deltas)
    assert (answer["content"][0]["input"], answer["stop_reason"]) == ({}, "max_tokens")


def test_errors_have_types() -> None:
    wrong = worded(ApiError(400, "no"))
    assert wrong == {"type": "error", "error": {"type": "invalid_request_error", "message": "no"}}
    assert worded(ApiError(500, "no"))["error"]["type"] == "api_error"
    assert worded(ApiError(503, "no"))["error"]["type"] == "overloaded_error"
    assert worded(overflow(9000, 4096))["error"]["message"].startswith("prompt is too long: 9000 tokens > 4096 maximum")


def test_silence_is_told() -> None:
    kinds = [event["type"] for event in streamed([None, Content("a"), None, finish()])]
    assert kinds[:5] == ["message_start", "ping", "content_block_start", "content_block_delta", "ping"]
