"""Features of a chat template (`Abilities`), found by rendering small conversations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from ngramspec.chat_template.environment import Render
from ngramspec.chat_template.variables import template_variables
from ngramspec.errors import ModelError
from ngramspec.tool_calls.deltas import Tool

Message = dict[str, Any]
Kind = Literal["object", "text"]

_USER: Message = {"role": "user", "content": "hi"}
_ARGUMENTS: Mapping[Kind, Any] = {"object": {"qkeyq": "qvalueq"}, "text": '{"qkeyq": "qvalueq"}'}


class Abilities(NamedTuple):
    """Features of a template."""

    tools: bool  # whether the template renders the list of tools
    system: bool  # whether the template renders a system message
    arguments: Kind | None = None  # type of the arguments of calls; `None` if the template does not render calls
    results: bool = False  # whether the template renders results of calls
    short_ids: bool = False  # whether ids of calls must have nine characters
    strings: bool = True  # whether contents may be strings
    typed: bool = False  # whether contents may be lists of parts


def find_abilities(render: Render, known: bool) -> Abilities:
    """Render small conversations to find the features of a template; `known`: it belongs to a family."""
    strings = "qwordq" in _rendered(render, [{"role": "user", "content": "qwordq"}])
    typed = _shows_parts(render)

    def shows(messages: list[Message], **variables: Any) -> str:
        return _rendered(render, messages if strings or not typed else in_parts(messages), **variables)

    tool = _tool("qlistq", "qpartq")
    tools = "qlistq" in shows([_USER], tools=[tool])
    shown: dict[str, Any] = {"tools": [tool]} if tools else {}
    system = "qsystemq" in shows([{"role": "system", "content": "qsystemq"}, _USER])
    can = Abilities(tools and known, system, strings=strings, typed=typed)
    if not known:  # calls of unknown families could not be parsed
        return can
    for id_ in ("call_qidqidq", "call12345"):
        for kind in _ARGUMENTS:
            call = _calling(kind, id_=id_)
            result = {"role": "tool", "tool_call_id": id_, "name": "qlistq", "content": "qresultq"}
            text = shows([_USER, call, result], **shown)
            # Some templates reject results, and some do not show calls of the last turn.
            if not _shows_call(text, kind) and not _shows_call(shows([_USER, call], **shown), kind):
                continue
            results = "qresultq" in text
            if results or len(id_) == 9:
                return can._replace(arguments=kind, results=results, short_ids=len(id_) == 9)
    return can


def in_parts(messages: Sequence[Message]) -> list[Message]:
    """Return messages whose contents are lists of parts."""
    return [
        {**message, "content": [{"type": "text", "text": content}]}
        if isinstance(content := message.get("content"), str)
        else message
        for message in messages
    ]


def _shows_parts(render: Render) -> bool:
    """Return True if contents may be lists of parts; a template that does not know them writes them like Python."""
    text = _rendered(render, [{"role": "user", "content": [{"type": "text", "text": "qwordq"}]}])
    return "qwordq" in text and not any(f"{mark}text{mark}" in text for mark in "'\"")


def _rendered(render: Render, messages: Sequence[Message], **variables: Any) -> str:
    """Render a conversation; "" if the template rejects it."""
    try:
        return render({"messages": list(messages), **template_variables(variables)})
    except ModelError:
        return ""


def _tool(name: str, parameter: str = "qkeyq") -> dict[str, Any]:
    return openai_tool(Tool(name, "about", {"type": "object", "properties": {parameter: {"type": "string"}}}))


def _calling(kind: Kind, *names: str, id_: str = "call12345") -> Message:
    """Return a turn that calls functions; the default id has nine characters, which some templates require."""
    calls = [
        {"id": id_, "type": "function", "function": {"name": name, "arguments": _ARGUMENTS[kind]}}
        for name in names or ("qlistq",)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def capabilities(render: Render) -> dict[str, bool]:
    """Return llama-server's `chat_template_caps`; `render` raises a ModelError if the template rejects messages."""

    def says(messages: Sequence[Message], *words: str, **variables: Any) -> bool:
        text = _rendered(render, messages, **variables)
        return all(word in text for word in words)

    said: Message = {"role": "assistant", "content": "ho"}
    tools = [_tool("qlistq")]
    effort = [_rendered(render, [_USER], reasoning_effort=one, enable_thinking=True) for one in ("low", "high")]
    thought = [_USER, {**said, "reasoning_content": "qwordq"}, _USER, said, _USER]
    # Variables by which templates keep earlier reasoning.
    leaves = ("clear_thinking", "truncate_history_thinking", "drop_thinking")
    keeps = {"enable_thinking": True, "preserve_thinking": True, **dict.fromkeys(leaves, False)}
    as_object = _rendered(render, [_USER, _calling("object")], tools=tools)
    return {
        "supports_string_content": says([{"role": "user", "content": "qwordq"}], "qwordq"),
        "supports_typed_content": _shows_parts(render),
        "supports_tools": says([_USER], "qlistq", tools=tools),
        "supports_tool_calls": any(
            says([_USER, _calling(kind)], "qlistq", "qvalueq", tools=tools) for kind in _ARGUMENTS
        ),
        "supports_parallel_tool_calls": any(
            says([_USER, _calling(kind, "qlistq", "qreadq")], "qlistq", "qreadq", tools=[_tool("about")])
            for kind in _ARGUMENTS
        ),
        "supports_system_role": says([{"role": "system", "content": "qwordq"}, _USER], "qwordq"),
        "supports_preserve_reasoning": says(thought, "qwordq", **keeps),
        "supports_reasoning_effort": effort[0] != effort[1],
        "supports_object_arguments": "qvalueq" in as_object and "'qkeyq'" not in as_object,
    }


def _shows_call(text: str, kind: Kind) -> bool:
    """Return True if a text contains the call, and its arguments are not written as a Python object."""
    if not all(word in text for word in ("qlistq", "qkeyq", "qvalueq")):
        return False
    return "'qkeyq'" not in text if kind == "object" else '"qkeyq"' in text


def openai_tool(tool: Tool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}
