"""Rendering of chat templates, which `ChatTemplate` calls in a child process with limits, and what they support."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from datetime import datetime
from functools import lru_cache, partial
from itertools import product
from typing import Any, Literal, NoReturn, TypeVar

from jinja2 import TemplateSyntaxError, nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import SandboxedEnvironment

from ngramspec.chat.prompt import ChatPrompt, LayoutTemplate, Render, Values
from ngramspec.chat.stream import Tool
from ngramspec.data import ModelError
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


@lru_cache(8)
def _load(parts: bytes) -> tuple[Render, LayoutTemplate]:
    source, controls, bos, eos = pickle.loads(parts)
    render = make_render(source, bos, eos)
    return render, LayoutTemplate(source, render, controls, bos)


def lay_out(parts: bytes, values: bytes) -> ChatPrompt:
    return _load(parts)[1].lay_out(pickle.loads(values))


def examine(parts: bytes, function: Callable[..., T], arguments: Sequence[Any]) -> T:
    return function(_load(parts)[0], *arguments)


_MAX_CHARACTERS = 2**24  # of a prompt, more than the longest contexts contain

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
    # Calls that may change the values; Transformers forbids them, llama.cpp allows them.
    changes = r"\.(append|clear|extend|insert|pop|popitem|remove|reverse|setdefault|sort|update)\s*\("
    is_changing = re.search(changes, source) is not None
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
        values = deepcopy(dict(values)) if is_changing else dict(values)
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


def check_variables(variables: Any) -> None:
    """Raise a ValueError if variables are not an object, or one of them has a wrong type or cannot be set."""
    if not isinstance(variables, Mapping):
        raise ValueError("the chat template's variables must be a JSON object")
    own_names = {"messages", "tools", "bos_token", "eos_token", "add_generation_prompt"}
    for name, value in variables.items():
        if name in own_names | {"raise_exception", "strftime_now"}:
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


class TemplateFeatures:
    """The features of a template, found by rendering small conversations; without `calls`, it gets no tools."""

    def __init__(self, render: Render, calls: bool = True) -> None:
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

        self.strings = "qwordq" in show({"role": "user", "content": "qwordq"})  # whether contents may be strings
        needs_parts = not self.strings and shows_parts({"role": "user"})
        tool = openai_tool(Tool("qlistq", "about", {"type": "object", "properties": {"qpartq": {"type": "string"}}}))
        self.tools = calls and "qlistq" in show(_USER, tools=[tool])  # whether the template renders the list of tools
        types = {"type": ["string", "null"]}
        rare_tools = [Tool("qoneq", "", {"type": "object"}), Tool("qtwoq", "", {"properties": {"qpartq": types}})]
        # Whether schemas may have no properties, and lists of types.
        self.schemas = not self.tools or "qtwoq" in show(_USER, tools=list(map(openai_tool, rare_tools)))
        self.system = "qsystemq" in show({"role": "system", "content": "qsystemq"}, _USER)
        answer: Message = {"role": "assistant", "content": "ho"}
        # Whether the template renders the reasoning of earlier answers.
        self.reasoning = "qwordq" in show(_USER, answer | {"reasoning_content": "qwordq"}, _USER, answer, _USER)
        self.effort = show(_USER, reasoning_effort="low") != show(_USER, reasoning_effort="high")
        variables: dict[str, Any] = {"tools": [tool]} if self.tools else {}
        self.arguments: Kind | None = None  # type of the arguments of calls; `None` if the template has no calls
        self.results = self.short_ids = False  # whether it renders results, and whether ids must have nine characters
        self.parallel = self.user_next = True  # whether a turn may have several calls, and the user's follow results
        if calls:
            self._find_call_form(partial(show, **variables))
        turns = {
            "user": [{"role": "user"}],
            "system": [{"role": "system"}, _USER],
            "assistant": [_USER, {"role": "assistant"}, _USER],
        }
        if self.arguments is not None and self.results:
            result = {key: value for key, value in _RESULT.items() if key != "content"}
            turns["tool"] = [_USER, _make_call_turn(self.arguments), result]
        # Roles whose contents may be lists of parts.
        self.parts = frozenset(role for role, messages in turns.items() if shows_parts(*messages, **variables))

    def _find_call_form(self, show: Callable[..., str]) -> None:
        for id_, kind in product(("call_qidqidq", "call12345"), _ARGUMENTS):
            call = _make_call_turn(kind, id_=id_) | {"content": "qsaidq"}  # some show either the text or the calls
            result = _RESULT | {"tool_call_id": id_}
            text = show(_USER, call, result)
            # Some templates reject results, and some do not show calls of the last turn.
            if not _shows_call(text, kind) and not _shows_call(show(_USER, call), kind):
                continue
            results = [result] if "qresultq" in text else []
            if results or len(id_) == 9:
                text = show(_USER, _make_call_turn(kind, "qoneq", "qtwoq", id_=id_), *results * 2)
                self.arguments, self.results, self.short_ids = kind, bool(results), len(id_) == 9
                self.parallel = "qoneq" in text and "qtwoq" in text
                self.user_next = "hi" in show(_USER, call, *results, _USER)
                return

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
    """Return a template's text before the reasoning (or text) of `turns[1]`, and between; `None` if it has others."""
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
