"""`capabilities`: what a chat template can say, under llama-server's names, found by rendering small conversations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ngramspec.tool_calls.conversation import Message, Render

_WORD = "qwordq"
_USER: Message = {"role": "user", "content": "hi"}
_SAID: Message = {"role": "assistant", "content": "ho"}


def capabilities(render: Render) -> dict[str, bool]:
    """llama-server's `chat_template_caps`; `render` raises whatever the template raises."""

    def shown(messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        try:
            return render({"messages": list(messages), **variables})
        except Exception:  # jinja2's and whatever the template itself raises: that is the answer
            return ""

    def says(messages: Sequence[Mapping[str, Any]], *words: str, **variables: Any) -> bool:
        text = shown(messages, **variables)
        return all(word in text for word in words)

    typed = shown([{"role": "user", "content": [{"type": "text", "text": _WORD}]}])
    tools = [_tool("qlistq")]
    effort = [shown([_USER], reasoning_effort=level, enable_thinking=True) for level in ("low", "high")]
    thought = [_USER, {**_SAID, "reasoning_content": _WORD}, _USER, _SAID, _USER]
    # By these names templates are told to leave earlier thoughts in.
    leaves = ("clear_thinking", "truncate_history_thinking", "drop_thinking")
    keeps = {"enable_thinking": True, "preserve_thinking": True, **dict.fromkeys(leaves, False)}
    as_object = shown([_USER, _calls({"qkeyq": "qvalueq"})], tools=tools)
    return {
        "supports_string_content": says([{"role": "user", "content": _WORD}], _WORD),
        "supports_typed_content": _WORD in typed and not any(f"{mark}text{mark}" in typed for mark in "'\""),
        "supports_tools": says([_USER], "qlistq", tools=tools),
        "supports_tool_calls": any(
            says([_USER, _calls(one)], "qlistq", "qvalueq", tools=tools) for one in ({"qkeyq": "qvalueq"}, _TEXT)
        ),
        "supports_parallel_tool_calls": any(
            says([_USER, _calls(one, "qlistq", "qreadq")], "qlistq", "qreadq", tools=[_tool("about")])
            for one in ({"qkeyq": "qvalueq"}, _TEXT)
        ),
        "supports_system_role": says([{"role": "system", "content": _WORD}, _USER], _WORD),
        "supports_preserve_reasoning": says(thought, _WORD, **keeps),
        "supports_reasoning_effort": effort[0] != effort[1],
        "supports_object_arguments": "qvalueq" in as_object and "'qkeyq'" not in as_object,
    }


_TEXT = '{"qkeyq": "qvalueq"}'


def _tool(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"qkeyq": {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "description": "about", "parameters": parameters}}


def _calls(arguments: Any, *names: str) -> Message:
    """A turn that calls functions; ids have nine characters, as some templates demand."""
    calls = [
        {"id": f"call{i:05d}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, name in enumerate(names or ("qlistq",))
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}
