"""Tests that every chat API continues a last message of the assistant."""

from __future__ import annotations

from typing import Any

import pytest
from support.http import ask, demo_vocabulary, get_error, vocabulary_with

CHATS = "/v1/chat/completions"
USER = {"role": "user", "content": "2 + 2?"}
BEGUN = {"role": "assistant", "content": "The answer <|im_end|> is "}
TURNS: list[dict[str, Any]] = [USER, BEGUN]


def prompt_of(path: str, body: dict[str, Any]) -> list[int]:
    _, service = ask(path, body)
    return list(service.requests[0].prompt)


def continued(turns: list[dict[str, Any]]) -> list[int]:
    """Return the prompt of the earlier turns, followed by the tokens of the last message as text."""
    vocabulary = demo_vocabulary()
    return vocabulary.chats.tokens(turns[:-1]) + vocabulary.tokenize(turns[-1]["content"], add_bos=False)


def test_chat_apis_with_assistant_last_message_continue_its_text() -> None:
    """Tests of dialects test the endpoints that answer."""
    expected = continued(TURNS)
    vllm = {"continue_final_message": True, "add_generation_prompt": False}
    assert prompt_of(CHATS, {"messages": TURNS} | vllm) == expected
    told, _ = ask("/apply-template", {"messages": TURNS})
    assert told["prompt"].endswith("assistant\nThe answer <|im_end|> is ")
    counted, _ = ask("/v1/messages/count_tokens", {"messages": TURNS})
    assert counted["input_tokens"] == len(expected)


def test_chat_completions_without_continuation_starts_new_turn() -> None:
    vocabulary = demo_vocabulary()
    assert prompt_of(CHATS, {"messages": TURNS, "continue_final_message": False}) == vocabulary.chats.tokens(TURNS)
    assert prompt_of(CHATS, {"messages": TURNS, "add_generation_prompt": True}) == vocabulary.chats.tokens(TURNS)
    told, _ = ask("/apply-template", {"messages": [USER], "add_generation_prompt": False})
    assert told["prompt"] == "<|im_start|>user\n2 + 2?<|im_end|>\n"


def test_chat_apis_reject_invalid_continuations() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    continues = {"continue_final_message": True}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"messages": [USER]} | continues, "continue_final_message"),
        ({"messages": [USER, BEGUN, BEGUN]}, "messages"),
        ({"messages": TURNS, "add_generation_prompt": True} | continues, "add_generation_prompt"),
        ({"messages": [USER, BEGUN | {"tool_calls": [call]}]} | continues, "continue_final_message"),
    ]
    for body, param in cases:
        assert get_error(CHATS, body)["param"] == param


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
    thinking = [USER, BEGUN | {"reasoning_content": "hm"}]
    assert prompt(MARKED) == f"<think>{said}"
    assert prompt(MARKED, chat_template_kwargs={"enable_thinking": False}) == said
    assert prompt(MARKED, messages=thinking) == f"<think>[hm]</think>{said}"
    assert prompt(MARKED, messages=[USER, {"role": "assistant", "content": "", "reasoning_content": "hm"}]) == (
        "<think>[hm"
    )
    # This template begins new answers differently from earlier ones.
    opened = MARKED.replace("<assistant>{% endif %}", "<assistant><think>{% endif %}").replace("[", "").replace("]", "")
    assert prompt(opened.replace("elif enable_thinking", "elif false")) == f"<think></think>{said}"
    strict = MARKED.replace("{% for", "{% if messages | length > 1 %}{{ raise_exception('no') }}{% endif %}{% for")
    assert prompt(strict) == said


def test_chat_prompt_of_gemma_4_starts_missing_model_turn() -> None:
    vocabulary = vocabulary_with("{# <|tool_call> #}{{ messages[0].content ~ '<turn|>\\n' }}")
    prompt = vocabulary.chats.prompt([USER])
    assert prompt.text == "2 + 2?<turn|>\n<|turn>model\n"
    assert prompt.opening.endswith("<|turn>model\n")
    assert vocabulary.chats.prompt([USER], answered=False).text == "2 + 2?<turn|>\n"


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
    told, _ = ask("/apply-template", {"messages": [USER, begun]}, vocabulary=vocabulary)
    assert told["prompt"] == opening + expected
