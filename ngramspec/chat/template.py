"""`ChatTemplate`: a model's chat template, which runs in a child process with limits on its time and memory."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from datetime import datetime
from functools import cached_property, lru_cache, partial
from types import MappingProxyType
from typing import Any, Concatenate, NoReturn, ParamSpec, TypeVar

from jinja2 import TemplateSyntaxError, nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import SandboxedEnvironment

from ngramspec.chat.prompt import ChatPrompt, LayoutTemplate, Render, Values
from ngramspec.data import ModelError
from ngramspec.tokens import Control, Tokenizer, make_pattern
from ngramspec.worker import Worker

P = ParamSpec("P")
T = TypeVar("T")

Messages = Sequence[Mapping[str, Any]]

LARGE = 2**18
"""Size in bytes above which a conversation's variables go to `large_worker`, so that the others need not wait."""

# Python takes a tenth of the address space that a child may use.
worker = Worker("the chat template", "render", ModelError, memory=2**30)
large_worker = Worker("the chat template", "render", ModelError, memory=2**30)


class ChatTemplate:
    """A chat template in Jinja over a vocabulary, the control tokens by their texts, and the texts of BOS and EOS."""

    def __init__(self, source: str, controls: Mapping[str, Control], bos: str = "", eos: str = "") -> None:
        self._parts = pickle.dumps((source, tuple(controls), bos, eos), pickle.HIGHEST_PROTOCOL)
        self._controls = controls

    def prompt(
        self,
        messages: Messages,
        tokenizer: Tokenizer,
        variables: Mapping[str, Any] = MappingProxyType({}),
        check: Callable[[int], None] | None = None,
    ) -> ChatPrompt:
        """Return the prompt of a conversation; `check` raises an error for the length of a text that is too long."""
        prompt = self.lay_out({**variables, "messages": messages})
        if check is not None:
            check(len(prompt.text))
        return self._tokenize(prompt, tokenizer)

    def extend(
        self, prompt: ChatPrompt, pieces: Sequence[tuple[str, bool]], opening: str, tokenizer: Tokenizer
    ) -> ChatPrompt:
        """Return a prompt followed by pieces of text; control tokens are parsed only in the template's own pieces."""
        return self._tokenize(prompt.extend(pieces, opening, self._pattern), tokenizer)

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return make_pattern(self._controls)

    def lay_out(self, values: Mapping[str, Any]) -> ChatPrompt:
        """Return the text of a prompt for the variables of the template; raise a ModelError if it rejects them."""
        with _nesting_errors():
            raw = pickle.dumps(dict(values), pickle.HIGHEST_PROTOCOL)
            return (large_worker if len(raw) > LARGE else worker).call(_lay_out, self._parts, raw)

    def examine(self, function: Callable[Concatenate[Render, P], T], *arguments: P.args, **keywords: P.kwargs) -> T:
        """Return the result of a function of a module that renders conversations with its first argument."""
        with _nesting_errors():
            result: T = worker.call(_examine, self._parts, function, arguments, keywords)
        return result

    def _tokenize(self, prompt: ChatPrompt, tokenizer: Tokenizer) -> ChatPrompt:
        text, add_bos = prompt.text, not prompt.has_bos
        if prompt.only_own:
            return prompt._replace(tokens=tokenizer.tokenize(text, special=True, add_bos=add_bos))
        tokens, at, before = tokenizer.tokenize("", add_bos=add_bos)[:1], 0, None
        space = " \t\n\v\f\r"  # C's isspace()
        # The tokenizer, too, cuts a text at its control tokens first and takes what is between them by itself.
        for start, end in [*prompt.controls, (len(text), len(text))]:
            control = self._controls.get(text[start:end])
            piece = text[at:start]
            piece = piece.lstrip(space) if before is not None and before.rstrip else piece
            piece = piece.rstrip(space) if control is not None and control.lstrip else piece
            tokens += tokenizer.tokenize(piece, add_bos=False) if piece else []
            tokens += [control.token] if control is not None else []
            at, before = end, control
        return prompt._replace(tokens=tokens)


@contextmanager
def _nesting_errors() -> Iterator[None]:
    try:
        yield
    except RecursionError:
        raise ModelError("the conversation or a variable of the chat template is nested too deeply") from None


@lru_cache(8)
def _load(parts: bytes) -> tuple[Render, LayoutTemplate]:
    source, controls, bos, eos = pickle.loads(parts)
    render = make_render(source, bos, eos)
    return render, LayoutTemplate(source, render, controls, bos)


def _lay_out(parts: bytes, values: bytes) -> ChatPrompt:
    return _load(parts)[1].lay_out(pickle.loads(values))


def _examine(parts: bytes, function: Callable[..., T], arguments: Sequence[Any], keywords: Mapping[str, Any]) -> T:
    return function(_load(parts)[0], *arguments, **keywords)


_MAX_CHARACTERS = 2**24  # of a prompt, more than the longest contexts contain

# Calls that may change the values; Transformers forbids them, llama.cpp allows them.
_CHANGES = re.compile(r"\.(append|clear|extend|insert|pop|popitem|remove|reverse|setdefault|sort|update)\s*\(")
# Checks of Mistral's and gpt-oss' templates that reject empty answers, and reasoning in the content of a message.
_CHECKS = re.compile(
    r"""\{%-? if \(message\['content'\] is [a-z ]+ or [^%]*message\['tool_calls'\]\|length == 0\) %\}"""
    r"""|\{%-? if "<\|channel\|>[^%]*" in message\.content %\}"""
)


def make_render(source: str, bos: str = "", eos: str = "") -> Render:
    """Return the function from a template's variables to text; both raise ModelErrors about the template."""
    environment = SandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, LoopControlExtension]
    )
    # Nothing is escaped, and Markup would escape the rest.
    environment.filters |= {"tojson": partial(json.dumps, ensure_ascii=False), "safe": str}
    changing = _CHANGES.search(source) is not None
    try:
        template = environment.from_string(
            _CHECKS.sub("{%- if false %}", source),
            {
                "bos_token": bos,
                "eos_token": eos,
                "raise_exception": _raise_exception,
                "strftime_now": lambda form: datetime.now().strftime(form),
                "add_generation_prompt": True,
            },
        )
    except MemoryError:
        raise
    except Exception as error:  # also of constant expressions, which Jinja evaluates when it compiles them
        line = f" (line {error.lineno})" if isinstance(error, TemplateSyntaxError) else ""
        reason = f"{str(error) or type(error).__name__}{line}"
        raise ModelError(f"the chat template is not valid Jinja: {reason}") from None

    def render(values: Values) -> str:
        parts, length = list[str](), 0
        values = deepcopy(dict(values)) if changing else dict(values)
        try:
            for part in template.generate(values):
                parts.append(part)
                length += len(part)
                if length > _MAX_CHARACTERS:
                    raise ModelError(f"the chat template writes more than {_MAX_CHARACTERS:,} characters")
        except (ModelError, MemoryError):
            raise
        except Exception as error:
            _raise_exception(str(error) or type(error).__name__)
        return "".join(parts)

    return render


class _Generation(Extension):
    """The block {% generation %}, which marks answers for training: its contents."""

    tags = {"generation"}  # noqa: RUF012 - declared by Jinja

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise ModelError(f"the chat template rejects this conversation: {message}")


_RESERVED = ["messages", "tools", "bos_token", "eos_token", "add_generation_prompt", "raise_exception", "strftime_now"]


def check_variables(variables: Any) -> None:
    """Raise a ValueError if variables are not an object, or one of them has a wrong type or cannot be set."""
    if not isinstance(variables, Mapping):
        raise ValueError("the chat template's variables must be a JSON object")
    for name, value in variables.items():
        if name in _RESERVED:
            raise ValueError(f"the chat template's variable {name!r} cannot be set")
        if name in {"enable_thinking", "preserve_reasoning"} and not isinstance(value, bool):
            raise ValueError(f"the chat template's variable {name!r} must be true or false, got {value!r:.60}")


def template_variables(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables of a template, for those that a request or user gives.

    Dates change once a day, so that the prompts of a day share the cache.
    """
    today = datetime.now()
    values = {
        "enable_thinking": True,
        "preserve_reasoning": True,
        "date_string": today.strftime("%d %b %Y"),
        "datetime": today.strftime("%b %d %Y"),
        "functions": "",  # FireFunction's template concatenates it
    } | dict(variables)
    # Templates know `preserve_reasoning` by these names.
    keeps = values["preserve_reasoning"] is True
    drops = dict.fromkeys(("clear_thinking", "truncate_history_thinking", "drop_thinking"), not keeps)
    values = {"preserve_thinking": keeps, **drops} | values
    if values.get("reasoning_effort") is None:
        values.pop("reasoning_effort", None)
    elif isinstance(effort := values["reasoning_effort"], str):
        values = {"reasoning_strength": effort} | values
    return values
