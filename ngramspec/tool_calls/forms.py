"""Forms of messages that only some chat templates require, as in llama-server's chat layer."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from ngramspec.tool_calls.template_features import Message

Messages = list[Message]


def forms_of(source: str) -> list[Callable[[Messages], Messages]]:
    """Return the functions that turn messages in OpenAI's form into those of a template."""
    forms: list[Callable[[Messages], Messages]] = []
    if "You have access to the following functions in JSONSchema format" in source:
        forms.append(_strip_texts)  # StepFun: leftover white space makes the model reason in circles
    if re.search(r"""message(\.|\[['"])thinking""", source):
        forms.append(_replace_content if "<|channel|>" in source else _copy_reasoning)
    if all(mark in source for mark in ("[TOOL_CALLS]", "[ARGS]", "block['thinking']")):
        forms.append(_make_blocks)
    if "'<|tool_call>call:'" in source and "message['tool_responses']" in source and "'tool_call_id'" not in source:
        forms.append(_move_results_to_calls)
    return forms


def _strip_texts(messages: Messages) -> Messages:
    for message in messages:
        for field in ("content", "reasoning_content"):
            if isinstance(value := message.get(field), str):
                message[field] = value.strip()
            elif value:
                message[field] = [{**part, "text": part["text"].strip()} for part in value]
    return messages


def _copy_reasoning(messages: Messages) -> Messages:
    """Return messages whose reasoning is in "thinking" (LFM2)."""
    for message in messages:
        if "reasoning_content" in message:
            message["thinking"] = message["reasoning_content"]
    return messages


def _replace_content(messages: Messages) -> Messages:
    """Return messages whose reasoning is in "thinking" and replaces the content next to calls (gpt-oss)."""
    for message in _copy_reasoning(messages):
        if "thinking" in message and message.get("tool_calls"):
            del message["content"]
    return messages


def _make_blocks(messages: Messages) -> Messages:
    """Return messages whose reasoning is a block of the content (Ministral 3)."""
    for message in messages:
        if message["role"] in ("system", "assistant"):
            content, reasoning = message.get("content", ""), message.pop("reasoning_content", None)
            blocks = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
            message["content"] = [{"type": "thinking", "thinking": reasoning}, *blocks] if reasoning else blocks
    return messages


def _move_results_to_calls(messages: Messages) -> Messages:
    """Return messages whose results are part of the calls, and so is the answer after them (early Gemma 4)."""
    turns: Messages = []
    call_turn: Message | None = None  # turn whose results follow
    for message in messages:
        if call_turn is not None and message["role"] == "tool":
            results = call_turn.setdefault("tool_responses", [])
            results.append(
                {"name": _function_name(call_turn, len(results), message), "response": _value(message["content"])}
            )
        elif call_turn is not None and message["role"] == "assistant" and not message.get("tool_calls"):
            call_turn["content"], call_turn = message["content"], None
        else:
            call_turn = message if message.get("tool_calls") else None
            turns.append(message)
            if call_turn is not None:
                call_turn.pop("content", None)
    return turns


def _function_name(call_turn: Message, number: int, result: Message) -> str:
    calls = call_turn["tool_calls"]
    return str(calls[number]["function"]["name"] if number < len(calls) else result.get("tool_call_id", ""))


def _value(text: Any) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return text
