"""`ChatFormat`: the prompts of conversations over a vocabulary; `BuiltinTemplate`: llama.cpp's own chat templates."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from types import MappingProxyType
from typing import Any, TypeVar

import llama_cpp.llama_cpp as llama

from ngramspec.chat.conversation import ChatTemplate, adapt, begin_answer
from ngramspec.chat.families import MARKS, missing_turn, reasoning_tags
from ngramspec.chat.prompt import ChatPrompt, LayoutTemplate
from ngramspec.chat.stream import Tool
from ngramspec.chat.template import TemplateFeatures, check_variables, template_variables
from ngramspec.data import ModelError
from ngramspec.llama.vocabulary import Vocabulary
from ngramspec.tokens import Control

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Template of models that have none."""

T = TypeVar("T")


@cache
def builtin_names() -> tuple[str, ...]:
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

    def lay_out(self, values: Mapping[str, Any]) -> ChatPrompt:
        return self._layouts.lay_out(values)

    def examine(self, function: Callable[..., T], *arguments: Any) -> T:
        return function(self._render, *arguments)

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


class ChatFormat:
    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary, self._source = vocabulary, vocabulary.chat_template

    @property
    def template_text(self) -> str:
        """The template; for one of llama.cpp's, a short conversation in its format."""
        source = self._source or CHATML
        return builtin_text(source) if source in builtin_names() else source

    def check(self) -> None:
        """Raise a ModelError if the chat template is not valid Jinja, or exceeds a limit when it is compiled."""
        self._template.examine(bool)

    def tokens(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the token ids of a conversation up to the beginning of the assistant's next turn."""
        return self.prompt(messages).tokens

    def prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Tool] = (),
        variables: Mapping[str, Any] = MappingProxyType({}),
        *,
        answered: bool = True,
        check: Callable[[int], None] | None = None,
    ) -> ChatPrompt:
        """Format a conversation for the assistant's next turn (as ChatML if the model has no template).

        Only the template adds control tokens. If a message, a tool, a result or a variable contains the name of one, it
        is tokenized as text. With `answered`, the prompt ends with the start of the next turn of the assistant. `check`
        raises an error if a text with that many characters is too long to be tokenized.
        """
        check_variables(variables)
        turns, shown_tools = adapt(self._template, messages, tools)
        values = template_variables(self._variables(variables)) | {"add_generation_prompt": answered}
        if shown_tools is not None:
            values["tools"] = shown_tools
        prompt = self._template.prompt(turns, self._vocabulary, values, check)
        start = missing_turn(self._source, prompt.opening) if answered else ""
        if not start:
            return prompt
        return self._template.extend(prompt, [(start, True)], prompt.opening + start, self._vocabulary)

    def continue_answer(
        self, prompt: ChatPrompt, thoughts: str, text: str, variables: Mapping[str, Any] = MappingProxyType({})
    ) -> ChatPrompt:
        """Return a prompt followed by the beginning of its answer: reasoning, which ends if there is text, and text."""
        # A client's string must not become part of the template's own text, in which control tokens are parsed.
        values = self._variables(variables).items()
        plain = {name: value for name, value in values if not isinstance(value, str | list | dict)}
        pieces = begin_answer(self._template, prompt.opening, thoughts, text, plain)
        opening = "" if text else prompt.opening + "".join(piece for piece, own in pieces if own)
        return self._template.extend(prompt, pieces, opening, self._vocabulary)

    def _variables(self, variables: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"enable_thinking": bool(reasoning_tags(self._source)), **variables}

    @cached_property
    def capabilities(self) -> Mapping[str, bool]:
        """Features of the chat template by llama-server's names; a template that does not work has none."""
        try:
            return self._template.examine(TemplateFeatures).capabilities()
        except ModelError:
            return TemplateFeatures(lambda _: "").capabilities()

    @property
    def allows_parallel_calls(self) -> bool:
        """True if the chat template can render several calls in one turn."""
        return self._template.features.parallel

    @cached_property
    def _template(self) -> ChatTemplate:
        controls, (bos, eos) = self._vocabulary.control_tokens, self._vocabulary.ends
        if self._source in builtin_names():
            return BuiltinTemplate(self._source, controls, bos)
        return ChatTemplate(self._source or CHATML, controls, bos, eos)

    @cached_property
    def marks(self) -> frozenset[int]:
        """Ids of the control tokens that the parsers of answers read; other control tokens are not part of answers."""
        return frozenset(token for name, token in self._vocabulary.controls.items() if name in MARKS)
