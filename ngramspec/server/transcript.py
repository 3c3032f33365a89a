"""`Transcript`: the turns of a conversation as messages that chat templates can render; and the arguments of calls."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


class Transcript:
    """The turns of a conversation as messages of a `ChatTask`, in a form that chat templates can render.

    Many templates reject a system message that is not the first, or two consecutive turns of one side. So system texts
    before the first turn become one message, and consecutive turns of one side become one. Later system texts become
    part of the user's turn, inside <system> tags, because moving them to the front would invalidate the cached prompt.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._names: dict[str, str] = {}

    def add_system(self, text: str) -> None:
        """Add a text with the role system; see the class for its place."""
        if not text:
            return
        if all(message["role"] == "system" for message in self.messages):
            self.add_message("system", text)
        else:
            self.add_message("user", f"<system>\n{text}\n</system>")

    def add_message(self, role: str, text: str) -> None:
        """Add a text of the user or the assistant."""
        message = self._turn(role)
        message["content"] = join_lines(message["content"], text)

    def add_reasoning(self, text: str) -> None:
        """Add the assistant's reasoning."""
        message = self._turn("assistant")
        message["reasoning_content"] = join_lines(message.get("reasoning_content", ""), text)

    def add_call(self, call: str, name: str, arguments: str) -> None:
        """Add a tool call of the assistant; `arguments` is JSON."""
        self._names[call] = name
        calls = self._turn("assistant").setdefault("tool_calls", [])
        calls.append({"id": call, "type": "function", "function": {"name": name, "arguments": arguments}})

    def add_result(self, call: str, text: str, name: str = "") -> None:
        """Add the result of a tool; `name` is the tool's, if its call is not in the conversation."""
        name = self._names.get(call, name)
        name_field = {"name": name} if name else {}
        self.messages.append({"role": "tool", "tool_call_id": call, "content": text, **name_field})

    def _turn(self, role: str) -> dict[str, Any]:
        if not self.messages or self.messages[-1]["role"] != role:
            self.messages.append({"role": role, "content": ""})
        return self.messages[-1]


def join_lines(before: str, text: str) -> str:
    """Join two texts; between two that are not empty comes a newline."""
    return before + "\n" + text if before and text else before + text


def dump_arguments(arguments: Mapping[str, Any]) -> str:
    """Return the arguments of a call as JSON, in the form that models write."""
    return json.dumps(arguments, ensure_ascii=False)


def read_arguments(text: str) -> dict[str, Any] | None:
    """Return the arguments of a call; `None` if they are incomplete."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
