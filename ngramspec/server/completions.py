"""`/v1/completions`: texts continued, in OpenAI's words; with `suffix` and `echo`."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.responses import Response

from ngramspec.batching.request import Request
from ngramspec.sampling.logprobs import Logprobs
from ngramspec.server.answer import End, Piece, Progress, answer, check_room
from ngramspec.server.common_fields import MOST_ANSWERS, read_answers, read_max_tokens, read_slot, read_stop
from ngramspec.server.errors import bad_field, worded
from ngramspec.server.fields import Fields
from ngramspec.server.gap import gap_prompt
from ngramspec.server.json_text import JsonAnswer
from ngramspec.server.merged import merged
from ngramspec.server.prompts_fields import read_prompts
from ngramspec.server.report import FINGERPRINT, finite, timings, token_text, usage
from ngramspec.server.sampling_fields import grammar_of, read_format, read_sampling
from ngramspec.server.served import ServedModel, Server
from ngramspec.server.sse import DONE, event, event_stream


async def completions(server: Server, given: Fields) -> Response:
    """Continue one or more texts."""
    model = server.ready()
    task = await asyncio.to_thread(_read, server, model, given)
    streamed = given.flag("stream")
    runs = merged([answer(model, request, streamed=streamed) for request in task.requests])
    if streamed:
        options = given.object("stream_options")
        usage_too = options is not None and options.flag("include_usage")
        return await event_stream(_chunks(task, runs, usage_too), server.ping_seconds, lambda e: event(worded(e)))
    async with aclosing(runs):
        async for number, told in runs:
            task.choices[number].add(told)
    choices = [task.told(i, choice.text, choice.likely, choice.end) for i, choice in enumerate(task.choices)]
    return JsonAnswer({**task.head, "choices": choices, **task.ending(usage_too=True)})


@dataclass(slots=True)
class _Choice:
    """A text as it grows.

    Attributes:
        text: the prompt's too, where that is to be repeated.
        offset: characters of it that were told in earlier chunks' logprobs.
    """

    text: str = ""
    offset: int = 0
    likely: list[Logprobs] = field(default_factory=list)
    end: End | None = None

    def add(self, told: Progress | Piece | End) -> None:
        if isinstance(told, Piece):
            self.text += told.text
            self.likely += told.logprobs
        elif isinstance(told, End):
            self.end = told


@dataclass(slots=True)
class _Task:
    """What was asked, and what came of it so far: one choice for each request, those of one prompt together."""

    model: ServedModel
    prompts: Sequence[Sequence[int]]
    requests: Sequence[Request]
    choices: list[_Choice]
    head: dict[str, Any]
    logprobs: bool

    def told(self, number: int, text: str, likely: Sequence[Logprobs], end: End | None) -> dict[str, Any]:
        """A choice, or a part of one."""
        one: dict[str, Any] = {"index": number, "text": text, "finish_reason": None if end is None else end.reason}
        one["logprobs"] = self._table(self.choices[number], likely) if self.logprobs else None
        return one

    def _table(self, choice: _Choice, likely: Sequence[Logprobs]) -> dict[str, Any]:
        """OpenAI's table of logprobs: columns, with the likeliest tokens by their text."""
        table: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for one in likely:
            text = token_text(self.model, one.token)
            top: dict[str, float] = {}
            for token, logprob in (*one.top, (one.token, one.logprob)):
                top.setdefault(token_text(self.model, token), finite(logprob))
            table["tokens"].append(text)
            table["token_logprobs"].append(finite(one.logprob))
            table["top_logprobs"].append(top)
            table["text_offset"].append(choice.offset)
            choice.offset += len(self.model.vocabulary.piece(one.token).decode("utf-8", "ignore"))
        return table

    def ending(self, usage_too: bool) -> dict[str, Any]:
        """What is told once, at the end; the timings are the last text's."""
        ends = [choice.end for choice in self.choices if choice.end is not None]
        told: dict[str, Any] = {"timings": timings(len(self.requests[-1].prompt), ends[-1].done)}
        if usage_too:
            each = len(self.requests) // len(self.prompts)
            cached = sum(min(e.done.cached for e in ends[i : i + each]) for i in range(0, len(ends), each))
            prompt_tokens = sum(len(prompt) for prompt in self.prompts)
            told["usage"] = usage(prompt_tokens, cached, sum(end.done.stats.generated for end in ends))
        return told


def _read(server: Server, model: ServedModel, given: Fields) -> _Task:
    """What is asked for; tokenizes."""
    answers = read_answers(given)
    if (given.whole("best_of", answers) or 0) != answers:
        raise bad_field("best_of", "best_of is not supported: leave it out, or ask for several answers with n")
    logprobs = _read_logprobs(given, model)
    echo = given.flag("echo")
    if echo and logprobs is not None:
        raise bad_field("echo", "echo with logprobs is not supported: a prompt's tokens have none; leave out one")
    suffix = given.text("suffix")
    prompts = [_filled_in(model, given, suffix)] if suffix else read_prompts(model, given)
    if len(prompts) * answers > MOST_ANSWERS:
        raise bad_field("n", f"n asks for {len(prompts) * answers} texts, but at most {MOST_ANSWERS} are given")
    sampling = read_sampling(given, server.defaults, model.vocabulary)
    if (schema := read_format(given)) is not None:
        if sampling.grammar is not None:
            raise bad_field("response_format", "response_format and grammar exclude each other")
        sampling = replace(sampling, grammar=grammar_of(schema, "response_format"))
    max_tokens, stop = read_max_tokens(given), read_stop(given)
    slot = read_slot(given, len(model.service.report().slots))
    requests = []
    for prompt in prompts:
        check_room(prompt, model.n_ctx, max_tokens)
        for i in range(answers):
            seeded = replace(sampling, seed=(sampling.seed + i) % 2**64)
            most = model.n_ctx if max_tokens is None else max_tokens
            requests.append(Request(prompt, most, seeded, stop, logprobs, slot=slot))
    texts = _texts(model, given, prompts) if echo else [""] * len(prompts)
    choices = [_Choice(text) for text in texts for _ in range(answers)]
    head = {
        "id": f"cmpl-{secrets.token_urlsafe(18)}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": given.text("model") or model.name,
        "system_fingerprint": FINGERPRINT,
    }
    return _Task(model, prompts, requests, choices, head, logprobs is not None)


def _filled_in(model: ServedModel, given: Fields, suffix: str) -> list[int]:
    """The prompt that asks for what stands between `prompt` and `suffix`; all of both is shown."""
    if not isinstance(given.data.get("prompt"), str):
        raise bad_field("suffix", "suffix goes with one prompt that is text")
    return gap_prompt(model, given.data["prompt"], suffix)


def _read_logprobs(given: Fields, model: ServedModel) -> int | None:
    if isinstance(given.data.get("logprobs"), bool):  # as a chat spells it
        return (given.whole("top_logprobs", most=model.vocabulary.n_vocab) or 0) if given.flag("logprobs") else None
    return given.whole("logprobs", most=model.vocabulary.n_vocab)


def _texts(model: ServedModel, given: Fields, prompts: Sequence[Sequence[int]]) -> list[str]:
    """The prompts' own texts."""
    value = given.data["prompt"]
    if isinstance(value, str):
        return [value]
    if all(isinstance(item, str) for item in value):
        return list(value)
    return [b"".join(map(model.vocabulary.piece, prompt)).decode("utf-8", "replace") for prompt in prompts]


async def _chunks(
    task: _Task, runs: AsyncGenerator[tuple[int, Progress | Piece | End], None], usage_too: bool
) -> AsyncGenerator[str, None]:
    begun, left = set[int](), len(task.choices)
    async with aclosing(runs):
        async for number, told in runs:
            choice = task.choices[number]
            if isinstance(told, Piece | End) and number not in begun:
                begun.add(number)
                if choice.text:
                    yield event({**task.head, "choices": [task.told(number, choice.text, (), None)]})
            if isinstance(told, Piece) and (told.text or told.logprobs):
                yield event({**task.head, "choices": [task.told(number, told.text, told.logprobs, None)]})
            elif isinstance(told, End):
                choice.end = told
                left -= 1
                more = {} if usage_too or left else task.ending(usage_too=False)
                yield event({**task.head, "choices": [task.told(number, "", (), told)], **more})
    if usage_too:
        yield event({**task.head, "choices": [], **task.ending(usage_too=True)})
    yield DONE
