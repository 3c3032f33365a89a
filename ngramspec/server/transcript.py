"""`Transcript`: the turns of a conversation as messages that chat templates can render; and the arguments of calls."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_TEXTS = ("content", "reasoning_content")
"""Fields of a message that are texts, which may come in parts."""


class Transcript:
    """The turns of a conversation as messages of a `ChatTask`, in a form that chat templates can render.

    Many templates reject a system message that is not the first, or two consecutive turns of one side. So system texts
    before the first turn become one message, and consecutive turns of one side become one. Later system texts become
    part of the user's turn, inside <system> tags, because moving them to the front would invalidate the cached prompt.
    """

    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = []  # texts of one message are a list, because joining each takes O(n^2)
        self._names: dict[str, str] = {}

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Messages so far."""
        return [
            {name: "\n".join(filter(None, value)) if name in _TEXTS else value for name, value in message.items()}
            for message in self._messages
        ]

    def add_system(self, text: str) -> None:
        """Add a text with the role system; see the class for its place."""
        if not text:
            return
        if not self._messages or self._messages[-1]["role"] == "system":
            self.add_message("system", text)
        else:
            self.add_message("user", f"<system>\n{text}\n</system>")

    def add_message(self, role: str, text: str) -> None:
        """Add a text of the user or the assistant."""
        self._turn(role)["content"].append(text)

    def add_reasoning(self, text: str) -> None:
        """Add the assistant's reasoning."""
        self._turn("assistant").setdefault("reasoning_content", []).append(text)

    def add_call(self, call: str, name: str, arguments: str) -> None:
        """Add a tool call of the assistant; `arguments` is JSON."""
        self._names[call] = name
        calls = self._turn("assistant").setdefault("tool_calls", [])
        calls.append({"id": call, "type": "function", "function": {"name": name, "arguments": arguments}})

    def add_result(self, call: str, text: str, name: str = "") -> None:
        """Add the result of a tool; `name` is the tool's, if its call is not in the conversation."""
        name = self._names.get(call, name)
        name_field = {"name": name} if name else {}
        self._messages.append({"role": "tool", "tool_call_id": call, "content": [text], **name_field})

    def _turn(self, role: str) -> dict[str, Any]:
        if not self._messages or self._messages[-1]["role"] != role:
            self._messages.append({"role": role, "content": []})
        return self._messages[-1]


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
