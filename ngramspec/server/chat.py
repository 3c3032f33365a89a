"""`run_chat`: a `ChatTask` answered, for whichever dialect asks.

    async with aclosing(run_chat(model, task, streamed=True)) as deltas:
        async for delta in deltas: ...

The layout of the conversation and the grammar of forced tool calls are worked out on another thread, since a long
conversation takes the tokenizer a while.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from ngramspec.batching.request import Request, Started
from ngramspec.chat_prompt import ChatPrompt
from ngramspec.errors import GrammarError
from ngramspec.llama.json_schema import schema_rules
from ngramspec.server.answer import End, Piece, answer, check_room
from ngramspec.server.dialogue import ChatDelta, ChatTask, Finish, Likely
from ngramspec.server.drafted import DraftedText
from ngramspec.server.errors import ApiError, bad_field
from ngramspec.server.paced import Paced
from ngramspec.server.served import ServedModel
from ngramspec.tool_calls import AnswerParser, forced_grammar, parser_for, thoughts_first
from ngramspec.tool_calls.deltas import CallBegin, Delta, Reasoning


class Layout(NamedTuple):
    """A task in the model's own terms: the request, and what reads the answer."""

    request: Request
    parser: AnswerParser


def chat_prompt(model: ServedModel, task: ChatTask) -> ChatPrompt:
    """The prompt of a conversation, with the tools that may be called.

    Raises:
        ApiError: the conversation or a variable cannot be.
        ModelError: the model's template refuses them.
    """
    tools = task.tools if task.tool_choice != "none" else ()
    try:
        prompt: ChatPrompt = model.vocabulary.chat(task.messages, tools, task.variables)
    except ValueError as error:
        raise ApiError(400, str(error), param="messages") from error
    return prompt


def lay_out(model: ServedModel, task: ChatTask) -> Layout:
    """Turn a task into a request.

    Raises:
        ApiError: the conversation leaves no room for an answer, or fields contradict each other.
        ModelError: the model's template refuses the conversation.
    """
    prompt, template = chat_prompt(model, task), model.vocabulary.chat_template
    check_room(prompt.tokens, model.n_ctx)
    tools = task.tools if task.tool_choice != "none" else ()
    grammar = _grammar(task, template, prompt.opening)
    request = Request(
        prompt.tokens,
        max_tokens=model.n_ctx if task.max_tokens is None else task.max_tokens,
        sampling=task.sampling if grammar is None else replace(task.sampling, grammar=grammar),
        stop=task.stop,
        logprobs=task.logprobs,
        controls=True,
        slot=task.slot,
    )
    return Layout(request, parser_for(template, tools, opening=prompt.opening))


def _grammar(task: ChatTask, template: str | None, opening: str) -> str | None:
    """What the answer must be like, where the task asks for more than text."""
    tools = task.tools if task.tool_choice != "none" else ()
    forced = bool(tools) and task.tool_choice != "auto"
    if task.schema is None and not forced:
        return None
    name = "tools" if tools else "response_format"
    if task.sampling.grammar is not None:
        raise bad_field("grammar", f"grammar and {name} exclude each other")
    try:
        if tools:
            choice, instead = (task.tool_choice, None) if forced else ("required", task.schema)
            return forced_grammar(
                tools, choice, task.parallel, schema_rules, template=template, opening=opening, instead=instead
            )
        assert task.schema is not None
        rules = schema_rules({"answer": task.schema})
    except (GrammarError, ValueError, RecursionError) as error:
        raise bad_field(name, f"{name}: {error}") from error
    return "\n".join([*thoughts_first("answer", template, opening), rules])


async def run_chat(model: ServedModel, task: ChatTask, *, streamed: bool) -> AsyncGenerator[ChatDelta, None]:
    """Answer a task: deltas, and a `Finish`; `streamed`: as they come, else all may come at the end.

    Raises:
        ApiError: whatever goes wrong.
        ModelError: as in `lay_out`.
    """
    request, parser = await asyncio.to_thread(lay_out, model, task)
    prompt_tokens, called = len(request.prompt), False
    untold = thought = 0  # tokens whose text is held back; tokens of thoughts
    paced, drafted = Paced(prompt_tokens), DraftedText()
    told = answer(model, request, streamed=streamed)
    try:
        async for event in told:
            deltas: Sequence[Delta] = ()
            if isinstance(event, Started):
                paced.start(event.cached)
            elif isinstance(event, Piece):
                if task.progress:
                    yield paced.push(event.step)
                if task.drafts:
                    drafted.push(event.step)
                deltas = parser.push(event.text)
                untold += len(event.tokens)
            elif isinstance(event, End):
                deltas = parser.finish()
            if deltas:
                thought += untold if isinstance(deltas[0], Reasoning) else 0
                untold = 0
            for delta in deltas:
                called = called or isinstance(delta, CallBegin)
                yield drafted.mark(delta) if task.drafts else delta
            if isinstance(event, Piece) and event.logprobs:
                yield Likely(event.logprobs)
            if isinstance(event, End):
                reason: Literal["stop", "length", "tool_calls"] = event.reason
                yield Finish(
                    "tool_calls" if called and reason == "stop" else reason,
                    event.stop_string,
                    prompt_tokens,
                    event.done,
                    thought,
                )
    finally:
        await told.aclose()
