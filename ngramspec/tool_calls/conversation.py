"""`ToolTemplate`: conversations in the form that a chat template requires.

Rendering small conversations shows the features of a template (`TemplateFeatures`). The rest becomes plain messages:
tools are described in the system message, calls are part of the assistant's text in the form that `parser_for` reads,
and results are in a user's turn.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from ngramspec.tool_calls.deltas import Tool
from ngramspec.tool_calls.families import HERMES, family_of
from ngramspec.tool_calls.forms import forms_of
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
        self._forms = forms_of(source or "")

    def adapt(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]
    ) -> tuple[list[Message], list[Any] | None]:
        """Return messages and tools as the template requires them; tools of `None` mean that it receives none.

        Messages are in OpenAI's form; a content may be a list of text parts.

        Raises:
            ValueError: The arguments of a call are not a JSON object.
        """
        features = self.features
        adapted_messages = [{field: m[field] for field in _FIELDS if m.get(field) is not None} for m in messages]
        has_calls = bool(tools) or any(m["role"] == "tool" or m.get("tool_calls") for m in adapted_messages)
        if not (
            features.parts
            and features.system
            and ((features.arguments and features.results and features.tools) or not has_calls)
        ):
            for message in adapted_messages:
                if isinstance(content := message.get("content"), list):
                    message["content"] = "\n".join(part["text"] for part in content)
        template_tools: list[Any] | None = None
        if has_calls:
            adapted_messages, template_tools = self._adapt_tools(adapted_messages, tools, features)
        if not features.system:
            adapted_messages = _merge_system_message(adapted_messages)
        for form in self._forms:
            adapted_messages = form(adapted_messages)
        return adapted_messages if features.strings or not features.parts else split_contents(
            adapted_messages
        ), template_tools

    def _adapt_tools(
        self, messages: list[Message], tools: Sequence[Tool], features: TemplateFeatures
    ) -> tuple[list[Message], list[Any] | None]:
        for number, message in enumerate(messages):
            if message.get("tool_calls"):
                message["tool_calls"] = list(self._calls(message["tool_calls"], features, number))
                message.setdefault("content", "")
            else:
                message.pop("tool_calls", None)
            if features.short_ids and "tool_call_id" in message:
                message["tool_call_id"] = _shorten_id(message["tool_call_id"])
        if features.arguments is None:
            messages = [self._write_calls(message) for message in messages]
        if not features.results:
            messages = _move_results_to_turns(messages)
        if tools and not features.tools:
            return _add_description(messages, self._describe(tools), features.system), None
        return messages, [openai_tool(tool) for tool in tools] or None

    @cached_property
    def features(self) -> TemplateFeatures:
        """Features of the template."""
        features: TemplateFeatures = self._examine(find_features, self._known)
        return features

    def _calls(self, calls: Sequence[Mapping[str, Any]], features: TemplateFeatures, number: int) -> Iterator[Message]:
        for place, call in enumerate(calls):
            function = call["function"]
            arguments = function.get("arguments") or "{}"
            try:
                value = json.loads(arguments) if isinstance(arguments, str) else arguments
            except (ValueError, RecursionError):
                value = None
            if not isinstance(value, dict):
                raise ValueError(f"messages[{number}].tool_calls[{place}].function.arguments is not a JSON object")
            if features.arguments == "text":
                value = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            id_ = str(call.get("id") or f"call_{number}_{place}")
            yield {
                "id": _shorten_id(id_) if features.short_ids else id_,
                "type": "function",
                "function": {"name": function["name"], "arguments": value},
            }

    def _write_calls(self, message: Message) -> Message:
        calls = message.pop("tool_calls", None)
        if not calls:
            return message
        texts = []
        for call in calls:
            before, after = self._family.write(call["function"]["name"])
            texts.append(before + json.dumps(call["function"]["arguments"], ensure_ascii=False) + after)
        begin, between, end = self._family.around
        text = begin + (between or "").join(texts) + end
        return {**message, "content": f"{message['content']}\n{text}" if message["content"] else text}

    def _describe(self, tools: Sequence[Tool]) -> str:
        descriptions = "\n".join(json.dumps(openai_tool(tool)["function"], ensure_ascii=False) for tool in tools)
        before, after = self._family.write("NAME")
        begin, _, end = self._family.around
        return (
            "# Tools\n\nYou can call these functions:\n\n<tools>\n"
            f"{descriptions}\n</tools>\n\n"
            "To call one, answer with its name and with arguments that fit its parameters, in this form:\n\n"
            f'{begin}{before}{{"PARAMETER": "VALUE"}}{after}{end}\n\n'
            "You then get the result. If no function is needed, just answer."
        )


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
