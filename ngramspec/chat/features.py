"""Features of a chat template (`TemplateFeatures`), found by rendering small conversations."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

from ngramspec.chat.prompt import Render
from ngramspec.chat.stream import Tool
from ngramspec.chat.template import template_variables
from ngramspec.data import ModelError

Message = dict[str, Any]
Kind = Literal["object", "text"]

_USER: Message = {"role": "user", "content": "hi"}
_RESULT: Message = {"role": "tool", "tool_call_id": "call12345", "name": "qlistq", "content": "qresultq"}
_ARGUMENTS: Mapping[Kind, Any] = {"object": {"qkeyq": "qvalueq"}, "text": '{"qkeyq": "qvalueq"}'}


class TemplateFeatures(NamedTuple):
    tools: bool  # whether the template renders the list of tools
    system: bool  # whether the template renders a system message
    schemas: bool = True  # whether schemas may have no properties, and lists of types
    arguments: Kind | None = None  # type of the arguments of calls; `None` if the template does not render calls
    results: bool = False  # whether the template renders results of calls
    short_ids: bool = False  # whether ids of calls must have nine characters
    parallel: bool = True  # whether a turn may have several calls
    user_next: bool = True  # whether the user's turn may follow results directly
    strings: bool = True  # whether contents may be strings
    parts: frozenset[str] = frozenset()  # roles whose contents may be lists of parts
    reasoning: bool = False  # whether the template renders the reasoning of earlier answers
    effort: bool = False  # whether the prompt depends on `reasoning_effort`

    def capabilities(self) -> dict[str, bool]:
        """Return the features as llama-server's `chat_template_caps`."""
        return {
            "supports_string_content": self.strings,
            "supports_typed_content": "user" in self.parts,
            "supports_tools": self.tools,
            "supports_tool_calls": self.arguments is not None,
            "supports_parallel_tool_calls": self.arguments is not None and self.parallel,
            "supports_system_role": self.system,
            "supports_preserve_reasoning": self.reasoning,
            "supports_reasoning_effort": self.effort,
            "supports_object_arguments": self.arguments == "object",
        }


def find_features(render: Render) -> TemplateFeatures:
    """Render small conversations to find the features of a template."""
    needs_parts = False

    def show(*messages: Message, **variables: Any) -> str:
        """Render a conversation; "" if the template rejects it."""
        turns = split_contents(messages) if needs_parts else [*messages]
        try:
            return render({"messages": turns, **template_variables(variables)})
        except ModelError:
            return ""

    def shows_parts(*messages: Message, **variables: Any) -> bool:
        """Return True if the content that a message lacks may be a list of parts."""
        parts = [{"type": "text", "text": word} for word in ("qwordq", "qmoreq")]
        text = show(*({"content": parts} | message for message in messages), **variables)
        # A template that does not know parts writes them like Python, or omits some.
        return "qwordq" in text and "qmoreq" in text and not any(f"{mark}text{mark}" in text for mark in "'\"")

    strings = "qwordq" in show({"role": "user", "content": "qwordq"})
    needs_parts = not strings and shows_parts({"role": "user"})
    tool = openai_tool(Tool("qlistq", "about", {"type": "object", "properties": {"qpartq": {"type": "string"}}}))
    tools = "qlistq" in show(_USER, tools=[tool])
    variables: dict[str, Any] = {"tools": [tool]} if tools else {}
    types = {"type": ["string", "null"]}
    rare_tools = [Tool("qoneq", "", {"type": "object"}), Tool("qtwoq", "", {"properties": {"qpartq": types}})]
    answer: Message = {"role": "assistant", "content": "ho"}
    features = TemplateFeatures(
        tools=tools,
        system="qsystemq" in show({"role": "system", "content": "qsystemq"}, _USER),
        schemas=not tools or "qtwoq" in show(_USER, tools=list(map(openai_tool, rare_tools))),
        strings=strings,
        reasoning="qwordq" in show(_USER, answer | {"reasoning_content": "qwordq"}, _USER, answer, _USER),
        effort=show(_USER, reasoning_effort="low") != show(_USER, reasoning_effort="high"),
    )
    features = _find_call_features(features, partial(show, **variables))
    turns = {
        "user": [{"role": "user"}],
        "system": [{"role": "system"}, _USER],
        "assistant": [_USER, {"role": "assistant"}, _USER],
    }
    if features.arguments is not None and features.results:
        result = {key: value for key, value in _RESULT.items() if key != "content"}
        turns["tool"] = [_USER, _make_call_turn(features.arguments), result]
    parts = frozenset(role for role, messages in turns.items() if shows_parts(*messages, **variables))
    return features._replace(parts=parts)


def _find_call_features(features: TemplateFeatures, show: Callable[..., str]) -> TemplateFeatures:
    for id_ in ("call_qidqidq", "call12345"):
        for kind in _ARGUMENTS:
            call = _make_call_turn(kind, id_=id_) | {"content": "qsaidq"}  # some show either the text or the calls
            result = _RESULT | {"tool_call_id": id_}
            text = show(_USER, call, result)
            # Some templates reject results, and some do not show calls of the last turn.
            if not _shows_call(text, kind) and not _shows_call(show(_USER, call), kind):
                continue
            results = [result] if "qresultq" in text else []
            if results or len(id_) == 9:
                text = show(_USER, _make_call_turn(kind, "qoneq", "qtwoq", id_=id_), *results * 2)
                return features._replace(
                    arguments=kind,
                    results=bool(results),
                    short_ids=len(id_) == 9,
                    parallel="qoneq" in text and "qtwoq" in text,
                    user_next="hi" in show(_USER, call, *results, _USER),
                )
    return features


def split_contents(messages: Sequence[Message]) -> list[Message]:
    """Return messages whose contents are lists of parts."""
    return [
        {**message, "content": [{"type": "text", "text": content}]}
        if isinstance(content := message.get("content"), str)
        else message
        for message in messages
    ]


def _make_call_turn(kind: Kind, *names: str, id_: str = "call12345") -> Message:
    """Return a turn that calls functions; the default id has nine characters, which some templates require."""
    calls = [
        {"id": id_, "type": "function", "function": {"name": name, "arguments": _ARGUMENTS[kind]}}
        for name in names or ("qlistq",)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _shows_call(text: str, kind: Kind) -> bool:
    """Return True if a text contains the call, and its arguments are not written as a Python object."""
    is_json = "'qkeyq'" not in text if kind == "object" else '"qkeyq"' in text
    return is_json and all(word in text for word in ("qlistq", "qkeyq", "qvalueq"))


def openai_tool(tool: Tool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}


def find_marks(render: Render, turns: list[Message], variables: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the texts of a template before the reasoning in `turns[1]`, or before its text, and between the two.

    `None` means that the template begins answers differently.
    """
    values = template_variables(variables)
    try:
        prompt_text = render({**values, "messages": turns[:1], "add_generation_prompt": True})
        full_text = render({**values, "messages": turns, "add_generation_prompt": False})
    except ModelError:
        return None
    pattern = "(quserq.*?)" + ("qthoughtq(.*?)" if "qthoughtq" in str(turns) else "()") + "qtextq"
    match, start = re.search(pattern, full_text, re.DOTALL), prompt_text.find("quserq")
    if match is None or start < 0 or not match[1].startswith(prompt_text[start:]):
        return None
    return match[1].removeprefix(prompt_text[start:]), match[2]
