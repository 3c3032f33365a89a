"""`Transcript`: a conversation told turn by turn, put into the form that chat templates can render."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_SEPARATOR = "\n"


class Transcript:
    """Collects the turns of a conversation as the messages of a `ChatTask`.

    Templates are stricter than the APIs: many refuse a system message that is not the first, or two turns of one
    side in a row. So system texts before the first turn become one system message, later ones part of the user's turn,
    within <system> tags (where they stand, since moving them to the front would spoil the cached prompt); and
    neighbouring turns of one side become one.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._names: dict[str, str] = {}

    def system(self, text: str) -> None:
        if not text:
            return
        if all(message["role"] == "system" for message in self.messages):
            self._extend("system", text)
        else:
            self._extend("user", f"<system>\n{text}\n</system>")

    def user(self, text: str) -> None:
        self._extend("user", text)

    def assistant(self, text: str) -> None:
        self._extend("assistant", text)

    def thought(self, text: str) -> None:
        """What the assistant thought."""
        message = self._turn("assistant")
        message["reasoning_content"] = _joined(message.get("reasoning_content", ""), text)

    def call(self, call: str, name: str, arguments: str) -> None:
        """The assistant called a tool; `arguments` is JSON."""
        self._names[call] = name
        function = {"name": name, "arguments": arguments}
        calls = self._turn("assistant").setdefault("tool_calls", [])
        calls.append({"id": call, "type": "function", "function": function})

    def result(self, call: str, text: str) -> None:
        """What a tool answered."""
        message = {"role": "tool", "tool_call_id": call, "content": text}
        if call in self._names:
            message["name"] = self._names[call]
        self.messages.append(message)

    def _turn(self, role: str) -> dict[str, Any]:
        if not self.messages or self.messages[-1]["role"] != role:
            self.messages.append({"role": role, "content": ""})
        return self.messages[-1]

    def _extend(self, role: str, text: str) -> None:
        message = self._turn(role)
        message["content"] = _joined(message["content"], text)


def as_json(arguments: Mapping[str, Any]) -> str:
    """A call's arguments as models write them."""
    return json.dumps(arguments, ensure_ascii=False).encode(errors="replace").decode()


def _joined(before: str, text: str) -> str:
    return before + _SEPARATOR + text if before and text else before + text
