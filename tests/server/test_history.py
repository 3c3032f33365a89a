"""Tests that the server accepts its own answers, and those of other servers, as the history of the next request."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import RawMessageStreamEvent
from pydantic import TypeAdapter
from support.fake_service import Script
from support.http import format_tool_call, make_server, parse_chunks, send, vocabulary_with
from support.json_chat import TEMPLATE, Chat

USER = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"at": {"type": "integer"}}}
LOOK = {"name": "look", "description": "Looks.", "parameters": SCHEMA}
PATCH = {"type": "custom", "name": "patch", "description": "Edits."}
Message = dict[str, Any]

THOUGHT, ONE = "<think>\nPondering.\n</think>\n\n", format_tool_call("look", '{"at": 1}')
CUSTOM = format_tool_call("patch", '{"input": "x"}')
ANSWERS = {
    "text": THOUGHT + "I look.",
    "nothing": "",
    "reasoning": "<think>\nPondering.\n</think>",
    "call": ONE,
    "calls": f"{THOUGHT}I look.\n{ONE}\n{ONE}\n{CUSTOM}",
    "invalid arguments": format_tool_call("look", '{"at": "x", "b": [1]}'),
    "no arguments": format_tool_call("look"),
    "unknown tool": format_tool_call("other", '{"at": 1}'),
    "half a call": ONE[:-20],
    "half a name": ONE[:25],
    "half a custom call": CUSTOM[:-20],
}


def read_stream(path: str, text: str) -> Any:
    """Return the answer that the official client makes of a stream."""
    if path == "/api/chat":
        message: Message = {"role": "assistant", "content": "", "thinking": "", "tool_calls": []}
        for line in text.splitlines():
            for name, value in json.loads(line)["message"].items():
                if name != "role":
                    message[name] += value
        return {"message": message}
    events = [event for event in parse_chunks(text) if event != "[DONE]"]
    if path == "/v1/responses":
        return events[-1]["response"]
    if path == "/v1/messages":
        snapshot: Any = None
        parts: dict[int, bytes] = {}
        adapter: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
        for event in events:
            snapshot = accumulate_event(
                event=adapter.validate_python(event), current_snapshot=snapshot, json_bufs=parts
            )
        return snapshot.model_dump(exclude_none=True)
    return {"choices": [{"message": merge([event["choices"][0]["delta"] for event in events])}]}


def merge(deltas: list[Message]) -> Message:
    """Return the object of deltas whose texts are joined; items of a list are merged if they have the same index."""
    message: Message = {}
    for delta in deltas:
        for name, value in delta.items():
            before = message.get(name)
            if isinstance(value, list):
                message[name] = [*(before or []), *value]
            elif isinstance(value, dict):
                message[name] = merge([before or {}, value])
            else:
                message[name] = before + value if isinstance(before, str) and isinstance(value, str) else value
    for name, items in message.items():
        if isinstance(items, list):
            groups = [[item for item in items if item["index"] == index] for index in {item["index"] for item in items}]
            message[name] = [merge(group) for group in groups]
    return message


def chat_history(answer: Any) -> tuple[list[Message], list[Message]]:
    """Return the history that a client makes of an answer, and the results of its calls."""
    (choice,) = answer["choices"]
    calls = choice["message"].get("tool_calls") or ()
    return [choice["message"]], [{"role": "tool", "tool_call_id": call["id"], "content": "seen"} for call in calls]


def response_history(answer: Any) -> tuple[list[Message], list[Message]]:
    results = [
        {"type": f"{item['type']}_output", "call_id": item["call_id"], "output": "seen"}
        for item in answer["output"]
        if "call_id" in item
    ]
    return answer["output"], results


def message_history(answer: Any) -> tuple[list[Message], list[Message]]:
    calls = [block for block in answer["content"] if block["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": call["id"], "content": "seen"} for call in calls]
    history = [{"role": "assistant", "content": answer["content"]}]
    return history, [{"role": "user", "content": results}] if results else []


def ollama_history(answer: Any) -> tuple[list[Message], list[Message]]:
    calls = answer["message"].get("tool_calls", ())
    return [answer["message"]], [
        {"role": "tool", "tool_name": call["function"]["name"], "content": "seen"} for call in calls
    ]


CHAT_TOOLS = [{"type": "function", "function": LOOK}, {"type": "custom", "custom": PATCH}]
ANTHROPIC_TOOLS = [{"name": name, "input_schema": SCHEMA} for name in ("look", "patch")]
OLLAMA_TOOLS = [{"type": "function", "function": LOOK | {"name": name}} for name in ("look", "patch")]
APIS: dict[str, tuple[str, str, list[Message], Callable[[Any], tuple[list[Message], list[Message]]]]] = {
    "/v1/chat/completions": ("messages", "max_tokens", CHAT_TOOLS, chat_history),
    "/v1/responses": ("input", "max_output_tokens", [{"type": "function"} | LOOK, PATCH], response_history),
    "/v1/messages": ("messages", "max_tokens", ANTHROPIC_TOOLS, message_history),
    "/api/chat": ("messages", "", OLLAMA_TOOLS, ollama_history),
}


def follow_ups(history: list[Message], results: list[Message]) -> Iterator[tuple[list[Message], bool]]:
    """Yield what clients send after an answer, and whether that contains the answer."""
    yield [USER, *history, *results, USER], True
    yield [USER, *history, USER], True
    yield [USER, *history], True
    yield [USER, *history, *results], True
    yield [USER, *results, USER], False


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("path", APIS)
def test_every_answer_is_accepted_as_history(path: str, name: str, stream: bool) -> None:
    field, limit, tools, read_history = APIS[path]
    vocabulary, text = vocabulary_with(TEMPLATE), ANSWERS[name]
    fields: Message = {"model": "m", "max_tokens": 400, "tools": tools, "stream": False}
    if name.startswith("half"):  # the limit cuts the answer there
        n_tokens = len(vocabulary.tokenize(text, add_bos=False))
        cut = {"options": {"num_predict": n_tokens}} if not limit else {limit: n_tokens}
    else:
        cut = {}
    body = {field: [USER]} | fields | cut | {"stream": stream}
    script = Script(text or "<|im_end|>", ends=not cut)
    response = send(make_server(script, vocabulary=vocabulary, n_ctx=4000)[0], path, body)
    assert response.status_code == 200, response.text
    answer = read_stream(path, response.text) if stream else response.json()
    for conversation, has_answer in follow_ups(*read_history(answer)):
        server, service = make_server(vocabulary=vocabulary, n_ctx=4000)
        again = send(server, path, fields | {field: conversation})
        assert again.status_code == 200, (again.text, conversation)
        if has_answer:
            assert ("Pondering." in service.prompt_text()) == ("Pondering." in text), conversation


CHAT = Chat("/v1/chat/completions")
PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


@pytest.mark.parametrize(
    ("message", "content", "reasoning"),
    [
        ({"content": None, "refusal": "no"}, "no", None),
        ({"content": "yes", "refusal": None, "annotations": [], "audio": None, "function_call": None}, "yes", None),
        ({"content": [{"type": "refusal", "refusal": "no"}]}, "no", None),
        ({"content": [{"type": "thinking", "thinking": "hm", "signature": "s"}, PARTS[0]]}, "a", "hm"),
        ({"content": [{"type": "thinking", "thinking": PARTS}, PARTS[0]]}, "a", "a\nb"),
        ({"content": [{"type": "redacted_thinking", "data": "x"}, PARTS[0]]}, "a", None),
        ({"content": [{"type": "reasoning", "text": "hm"}, *PARTS]}, "a\nb", "hm"),
        ({"content": "a", "reasoning": "hm", "reasoning_details": [{"type": "reasoning.text"}]}, "a", "hm"),
        ({"content": "a", "reasoning": "hm", "reasoning_content": "hm"}, "a", "hm"),
        ({"content": [], "tool_calls": []}, "", None),
        ({}, "", None),
    ],
)
def test_chat_completions_accepts_answers_of_other_servers(
    message: Message, content: str, reasoning: str | None
) -> None:
    _, answer, _ = CHAT.messages(messages=[USER, {"role": "assistant"} | message, USER])
    texts = answer["content"] if isinstance(answer["content"], list) else [{"text": answer["content"]}]
    assert "\n".join(part["text"] for part in texts) == content
    assert answer.get("reasoning_content") == reasoning


@pytest.mark.parametrize(
    ("part", "field"),
    [
        ({"type": "refusal"}, "refusal"),
        ({"type": "thinking"}, "thinking"),
        ({"type": "reasoning"}, "text"),
        ({"type": "mystery"}, "type"),
    ],
)
def test_chat_completions_rejects_invalid_parts_of_answers_by_name(part: Message, field: str) -> None:
    CHAT.get_error(f"messages[0].content[0].{field}", messages=[{"role": "assistant", "content": [part]}, USER])
    if field != "type":  # only answers have such parts
        CHAT.get_error("messages[0].content[0].type", messages=[{"role": "user", "content": [part]}])


@pytest.mark.parametrize(
    ("fields", "enabled", "effort"),
    [
        ({}, True, None),  # the default
        ({"reasoning_effort": "none"}, False, None),
        ({"reasoning": {"effort": "none"}}, False, None),
        ({"reasoning": {"enabled": False}}, False, None),
        ({"thinking": {"type": "disabled"}}, False, None),
        ({"think": False}, False, None),
        ({"enable_thinking": False}, False, None),
        ({"enable_thinking": False, "chat_template_kwargs": {"enable_thinking": True}}, False, None),
        ({"reasoning_effort": "low"}, True, "low"),
        ({"reasoning": {"effort": "high", "exclude": False}}, True, "high"),
        ({"reasoning_effort": "low", "reasoning": {"effort": "none"}, "think": False}, True, "low"),
        ({"think": "medium"}, True, "medium"),
        ({"think": None, "thinking": None, "reasoning": None, "enable_thinking": None}, True, None),
        *(
            (switch | {"chat_template_kwargs": {"enable_thinking": False}}, True, None)
            for switch in (
                {"reasoning": {"enabled": True}},
                {"thinking": {"type": "enabled"}},
                {"think": True},
                {"enable_thinking": True},
            )
        ),
    ],
)
def test_chat_completions_switches_reasoning_in_the_form_of_any_server(
    fields: Message, enabled: bool, effort: str | None
) -> None:
    received = CHAT.template_values(messages=[USER], **fields)
    assert (received["enable_thinking"], received["reasoning_effort"]) == (enabled, effort)


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("reasoning", {"reasoning": "none"}),
        ("reasoning.effort", {"reasoning": {"effort": 5}}),
        ("reasoning.enabled", {"reasoning": {"enabled": "no"}}),
        ("reasoning.max_tokens", {"reasoning": {"max_tokens": -1}}),
        ("thinking", {"thinking": False}),
        ("thinking.type", {"thinking": {"type": "perhaps"}}),
        ("thinking.budget_tokens", {"thinking": {"type": "enabled", "budget_tokens": -1}}),
        ("think", {"think": 5}),
        ("enable_thinking", {"enable_thinking": "no"}),
    ],
)
def test_chat_completions_rejects_invalid_switches_of_reasoning_by_name(field: str, fields: Message) -> None:
    CHAT.get_error(field, messages=[USER], **fields)


@pytest.mark.parametrize(
    "fields", [{"reasoning": {"max_tokens": 7}}, {"thinking": {"type": "enabled", "budget_tokens": 7}}]
)
def test_chat_completions_reads_reasoning_budget_of_other_servers(fields: Message) -> None:
    response, engine = CHAT.ask(messages=[USER], **fields)
    assert response.status_code == 200, response.text
    budget = engine.requests[0].rules.reasoning
    assert budget is not None
    assert budget.limit == 7
