"""`/completion`: texts continued, in llama-server's own words."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.responses import Response

from ngramspec.batching.request import Prefilled, Request, Started
from ngramspec.sampling.logprobs import Logprobs
from ngramspec.server.answer import End, Piece, Progress, answer, check_room
from ngramspec.server.common_fields import MOST_ANSWERS, read_answers, read_max_tokens, read_slot, read_stop
from ngramspec.server.deadline import LineLimits, LineRules
from ngramspec.server.errors import ApiError, bad_field, worded
from ngramspec.server.fields import Fields
from ngramspec.server.generation_settings import generation_settings
from ngramspec.server.json_text import JsonAnswer
from ngramspec.server.merged import merged
from ngramspec.server.prompts_fields import read_prompts, several
from ngramspec.server.report import logprobs_content, timings
from ngramspec.server.sampling_fields import read_sampling
from ngramspec.server.served import ServedModel, Server
from ngramspec.server.sse import event, event_stream


async def completion(server: Server, given: Fields) -> Response:
    """Continue one text, or several."""
    model = server.ready()
    prompts = await asyncio.to_thread(read_prompts, model, given)
    tasks = read_tasks(server, model, given, prompts)
    listed = several(given.data["prompt"]) or len(tasks) > 1
    return await respond(server, given, tasks, listed=listed)


@dataclass(slots=True)
class NativeTask:
    """A text to continue, and what came of it so far.

    Attributes:
        model: that continues it.
        request: what the engine is asked.
        most: the most tokens that were asked for; -1: as many as the context holds.
        rules: where the text ends before the model ends it.
        tokens_too: whether the answer names its tokens.
        shown: names of the fields to answer with; None: all.
    """

    model: ServedModel
    request: Request
    most: int
    rules: LineRules
    tokens_too: bool
    shown: Sequence[str] | None
    index: int = 0
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    likely: list[Logprobs] = field(default_factory=list)
    slot: int = 0

    def run(self, *, streamed: bool) -> AsyncGenerator[Progress | Piece | End, None]:
        limits = LineLimits(self.rules) if self.rules != LineRules() else None
        return answer(self.model, self.request, limits, streamed=streamed)

    def take(self, told: Progress | Piece | End) -> None:
        if isinstance(told, Started):
            self.slot = told.slot
        elif isinstance(told, Piece):
            self.text += told.text
            self.tokens += told.tokens
            self.likely += told.logprobs

    def part(self, piece: Piece) -> dict[str, Any]:
        """A piece as a chunk of a stream."""
        told = {
            "index": self.index,
            "content": piece.text,
            "tokens": list(piece.tokens),
            "stop": False,
            "id_slot": self.slot,
            "tokens_predicted": len(self.tokens),
            "tokens_evaluated": len(self.request.prompt),
        }
        if self.request.logprobs is not None:
            told["completion_probabilities"] = logprobs_content(self.model, piece.logprobs)
        return told

    def progress(self, done: Prefilled, cached: int) -> dict[str, Any]:
        """How far the prompt is."""
        progress = {"total": done.total, "cache": cached, "processed": done.done}
        return {"index": self.index, "content": "", "tokens": [], "stop": False, "prompt_progress": progress}

    def whole(self, end: End, *, streamed: bool) -> dict[str, Any]:
        """The answer, or the last chunk of a stream."""
        held = len(self.request.prompt) + max(0, len(self.tokens) - 1)  # the last token was never evaluated
        told: dict[str, Any] = {
            "index": self.index,
            "content": "" if streamed else self.text,
            "tokens": self.tokens if self.tokens_too and not streamed else [],
            "id_slot": self.slot,
            "stop": True,
            "model": self.model.name,
            "tokens_predicted": end.done.stats.generated,
            "tokens_evaluated": len(self.request.prompt),
            "generation_settings": generation_settings(self.request.sampling, self.most, self.request.stop),
            "has_new_line": "\n" in self.text,
            "truncated": end.full,
            "stop_type": _stop_type(end),
            "stopping_word": end.stop_string or "",
            "tokens_cached": held,
            "timings": timings(len(self.request.prompt), end.done),
        }
        if self.request.logprobs is not None and not streamed:
            told["completion_probabilities"] = logprobs_content(self.model, self.likely)
        return told if self.shown is None else chosen(told, self.shown)


def _stop_type(end: End) -> str:
    if end.reason == "length":
        return "limit"
    return "eos" if end.stop_string is None else "word"


def chosen(told: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The fields of these names, of which "a/b" is b within a; names of nothing name nothing."""
    found: dict[str, Any] = {}
    for name in names:
        value: Any = told
        for part in name.split("/"):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None:
            found[name] = value
    return found


def read_tasks(server: Server, model: ServedModel, given: Fields, prompts: Sequence[Sequence[int]]) -> list[NativeTask]:
    """What is asked, for each prompt as often as answers are wanted.

    Raises:
        ApiError: a field is wrong, or a prompt leaves no room for an answer.
    """
    answers, max_tokens = read_answers(given), read_max_tokens(given)
    if len(prompts) * answers > MOST_ANSWERS:
        raise bad_field("n", f"n asks for {len(prompts) * answers} texts, but at most {MOST_ANSWERS} are given")
    if given.flag("post_sampling_probs"):
        raise bad_field("post_sampling_probs", "post_sampling_probs is not supported; n_probs tells the model's own")
    sampling = read_sampling(given, server.defaults, model.vocabulary)
    stop, slot = read_stop(given), read_slot(given, len(model.service.report().slots))
    n_probs = given.whole(given.name("n_probs", "logprobs"), 0, most=model.vocabulary.n_vocab) or None
    rules = _read_rules(given)
    shown = given.texts("response_fields") if "response_fields" in given else None
    tokens_too, cache_prompt = given.flag("return_tokens"), given.flag("cache_prompt", True)
    tasks: list[NativeTask] = []
    for prompt in prompts:
        check_room(prompt, model.n_ctx, max_tokens)
        for i in range(answers):
            request = Request(
                prompt,
                max_tokens=model.n_ctx if max_tokens is None else max_tokens,
                sampling=replace(sampling, seed=(sampling.seed + i) % 2**64),
                stop=stop,
                logprobs=n_probs,
                slot=slot,
                cache_prompt=cache_prompt,
            )
            most = -1 if max_tokens is None else max_tokens
            tasks.append(NativeTask(model, request, most, rules, tokens_too, shown, index=len(tasks)))
    return tasks


def _read_rules(given: Fields) -> LineRules:
    milliseconds = given.whole("t_max_predict_ms", -1, least=-(2**31)) or 0
    return LineRules(milliseconds / 1000 if milliseconds > 0 else None, given.whole("n_indent", 0) or 0)


async def respond(server: Server, given: Fields, tasks: Sequence[NativeTask], *, listed: bool) -> Response:
    """Carry tasks out; `listed`: the answer is a list, even of one."""
    if given.flag("stream"):
        chunks = _chunks(tasks, given.flag("return_progress"))
        return await event_stream(chunks, server.ping_seconds, lambda error: event(worded(error)))
    told: dict[int, dict[str, Any]] = {}
    async with aclosing(merged([task.run(streamed=False) for task in tasks])) as runs:
        async for number, one in runs:
            tasks[number].take(one)
            if isinstance(one, End):
                told[number] = tasks[number].whole(one, streamed=False)
    if len(told) < len(tasks):
        raise ApiError(500, "an answer did not end")
    answers = [told[number] for number in range(len(tasks))]
    return JsonAnswer(answers if listed else answers[0])


async def _chunks(tasks: Sequence[NativeTask], progress_too: bool) -> AsyncGenerator[str, None]:
    cached = dict[int, int]()
    async with aclosing(merged([task.run(streamed=True) for task in tasks])) as runs:
        async for number, one in runs:
            task = tasks[number]
            task.take(one)
            if isinstance(one, Started):
                cached[number] = one.cached
            elif isinstance(one, Prefilled):
                if progress_too:
                    yield event(task.progress(one, cached[number]))
            elif isinstance(one, Piece):
                yield event(task.part(one))
            else:
                yield event(task.whole(one, streamed=True))
