"""`/v1/chat/completions`: a chat in OpenAI's words, with what llama-server adds to them."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.responses import Response

from ngramspec.server.chat import run_chat
from ngramspec.server.common_fields import read_answers, read_max_tokens, read_slot, read_stop
from ngramspec.server.dialogue import ChatDelta, ChatTask, Finish, Likely, Progress
from ngramspec.server.errors import bad_field, worded
from ngramspec.server.fields import Fields
from ngramspec.server.json_text import JsonAnswer
from ngramspec.server.merged import merged
from ngramspec.server.messages import read_conversation
from ngramspec.server.report import FINGERPRINT, logprobs_content, timings, usage
from ngramspec.server.sampling_fields import read_format, read_sampling
from ngramspec.server.served import ServedModel, Server
from ngramspec.server.sse import DONE, event, event_stream
from ngramspec.tool_calls.deltas import CallArguments, CallBegin, Content, Delta, Reasoning, Span


async def chat_completions(server: Server, given: Fields) -> Response:
    """Answer a chat."""
    model = server.ready()
    task = read_task(server, model, given)
    tasks = [
        replace(task, sampling=replace(task.sampling, seed=(task.sampling.seed + i) % 2**64))
        for i in range(read_answers(given))
    ]
    reply = _Reply(model, given.text("model") or model.name, task)
    streamed = given.flag("stream")
    runs = merged([run_chat(model, one, streamed=streamed) for one in tasks])
    if streamed:
        options = given.object("stream_options")
        chunks = _chunks(reply, runs, len(tasks), usage_too=options is not None and options.flag("include_usage"))
        return await event_stream(chunks, server.ping_seconds, lambda error: event(worded(error)))
    choices = [_Choice() for _ in tasks]
    async with aclosing(runs):
        async for number, delta in runs:
            choices[number].add(delta)
    return JsonAnswer(reply.whole(choices))


def read_task(server: Server, model: ServedModel, given: Fields) -> ChatTask:
    """The fields of a chat, but for how it is to be told."""
    return replace(
        read_conversation(given),
        parallel=given.flag("parallel_tool_calls", True),
        schema=read_format(given),
        max_tokens=read_max_tokens(given),
        sampling=read_sampling(given, server.defaults, model.vocabulary),
        stop=read_stop(given),
        logprobs=_read_logprobs(given, model),
        slot=read_slot(given, len(model.service.report().slots)),
        progress=given.flag("stream") and given.flag("timings_per_token"),
        drafts=given.flag("return_drafts"),
    )


def _read_logprobs(given: Fields, model: ServedModel) -> int | None:
    top = given.whole("top_logprobs", most=model.vocabulary.n_vocab)
    if given.flag("logprobs"):
        return top or 0
    if top:
        raise bad_field("top_logprobs", "top_logprobs needs logprobs to be true")
    return None


@dataclass(slots=True)
class _Choice:
    """An answer as it grows."""

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    likely: list[Any] = field(default_factory=list)
    drafted: list[Span] = field(default_factory=list)
    finish: Finish | None = None

    def add(self, delta: ChatDelta) -> None:
        if isinstance(delta, Content):
            at = len(self.content)
            self.drafted += [(at + start, at + end) for start, end in delta.drafted]
            self.content += delta.text
        elif isinstance(delta, Reasoning):
            self.reasoning += delta.text
        elif isinstance(delta, CallBegin):
            function = {"name": delta.name, "arguments": ""}
            self.calls.append({"id": delta.id, "type": "function", "function": function})
        elif isinstance(delta, CallArguments):
            self.calls[delta.call]["function"]["arguments"] += delta.text
        elif isinstance(delta, Likely):
            self.likely += delta.logprobs
        elif isinstance(delta, Finish):
            self.finish = delta

    def message(self) -> dict[str, Any]:
        told: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            told["reasoning_content"] = self.reasoning
        if self.calls:
            told["tool_calls"] = self.calls
        return told


class _Reply:
    """What all chunks of a reply have in common, and how its parts are told."""

    def __init__(self, model: ServedModel, name: str, task: ChatTask) -> None:
        self.model, self.logprobs, self.drafts = model, task.logprobs is not None, task.drafts
        self.progress: dict[int, Progress] = {}  # of each choice, where it is told
        self._head = {
            "id": f"chatcmpl-{secrets.token_urlsafe(18)}",
            "created": int(time.time()),
            "model": name,
            "system_fingerprint": FINGERPRINT,
        }

    def whole(self, choices: list[_Choice]) -> dict[str, Any]:
        finishes = [choice.finish for choice in choices if choice.finish is not None]
        told = []
        for i, choice in enumerate(choices):
            one: dict[str, Any] = {"index": i, "message": choice.message(), "finish_reason": finishes[i].reason}
            if self.logprobs:
                one["logprobs"] = {"content": logprobs_content(self.model, choice.likely)}
            if self.drafts:
                one["drafted"] = choice.drafted
            told.append(one)
        return {**self._head, "object": "chat.completion", "choices": told, **_ending(finishes, usage_too=True)}

    def chunk(self, choices: list[dict[str, Any]], more: Mapping[str, Any] | None = None) -> str:
        return event({**self._head, "object": "chat.completion.chunk", "choices": choices, **(more or {})})

    def part(self, number: int, delta: Delta, likely: Likely | None = None) -> str:
        choice: dict[str, Any] = {"index": number, "delta": _fields(delta), "finish_reason": None}
        if self.drafts and isinstance(delta, Content | Reasoning):
            choice["drafted"] = delta.drafted
        if likely is not None:
            choice["logprobs"] = {"content": logprobs_content(self.model, likely.logprobs)}
        return self.chunk([choice], self.pace(number))

    def pace(self, number: int) -> dict[str, Any]:
        """How far a choice is."""
        progress = self.progress.get(number)
        return {} if progress is None else {"timings": timings(progress.prompt_tokens, progress)}


def _ending(finishes: list[Finish], usage_too: bool) -> dict[str, Any]:
    """What is told once, at the end: of several answers to one prompt, the timings are the last one's."""
    last = finishes[-1]
    told: dict[str, Any] = {"timings": timings(last.prompt_tokens, last.done)}
    if usage_too:
        cached = min(finish.done.cached for finish in finishes)
        told["usage"] = usage(last.prompt_tokens, cached, sum(finish.done.stats.generated for finish in finishes))
    return told


def _fields(delta: Delta) -> dict[str, Any]:
    """A delta in OpenAI's form: a name once, then only pieces."""
    if isinstance(delta, Content):
        return {"content": delta.text}
    if isinstance(delta, Reasoning):
        return {"reasoning_content": delta.text}
    if isinstance(delta, CallBegin):
        function = {"name": delta.name, "arguments": ""}
        return {"tool_calls": [{"index": delta.call, "id": delta.id, "type": "function", "function": function}]}
    return {"tool_calls": [{"index": delta.call, "function": {"arguments": delta.text}}]}


async def _chunks(
    reply: _Reply, runs: AsyncGenerator[tuple[int, ChatDelta], None], count: int, usage_too: bool
) -> AsyncGenerator[str, None]:
    """The stream: of each choice its role, its deltas and its finish; then usage and timings."""
    begun, finishes = set[int](), list[Finish]()
    waiting: dict[int, Delta] = {}  # content whose logprobs come next
    async with aclosing(runs):
        async for number, delta in runs:
            if number not in begun:
                begun.add(number)
                start = {"index": number, "delta": {"role": "assistant", "content": None}, "finish_reason": None}
                yield reply.chunk([start])
            if isinstance(delta, Progress):
                reply.progress[number] = delta
                continue
            before = waiting.pop(number, None)
            if isinstance(delta, Likely):
                yield reply.part(number, before or Content(""), delta)
                continue
            if before is not None:
                yield reply.part(number, before)
            if isinstance(delta, Finish):
                finishes.append(delta)
                choice = {"index": number, "delta": {}, "finish_reason": delta.reason}
                more = reply.pace(number) if usage_too or len(finishes) < count else _ending(finishes, usage_too=False)
                yield reply.chunk([choice], more)
            elif reply.logprobs and isinstance(delta, Content):
                waiting[number] = delta
            else:
                yield reply.part(number, delta)
    if usage_too:
        yield reply.chunk([], _ending(finishes, usage_too=True))
    yield DONE
