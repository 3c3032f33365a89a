"""Chats through the app: the values that the chat template receives, and random responses of a scripted engine."""

from __future__ import annotations

import json
from typing import Any

import httpx
from hypothesis import strategies as st
from support.fake_service import FakeService, Script
from support.http import format_tool_call, make_server, send, vocabulary_with

NAMES = ("messages", "tools", "enable_thinking", "reasoning_effort")
VALUES = ", ".join(f"'{name}': {name} | default(none)" for name in NAMES)
TEMPLATE = f"{{{{ {{{VALUES}}} | tojson }}}}{{# <tool_call> <think> </think> #}}"
"""Chat template that writes the values that it receives as JSON, and supports reasoning and tool calls."""


class Chat:
    """The requests to an endpoint.

    Args:
        path: Path of the endpoint.
        fields: Default fields of each request.
    """

    def __init__(self, path: str, **fields: Any) -> None:
        self._path, self._fields = path, fields

    def ask(self, script: Any = None, n_ctx: int = 4000, **fields: Any) -> tuple[httpx.Response, FakeService]:
        """Return the response to a request with these fields, and the engine that answered it."""
        server, engine = make_server(script, vocabulary=vocabulary_with(TEMPLATE), n_ctx=n_ctx)
        return send(server, self._path, self._fields | fields), engine

    def template_values(self, **fields: Any) -> dict[str, Any]:
        """Return what the chat template receives for a request with these fields."""
        response, engine = self.ask(**fields)
        assert response.status_code == 200, response.text
        values: dict[str, Any] = json.loads(engine.prompt_text())
        return values

    def messages(self, **fields: Any) -> list[dict[str, Any]]:
        """Return the messages that the template receives."""
        return list(self.template_values(**fields)["messages"])

    def tools(self, **fields: Any) -> list[dict[str, Any]]:
        """Return the functions that the template receives."""
        return [tool["function"] for tool in self.template_values(**fields)["tools"]]


FRAGMENTS = ("<think>\n", "hm ", "\n</think>\n\n", "I löok. ", "\n", '<tool_call>\n{"name": "loo', '{"at": [1]}', "</")


@st.composite
def answers(draw: st.DrawFn, *names: str) -> tuple[Script, int]:
    """Draw reasoning, texts, calls of these tools and parts of them in any order; and the maximum number of tokens."""
    parts = draw(st.lists(st.sampled_from([*FRAGMENTS, *map(format_tool_call, names)]), max_size=8))
    is_cut = draw(st.booleans())
    script = Script("".join(parts) or "x", step=draw(st.integers(1, 9)), ends=not is_cut, n_cached=5)
    return script, 60 if is_cut else 400
