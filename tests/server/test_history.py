"""Tests that the server accepts its own answers, and those of other servers, as the history of the next request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.dialects import DIALECTS, USER, Dialect
from support.fake_service import Script
from support.http import format_tool_call, vocabulary_with
from support.json_chat import TEMPLATE, Chat

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


def follow_ups(history: list[Message], results: list[Message]) -> Iterator[tuple[list[Message], bool]]:
    """Yield what clients send after an answer, and whether that contains the answer."""
    yield [USER, *history, *results, USER], True
    yield [USER, *history, USER], True
    yield [USER, *history], True
    yield [USER, *history, *results], True
    yield [USER, *results, USER], False


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
def test_every_answer_is_accepted_as_history(dialect: Dialect, name: str, stream: bool) -> None:
    server, text = {"vocabulary": vocabulary_with(TEMPLATE), "n_ctx": 4000}, ANSWERS[name]
    is_cut = name.startswith("half")  # the limit cuts the answer there
    limit = len(vocabulary_with(TEMPLATE).tokenize(text, add_bos=False)) if is_cut else 400
    script = Script(text or "<|im_end|>", ends=not is_cut)
    answer, _ = dialect.ask(dialect.body(limit=limit, stream=stream), script, **server)
    for conversation, has_answer in follow_ups(answer.history, answer.results):
        _, service = dialect.ask(dialect.body(**{dialect.messages: conversation}), **server)
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
