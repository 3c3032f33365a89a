"""`ToolTemplate`: conversations with tools as a chat template wants them; `capabilities`: what clients are told of one.

What a template does is found by rendering small conversations. What it cannot say is said in plain messages: tools are
described in the system message, calls stand in the assistant's text in the form that `parser_for` reads, and results
stand in a user's turn.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, NamedTuple

from ngramspec.tool_calls.deltas import Tool
from ngramspec.tool_calls.families import HERMES, family_of

Message = dict[str, Any]
Render = Callable[[Mapping[str, Any]], str]
Kind = Literal["object", "text"]

_FIELDS = ("role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content")
_USER: Message = {"role": "user", "content": "hi"}
_ARGUMENTS: Mapping[Kind, Any] = {"object": {"qkeyq": "qvalueq"}, "text": '{"qkeyq": "qvalueq"}'}


class Abilities(NamedTuple):
    """Features of a template."""

    tools: bool  # which tools there are
    system: bool  # a system message
    arguments: Kind | None = None  # as which it wants those of calls; None: it shows no calls
    results: bool = False  # of calls
    short_ids: bool = False  # whether ids of calls must have nine characters


class ToolTemplate:
    """A chat template in Jinja, and what it makes of tools; `render` raises whatever the template raises."""

    def __init__(self, source: str | None, render: Render) -> None:
        self._render = render
        family = family_of(source)
        self._known = family is not None
        self._family = family or HERMES
        # gpt-oss' name for thoughts; it refuses them beside content.
        self._thinks = "message.thinking" in (source or "")

    def adapt(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]
    ) -> tuple[list[Message], list[Any] | None]:
        """Messages in OpenAI's form, and tools, as the template wants them; None: it shall not know of any tools.

        Raises:
            ValueError: the arguments of a call are not a JSON object.
        """
        adapted = [{field: m[field] for field in _FIELDS if m.get(field) is not None} for m in messages]
        if self._thinks:
            for message in adapted:
                if "reasoning_content" in message and not message.get("content"):
                    message["thinking"] = message.pop("reasoning_content")
        if not tools and not any(m["role"] == "tool" or m.get("tool_calls") for m in adapted):
            return adapted, None
        can = self.abilities
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
            adapted = _described(adapted, self._describe(tools), can.system)
            return adapted, None
        return adapted, [_openai(tool) for tool in tools] or None

    @cached_property
    def abilities(self) -> Abilities:
        """Render a small conversation to find the features of the template."""
        tool = _tool("qlistq", "qpartq")
        tools = "qlistq" in self._try([_USER], [tool])
        system = "qsystemq" in self._try([{"role": "system", "content": "qsystemq"}, _USER])
        shown = [tool] if tools else None
        if not self._known:  # nor could its calls be read
            return Abilities(False, system)
        for id_ in ("call_qidqidq", "call12345"):
            for kind in _ARGUMENTS:
                call = _calling(kind, id_=id_)
                if not _shows_call(self._try([_USER, call], shown), kind):
                    continue
                result = {"role": "tool", "tool_call_id": id_, "name": "qlistq", "content": "qresultq"}
                results = "qresultq" in self._try([_USER, call, result], shown)
                if results or len(id_) == 9:
                    return Abilities(tools, system, kind, results, len(id_) == 9)
        return Abilities(tools, system)

    def _try(self, messages: list[Message], tools: list[Any] | None = None) -> str:
        return _rendered(self._render, messages, tools=tools)

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
        listed = "\n".join(json.dumps(_openai(tool)["function"], ensure_ascii=False) for tool in tools)
        before, after = self._family.write("NAME")
        begin, _, end = self._family.around
        return (
            "# Tools\n\nYou can call these functions:\n\n<tools>\n"
            f"{listed}\n</tools>\n\n"
            "To call one, answer with its name and with arguments that fit its parameters, in this form:\n\n"
            f'{begin}{before}{{"PARAMETER": "VALUE"}}{after}{end}\n\n'
            "You then get the result. If no function is needed, just answer."
        )


def _openai(tool: Tool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}


def _shows_call(text: str, kind: Kind) -> bool:
    """Whether a text holds the call, with its arguments in a language that is not Python's."""
    if not all(word in text for word in ("qlistq", "qkeyq", "qvalueq")):
        return False
    return "'qkeyq'" not in text if kind == "object" else '"qkeyq"' in text


def _short(id_: str) -> str:
    """An id of nine letters and digits, the same for the same id."""
    return id_ if len(id_) == 9 and id_.isalnum() else hashlib.blake2b(id_.encode()).hexdigest()[:9]


def _results_in_turns(messages: list[Message]) -> list[Message]:
    """Results as turns of the user, one turn for those in a row and for what the user says next."""
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
    """With a text behind the system message, or before the first turn where there can be none."""
    first = messages[0] if messages else None
    if first is not None and first["role"] == "system":
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *messages[1:]]
    if system or first is None:
        return [{"role": "system", "content": text}, *messages]
    return [{**first, "content": f"{text}\n\n{first['content']}"}, *messages[1:]]


# --------------------------------------------------------------------------- small conversations


def _rendered(render: Render, messages: Sequence[Message], **variables: Any) -> str:
    """Render a conversation; "" if the template rejects it."""
    try:
        return render({"messages": list(messages), **variables})
    except Exception:  # jinja2's and whatever the template itself raises: that is the answer
        return ""


def _tool(name: str, parameter: str = "qkeyq") -> dict[str, Any]:
    return _openai(Tool(name, "about", {"type": "object", "properties": {parameter: {"type": "string"}}}))


def _calling(kind: Kind, *names: str, id_: str = "call12345") -> Message:
    """A turn that calls functions; an id has nine characters unless it is given, as some templates demand."""
    calls = [
        {"id": id_, "type": "function", "function": {"name": name, "arguments": _ARGUMENTS[kind]}}
        for name in names or ("qlistq",)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def capabilities(render: Render) -> dict[str, bool]:
    """llama-server's `chat_template_caps`; `render` raises whatever the template raises."""

    def says(messages: Sequence[Message], *words: str, **variables: Any) -> bool:
        text = _rendered(render, messages, **variables)
        return all(word in text for word in words)

    said: Message = {"role": "assistant", "content": "ho"}
    tools = [_tool("qlistq")]
    typed = _rendered(render, [{"role": "user", "content": [{"type": "text", "text": "qwordq"}]}])
    effort = [_rendered(render, [_USER], reasoning_effort=one, enable_thinking=True) for one in ("low", "high")]
    thought = [_USER, {**said, "reasoning_content": "qwordq"}, _USER, said, _USER]
    # By these names templates are told to leave earlier thoughts in.
    leaves = ("clear_thinking", "truncate_history_thinking", "drop_thinking")
    keeps = {"enable_thinking": True, "preserve_thinking": True, **dict.fromkeys(leaves, False)}
    as_object = _rendered(render, [_USER, _calling("object")], tools=tools)
    return {
        "supports_string_content": says([{"role": "user", "content": "qwordq"}], "qwordq"),
        "supports_typed_content": "qwordq" in typed and not any(f"{mark}text{mark}" in typed for mark in "'\""),
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
