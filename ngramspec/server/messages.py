"""The conversation of a chat, out of OpenAI's JSON: messages, tools, and which of them to call."""

from __future__ import annotations

import json
from typing import Any

from ngramspec.server.dialogue import ChatTask
from ngramspec.server.errors import bad_field
from ngramspec.server.fields import Fields
from ngramspec.tool_calls.deltas import Tool

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""As templates know them."""

_TEXT_PARTS = ("text", "input_text", "output_text")


def read_conversation(given: Fields) -> ChatTask:
    """The fields that say what the prompt is: messages, tools, and variables of the template."""
    tools = read_tools(given)
    variables = given.object("chat_template_kwargs")
    effort = given.text("reasoning_effort")
    return ChatTask(
        messages=read_messages(given),
        tools=tools,
        tool_choice=read_tool_choice(given, tools),
        variables=({} if effort is None else {"reasoning_effort": effort})
        | ({} if variables is None else dict(variables.data)),
    )


def read_messages(given: Fields) -> list[dict[str, Any]]:
    """The messages, as `ChatTask` has them."""
    found = [_message(message) for message in given.objects("messages")]
    if not found:
        raise bad_field("messages", "messages is empty, but must hold at least one message")
    return found


def _message(given: Fields) -> dict[str, Any]:
    role = _ROLES[given.choice("role", tuple(_ROLES), "")] if "role" in given else None
    if role is None:
        raise bad_field(f"{given.path}role", f"{given.path}role is missing")
    calls = [_call(call) for call in given.objects("tool_calls")]
    if "content" not in given and not calls and role != "assistant":
        raise bad_field(f"{given.path}content", f"{given.path}content is missing")
    message: dict[str, Any] = {"role": role, "content": _content(given)}
    if calls:
        message["tool_calls"] = calls
    for name in ("tool_call_id", "name", "reasoning_content"):
        if (text := given.text(name)) is not None:
            message[name] = text
    return message


def _content(given: Fields) -> str:
    if not isinstance(given.data.get("content"), list):
        return given.text("content") or ""
    texts = []
    for part in given.objects("content"):
        kind = part.text("type")
        if kind not in _TEXT_PARTS:
            raise part.wrong("type", "text: this server reads nothing else")
        texts.append(part.needed_text("text"))
    return "\n".join(texts)


def _call(given: Fields) -> dict[str, Any]:
    function = given.object("function")
    if function is None:
        raise bad_field(f"{given.path}function", f"{given.path}function is missing")
    arguments = function.data.get("arguments")
    if isinstance(arguments, dict):  # not OpenAI's form, but what some clients keep
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif arguments is not None and not isinstance(arguments, str):
        raise function.wrong("arguments", "text")
    return {
        "id": given.text("id") or "",
        "type": "function",
        "function": {"name": function.needed_text("name"), "arguments": arguments or "{}"},
    }


def read_tools(given: Fields) -> tuple[Tool, ...]:
    """The tools that may be called."""
    tools = []
    for item in given.objects("tools"):
        if item.text("type") not in (None, "function"):
            raise item.wrong("type", "function")
        function = item.object("function")
        if function is None:
            raise bad_field(f"{item.path}function", f"{item.path}function is missing")
        parameters = function.object("parameters")
        described = (function.needed_text("name"), function.text("description") or "")
        tools.append(Tool(*described) if parameters is None else Tool(*described, parameters.data))
    return tuple(tools)


def read_tool_choice(given: Fields, tools: tuple[Tool, ...]) -> str:
    """Which tools are to be called: see `ChatTask`."""
    if isinstance(given.data.get("tool_choice"), dict):
        asked = given.object("tool_choice")
        function = asked.object("function") if asked is not None else None
        choice = "" if function is None else function.needed_text("name")
        if choice not in [tool.name for tool in tools]:
            raise bad_field("tool_choice", "tool_choice names no function that is in tools")
        return choice
    choice = given.choice("tool_choice", ("auto", "none", "required"), "auto")
    if choice == "required" and not tools:
        raise bad_field("tool_choice", "tool_choice is 'required', but there are no tools")
    return choice
