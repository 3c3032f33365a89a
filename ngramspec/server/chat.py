"""`answer_chat`: the response to a chat, for every API that has chats.

Each API reads its JSON into a `ChatTask`, with a `Transcript` and a `Toolbox`, and words the answers with its `Reply`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.responses import Response

from ngramspec.chat_template.template import ChatPrompt
from ngramspec.llama.vocabulary import Vocabulary
from ngramspec.request import Request
from ngramspec.sampling.settings import Sampling
from ngramspec.server.call import ApiError, Call, Fields, ServedModel, bad_field
from ngramspec.server.common_fields import Form, prepared, read_sampling, read_shared, several_seeds
from ngramspec.server.reasoning import read_budget
from ngramspec.server.reply import Reply, respond
from ngramspec.tool_calls.deltas import Tool
from ngramspec.tool_calls.families import answer_grammar
from ngramspec.tool_calls.parser import parser_for

EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
"""The APIs' levels of effort in the words that chat templates know."""

NO_REASONING: Mapping[str, Any] = {"enable_thinking": False, "reasoning_effort": None}
"""Variables of the chat template that disable reasoning; an effort that the server sets has no effect then."""


@dataclass(frozen=True, slots=True)
class ChatTask:
    """A conversation to answer."""

    # In OpenAI's form: "role" (system, user, assistant, tool), "content" (a string, or several text parts), and where
    # they apply "tool_calls" (with arguments as a JSON string), "tool_call_id", "name", "reasoning_content".
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Tool] = ()  # that may be called
    tool_choice: str = "auto"  # or "none", "required", or the name of the tool that must be called
    parallel: bool = True  # whether one answer may hold several calls
    form: Form | None = None  # JSON that the answer must be; None for any text
    max_tokens: int | None = None  # most tokens to emit; None: as many as the context holds
    stop: tuple[str, ...] = ()  # this and others of these names: see `Request`
    logprobs: int | None = None
    post_sampling: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)  # of the chat template ("enable_thinking": False, ...)
    prediction: str = ""  # a text that the answer is likely to copy
    reasoning_budget: int | None = None  # the API's own budget of reasoning; see `read_budget`
    # Whether a last message of the assistant that calls no tools is continued with, as in llama-server; else it is
    # answered by a turn of its own. `answered`: whether the prompt then ends in the beginning of that turn.
    continued: bool = True
    answered: bool = True
    before: Sequence[int] = ()  # token ids of an earlier text, which the conversation follows

    def __post_init__(self) -> None:
        if self.tool_choice == "required" and not self.tools:
            raise bad_field("tool_choice", "tool_choice requires a call, but there are no tools")

    @property
    def begun(self) -> Mapping[str, Any] | None:
        """The message to continue with."""
        last = self.messages[-1] if self.messages and self.continued else {}
        return last if last.get("role") == "assistant" and not last.get("tool_calls") else None

    @property
    def callable_tools(self) -> Sequence[Tool]:
        return self.tools if self.tool_choice != "none" else ()


def chat_prompt(model: ServedModel, task: ChatTask) -> ChatPrompt:
    """The prompt of a conversation, with the tools that may be called, and an answer that was begun; tokenizes.

    Raises an ApiError where the conversation or a variable cannot be, a ModelError where the template refuses them.
    """
    model.check_size(sum(_content_size(message.get("content", "")) for message in task.messages))
    vocabulary, begun = model.vocabulary, task.begun
    messages = task.messages if begun is None else task.messages[:-1]
    variables = {**model.variables, **task.variables}
    if task.form is not None and "response_format" in (vocabulary.chat_template or ""):
        variables["response_format"] = task.form.schema or {"type": "object"}
    try:
        prompt: ChatPrompt = vocabulary.chat(
            messages,
            task.callable_tools,
            variables,
            answered=task.answered or begun is not None,
            check=model.check_size,
        )
    except ValueError as error:
        raise ApiError(400, str(error), param="messages") from error
    if task.before:
        start = vocabulary.tokenize("")[:1]
        skipped = len(start) if prompt.tokens[: len(start)] == start else 0
        prompt = prompt._replace(tokens=[*task.before, *prompt.tokens[skipped:]])
    if begun is None:
        return prompt
    content = begun.get("content", "")
    # llama-server joins the parts of a begun answer in this way, and those of other messages by one line end.
    text = content if isinstance(content, str) else "\n\n".join(part["text"] for part in content)
    return vocabulary.begun_answer(prompt, begun.get("reasoning_content", ""), text, variables)


def _content_size(content: str | Sequence[Mapping[str, str]]) -> int:
    return len(content) if isinstance(content, str) else sum(len(part["text"]) for part in content)


async def count_prompt(call: Call, task: ChatTask) -> int:
    """How many tokens the prompt of a conversation has. Raises as `chat_prompt` does."""
    return len((await asyncio.to_thread(chat_prompt, call.model, task)).tokens)


def _lay_out(call: Call, task: ChatTask) -> tuple[Request, str]:
    """The request of a task, and the text that its prompt ends in (`ChatPrompt.opening`). Raises as `chat_prompt` does,
    and an ApiError where fields contradict each other.
    """
    model, sampling = call.model, read_sampling(call, schemas=False)
    prompt = chat_prompt(model, task)
    model.check_size(len(task.prediction))
    grammar = _grammar(task, sampling, model.vocabulary, prompt.opening)
    budget = read_budget(call.given, model, prompt, task.reasoning_budget)
    sampling = sampling if grammar is None else replace(sampling, grammar=grammar)
    request = read_shared(call, sampling, task.max_tokens, task.stop)
    request = replace(
        request,
        prompt=prompt.tokens,
        logprobs=task.logprobs,
        post_sampling=task.post_sampling,
        controls=True,
        rules=replace(request.rules, reasoning=budget),
        prediction=model.vocabulary.tokenize(task.prediction, add_bos=False) if task.prediction else (),
    )
    return request, prompt.opening


def _grammar(task: ChatTask, sampling: Sampling, vocabulary: Vocabulary, opening: str) -> str | None:
    """Return the grammar of the answer, if the task requires a format or a call."""
    tools = task.callable_tools
    forced = bool(tools) and task.tool_choice != "auto"
    if task.form is None and not forced:
        return None
    name = "tools" if tools or task.form is None else task.form.field
    if sampling.grammar is not None:
        raise bad_field("grammar", f"grammar cannot be combined with {name}")
    return prepared(
        "tools",
        answer_grammar,
        tools,
        choice=task.tool_choice if forced else "auto",
        parallel=task.parallel,
        json="" if task.form is None else task.form.rule(),
        template=vocabulary.chat_template,
        opening=opening,
        controls=vocabulary.controls,
    )


async def answer_chat(call: Call, task: ChatTask, reply: Reply) -> Response:
    """Answer a task once for each answer of a reply.

    Raises:
        ApiError: A field is invalid, or the conversation cannot be rendered.
        ModelError: The chat template rejects the conversation.
    """
    request, opening = await asyncio.to_thread(_lay_out, call, task)
    requests = several_seeds(request, len(reply.answers))
    template = call.model.vocabulary.chat_template
    parsers = [parser_for(template, task.callable_tools, opening=opening) for _ in requests]
    return await respond(call, requests, reply, parsers)


# --------------------------------------------------------------------------- conversations


class Transcript:
    """Collects the turns of a conversation as the messages of a `ChatTask`, in a form that chat templates can render.

    Many templates refuse a system message that is not the first, or two turns of one side in a row. So system texts
    before the first turn become one message, later ones part of the user's turn, within <system> tags (moving them to
    the front would spoil the cached prompt); and neighbouring turns of one side become one.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._names: dict[str, str] = {}

    def system(self, text: str) -> None:
        if not text:
            return
        if all(message["role"] == "system" for message in self.messages):
            self.say("system", text)
        else:
            self.say("user", f"<system>\n{text}\n</system>")

    def say(self, role: str, text: str) -> None:
        """The user or the assistant said something."""
        message = self._turn(role)
        message["content"] = _joined(message["content"], text)

    def thought(self, text: str) -> None:
        """Add the assistant's reasoning."""
        message = self._turn("assistant")
        message["reasoning_content"] = _joined(message.get("reasoning_content", ""), text)

    def call(self, call: str, name: str, arguments: str) -> None:
        """The assistant called a tool; `arguments` is JSON."""
        self._names[call] = name
        calls = self._turn("assistant").setdefault("tool_calls", [])
        calls.append({"id": call, "type": "function", "function": {"name": name, "arguments": arguments}})

    def result(self, call: str, text: str, name: str = "") -> None:
        """Add the result of a tool; `name` is the tool's, if its call is not in the conversation."""
        name = self._names.get(call, name)
        named = {"name": name} if name else {}
        self.messages.append({"role": "tool", "tool_call_id": call, "content": text, **named})

    def _turn(self, role: str) -> dict[str, Any]:
        if not self.messages or self.messages[-1]["role"] != role:
            self.messages.append({"role": role, "content": ""})
        return self.messages[-1]


def as_json(arguments: Mapping[str, Any]) -> str:
    """A call's arguments as models write them."""
    return json.dumps(arguments, ensure_ascii=False)


def read_arguments(text: str) -> dict[str, Any] | None:
    """Return the arguments of a call; `None` if they are incomplete."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _joined(before: str, text: str) -> str:
    return before + "\n" + text if before and text else before + text


# --------------------------------------------------------------------------- tools

_PLAIN = "functions"  # the namespace of tools that are in none
_INPUT = {"input": {"type": "string"}}
_FREE = {"type": "object", "properties": _INPUT, "required": ["input"], "additionalProperties": False}
"""A custom tool takes any text; as a function it takes that text as its one argument."""


class Toolbox:
    """The tools of a request of OpenAI's APIs as functions, and calls of functions as calls of those tools."""

    def __init__(self) -> None:
        self.tools: list[Tool] = []  # as functions, each under a name of its own
        # Original names of functions: a tool's name, and its namespace.
        self.origins: dict[str, tuple[str, str | None]] = {}
        self.custom: set[str] = set()  # the functions that stand for custom tools

    def add(self, tools: Iterable[Fields], namespace: str | None = None) -> None:
        """Take in functions, custom tools, and namespaces of both (Codex has one for each MCP server). Web search and
        its like, which OpenAI's servers or its own models bring along, are left out.
        """
        for tool in tools:
            match tool.needed_name("type"):
                case "function" | "custom" as kind:
                    self.add_one(tool, kind, namespace)
                case "namespace" if namespace is None:
                    name = tool.needed_name("name")
                    self.add(tool.objects("tools"), None if name == _PLAIN else name)

    def add_one(
        self, tool: Fields, kind: str, namespace: str | None = None, *, unique: bool = True, schema: str = "parameters"
    ) -> None:
        """Take in a tool of the kind "function" or "custom".

        `unique`: there may be only one of its name. `schema`: the field of its parameters, needed under another name.
        """
        own = tool.needed_name("name")
        name = function_name(own, namespace)
        if unique and name in self.origins:
            raise tool.refused("name", f"two tools are named {name!r}")
        description = tool.text("description") or ""
        if kind == "custom":
            grammar = tool.object("format")
            grammar = grammar and (grammar.object("grammar") or grammar)  # as chat completions have it, or responses
            if grammar is not None and (definition := grammar.text("definition")):
                description += f"\nThe input keeps to this grammar:\n{definition}"
            self.custom.add(name)
            self.tools.append(Tool(name, description, _FREE))
        else:
            given = tool.object(schema) if schema == "parameters" else tool.needed_object(schema)
            parameters = {"type": "object", "properties": {}} if given is None else given.data
            self.tools.append(Tool(name, description, parameters, tool.flag("strict")))
            self.custom.discard(name)  # of several tools of one name the last counts
        self.origins[name] = own, namespace

    def read_choice(self, given: Fields, field: str) -> str:
        """Return the tools to call: see `ChatTask`. If only some are allowed, the others are dropped."""
        if not isinstance(given.data.get(field), dict):
            return given.choice(field, ("auto", "none", "required"), "auto")
        choice = given.needed_object(field)
        match choice.text("type"):
            case None | "function" | "custom":
                return self.choose(choice)
            case "allowed_tools":
                allowed = choice.object("allowed_tools") or choice  # as chat completions have it, or responses
                # Those of OpenAI's servers have no name.
                named = [one for one in allowed.objects("tools") if {"name", "function", "custom"} & one.data.keys()]
                kept = {self.choose(one) for one in named}
                self.tools = [tool for tool in self.tools if tool.name in kept]
                return allowed.choice("mode", ("auto", "required"), "auto")
            case other:
                raise choice.refused("type", f"unsupported tool type {other!r}")

    def choose(self, choice: Fields) -> str:
        """The function that a choice names by "name" and "namespace"."""
        named = choice.object("function") or choice.object("custom") or choice
        name = function_name(named.needed_name("name"), named.text("namespace"))
        if name not in self.origins:
            raise named.refused("name", f"there is no tool named {name!r}")
        return name

    def origin(self, function: str) -> tuple[str, str | None]:
        """The tool that a function stands for, by its name and namespace; itself where the model made it up."""
        return self.origins.get(function, (function, None))


def function_name(name: str, namespace: str | None) -> str:
    """The function that a tool is given as. Namespaces of Codex end in "__" or do not, by its version."""
    if namespace is None or namespace == _PLAIN:
        return name
    return f"{namespace.removesuffix('__')}__{name}"


def free_text(arguments: str) -> str:
    """The input of a custom tool, out of the arguments of its function; the arguments themselves where they are cut."""
    try:
        value = json.loads(arguments)
    except ValueError:
        return arguments
    found = value.get("input") if isinstance(value, dict) else None
    return found if isinstance(found, str) else arguments
