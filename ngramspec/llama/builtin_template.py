"""`BuiltinTemplate`: llama.cpp's own chat templates, which have names and do not use Jinja."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Concatenate, ParamSpec, TypeVar

import llama_cpp.llama_cpp as llama

from ngramspec.chat.prompt import Layout, LayoutTemplate, Render
from ngramspec.chat.template import ChatTemplate, Control
from ngramspec.data import ModelError

P = ParamSpec("P")
T = TypeVar("T")


@cache
def builtin_names() -> tuple[str, ...]:
    """Return the names of the templates."""
    count = llama.llama_chat_builtin_templates(None, 0)
    names = (ctypes.c_char_p * count)()
    llama.llama_chat_builtin_templates(names, count)
    return tuple(name.decode() for name in names if name)


def builtin_text(name: str) -> str:
    """Return a short conversation in the format of a template, which contains its control tokens."""
    roles = ("system", "user", "assistant", "user")
    return BuiltinTemplate(name, {}, "").lay_out({"messages": [{"role": role, "content": "x"} for role in roles]}).text


class BuiltinTemplate(ChatTemplate):
    """One of llama.cpp's templates over a vocabulary; it needs no limits, so it runs in this process."""

    def __init__(self, name: str, controls: Mapping[str, Control], bos: str) -> None:
        super().__init__("", controls, bos)
        self._name = name.encode()
        self._layouts = LayoutTemplate("", self._render, controls, bos)

    def lay_out(self, values: Mapping[str, Any]) -> Layout:
        return self._layouts.lay_out(values)

    def examine(self, function: Callable[Concatenate[Render, P], T], *arguments: P.args, **named: P.kwargs) -> T:
        return function(self._render, *arguments, **named)

    def _render(self, values: Mapping[str, Any]) -> str:
        messages = [(message["role"], message.get("content", "")) for message in values["messages"]]
        if any(not isinstance(content, str) or "\0" in content for _, content in messages):
            raise ModelError("the built-in chat templates take only text without null characters")
        array = (llama.llama_chat_message * len(messages))(
            *((role.encode(), content.encode("utf-8", "surrogatepass")) for role, content in messages)
        )
        size = 256 + 2 * sum(len(content) for _, content in messages)
        begins = bool(values.get("add_generation_prompt", True))
        while True:
            buffer = ctypes.create_string_buffer(size)
            length = llama.llama_chat_apply_template(self._name, array, len(messages), begins, buffer, size)
            if length < 0:
                raise ModelError(f"llama.cpp's chat template {self._name.decode()} rejects this conversation")
            if length <= size:
                return buffer.raw[:length].decode("utf-8", "surrogatepass")
            size = length
