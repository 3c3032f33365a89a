"""`ToolTemplate`: conversations in the form that a chat template requires.

Rendering small conversations shows the features of a template (`Abilities`). The rest becomes plain messages: tools are
described in the system message, calls are part of the assistant's text in the form that `parser_for` reads, and results
are in a user's turn.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from ngramspec.tool_calls.abilities import Abilities, Message, find_abilities, in_parts, openai_tool
from ngramspec.tool_calls.deltas import Tool
from ngramspec.tool_calls.families import HERMES, family_of
from ngramspec.tool_calls.forms import forms_of

_FIELDS = ("role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content")


class ToolTemplate:
    """A chat template in Jinja, and its support for tools.

    Args:
        source: Template.
        examine: Function that calls its argument with the template's `Render` and further arguments.
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
        """Return messages and tools as the template requires them.

        Args:
            messages: Messages in OpenAI's form; a content may be a list of text parts.
            tools: Tools that the model may call.

        Returns:
            Messages, and tools for the template. `None` means that it receives none.

        Raises:
            ValueError: The arguments of a call are not a JSON object.
        """
        can = self.abilities
        adapted = [{field: m[field] for field in _FIELDS if m.get(field) is not None} for m in messages]
        calling = bool(tools) or any(m["role"] == "tool" or m.get("tool_calls") for m in adapted)
        if not (can.typed and can.system and ((can.arguments and can.results and can.tools) or not calling)):
            for message in adapted:
                if isinstance(content := message.get("content"), list):
                    message["content"] = "\n".join(part["text"] for part in content)
        shown: list[Any] | None = None
        if calling:
            adapted, shown = self._with_tools(adapted, tools, can)
        if not can.system:
            adapted = _without_system(adapted)
        for form in self._forms:
            adapted = form(adapted)
        return adapted if can.strings or not can.typed else in_parts(adapted), shown

    def _with_tools(
        self, adapted: list[Message], tools: Sequence[Tool], can: Abilities
    ) -> tuple[list[Message], list[Any] | None]:
        for number, message in enumerate(adapted):
            if message.get("tool_calls"):
                message["tool_calls"] = list(self._calls(message["tool_calls"], can, number))
                message.setdefault("content", "")
            else:
                message.pop("tool_calls", None)
            if can.short_ids and "tool_call_id" in message:
                message["tool_call_id"] = _short(message["tool_call_id"])
        if can.arguments is None:
            adapted = [self._in_text(message) for message in adapted]
        if not can.results:
            adapted = _results_in_turns(adapted)
        if tools and not can.tools:
            return _described(adapted, self._describe(tools), can.system), None
        return adapted, [openai_tool(tool) for tool in tools] or None

    @cached_property
    def abilities(self) -> Abilities:
        """Features of the template."""
        found: Abilities = self._examine(find_abilities, self._known)
        return found

    def _calls(self, calls: Sequence[Mapping[str, Any]], can: Abilities, number: int) -> Iterator[Message]:
        for place, call in enumerate(calls):
            function = call["function"]
            arguments = function.get("arguments") or "{}"
            try:
                loaded = json.loads(arguments) if isinstance(arguments, str) else arguments
            except (ValueError, RecursionError):
                loaded = None
            if not isinstance(loaded, dict):
                raise ValueError(f"messages[{number}].tool_calls[{place}].function.arguments is not a JSON object")
            if can.arguments == "text":
                loaded = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            id_ = str(call.get("id") or f"call_{number}_{place}")
            yield {
                "id": _short(id_) if can.short_ids else id_,
                "type": "function",
                "function": {"name": function["name"], "arguments": loaded},
            }

    def _in_text(self, message: Message) -> Message:
        calls = message.pop("tool_calls", None)
        if not calls:
            return message
        written = []
        for call in calls:
            before, after = self._family.write(call["function"]["name"])
            written.append(before + json.dumps(call["function"]["arguments"], ensure_ascii=False) + after)
        begin, between, end = self._family.around
        text = begin + (between or "").join(written) + end
        return {**message, "content": f"{message['content']}\n{text}" if message["content"] else text}

    def _describe(self, tools: Sequence[Tool]) -> str:
        listed = "\n".join(json.dumps(openai_tool(tool)["function"], ensure_ascii=False) for tool in tools)
        before, after = self._family.write("NAME")
        begin, _, end = self._family.around
        return (
            "# Tools\n\nYou can call these functions:\n\n<tools>\n"
            f"{listed}\n</tools>\n\n"
            "To call one, answer with its name and with arguments that fit its parameters, in this form:\n\n"
            f'{begin}{before}{{"PARAMETER": "VALUE"}}{after}{end}\n\n'
            "You then get the result. If no function is needed, just answer."
        )


def _short(id_: str) -> str:
    """Return an id of nine letters and digits, which depends only on the given id."""
    return id_ if len(id_) == 9 and id_.isalnum() else hashlib.blake2b(id_.encode()).hexdigest()[:9]


def _results_in_turns(messages: list[Message]) -> list[Message]:
    """Return messages with results in user turns; consecutive results share a turn with the next user message."""
    turned: list[Message] = []
    open_ = False
    for message in messages:
        result = message["role"] == "tool"
        content = message.get("content", "")
        content = f"<tool_response>\n{content}\n</tool_response>" if result else content
        if open_ and message["role"] in {"user", "tool"}:
            turned[-1]["content"] += f"\n{content}"
        else:
            turned.append({"role": "user", "content": content} if result else message)
        open_ = result
    return turned


def _described(messages: list[Message], text: str, system: bool) -> list[Message]:
    """Return messages with a text after the system message; without support for one, before the first turn."""
    first = messages[0] if messages else None
    if first is not None and first["role"] == "system":
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *messages[1:]]
    if system or first is None:
        return [{"role": "system", "content": text}, *messages]
    return [{**first, "content": f"{text}\n\n{first['content']}"}, *messages[1:]]


def _without_system(messages: list[Message]) -> list[Message]:
    """Return messages whose system message is part of the first turn."""
    if not messages or messages[0]["role"] != "system":
        return messages
    first, *others = messages
    if not others or others[0]["role"] != "user":
        return [{**first, "role": "user"}, *others]
    return [{**others[0], "content": f"{first['content']}\n{others[0]['content']}"}, *others[1:]]
