"""Responses to chats, for every API with chats.

Each API reads its JSON into a `ChatTask`, with a `Transcript` and a `Toolbox`. Its `Reply` formats the answers.
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
"""Levels of effort of the APIs, and the names that chat templates support."""

NO_REASONING: Mapping[str, Any] = {"enable_thinking": False, "reasoning_effort": None}
"""Variables of the chat template that disable reasoning; an effort that the server sets has no effect then."""


@dataclass(frozen=True, slots=True)
class ChatTask:
    """A conversation to answer."""

    # Messages in OpenAI's form: "role" (system, user, assistant, tool) and "content" (a string, or several text parts).
    # If they apply: "tool_calls" (with arguments as a JSON string), "tool_call_id", "name", "reasoning_content".
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Tool] = ()  # tools that may be called
    tool_choice: str = "auto"  # "auto", "none", "required", or the name of the tool that must be called
    parallel: bool = True  # whether one answer may contain several calls
    form: Form | None = None  # JSON that the answer must be; `None` means any text
    max_tokens: int | None = None  # maximum number of tokens; `None` means until the context is full
    stop: tuple[str, ...] = ()  # stop strings; for this and the next two fields see `Request`
    logprobs: int | None = None
    post_sampling: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)  # variables of the template: "enable_thinking" and so on
    prediction: str = ""  # text that the answer probably copies
    reasoning_budget: int | None = None  # budget of reasoning in the API's own field; see `read_budget`
    # Whether a last message of the assistant without calls is continued, as in llama-server. Otherwise the answer is a
    # separate turn.
    continued: bool = True
    answered: bool = True  # whether the prompt ends with the start of that separate turn
    before: Sequence[int] = ()  # token ids of an earlier text before the conversation

    def __post_init__(self) -> None:
        if self.tool_choice == "required" and not self.tools:
            raise bad_field("tool_choice", "tool_choice requires a call, but there are no tools")

    @property
    def begun(self) -> Mapping[str, Any] | None:
        """Message that the answer continues; `None` if the answer is a separate turn."""
        last = self.messages[-1] if self.messages and self.continued else {}
        return last if last.get("role") == "assistant" and not last.get("tool_calls") else None

    @property
    def callable_tools(self) -> Sequence[Tool]:
        return self.tools if self.tool_choice != "none" else ()


def chat_prompt(model: ServedModel, task: ChatTask) -> ChatPrompt:
    """Render and tokenize the prompt of a conversation, with the callable tools and the start of the answer.

    Raises:
        ApiError: The conversation or a variable is invalid.
        ModelError: The chat template rejects them.
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
    # llama-server joins the parts of the continued message with two line ends, and those of other messages with one.
    text = content if isinstance(content, str) else "\n\n".join(part["text"] for part in content)
    return vocabulary.begun_answer(prompt, begun.get("reasoning_content", ""), text, variables)


def _content_size(content: str | Sequence[Mapping[str, str]]) -> int:
    return len(content) if isinstance(content, str) else sum(len(part["text"]) for part in content)


async def count_prompt(call: Call, task: ChatTask) -> int:
    """Return the number of tokens of the prompt; it raises the same errors as `chat_prompt`."""
    return len((await asyncio.to_thread(chat_prompt, call.model, task)).tokens)


def _lay_out(call: Call, task: ChatTask) -> tuple[Request, str]:
    """Return the request of a task, and the text at the end of its prompt (`ChatPrompt.opening`).

    It raises the same errors as `chat_prompt`.

    Raises:
        ApiError: Fields contradict each other.
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
    """The turns of a conversation as messages of a `ChatTask`, in a form that chat templates can render.

    Many templates reject a system message that is not the first, or two consecutive turns of one side. So system texts
    before the first turn become one message, and consecutive turns of one side become one. Later system texts become
    part of the user's turn, inside <system> tags, because moving them to the front would invalidate the cached prompt.
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
        """Add a text of the user or the assistant."""
        message = self._turn(role)
        message["content"] = _joined(message["content"], text)

    def thought(self, text: str) -> None:
        """Add the assistant's reasoning."""
        message = self._turn("assistant")
        message["reasoning_content"] = _joined(message.get("reasoning_content", ""), text)

    def call(self, call: str, name: str, arguments: str) -> None:
        """Add a tool call of the assistant; `arguments` is JSON."""
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
    """Return the arguments of a call as JSON, in the form that models write."""
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

_PLAIN = "functions"  # namespace of tools without a namespace
_INPUT = {"input": {"type": "string"}}
_FREE = {"type": "object", "properties": _INPUT, "required": ["input"], "additionalProperties": False}
"""Parameters of a custom tool as a function: its only argument is the text that the tool receives."""


class Toolbox:
    """The conversion of tools in OpenAI's APIs to functions, and of calls of functions to calls of those tools."""

    def __init__(self) -> None:
        self.tools: list[Tool] = []  # tools as functions with unique names
        # Original name and namespace of the tool of each function.
        self.origins: dict[str, tuple[str, str | None]] = {}
        self.custom: set[str] = set()  # functions that represent custom tools

    def add(self, tools: Iterable[Fields], namespace: str | None = None) -> None:
        """Add functions, custom tools, and namespaces of both (Codex has one for each MCP server).

        Other tools such as web search, which only OpenAI's servers or models provide, are omitted.
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
        """Add a tool.

        Args:
            tool: Fields of the tool.
            kind: Kind of the tool: "function" or "custom".
            namespace: Namespace of the tool, if it has one.
            unique: Reject a second tool of the same name.
            schema: Name of the field with the parameters; it is required if it is not "parameters".
        """
        own = tool.needed_name("name")
        name = function_name(own, namespace)
        if unique and name in self.origins:
            raise tool.refused("name", f"two tools are named {name!r}")
        description = tool.text("description") or ""
        if kind == "custom":
            grammar = tool.object("format")
            grammar = grammar and (grammar.object("grammar") or grammar)  # as in chat completions, or as in responses
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
        """Return the choice of tools (see `ChatTask`); if only some tools are allowed, drop the others."""
        if not isinstance(given.data.get(field), dict):
            return given.choice(field, ("auto", "none", "required"), "auto")
        choice = given.needed_object(field)
        match choice.text("type"):
            case None | "function" | "custom":
                return self.choose(choice)
            case "allowed_tools":
                allowed = choice.object("allowed_tools") or choice  # as in chat completions, or as in responses
                # Tools of OpenAI's servers have no name.
                named = [one for one in allowed.objects("tools") if {"name", "function", "custom"} & one.data.keys()]
                kept = {self.choose(one) for one in named}
                self.tools = [tool for tool in self.tools if tool.name in kept]
                return allowed.choice("mode", ("auto", "required"), "auto")
            case other:
                raise choice.refused("type", f"unsupported tool type {other!r}")

    def choose(self, choice: Fields) -> str:
        """Return the function that a choice names with "name" and "namespace"."""
        named = choice.object("function") or choice.object("custom") or choice
        name = function_name(named.needed_name("name"), named.text("namespace"))
        if name not in self.origins:
            raise named.refused("name", f"there is no tool named {name!r}")
        return name

    def origin(self, function: str) -> tuple[str, str | None]:
        """Return the name and namespace of a function's tool; the given name for a function that does not exist."""
        return self.origins.get(function, (function, None))


def function_name(name: str, namespace: str | None) -> str:
    """Return the name of the function that represents a tool. Only some versions of Codex end namespaces with "__"."""
    if namespace is None or namespace == _PLAIN:
        return name
    return f"{namespace.removesuffix('__')}__{name}"


def free_text(arguments: str) -> str:
    """Return the input of a custom tool from the arguments of its function; incomplete arguments stay as they are."""
    try:
        value = json.loads(arguments)
    except ValueError:
        return arguments
    found = value.get("input") if isinstance(value, dict) else None
    return found if isinstance(found, str) else arguments
