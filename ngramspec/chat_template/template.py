"""`ChatTemplate`: a model's chat template, which runs in a child process with limits on its time and memory."""

from __future__ import annotations

import pickle
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from ngramspec.chat_template.environment import Render, make_render
from ngramspec.chat_template.prompt import Layout, LayoutTemplate, make_pattern
from ngramspec.errors import ModelError, NGramSpecError, ShutdownError
from ngramspec.tokens import Tokenizer
from ngramspec.worker import Worker

P = ParamSpec("P")
T = TypeVar("T")

Messages = Sequence[Mapping[str, Any]]

_SPACE = " \t\n\v\f\r"  # C's isspace()
_MEMORY = 2**30  # bytes of address space: Python takes a tenth of it
_MAX_TEMPLATES = 8  # templates that the child keeps

LARGE = 2**18
"""Size of the variables, in bytes, above which a conversation is rendered by `large_worker`."""

worker = Worker("the chat template", "render", ModelError, ShutdownError, memory=_MEMORY)
"""The worker that renders the templates of this process; its child starts with the first call."""

large_worker = Worker("the chat template", "render", ModelError, ShutdownError, memory=_MEMORY)
"""The worker for large conversations. These may take two seconds each, and the others do not wait for them."""


class ChatPrompt(NamedTuple):
    """The prompt of a conversation."""

    tokens: list[int]  # ids of the prompt
    layout: Layout

    @property
    def text(self) -> str:
        """Text of the prompt, including control tokens."""
        return self.layout.text

    @property
    def opening(self) -> str:
        """Text of the template at the end, which ends in the begun answer; see `Layout`."""
        return self.layout.opening


@dataclass(frozen=True, slots=True)
class Control:
    """A control token: its id, and whether it swallows the white space before and after it."""

    token: int
    lstrip: bool = False
    rstrip: bool = False


class ChatTemplate:
    """A chat template in Jinja over a vocabulary.

    Args:
        source: Template.
        controls: Control tokens by their texts.
        bos: Text of the token that begins a prompt, unless the prompt already begins with it; "" without one.
        eos: Text of the token that ends a text.
    """

    def __init__(self, source: str, controls: Mapping[str, Control], bos: str = "", eos: str = "") -> None:
        self._parts = source, tuple(controls), bos, eos
        self._controls = controls
        self._key = secrets.token_bytes(8)

    def prompt(
        self,
        messages: Messages,
        tokenizer: Tokenizer,
        variables: Mapping[str, Any] = MappingProxyType({}),
        check: Callable[[int], None] | None = None,
    ) -> ChatPrompt:
        """Return the prompt of a conversation, with further variables of the template.

        `check` raises an error if a text with that many characters is too long to be tokenized. A ModelError means that
        the template rejects the conversation or exceeds a limit, or that a string contains the text of a control token
        that cannot be distinguished from those of the template.
        """
        layout = self.lay_out({**variables, "messages": messages})
        if check is not None:
            check(len(layout.text))
        return ChatPrompt(self._tokenize(layout, tokenizer), layout)

    def extend(
        self, prompt: ChatPrompt, pieces: Sequence[tuple[str, bool]], opening: str, tokenizer: Tokenizer
    ) -> ChatPrompt:
        """Return a prompt followed by pieces of text; control tokens are parsed only in the template's own pieces."""
        layout = prompt.layout.extend(pieces, opening, self._pattern)
        return ChatPrompt(self._tokenize(layout, tokenizer), layout)

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return make_pattern(self._controls)

    def lay_out(self, values: Mapping[str, Any]) -> Layout:
        """Return the text of a prompt for the variables of the template; it raises the same errors as `prompt`."""
        with _nesting_errors():
            raw = pickle.dumps(dict(values), pickle.HIGHEST_PROTOCOL)
        return self._call(large_worker if len(raw) > LARGE else worker, _lay_out, raw)

    def examine(self, function: Callable[Concatenate[Render, P], T], *arguments: P.args, **keywords: P.kwargs) -> T:
        """Return the result of a function of a module that renders conversations with its first argument.

        It raises a ModelError if the template is not valid Jinja, or exceeds a limit.
        """
        result: T = self._call(worker, _examine, function, arguments, keywords)
        return result

    def _call(self, child_worker: Worker, function: Callable[..., T], *arguments: Any) -> T:
        with _nesting_errors():
            with suppress(_UnknownTemplateError):  # the child is new, or knows too many others
                return child_worker.call(function, self._key, *arguments)
            child_worker.call(_compile, self._key, *self._parts)
            return child_worker.call(function, self._key, *arguments)

    def _tokenize(self, layout: Layout, tokenizer: Tokenizer) -> list[int]:
        text = layout.text
        if layout.only_own:
            return tokenizer.tokenize(text, special=True, add_bos=not layout.has_bos)
        tokens, at, before = tokenizer.tokenize("", add_bos=not layout.has_bos)[:1], 0, None
        # The tokenizer, too, cuts a text at its control tokens first and takes what is between them by itself.
        for start, end in [*layout.controls, (len(text), len(text))]:
            control = self._controls.get(text[start:end])
            piece = text[at:start]
            piece = piece.lstrip(_SPACE) if before is not None and before.rstrip else piece
            piece = piece.rstrip(_SPACE) if control is not None and control.lstrip else piece
            tokens += tokenizer.tokenize(piece, add_bos=False) if piece else []
            tokens += [control.token] if control is not None else []
            at, before = end, control
        return tokens


@contextmanager
def _nesting_errors() -> Iterator[None]:
    try:
        yield
    except RecursionError:
        raise ModelError("the conversation or a variable of the chat template is nested too deeply") from None


# --------------------------------------------------------------------------- the child


class _UnknownTemplateError(NGramSpecError):
    """The child does not know the template of a call."""


_templates: dict[bytes, tuple[Render, LayoutTemplate]] = {}


def _compile(key: bytes, source: str, controls: Sequence[str], bos: str, eos: str) -> None:
    render = make_render(source, bos, eos)
    if len(_templates) == _MAX_TEMPLATES:
        _templates.clear()
    _templates[key] = render, LayoutTemplate(source, render, controls, bos)


def _find_template(key: bytes) -> tuple[Render, LayoutTemplate]:
    if key not in _templates:
        raise _UnknownTemplateError("unknown template")
    return _templates[key]


def _lay_out(key: bytes, raw: bytes) -> Layout:
    return _find_template(key)[1].lay_out(pickle.loads(raw))


def _examine(key: bytes, function: Callable[..., T], arguments: Sequence[Any], keywords: Mapping[str, Any]) -> T:
    return function(_find_template(key)[0], *arguments, **keywords)
