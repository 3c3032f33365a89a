"""Tests of conversations in chat APIs: earlier answers as history, continued messages, and tools."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.dialects import DIALECTS, USER, Dialect
from support.fake_service import Script
from support.http import allows, ask, demo_vocabulary, format_tool_call, vocabulary_with
from support.templates import CHAT_VALUES

Message = dict[str, Any]

CHATS = "/v1/chat/completions"
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
    server, text = {"vocabulary": vocabulary_with(CHAT_VALUES), "n_ctx": 4000}, ANSWERS[name]
    is_cut = name.startswith("half")  # the limit cuts the answer there
    limit = len(vocabulary_with(CHAT_VALUES).tokenize(text, add_bos=False)) if is_cut else 400
    script = Script(text or "<|im_end|>", ends=not is_cut)
    answer, _ = dialect.ask(dialect.body(limit=limit, stream=stream), script, **server)
    for conversation, has_answer in follow_ups(answer.history, answer.results):
        _, service = dialect.ask(dialect.body(**{dialect.messages: conversation}), **server)
        if has_answer:
            assert ("Pondering." in service.prompt_text()) == ("Pondering." in text), conversation


QUESTION = {"role": "user", "content": "2 + 2?"}
BEGUN = {"role": "assistant", "content": "The answer <|im_end|> is "}
TURNS: list[dict[str, Any]] = [QUESTION, BEGUN]


def prompt_of(path: str, body: dict[str, Any]) -> list[int]:
    _, service = ask(path, body)
    return list(service.requests[0].prompt)


def test_chat_completions_without_continuation_starts_new_turn() -> None:
    vocabulary = demo_vocabulary()
    assert prompt_of(CHATS, {"messages": TURNS, "continue_final_message": False}) == vocabulary.chats.tokens(TURNS)
    assert prompt_of(CHATS, {"messages": TURNS, "add_generation_prompt": True}) == vocabulary.chats.tokens(TURNS)
    told, _ = ask("/apply-template", {"messages": [QUESTION], "add_generation_prompt": False})
    assert told["prompt"] == "<|im_start|>user\n2 + 2?<|im_end|>\n"


MARKED = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}"
    "{% if m.reasoning_content %}<think>[{{ m.reasoning_content }}]</think>{% elif enable_thinking %}<think>{% endif %}"
    "{% endif %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_continuation_formats_reasoning_as_the_template_does() -> None:
    def prompt(template: str, **body: Any) -> str:
        told, _ = ask("/apply-template", {"messages": TURNS} | body, vocabulary=vocabulary_with(template))
        return str(told["prompt"]).removeprefix("<user>2 + 2?<assistant>")

    said = BEGUN["content"]
    thinking = [QUESTION, BEGUN | {"reasoning_content": "hm"}]
    assert prompt(MARKED) == f"<think>{said}"
    assert prompt(MARKED, chat_template_kwargs={"enable_thinking": False}) == said
    assert prompt(MARKED, messages=thinking) == f"<think>[hm]</think>{said}"
    assert prompt(MARKED, messages=[QUESTION, {"role": "assistant", "content": "", "reasoning_content": "hm"}]) == (
        "<think>[hm"
    )
    # This template begins new answers differently from earlier ones.
    opened = MARKED.replace("<assistant>{% endif %}", "<assistant><think>{% endif %}").replace("[", "").replace("]", "")
    assert prompt(opened.replace("elif enable_thinking", "elif false")) == f"<think></think>{said}"
    strict = MARKED.replace("{% for", "{% if messages | length > 1 %}{{ raise_exception('no') }}{% endif %}{% for")
    assert prompt(strict) == said


def test_chat_prompt_of_gemma_4_starts_missing_model_turn() -> None:
    vocabulary = vocabulary_with("{# <|tool_call> #}{{ messages[0].content ~ '<turn|>\\n' }}")
    prompt = vocabulary.chats.prompt([QUESTION])
    assert prompt.text == "2 + 2?<turn|>\n<|turn>model\n"
    assert prompt.opening.endswith("<|turn>model\n")
    assert vocabulary.chats.prompt([QUESTION], answered=False).text == "2 + 2?<turn|>\n"


@pytest.mark.parametrize(
    ("template", "opening", "expected"),
    [
        ("", "assistant\n", "text"),
        ("<think>", "assistant\n", "<think>\nhm\n</think>\n\ntext"),
        ("<think>", "assistant\n<think>\n", "hm\n</think>\n\ntext"),
        ("<think>", "assistant<think>", "hm</think>text"),
        ("[THINK]", "assistant", "[THINK]hm[/THINK]text"),
        (
            "<|channel|> <|message|>",
            "<|start|>assistant",
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>text",
        ),
    ],
)
def test_continuation_without_template_support_formats_reasoning_by_its_markers(
    template: str, opening: str, expected: str
) -> None:
    rejecting = "{% if messages | length > 1 %}{{ raise_exception('no') }}{% endif %}"
    vocabulary = vocabulary_with(f"{rejecting}{{# {template} #}}{{{{ {opening!r} }}}}")
    begun = {"role": "assistant", "content": "text", "reasoning_content": "hm"}
    told, _ = ask("/apply-template", {"messages": [QUESTION, begun]}, vocabulary=vocabulary)
    assert told["prompt"] == opening + expected


LOOK = {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "integer"}}}}
FIND = {"name": "find", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": LOOK}, {"type": "function", "function": FIND}]


def allowed(body: dict[str, Any], text: str) -> bool:
    """Return True if the grammar of a request allows the complete answer."""
    _, service = ask(CHATS, {"messages": [USER]} | body)
    return allows(service, text)


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
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    assert allowed({"tools": [tool], "tool_choice": "required"}, format_tool_call("f", '{"a": []}'))
