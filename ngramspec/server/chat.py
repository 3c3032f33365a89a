"""Chats of all APIs: the body of each is a `Chat`, which becomes a `ChatTask`, and it has a `Reply`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, PlainValidator
from starlette.responses import Response

from ngramspec.chat.families import AnswerParser, answer_grammar, find_open_tag, reasoning_tags
from ngramspec.chat.prompt import ChatPrompt
from ngramspec.chat.stream import Tool
from ngramspec.llama.vocabulary import Vocabulary
from ngramspec.sampling.reasoning import budget_for
from ngramspec.sampling.settings import ReasoningBudget, Sampling
from ngramspec.server.answer import Answer
from ngramspec.server.body import Body, Content, FieldError, Items, Name, describe_value, whole
from ngramspec.server.generation import (
    Constraint,
    Generation,
    make_request,
    make_sampling,
    repeat_with_seeds,
    run_in_worker,
)
from ngramspec.server.json_text import ApiError, JsonResponse, dump_arguments, read_arguments
from ngramspec.server.reply import Reply, respond
from ngramspec.server.state import UNLIMITED, Call, ServedModel

EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
"""Levels of effort of the APIs, and the names that chat templates support."""


@dataclass(frozen=True, slots=True)
class ChatTask:
    body: Generation
    # Messages in OpenAI's form: "role" (system, user, assistant, tool) and "content" (a string, or several text parts).
    # If they apply: "tool_calls" (with arguments as a JSON string), "tool_call_id", "name", "reasoning_content".
    messages: Sequence[Mapping[str, Any]]
    toolbox: Toolbox
    parallel: bool = True  # whether one answer may contain several calls
    constraint: Constraint | None = None
    logprobs: int | None = None  # for this and the next field see `Request`
    post_sampling: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)  # variables of the template: "enable_thinking" and so on
    prediction: str = ""  # text that the answer probably copies
    reasoning_budget: int | None = None  # budget of reasoning in the API's own field, which others override
    # Whether a last message of the assistant without calls is continued, as in llama-server. Otherwise the answer is a
    # separate turn.
    continues_message: bool = True
    starts_answer: bool = True  # whether the prompt ends with the start of that separate turn
    n_answers: int = 1
    earlier_tokens: Sequence[int] = ()  # token ids of an earlier text before the conversation

    def __post_init__(self) -> None:
        if self.toolbox.choice == "required" and not self.toolbox.tools:
            raise FieldError("requires a call, but there are no tools", "tool_choice")

    @property
    def json_form(self) -> Constraint | None:
        return self.constraint if self.constraint is not None and self.constraint.kind == "json" else None

    @property
    def callable_tools(self) -> Sequence[Tool]:
        return self.toolbox.tools if self.toolbox.choice != "none" else ()


def render_prompt(model: ServedModel, task: ChatTask) -> ChatPrompt:
    """Render and tokenize the prompt of a conversation, with the callable tools and the start of the answer."""
    contents = [message.get("content", "") for message in task.messages]
    model.check_size(sum(len(c) if isinstance(c, str) else sum(len(part["text"]) for part in c) for c in contents))
    vocabulary, messages = model.vocabulary, [*task.messages]
    end = messages[-1] if messages and task.continues_message else {}
    # The answer continues a last message of the assistant.
    last = messages.pop() if end.get("role") == "assistant" and not end.get("tool_calls") else None
    variables = {**model.variables, **task.variables}
    if (form := task.json_form) is not None and "response_format" in (vocabulary.chat_template or ""):
        variables["response_format"] = form.value or {"type": "object"}
    try:
        prompt: ChatPrompt = vocabulary.chats.prompt(
            messages,
            task.callable_tools,
            variables,
            answered=task.starts_answer or last is not None,
            check=model.check_size,
        )
    except ValueError as error:
        raise ApiError(400, str(error), param="messages") from error
    if last is not None:
        content = last.get("content", "")
        # llama-server joins the parts of the continued message with two line ends, and those of others with one.
        text = content if isinstance(content, str) else "\n\n".join(part["text"] for part in content)
        prompt = vocabulary.chats.continue_answer(prompt, last.get("reasoning_content", ""), text, variables)
    if task.earlier_tokens:
        start = vocabulary.tokenize("")[:1]
        n_skipped = len(start) if prompt.tokens[: len(start)] == start else 0
        prompt = prompt._replace(tokens=[*task.earlier_tokens, *prompt.tokens[n_skipped:]])
    return prompt


class Chat(Body):
    """The JSON of a chat."""

    def task(self, model: ServedModel) -> ChatTask:
        raise NotImplementedError


C = TypeVar("C", bound=Chat)


async def count_tokens(call: Call[C], **fields: str) -> Response:
    """Return the number of tokens in the prompt of a chat, with further fields of an API."""
    prompt = await asyncio.to_thread(lambda: render_prompt(call.model, call.body.task(call.model)))
    return JsonResponse(fields | {"input_tokens": len(prompt.tokens)})


async def answer_chat(call: Call[C], make_reply: Callable[[Call[Any], Sequence[Answer], Toolbox], Reply]) -> Response:
    """Answer a chat, in the format of an API."""

    def prepare() -> Reply:
        task = call.body.task(call.model)
        return make_reply(call, _make_answers(call, task), task.toolbox)

    return await respond(prepare)


def _make_answers(call: Call[Any], task: ChatTask) -> list[Answer]:
    model, vocabulary = call.model, call.model.vocabulary
    sampling = make_sampling(call, task.body, task.constraint if task.json_form is None else None)
    prompt = render_prompt(model, task)
    model.check_size(len(task.prediction))
    parallel = task.parallel and vocabulary.chats.allows_parallel_calls
    if (grammar := _make_grammar(task, sampling, vocabulary, prompt.opening, parallel)) is not None:
        sampling = replace(sampling, grammar=grammar)
    request = make_request(
        call,
        task.body,
        prompt.tokens,
        sampling,
        _read_budget(model, task, prompt),
        logprobs=task.logprobs,
        post_sampling=task.post_sampling,
        controls=vocabulary.chats.marks,
        prediction=vocabulary.tokenize(task.prediction, add_bos=False) if task.prediction else (),
    )
    template, tools = vocabulary.chat_template, task.callable_tools
    return [
        Answer(request, number, AnswerParser(template, tools, opening=prompt.opening, parallel=parallel))
        for number, request in enumerate(repeat_with_seeds(request, task.n_answers))
    ]


def _make_grammar(
    task: ChatTask, sampling: Sampling, vocabulary: Vocabulary, opening: str, parallel: bool
) -> str | None:
    tools, choice = task.callable_tools, task.toolbox.choice if task.callable_tools else "auto"
    json_format = task.json_form
    if json_format is None and choice == "auto":
        return None
    if sampling.grammar is not None:
        name = "tools" if tools or json_format is None else json_format.field
        raise FieldError(f"cannot be combined with {name}", "grammar")
    return run_in_worker(
        "tools",
        answer_grammar,
        tools,
        choice=choice,
        parallel=parallel,
        json="" if json_format is None else json_format.make_rule(),
        template=vocabulary.chat_template,
        opening=opening,
        controls=vocabulary.controls,
    )


def _read_budget(model: ServedModel, task: ChatTask, prompt: ChatPrompt) -> ReasoningBudget | None:
    """Return the budget of a chat; `None` if it has no limit, or the model does not reason."""
    body, vocabulary = task.body, model.vocabulary
    limit = body.reasoning_budget_tokens
    if limit == UNLIMITED:
        limit = model.reasoning_budget if task.reasoning_budget is None else task.reasoning_budget
    if limit == UNLIMITED:
        return None
    message, tags = body.reasoning_budget_message, reasoning_tags(vocabulary.chat_template)
    return budget_for(
        limit,
        model.reasoning_message if message is None else message,
        tags,
        vocabulary,
        prompt=prompt.tokens,
        start=find_open_tag(tags, prompt.opening),
    )


NO_REASONING: dict[str, Any] = {"enable_thinking": False, "reasoning_effort": None}
"""Variables of the chat template that disable reasoning; an effort that the server sets has no effect then."""


class Thinking(Body):
    """The field `thinking` of Anthropic, DeepSeek and others."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, whole()] | None = None
    display: Literal["summarized", "omitted"] = "summarized"

    @property
    def budget(self) -> int | None:
        """Maximum number of tokens, which only enabled thinking has."""
        return self.budget_tokens if self.type == "enabled" else None


class Prediction(Body):
    """OpenAI's predicted output."""

    type: Literal["content"]
    content: Content

    @property
    def text(self) -> str:
        return "".join([part.text for part in self.content])


_INPUT = {"input": {"type": "string"}}
_FREE = {"type": "object", "properties": _INPUT, "required": ["input"], "additionalProperties": False}
"""Parameters of a custom tool as a function: its only argument is the text that the tool receives."""


class _Grammar(Body):
    definition: str = ""
    grammar: _Grammar | None = None  # in chat completions, the definition is one level deeper than in responses


class ToolFields(Body):
    """A function or a custom tool."""

    name: Name
    description: str = ""
    parameters: dict[str, Any] | None = None
    strict: bool = False
    format: _Grammar | None = None  # of a custom tool


class NamedTool(Body):
    name: Name = ""
    namespace: str | None = None


class ToolChoice(NamedTool):
    """A tool that must be called, or the tools that may be called."""

    type: str = "function"
    function: NamedTool | None = None
    custom: NamedTool | None = None
    allowed_tools: ToolChoice | None = None
    tools: Items[ToolChoice] = ()
    mode: Literal["auto", "required"] = "auto"


def _read_tool_choice(value: Any) -> str | ToolChoice:
    if isinstance(value, dict):
        return ToolChoice.model_validate(value)
    if value not in ("auto", "none", "required"):
        raise FieldError(f"must be one of auto, none, required, got {describe_value(value)}")
    return str(value)


ToolChoiceField = Annotated[str | ToolChoice, PlainValidator(_read_tool_choice)]


FreeText = Annotated[str, AfterValidator(lambda text: dump_arguments({"input": text}))]
"""The input of a custom tool, as the arguments of its function."""


class Toolbox:
    """The conversion of tools in OpenAI's APIs to functions with JSON arguments, and of their calls back.

    A custom tool becomes a function with the argument `input`, and the tool read of a namespace mcp `mcp__read`.
    """

    def __init__(self) -> None:
        self.tools: list[Tool] = []  # tools as functions with unique names
        self.choice = "auto"  # "auto", "none", "required", or the name of the function that must be called
        self.origins: dict[str, tuple[str, str | None, str]] = {}  # name, namespace and kind of each function's tool

    def add_tool(self, tool: ToolFields, kind: str, namespace: str | None = None, *, path: str = "") -> None:
        """Add a tool, whose `kind` is "function" or "custom"; with its `path`, a second one of a name is an error."""
        name = function_name(tool.name, namespace)
        if path and name in self.origins:
            raise FieldError(f"two tools are named {name!r}", path, "name")
        if kind == "custom":
            grammar = tool.format and (tool.format.grammar or tool.format)
            limit = (
                f"\nThe input keeps to this grammar:\n{grammar.definition}" if grammar and grammar.definition else ""
            )
            self.tools.append(Tool(name, tool.description + limit, _FREE))
        else:
            parameters = {"type": "object", "properties": {}} if tool.parameters is None else tool.parameters
            self.tools.append(Tool(name, tool.description, parameters, tool.strict))
        self.origins[name] = tool.name, namespace, kind  # of several tools of one name the last counts

    def read_choice(self, choice: str | ToolChoice) -> None:
        """Set the choice; if only some tools are allowed, drop the others."""
        if isinstance(choice, str):
            self.choice = choice
        elif choice.type in ("function", "custom"):
            self.choice = self.find(choice)
        elif choice.type == "allowed_tools":
            subset = choice.allowed_tools or choice  # as in chat completions, or as in responses
            # Tools of OpenAI's servers have no name.
            names = {self.find(tool) for tool in subset.tools if tool.name or tool.function or tool.custom}
            self.tools = [tool for tool in self.tools if tool.name in names]
            self.choice = subset.mode
        else:
            raise FieldError(f"unsupported tool type {choice.type!r}", "tool_choice", "type")

    def find(self, choice: NamedTool) -> str:
        path = "tool_choice"
        if isinstance(choice, ToolChoice) and choice.function is not None:
            choice, path = choice.function, f"{path}.function"
        elif isinstance(choice, ToolChoice) and choice.custom is not None:
            choice, path = choice.custom, f"{path}.custom"
        if not choice.name:
            raise FieldError("is missing", path, "name")
        name = function_name(choice.name, choice.namespace)
        if name not in self.origins:
            raise FieldError(f"there is no tool named {name!r}", path, "name")
        return name

    def origin(self, function: str) -> tuple[str, str | None, str]:
        """Return the name, namespace and kind of a function's tool, which may not exist."""
        return self.origins.get(function, (function, None, "function"))


def function_name(name: str, namespace: str | None) -> str:
    # Tools without a namespace may have "functions". Only some versions of Codex end namespaces with "__".
    return name if namespace in (None, "functions") else f"{str(namespace).removesuffix('__')}__{name}"


def free_text(arguments: str) -> str:
    """Return the input of a custom tool from the arguments of its function; incomplete arguments stay as they are."""
    text = (read_arguments(arguments) or {}).get("input")
    return text if isinstance(text, str) else arguments


_TEXTS = ("content", "reasoning_content")
"""Fields of a message that are texts, which may come in parts."""


class Transcript:
    """The turns of a conversation as messages of a `ChatTask`, in a form that chat templates can render.

    Many templates reject a system message that is not the first, or two consecutive turns of one side. So system texts
    before the first turn become one message, and consecutive turns of one side become one. Later system texts become
    part of the user's turn, inside <system> tags, because moving them to the front would invalidate the cached prompt.
    """

    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = []  # texts of one message are a list, because joining each takes O(n^2)
        self._names: dict[str, str] = {}

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [
            {name: "\n".join(filter(None, value)) if name in _TEXTS else value for name, value in message.items()}
            for message in self._messages
        ]

    def add_system(self, text: str) -> None:
        """Add a text with the role system; see the class for its place."""
        if not text:
            return
        if not self._messages or self._messages[-1]["role"] == "system":
            self.add_message("system", text)
        else:
            self.add_message("user", f"<system>\n{text}\n</system>")

    def add_message(self, role: str, text: str) -> None:
        self._turn(role)["content"].append(text)

    def add_reasoning(self, text: str) -> None:
        self._turn("assistant").setdefault("reasoning_content", []).append(text)

    def add_call(self, call: str, name: str, arguments: str) -> None:
        """Add a tool call of the assistant; `arguments` is JSON."""
        self._names[call] = name
        calls = self._turn("assistant").setdefault("tool_calls", [])
        calls.append({"id": call, "type": "function", "function": {"name": name, "arguments": arguments}})

    def add_result(self, call: str, text: str, name: str = "") -> None:
        """Add the result of a tool; `name` is the tool's, if its call is not in the conversation."""
        name = self._names.get(call, name)
        name_field = {"name": name} if name else {}
        self._messages.append({"role": "tool", "tool_call_id": call, "content": [text], **name_field})

    def _turn(self, role: str) -> dict[str, Any]:
        if not self._messages or self._messages[-1]["role"] != role:
            self._messages.append({"role": role, "content": []})
        return self._messages[-1]
