"""`ToolTemplate`: conversations in the form that a chat template requires.

Rendering small conversations shows the features of a template (`TemplateFeatures`). The rest becomes plain messages:
tools are described in the system message, calls are part of the assistant's text in the form that `parser_for` reads,
and results are in a user's turn.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from ngramspec.tool_calls.deltas import Tool
from ngramspec.tool_calls.families import HERMES, family_of
from ngramspec.tool_calls.json_stream import complete_object, read_object, to_json
from ngramspec.tool_calls.template_features import Message, TemplateFeatures, find_features, openai_tool, split_contents

_FIELDS = ("role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content")


class ToolTemplate:
    """A chat template in Jinja, and its support for tools.

    `examine` calls its argument with the template's `Render` and further arguments.
    """

    def __init__(self, source: str | None, examine: Callable[..., Any]) -> None:
        self._examine = examine
        family = family_of(source)
        self._known = family is not None
        self._family = family or HERMES
        self._forms = _forms_of(source or "")

    def adapt(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]
    ) -> tuple[list[Message], list[Any] | None]:
        """Return messages and tools as the template requires them; tools of `None` mean that it receives none.

        Messages are in OpenAI's form; a content may be a list of text parts. The arguments of a call may be any text,
        because models write invalid JSON, and limits cut it. The template then receives the object that they begin, or
        an object in which they are the only value.
        """
        features = self.features
        adapted_messages = [{field: m[field] for field in _FIELDS if m.get(field) is not None} for m in messages]
        has_calls = bool(tools) or any(m["role"] == "tool" or m.get("tool_calls") for m in adapted_messages)
        renders_calls = features.arguments and features.results and features.tools
        keeps_parts = features.system and (renders_calls or not has_calls)
        for message in adapted_messages:
            can_have_parts = keeps_parts and message["role"] in features.parts and not message.get("tool_calls")
            if isinstance(content := message.get("content"), list) and not can_have_parts:
                message["content"] = "\n".join(part["text"] for part in content)
        template_tools: list[Any] | None = None
        if has_calls:
            adapted_messages, template_tools = self._adapt_tools(adapted_messages, tools, features)
        if not features.system:
            adapted_messages = _merge_system_message(adapted_messages)
        for form in self._forms:
            adapted_messages = form(adapted_messages)
        if not features.strings and "user" in features.parts:
            adapted_messages = split_contents(adapted_messages)
        return adapted_messages, template_tools

    def _adapt_tools(
        self, messages: list[Message], tools: Sequence[Tool], features: TemplateFeatures
    ) -> tuple[list[Message], list[Any] | None]:
        for number, message in enumerate(messages):
            if message.get("tool_calls"):
                message["tool_calls"] = list(_adapt_calls(message["tool_calls"], features, number))
                message.setdefault("content", "")
            else:
                message.pop("tool_calls", None)
            if features.short_ids and "tool_call_id" in message:
                message["tool_call_id"] = _shorten_id(message["tool_call_id"])
        if features.arguments is None:
            messages = [self._write_calls(message) for message in messages]
        elif not features.parallel:
            messages = list(_split_turns(messages))
        if not features.user_next:
            messages = list(_add_answers(messages))
        if not features.results:
            messages = _move_results_to_turns(messages)
        if tools and not features.tools:
            return _add_description(messages, self._describe(tools), features.system), None
        return messages, [openai_tool(tool if features.schemas else _simplify(tool)) for tool in tools] or None

    @cached_property
    def features(self) -> TemplateFeatures:
        """Features of the template."""
        features: TemplateFeatures = self._examine(find_features, self._known)
        return features

    def _write_calls(self, message: Message) -> Message:
        calls = message.pop("tool_calls", None)
        if not calls:
            return message
        texts = []
        for call in calls:
            before, after = self._family.write(call["function"]["name"])
            texts.append(before + to_json(call["function"]["arguments"]) + after)
        begin, between, end = self._family.around
        text = begin + (between or "").join(texts) + end
        return {**message, "content": f"{message['content']}\n{text}" if message["content"] else text}

    def _describe(self, tools: Sequence[Tool]) -> str:
        descriptions = "\n".join(to_json(openai_tool(tool)["function"]) for tool in tools)
        before, after = self._family.write("NAME")
        begin, _, end = self._family.around
        return (
            "# Tools\n\nYou can call these functions:\n\n<tools>\n"
            f"{descriptions}\n</tools>\n\n"
            "To call one, answer with its name and with arguments that fit its parameters, in this form:\n\n"
            f'{begin}{before}{{"PARAMETER": "VALUE"}}{after}{end}\n\n'
            "You then get the result. If no function is needed, just answer."
        )


def _adapt_calls(calls: Sequence[Mapping[str, Any]], features: TemplateFeatures, number: int) -> Iterator[Message]:
    for place, call in enumerate(calls):
        function = call["function"]
        arguments = function.get("arguments") or "{}"
        value = _read_arguments(arguments) if isinstance(arguments, str) else arguments
        if features.arguments == "text":
            is_object = isinstance(arguments, str) and arguments.lstrip().startswith("{") and read_object(arguments)
            value = arguments if is_object else to_json(value)
        id_ = str(call.get("id") or f"call_{number}_{place}")
        yield {
            "id": _shorten_id(id_) if features.short_ids else id_,
            "type": "function",
            "function": {"name": function["name"], "arguments": value},
        }


def _read_arguments(text: str) -> dict[str, Any]:
    """Return the object that arguments are or begin; another text becomes the only value of an object."""
    value = read_object(text)
    value = complete_object(text) or {} if value is None else value
    return value if value or text.strip() in {"{", "{}", "null"} else {"input": text}


def _split_turns(messages: Sequence[Message]) -> Iterator[Message]:
    """Yield messages whose turns have one call each, before its results."""
    rest = deque(messages)
    while rest:
        message = rest.popleft()
        calls, results = message.get("tool_calls") or [], list[Message]()
        while len(calls) > 1 and rest and rest[0]["role"] == "tool":
            results.append(rest.popleft())
        for call in calls[:-1]:
            yield {**message, "tool_calls": [call]}
            own = [result for result in results if result.get("tool_call_id") == call["id"]]
            for result in own or [result for result in results if "tool_call_id" not in result][:1]:
                results.remove(result)
                yield result
            message = {"role": "assistant", "content": ""}
        yield {**message, "tool_calls": calls[-1:]} if calls else message
        yield from results


def _add_answers(messages: Sequence[Message]) -> Iterator[Message]:
    """Yield messages with an empty answer between calls or their results and the user's turn (Mistral)."""
    needs_answer = False
    role = ""  # of the last message that is not a result
    for message in messages:
        if needs_answer and message["role"] == "user":
            yield {"role": "assistant", "content": ""}
        yield message
        if message["role"] == "tool":
            needs_answer = needs_answer or role == "user"  # without a call, results belong to that turn
        else:
            needs_answer, role = "tool_calls" in message, message["role"]


def _simplify(tool: Tool) -> Tool:
    """Return a tool whose parameters have properties, and no lists of types (Seed-OSS, Hermes 2 and 3)."""

    def drop_lists(value: Any) -> Any:
        if isinstance(value, list):
            return [drop_lists(item) for item in value]
        if not isinstance(value, dict):
            return value
        types = value.get("type")
        first = next((kind for kind in types if kind != "null"), "string") if isinstance(types, list) else None
        return {key: drop_lists(item) for key, item in value.items()} | ({"type": first} if first else {})

    parameters = {"type": "object", "properties": {}} | drop_lists(dict(tool.parameters))
    return replace(tool, parameters=parameters | {"properties": parameters["properties"] or {}})


def _shorten_id(id_: str) -> str:
    """Return an id of nine letters and digits, which depends only on the given id."""
    return id_ if len(id_) == 9 and id_.isalnum() else hashlib.blake2b(id_.encode()).hexdigest()[:9]


def _move_results_to_turns(messages: list[Message]) -> list[Message]:
    """Return messages with results in user turns; consecutive results share a turn with the next user message."""
    turns: list[Message] = []
    is_open = False
    for message in messages:
        is_result = message["role"] == "tool"
        content = message.get("content", "")
        content = f"<tool_response>\n{content}\n</tool_response>" if is_result else content
        if is_open and message["role"] in {"user", "tool"}:
            turns[-1]["content"] += f"\n{content}"
        else:
            turns.append({"role": "user", "content": content} if is_result else message)
        is_open = is_result
    return turns


def _add_description(messages: list[Message], text: str, accepts_system: bool) -> list[Message]:
    """Return messages with a text after the system message; without support for one, before the first turn."""
    first = messages[0] if messages else None
    if first is not None and first["role"] == "system":
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *messages[1:]]
    if accepts_system or first is None:
        return [{"role": "system", "content": text}, *messages]
    return [{**first, "content": f"{text}\n\n{first['content']}"}, *messages[1:]]


def _merge_system_message(messages: list[Message]) -> list[Message]:
    """Return messages whose system message is part of the first turn."""
    if not messages or messages[0]["role"] != "system":
        return messages
    first, *rest = messages
    if not rest or rest[0]["role"] != "user":
        return [{**first, "role": "user"}, *rest]
    return [{**rest[0], "content": f"{first['content']}\n{rest[0]['content']}"}, *rest[1:]]


# --------------------------------------------------------------------------- forms that only some templates require


def _forms_of(source: str) -> list[Callable[[list[Message]], list[Message]]]:
    """Return the functions that turn messages in OpenAI's form into those of a template."""
    forms: list[Callable[[list[Message]], list[Message]]] = []
    if "You have access to the following functions in JSONSchema format" in source:
        forms.append(_strip_texts)  # StepFun: leftover white space makes the model reason in circles
    if re.search(r"""message(\.|\[['"])thinking""", source):
        forms.append(_replace_content if "<|channel|>" in source else _copy_reasoning)
    if all(mark in source for mark in ("[TOOL_CALLS]", "[ARGS]", "block['thinking']")):
        forms.append(_make_blocks)
    if "'<|tool_call>call:'" in source and "message['tool_responses']" in source and "'tool_call_id'" not in source:
        forms.append(_move_results_to_calls)
    return forms


def _strip_texts(messages: list[Message]) -> list[Message]:
    for message in messages:
        for field in ("content", "reasoning_content"):
            if isinstance(value := message.get(field), str):
                message[field] = value.strip()
            elif value:
                message[field] = [{**part, "text": part["text"].strip()} for part in value]
    return messages


def _copy_reasoning(messages: list[Message]) -> list[Message]:
    """Return messages whose reasoning is in "thinking" (LFM2)."""
    for message in messages:
        if "reasoning_content" in message:
            message["thinking"] = message["reasoning_content"]
    return messages


def _replace_content(messages: list[Message]) -> list[Message]:
    """Return messages whose reasoning is in "thinking" and replaces the content next to calls (gpt-oss)."""
    for message in _copy_reasoning(messages):
        if "thinking" in message and message.get("tool_calls"):
            del message["content"]
    return messages


def _make_blocks(messages: list[Message]) -> list[Message]:
    """Return messages whose reasoning is a block of the content (Ministral 3)."""
    for message in messages:
        if message["role"] in ("system", "assistant"):
            content, reasoning = message.get("content", ""), message.pop("reasoning_content", None)
            blocks = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
            message["content"] = [{"type": "thinking", "thinking": reasoning}, *blocks] if reasoning else blocks
    return messages


def _move_results_to_calls(messages: list[Message]) -> list[Message]:
    """Return messages whose results are part of the calls, and so is the answer after them (early Gemma 4)."""
    turns: list[Message] = []
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
