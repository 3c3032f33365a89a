"""Anthropic's Messages API: requests as chat tasks, and answers as Anthropic's own client reads them."""

from __future__ import annotations

from typing import Any

from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, RawMessageStreamEvent
from hypothesis import given
from pydantic import TypeAdapter
from support import chat_scripts
from support.chat_scripts import Said, answers, finish, refused

from ngramspec.server.anthropic import MessageReply, hides_thoughts, read_request, worded
from ngramspec.server.call import ApiError, Fields, overflow
from ngramspec.server.chat import ChatTask
from ngramspec.server.common_fields import Form
from ngramspec.tool_calls.deltas import Delta, Tool

EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
USER = {"role": "user", "content": "hi"}
LOOK = {"name": "look", "description": "Looks.", "input_schema": {"type": "object", "properties": {}}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def turn(role: str, *blocks: Any) -> dict[str, Any]:
    return {"role": role, "content": [*blocks]}


def task(**fields: Any) -> ChatTask:
    body = {"model": "m", "max_tokens": 9, "messages": [USER]} | fields
    return read_request(Fields(body))


def streamed(said: list[Said], hide: bool = False) -> list[dict[str, Any]]:
    return chat_scripts.streamed(MessageReply("msg_1", "m", hide), said)


def whole(said: list[Said], hide: bool = False) -> dict[str, Any]:
    return chat_scripts.whole(MessageReply("msg_1", "m", hide), said)


def accumulated(sent: list[dict[str, Any]]) -> dict[str, Any]:
    """What Anthropic's client makes of a stream."""
    snapshot: Any = None
    bufs: dict[int, bytes] = {}
    for event in sent:
        snapshot = accumulate_event(event=EVENT.validate_python(event), current_snapshot=snapshot, json_bufs=bufs)
    return Message.model_validate(snapshot.model_dump()).model_dump(exclude_none=True)


def test_system_and_turns_become_messages() -> None:
    said = [{"role": "assistant", "content": words} for words in ("c", "d")]
    system = [text("Be brief.") | {"cache_control": {"type": "ephemeral"}}]
    got = task(system=system, messages=[turn("user", text("a"), text("b")), USER, *said, USER])
    assert got.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a\nb\nhi"},
        {"role": "assistant", "content": "c\nd"},
        USER,
    ]


def test_calls_their_results_and_thoughts() -> None:
    called = turn(
        "assistant",
        {"type": "thinking", "thinking": "hm", "signature": "unsigned"},
        {"type": "redacted_thinking", "data": "x"},
        text("I look."),
        {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "é", "n": 1}},
        {"type": "tool_use", "id": "t2", "name": "list", "input": {}},
    )
    results = turn(
        "user",
        text("go on"),
        {"type": "tool_result", "tool_use_id": "t1", "content": "seen"},
        {"type": "tool_result", "tool_use_id": "t2", "is_error": True, "content": [text("no"), text("way")]},
        {"type": "tool_result", "tool_use_id": "t3"},
    )
    calls = [
        {"id": "t1", "type": "function", "function": {"name": "look", "arguments": '{"at": "é", "n": 1}'}},
        {"id": "t2", "type": "function", "function": {"name": "list", "arguments": "{}"}},
    ]
    assert task(messages=[USER, called, results]).messages[1:] == [
        {"role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "t1", "content": "seen", "name": "look"},
        {"role": "tool", "tool_call_id": "t2", "content": "Error: no\nway", "name": "list"},
        {"role": "tool", "tool_call_id": "t3", "content": ""},
        {"role": "user", "content": "go on"},
    ]


BILLING = "x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch={};"


def test_the_billing_line_never_reaches_the_prompt() -> None:
    """Two requests that differ only in it must have the same prompt."""
    for before in ("", "\n"):
        systems = [f"{before}{BILLING.format(x)}\nYou are Claude Code.\nMore." for x in ("fa690", "0aaa9")]
        first, second = (task(system=system).messages for system in systems)
        assert first == second == task(system="You are Claude Code.\nMore.").messages
    assert (
        task(system=[text(BILLING.format("0")), text("You are Claude Code.")]).messages[0]["content"]
        == "You are Claude Code."
    )
    assert task(system=BILLING.format("1")).messages == [USER]
    # What only quotes the line is kept.
    quoted = f"The file says:\n{BILLING.format(1)}"
    assert task(system=quoted).messages[0]["content"] == quoted
    assert task(messages=[{"role": "user", "content": BILLING.format(1)}]).messages[0]["content"] == BILLING.format(1)


def test_a_late_system_message_stays_where_it_is() -> None:
    """Claude Code sends them after the first turn; most templates allow none there, and the prompt before must stay."""
    late = turn("system", text("Agents: none."))
    got = task(system="S", messages=[USER, late, turn("system")]).messages
    assert got == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "hi\n<system>\nAgents: none.\n</system>"},
    ]
    assert task(system="S", messages=[late, USER]).messages[0]["content"] == "S\nAgents: none."


def test_documents_of_text_are_read() -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "body"}
    documents = (
        {"type": "document", "title": "name", "source": source},
        {"type": "document", "source": {"type": "content", "content": [text("part")]}},
        {"type": "search_result", "title": "T", "source": "S", "content": [text("x")]},
    )
    assert task(messages=[turn("user", *documents)]).messages[0]["content"] == "name\nbody\npart\nT\nS\nx"


def test_settings_of_the_request() -> None:
    got = task(stop_sequences=["END"], tools=[LOOK], metadata={"user_id": "u"}, container=None, unknown=[1])
    assert (got.max_tokens, got.stop, got.tools) == (9, ("END",), [Tool("look", "Looks.", LOOK["input_schema"])])
    assert (got.tool_choice, got.parallel, got.form, dict(got.variables)) == ("auto", True, None, {})


def test_tools_and_their_choice() -> None:
    choices: list[tuple[dict[str, Any], str, bool]] = [
        ({"type": "auto"}, "auto", True),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "tool", "name": "look"}, "look", True),
        ({"type": "none"}, "none", True),
    ]
    for choice, expected, parallel in choices:
        got = task(tools=[LOOK], tool_choice=choice)
        assert (got.tool_choice, got.parallel) == (expected, parallel)
    # Tools of the vendor are left out.
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
    assert [tool.name for tool in task(tools=[search, LOOK | {"type": "custom"}]).tools] == ["look"]
    refused(task, "tool_choice.name", tools=[search], tool_choice={"type": "tool", "name": "web_search"})
    refused(task, "tool_choice", tools=[search], tool_choice={"type": "any"})


def test_thinking_effort_and_format() -> None:
    assert task(thinking={"type": "disabled"}).variables == {"enable_thinking": False}
    assert task(thinking={"type": "enabled", "budget_tokens": 2048}).variables == {"enable_thinking": True}
    assert task(output_config={"effort": "max"}).variables == {"reasoning_effort": "high"}
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    form = {"type": "json_schema", "schema": schema}
    assert task(output_config={"format": form}).form == Form(schema, "output_config.format.schema")
    assert task(output_format=form).form == Form(schema, "output_format.schema")
    assert hides_thoughts(Fields({"thinking": {"type": "adaptive", "display": "omitted"}}))
    assert not hides_thoughts(Fields({"thinking": {"type": "adaptive"}}))


def test_impossible_values_are_named() -> None:
    alone = {"max_tokens": [None, "9"], "messages": [None, "x"], "system": [3], "stop_sequences": [[""]]}
    cases: list[tuple[str, dict[str, Any]]] = [
        *((name, {name: value}) for name, values in alone.items() for value in values),
        ("messages[0].role", {"messages": [{"role": "tool", "content": "x"}]}),
        ("messages[0].content", {"messages": [{"role": "user"}]}),
        ("messages[0].content", {"messages": [{"role": "user", "content": 3}]}),
        ("messages[0].content[0].type", {"messages": [turn("user", {"text": "x"})]}),
        ("messages[0].content[0].source", {"messages": [turn("user", {"type": "document"})]}),
        ("messages[0].content[0].text", {"messages": [turn("user", {"type": "text"})]}),
        ("messages[0].content[0].input", {"messages": [turn("assistant", {"type": "tool_use"}), USER]}),
        ("tools[0].input_schema", {"tools": [{"name": "x"}]}),
        ("tools[0].name", {"tools": [{"input_schema": {}}]}),
        ("tools[1].name", {"tools": [LOOK, LOOK]}),
        ("tool_choice.type", {"tool_choice": {"type": "some"}}),
        ("tool_choice.type", {"tool_choice": {}}),
        ("tool_choice.name", {"tools": [LOOK], "tool_choice": {"type": "tool", "name": "other"}}),
        ("thinking.type", {"thinking": {"type": "perhaps"}}),
        ("output_config.effort", {"output_config": {"effort": "all"}}),
        ("output_config.format.schema", {"output_config": {"format": {"type": "json_schema"}}}),
    ]
    for field, fields in cases:
        refused(task, field, **fields)


@given(answers())
def test_any_answer_streams_as_what_it_is_whole(deltas: list[Said]) -> None:
    sent = streamed(deltas)
    opened, current = 0, -1
    for event in sent[1:-2]:
        if event["type"] == "content_block_start":
            current, opened = opened, opened + 1
        assert event["index"] == current
        if event["type"] == "content_block_stop":
            current = -1
    ends = [sent[0]["type"], *(event["type"] for event in sent[-2:])]
    assert ends == ["message_start", "message_delta", "message_stop"]
    assert accumulated(sent) == Message.model_validate(whole(deltas)).model_dump(exclude_none=True)


def test_the_parts_of_an_answer() -> None:
    deltas: list[Said] = [Delta("thought", "h"), Delta("thought", "m"), Delta("text", "I "), Delta("text", "look.")]
    deltas += [
        Delta("call", "", 0, "c0", "look"),
        Delta("arguments", '{"at": "x"', 0),
        Delta("arguments", ', "n": [1]}', 0),
    ]
    deltas += [Delta("call", "", 1, "c1", "list"), finish("tool_calls")]
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


def test_how_an_answer_ended() -> None:
    for end, reason, sequence in (
        (finish("stop"), "end_turn", None),
        (finish("stop", "END"), "stop_sequence", "END"),
        (finish("length"), "max_tokens", None),
        (finish("length", full=True), "model_context_window_exceeded", None),
        (finish("tool_calls"), "tool_use", None),
    ):
        answer = whole([Delta("text", "x"), end])
        assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, sequence)
    # Arguments that were cut are not acted on.
    answer = whole(
        [Delta("call", "", 0, "c", "write"), Delta("arguments", '{"path": "/a", "text": "rm', 0), finish("length")]
    )
    assert (answer["content"][0]["input"], answer["stop_reason"]) == ({}, "max_tokens")


def test_errors_have_types() -> None:
    wrong = worded(ApiError(400, "no"))
    assert wrong == {"type": "error", "error": {"type": "invalid_request_error", "message": "no"}}
    types = [worded(ApiError(status, "no"))["error"]["type"] for status in (401, 500, 503)]
    assert types == ["authentication_error", "api_error", "overloaded_error"]
    assert worded(overflow(9000, 4096))["error"]["message"].startswith("prompt is too long: 9000 tokens > 4096 maximum")
