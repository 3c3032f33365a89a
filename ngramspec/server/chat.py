"""`run_chat`: a `ChatTask` answered, for whichever dialect asks.

    async with aclosing(run_chat(model, task)) as deltas:
        async for delta in deltas: ...

The layout of the conversation and the grammar of forced tool calls are worked out on another thread, since a long
conversation takes the tokenizer a while.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from ngramspec.batching.request import Request
from ngramspec.server.answer import End, Piece, answer, check_room
from ngramspec.server.dialogue import ChatDelta, ChatTask, Finish, Likely
from ngramspec.server.errors import bad_field
from ngramspec.server.sampling_fields import grammar_of
from ngramspec.server.served import ServedModel
from ngramspec.tool_calls.deltas import CallBegin, Content, Delta


class Parser(Protocol):
    """Turns the text of an answer into deltas."""

    def push(self, text: str) -> Sequence[Delta]: ...

    def finish(self) -> Sequence[Delta]: ...


class PlainParser:
    """All text is content."""

    def push(self, text: str) -> Sequence[Delta]:
        return (Content(text),) if text else ()

    def finish(self) -> Sequence[Delta]:
        return ()


class Layout(NamedTuple):
    """A task in the model's own terms: the request, and what reads the answer."""

    request: Request
    parser: Parser


def lay_out(model: ServedModel, task: ChatTask) -> Layout:
    """Turn a task into a request.

    Raises:
        ApiError: the conversation leaves no room for an answer, or fields contradict each other.
        ModelError: the model's template refuses the conversation.
    """
    sampling = task.sampling
    if task.schema is not None:
        if sampling.grammar is not None:
            raise bad_field("response_format", "response_format and grammar exclude each other")
        sampling = replace(sampling, grammar=grammar_of(task.schema, "response_format"))
    prompt = model.vocabulary.chat_prompt(task.messages)
    check_room(prompt, model.n_ctx)
    request = Request(
        prompt,
        max_tokens=model.n_ctx if task.max_tokens is None else task.max_tokens,
        sampling=sampling,
        stop=task.stop,
        logprobs=task.logprobs,
        slot=task.slot,
    )
    return Layout(request, PlainParser())


async def run_chat(model: ServedModel, task: ChatTask) -> AsyncGenerator[ChatDelta, None]:
    """Answer a task: deltas, and a `Finish`.

    Raises:
        ApiError: whatever goes wrong.
        ModelError: as in `lay_out`.
    """
    request, parser = await asyncio.to_thread(lay_out, model, task)
    prompt_tokens, called = len(request.prompt), False
    told = answer(model, request)
    try:
        async for event in told:
            deltas: Sequence[Delta] = ()
            if isinstance(event, Piece):
                deltas = parser.push(event.text)
            elif isinstance(event, End):
                deltas = parser.finish()
            for delta in deltas:
                called = called or isinstance(delta, CallBegin)
                yield delta
            if isinstance(event, Piece) and event.logprobs:
                yield Likely(event.logprobs)
            if isinstance(event, End):
                reason = "tool_calls" if called and event.reason == "stop" else event.reason
                yield Finish(reason, event.stop_string, prompt_tokens, event.done)
    finally:
        await told.aclose()
