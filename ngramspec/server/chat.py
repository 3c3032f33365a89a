"""Responses to chats, for every API with chats.

Each API reads its JSON into a `ChatTask`, with a `Transcript` and a `Toolbox`. Its `Reply` formats the answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ngramspec.chat.families import AnswerParser, answer_grammar
from ngramspec.chat.stream import Tool
from ngramspec.chat.template import ChatPrompt
from ngramspec.llama.vocabulary import Vocabulary
from ngramspec.request import Request
from ngramspec.sampling.settings import Sampling
from ngramspec.server.answer import Answer
from ngramspec.server.call import Call
from ngramspec.server.constraint_fields import JsonFormat, run_in_worker
from ngramspec.server.errors import ApiError, bad_field
from ngramspec.server.reasoning import read_budget
from ngramspec.server.request_fields import read_shared_fields, repeat_with_seeds
from ngramspec.server.sampling_fields import read_sampling
from ngramspec.server.state import ServedModel

EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
"""Levels of effort of the APIs, and the names that chat templates support."""


@dataclass(frozen=True, slots=True)
class ChatTask:
    """A conversation to answer."""

    # Messages in OpenAI's form: "role" (system, user, assistant, tool) and "content" (a string, or several text parts).
    # If they apply: "tool_calls" (with arguments as a JSON string), "tool_call_id", "name", "reasoning_content".
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Tool] = ()  # tools that may be called
    tool_choice: str = "auto"  # "auto", "none", "required", or the name of the tool that must be called
    parallel: bool = True  # whether one answer may contain several calls
    json_format: JsonFormat | None = None  # JSON that the answer must be; `None` means any text
    max_tokens: int | None = None  # maximum number of tokens; `None` means until the context is full
    stop: tuple[str, ...] = ()  # stop strings; for this and the next two fields see `Request`
    logprobs: int | None = None
    post_sampling: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)  # variables of the template: "enable_thinking" and so on
    prediction: str = ""  # text that the answer probably copies
    reasoning_budget: int | None = None  # budget of reasoning in the API's own field; see `read_budget`
    # Whether a last message of the assistant without calls is continued, as in llama-server. Otherwise the answer is a
    # separate turn.
    continues_message: bool = True
    starts_answer: bool = True  # whether the prompt ends with the start of that separate turn
    earlier_tokens: Sequence[int] = ()  # token ids of an earlier text before the conversation

    def __post_init__(self) -> None:
        if self.tool_choice == "required" and not self.tools:
            raise bad_field("tool_choice", "tool_choice requires a call, but there are no tools")

    @property
    def message_to_continue(self) -> Mapping[str, Any] | None:
        """Message that the answer continues; `None` if the answer is a separate turn."""
        message = self.messages[-1] if self.messages and self.continues_message else {}
        return message if message.get("role") == "assistant" and not message.get("tool_calls") else None

    @property
    def callable_tools(self) -> Sequence[Tool]:
        return self.tools if self.tool_choice != "none" else ()


def render_prompt(model: ServedModel, task: ChatTask) -> ChatPrompt:
    """Render and tokenize the prompt of a conversation, with the callable tools and the start of the answer.

    It raises an ApiError if the conversation is invalid, and a ModelError if the chat template rejects it.
    """
    model.check_size(sum(_content_size(message.get("content", "")) for message in task.messages))
    vocabulary, last = model.vocabulary, task.message_to_continue
    messages = task.messages if last is None else task.messages[:-1]
    variables = {**model.variables, **task.variables}
    if task.json_format is not None and "response_format" in (vocabulary.chat_template or ""):
        variables["response_format"] = task.json_format.schema or {"type": "object"}
    try:
        prompt: ChatPrompt = vocabulary.chat(
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
        prompt = vocabulary.continue_answer(prompt, last.get("reasoning_content", ""), text, variables)
    if task.earlier_tokens:
        start = vocabulary.tokenize("")[:1]
        n_skipped = len(start) if prompt.tokens[: len(start)] == start else 0
        prompt = prompt._replace(tokens=[*task.earlier_tokens, *prompt.tokens[n_skipped:]])
    return prompt


def _content_size(content: str | Sequence[Mapping[str, str]]) -> int:
    return len(content) if isinstance(content, str) else sum(len(part["text"]) for part in content)


async def count_prompt(call: Call, task: ChatTask) -> int:
    """Return the number of tokens of the prompt; it raises the same errors as `render_prompt`."""
    return len((await asyncio.to_thread(render_prompt, call.model, task)).tokens)


def _make_request(call: Call, task: ChatTask) -> tuple[Request, str]:
    """Return the request of a task, and the text at the end of its prompt (`ChatPrompt.opening`).

    It raises the same errors as `render_prompt`, and an ApiError for fields that contradict each other.
    """
    model, sampling = call.model, read_sampling(call, schemas=False)
    prompt = render_prompt(model, task)
    model.check_size(len(task.prediction))
    grammar = _make_grammar(task, sampling, model.vocabulary, prompt.opening)
    budget = read_budget(call.fields, model, prompt, task.reasoning_budget)
    sampling = sampling if grammar is None else replace(sampling, grammar=grammar)
    request = read_shared_fields(call, sampling, task.max_tokens, task.stop)
    request = replace(
        request,
        prompt=prompt.tokens,
        logprobs=task.logprobs,
        post_sampling=task.post_sampling,
        controls=model.vocabulary.marks,
        rules=replace(request.rules, reasoning=budget),
        prediction=model.vocabulary.tokenize(task.prediction, add_bos=False) if task.prediction else (),
    )
    return request, prompt.opening


def _make_grammar(task: ChatTask, sampling: Sampling, vocabulary: Vocabulary, opening: str) -> str | None:
    tools = task.callable_tools
    is_call_required = bool(tools) and task.tool_choice != "auto"
    if task.json_format is None and not is_call_required:
        return None
    name = "tools" if tools or task.json_format is None else task.json_format.field
    if sampling.grammar is not None:
        raise bad_field("grammar", f"grammar cannot be combined with {name}")
    return run_in_worker(
        "tools",
        answer_grammar,
        tools,
        choice=task.tool_choice if is_call_required else "auto",
        parallel=task.parallel and vocabulary.allows_parallel_calls,
        json="" if task.json_format is None else task.json_format.make_rule(),
        template=vocabulary.chat_template,
        opening=opening,
        controls=vocabulary.controls,
    )


async def start_chat(call: Call, task: ChatTask, n_answers: int = 1) -> list[Answer]:
    """Return the answers to a task, which are still empty; it raises the same errors as `render_prompt`."""
    request, opening = await asyncio.to_thread(_make_request, call, task)
    vocabulary, tools = call.model.vocabulary, task.callable_tools
    parallel = task.parallel and vocabulary.allows_parallel_calls
    return [
        Answer(request, number, AnswerParser(vocabulary.chat_template, tools, opening=opening, parallel=parallel))
        for number, request in enumerate(repeat_with_seeds(request, n_answers))
    ]
