"""`ChatTemplate`: a model's chat template, which runs in a child process with limits; and what a template supports."""

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
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar

from jinja2 import TemplateSyntaxError, nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import SandboxedEnvironment

from ngramspec.chat.prompt import ChatPrompt, LayoutTemplate, Render, Values
from ngramspec.chat.stream import Tool
from ngramspec.data import ModelError
from ngramspec.tokens import Control, Tokenizer, make_pattern
from ngramspec.worker import Worker

T = TypeVar("T")

Messages = Sequence[Mapping[str, Any]]
Message = dict[str, Any]
Kind = Literal["object", "text"]

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

    def examine(self, function: Callable[..., T], *arguments: Any) -> T:
        """Return the result of a function of a module that renders conversations with its first argument."""
        with _nesting_errors():
            result: T = worker.call(_examine, self._parts, function, arguments)
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


def _examine(parts: bytes, function: Callable[..., T], arguments: Sequence[Any]) -> T:
    return function(_load(parts)[0], *arguments)


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
    """Return the variables of a template, for those that a request or user gives."""
    today = datetime.now()  # without the time, so that the prompts of a day share the cache
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
