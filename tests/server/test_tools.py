"""Tests of tools in chat completions: tool choice, custom tools, the functions field, schemas and incomplete calls."""

from __future__ import annotations

from typing import Any

import pytest
from support.fake_service import Script
from support.http import allows, ask, demo_vocabulary, format_tool_call, get_error, vocabulary_with
from support.templates import ONE_CALL

CHATS = "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}
LOOK = {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "integer"}}}}
FIND = {"name": "find", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": LOOK}, {"type": "function", "function": FIND}]


def allowed(body: dict[str, Any], text: str) -> bool:
    """Return True if the grammar of a request allows the complete answer."""
    _, service = ask(CHATS, {"messages": [USER]} | body)
    return allows(service, text)


def test_chat_completions_tool_choice_allows_only_chosen_tools() -> None:
    look, find = format_tool_call("look", '{"at": 1}'), format_tool_call("find", "{}")
    named = {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "look"}}}
    assert [allowed(named, text) for text in (look, f"{look}\n{look}", find)] == [True, False, False]
    only = {"mode": "required", "tools": [{"type": "function", "function": {"name": "find"}}]}
    asked = {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": only}}
    assert [allowed(asked, text) for text in (find, look)] == [True, False]
    named["tool_choice"] = {"type": "function", "function": {"name": "other"}}
    message = get_error(CHATS, {"messages": [USER]} | named)["message"]
    assert message == "tool_choice.function.name: there is no tool named 'other'"
    for choice in ({"type": "allowed_tools", "allowed_tools": only | {"tools": [LOOK | {"name": "x"}]}}, {"name": "x"}):
        error = get_error(CHATS, {"messages": [USER], "tools": TOOLS, "tool_choice": choice})
        assert error["param"].startswith("tool_choice")


def test_chat_completions_describes_grammar_of_custom_tool_in_prompt() -> None:
    lark = {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: /.+/"}}
    tool = {"type": "custom", "custom": {"name": "patch", "format": lark}}
    _, service = ask(CHATS, {"messages": [USER], "tools": [tool]})
    assert "start: /.+/" in service.prompt_text()


def test_chat_completions_supports_deprecated_functions_field() -> None:
    body = {"messages": [USER], "functions": [LOOK], "function_call": {"name": "look"}}
    told, service = ask(CHATS, body, Script(format_tool_call("look", '{"at": 1}'), step=2))
    assert service.requests[0].sampling.grammar is not None
    said = told["choices"][0]["message"]
    result = {"role": "function", "name": "look", "content": "seen"}
    _, service = ask(CHATS, {"messages": [USER, said, result], "functions": [LOOK]})
    prompt = service.prompt_text()
    assert '{"at": 1}' in prompt
    assert "seen" in prompt


@pytest.mark.parametrize("stream", [False, True])
def test_chat_completions_omits_incomplete_call_from_content(stream: bool) -> None:
    text = "I look.\n" + format_tool_call("look", '{"at": 1}')
    vocabulary = demo_vocabulary()
    for cut in ("I look.\n<tool", 'I look.\n<tool_call>\n{"name": "lo'):
        tokens = len(vocabulary.tokenize(cut, add_bos=False))
        body = {"messages": [USER], "tools": TOOLS, "max_tokens": tokens, "stream": stream}
        told, _ = ask(CHATS, body, Script(text))
        parts = [chunk["choices"][0]["delta"] for chunk in told] if stream else [told["choices"][0]["message"]]
        assert "".join(part.get("content") or "" for part in parts) == "I look."


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "look"}}])
def test_chat_completions_omits_call_truncated_by_token_limit(choice: object) -> None:
    whole = format_tool_call("look", '{"at": 1}')
    cut = format_tool_call("look", '{"at": [1, 2, 3]}').partition(", 3")[0]
    for text, calls in ((cut, 0), (whole + "\n" + cut, 1), (whole, 1)):
        limit = len(demo_vocabulary().tokenize(text, add_bos=False))
        body = {"messages": [USER], "tools": TOOLS, "tool_choice": choice, "max_tokens": limit}
        told, _ = ask(CHATS, body, Script(text + " " * 40))
        (answer,) = told["choices"]
        assert [call["function"]["arguments"] for call in answer["message"].get("tool_calls", [])] == [
            '{"at": 1}'
        ] * calls
        assert answer["finish_reason"] == "length"


def test_chat_completions_relaxes_unsupported_schemas_unless_strict() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}, "required": ["a"]}

    def form(strict: bool | None) -> dict[str, Any]:
        return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema, "strict": strict}}}

    for strict in (None, False):
        assert [allowed(form(strict), text) for text in ('{"a": [1]}', "{}", '{"a": [1]} ')] == [True, False, False]
    assert get_error(CHATS, {"messages": [USER]} | form(True))["param"] == "response_format"
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    assert allowed({"tools": [tool], "tool_choice": "required"}, format_tool_call("f", '{"a": []}'))
    tool["function"]["strict"] = True  # type: ignore[index]
    asked = {"messages": [USER], "tools": [tool], "tool_choice": "required"}
    error = get_error(CHATS, asked)
    assert error["param"] == "tools"
    message = "the parameters of the tool 'f': the JSON schema cannot be used: unsupported keywords: uniqueItems"
    assert error["message"].endswith(message)


# --------------------------------------------------------------------------- several calls and incomplete calls

FUNCTION = {"type": "function", **LOOK}
CHAT: dict[str, Any] = {"messages": [USER], "tools": TOOLS, "max_tokens": 400}
RESPONSE: dict[str, Any] = {"input": "hi", "tools": [FUNCTION], "max_output_tokens": 400}


@pytest.mark.parametrize("source", [None, ONE_CALL])
def test_cut_answer_as_history_is_accepted(source: str | None) -> None:
    """A limit may cut the arguments of a call, which streams have sent by then."""
    whole = format_tool_call("look", '{"at": 123, "b": ["c"]}')
    vocabulary = demo_vocabulary() if source is None else vocabulary_with(source)
    for size in range(whole.index("123"), whole.index("</tool_call>"), 2):
        limit = len(vocabulary.tokenize(whole[:size], add_bos=False))
        fields = CHAT | {"max_tokens": limit, "stream": True}
        told, _ = ask(CHATS, fields, Script(whole), vocabulary=vocabulary)
        calls = [call for chunk in told for call in chunk["choices"][0]["delta"].get("tool_calls", [])]
        arguments = "".join(call["function"]["arguments"] for call in calls)
        call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": arguments}}
        turn = {"role": "assistant", "content": None, "tool_calls": [call, call | {"id": "call_2"}]}
        results = [{"role": "tool", "tool_call_id": f"call_{i}", "content": "failed"} for i in (1, 2)]
        body = CHAT | {"messages": [USER, turn, *results]}
        assert "failed" in ask(CHATS, body, vocabulary=vocabulary)[1].prompt_text()
        item = {"type": "function_call", "call_id": "c", "name": "look", "arguments": arguments}
        result = {"type": "function_call_output", "call_id": "c", "output": "failed"}
        body = RESPONSE | {"input": [USER, item, result]}
        assert "failed" in ask("/v1/responses", body, vocabulary=vocabulary)[1].prompt_text()
