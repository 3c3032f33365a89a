"""The format of answers (`Reply`), whole or as a stream of chunks, and the HTTP response with them (`respond`)."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import fields
from time import monotonic
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ngramspec.data import NGramSpecError, __version__
from ngramspec.sampling.distribution import Logprobs
from ngramspec.sampling.settings import Sampling
from ngramspec.server.answer import Answer, run_answers
from ngramspec.server.json_text import ENCODER, ApiError, Encoded, JsonResponse, encode_json, to_api_error
from ngramspec.server.limits import MAX_SENT
from ngramspec.server.state import COUNTERS, Call, ServedModel
from ngramspec.steps import Stats


class Reply:
    """The answers to a call in the format of an API, which is a subclass.

    An API only formats the events of a stream. A response that is not streamed is folded from the same events, so both
    have the same content.
    """

    media_type = "text/event-stream"  # type of a stream
    # Text before and after the JSON of an event, with its fields.
    head, tail = "data: ", "\n\n"
    ending = ""  # last chunk of a stream

    def __init__(self, call: Call[Any], answers: Sequence[Answer]) -> None:
        self.call, self.model, self.answers = call, call.model, answers
        self.name = call.body.model or call.model.name
        self.body: dict[str, Any] = {}  # response that is not streamed, as far as it is known
        has_telemetry = call.body.stream and (call.body.return_progress or call.body.timings_per_token)
        self.telemetry = [Telemetry(call.body) for _ in answers] if has_telemetry else []

    def events(self, answer: Answer) -> Iterable[dict[str, Any]]:
        """Return the events for what the last event of the engine added to an answer."""
        raise NotImplementedError

    def fold(self, event: dict[str, Any]) -> None:
        merge(self.body, event)

    def fold_all(self, events: Iterable[dict[str, Any]]) -> str:
        for event in events:
            self.fold(event)
        return ""

    def whole(self) -> Any:
        """Return the JSON of a response that is not streamed, from the body of all events."""
        return self.body

    def encode(self, events: Iterable[dict[str, Any]]) -> str:
        """Return the chunks of events."""
        chunks = ""
        for event in events:
            try:
                json = ENCODER.encode(event)
            except TypeError:  # a part is `Encoded`
                json = encode_json(event)
            chunks += self.head % event + json + self.tail
        return chunks

    def keepalive(self) -> str:
        return ":\n\n"

    def error_chunk(self, error: ApiError) -> str:
        return self.encode([self.call.format_error(error)])


class ChunkReply(Reply):
    """Answers in chunks with choices, as in OpenAI's older APIs: the usage is in a last chunk without choices."""

    ending = "data: [DONE]\n\n"

    def __init__(
        self, call: Call[Any], answers: Sequence[Answer], prefix: str, first: dict[str, Any], last: dict[str, Any]
    ) -> None:
        super().__init__(call, answers)
        self.has_usage_event = not call.body.stream or call.body.stream_options.include_usage
        self.chunk = {
            "id": f"{prefix}-{secrets.token_urlsafe(18)}",
            **first,
            "created": int(time.time()),
            "model": self.name,
            "system_fingerprint": FINGERPRINT,
            **last,
        }
        self.body = self.chunk | {"choices": [{"index": answer.number} for answer in answers]}

    def last_events(self) -> list[dict[str, Any]]:
        """Return the events after the end of an answer: the usage, if all answers have ended."""
        if not self.has_usage_event or not all(answer.done for answer in self.answers):
            return []
        return [{**self.chunk, "choices": [], **self.timings(), "usage": self.usage()}]

    def timings(self) -> dict[str, Any]:
        last = self.answers[-1]
        return {"timings": timings(last.prompt_tokens, *last.done[1:])} if last.done is not None else {}

    def usage(self) -> dict[str, Any]:
        """Return the usage, which counts a prompt with several answers once."""
        step = self.call.body.n
        prompt_tokens = sum(answer.prompt_tokens for answer in self.answers[::step])
        groups = [self.answers[i : i + step] for i in range(0, len(self.answers), step)]
        generated_tokens = sum(answer.done.stats.generated for answer in self.answers if answer.done is not None)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": generated_tokens,
            "total_tokens": prompt_tokens + generated_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(min(a.cached_tokens for a in group) for group in groups)},
        }


NAMED = "event: %(type)s\ndata: "
"""Head of the events of APIs whose events have a type."""

_TEXTS = {
    *("arguments", "content", "input", "partial_json", "reasoning_content", "response", "signature", "text"),
    "thinking",
}
"""Fields of events whose values continue those before."""


def merge(whole: dict[str, Any], part: Mapping[str, Any]) -> None:
    """Add an event, or a part of it, to what it continues: texts, lists and objects grow, others are replaced.

    Items of lists that have the same `index` are one item.
    """
    for name, value in part.items():
        match whole.get(name):
            case Encoded() as before:
                before.extend(value)
            case dict() as before if value is not None:
                merge(before, value)
            case list() as before:
                for item in value:
                    is_part = isinstance(item, dict) and "index" in item
                    known = [one for one in before if one["index"] == item["index"]] if is_part else []
                    if known:
                        merge(known[0], item)
                    else:
                        before.append(item)
            case str() as before if name in _TEXTS and value is not None:
                whole[name] = before + value
            case _:
                whole[name] = value


async def respond(make_reply: Callable[[], Reply]) -> Response:
    """Answer a call with what the requests of its reply generate, as a stream or as a whole.

    An error before the first chunk of a stream is a plain HTTP error, and a later one is a chunk. A ping is a chunk
    too, because clients disconnect from a server that sends no headers.
    """
    reply = await asyncio.to_thread(make_reply)
    if reply.call.body.stream:
        chunks = _generate(reply, reply.encode)
        return _Stream(await anext(chunks, ""), chunks, reply)
    async for _ in _generate(reply, reply.fold_all):
        pass  # nothing is sent before the end
    # A response with logprobs, or with many answers, takes seconds.
    return await asyncio.to_thread(lambda: JsonResponse(reply.whole()))


async def _generate(reply: Reply, use: Callable[[Iterable[dict[str, Any]]], str]) -> AsyncGenerator[str, None]:
    def format_events(answer: Answer) -> str:
        return use(reply.events(answer))

    async with run_answers(reply.call, reply.answers) as queue:
        while len(queue.ended) < len(reply.answers):
            await queue.wait()
            for number, event in queue.take():
                answer = reply.answers[number]
                if isinstance(event, list):
                    answer.write(event)
                else:
                    answer.add_event(event)
                if answer.ended:
                    answer.cancel()
                if answer.request.logprobs is not None or answer.done:  # a long prompt or text takes seconds
                    chunks = await asyncio.to_thread(format_events, answer)
                else:
                    chunks = use(reply.events(answer))
                if chunks:
                    yield chunks
                    queue.ping_at = monotonic() + queue.ping_seconds
            if monotonic() >= queue.ping_at:
                yield reply.keepalive()
                queue.ping_at = monotonic() + queue.ping_seconds


class _Stream(Response):
    def __init__(self, first: str, chunks: AsyncGenerator[str, None], reply: Reply) -> None:
        # A proxy must neither cache chunks nor collect them before it passes them on.
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(headers=headers, media_type=reply.media_type)
        del self.headers["content-length"]
        self._first, self._chunks, self._reply = first, chunks, reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body: dict[str, Any] = {"type": "http.response.body", "more_body": True}
        async with aclosing(self._chunks):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                chunks = self._first
                while chunks:
                    for start in range(0, len(chunks), MAX_SENT):  # of ASCII text
                        await send({**body, "body": chunks[start : start + MAX_SENT].encode()})
                    chunks = await anext(self._chunks, "")
            except (ApiError, NGramSpecError) as error:
                api_error = to_api_error(error, started=True)
                scope[COUNTERS].error = api_error.type
                await send({**body, "body": self._reply.error_chunk(api_error).encode()})
            except Exception:
                error_chunk = self._reply.error_chunk(ApiError(500, "internal error"))
                await send({**body, "body": error_chunk.encode(), "more_body": False})
                raise
            await send({**body, "body": self._reply.ending.encode(), "more_body": False})


FINGERPRINT = f"b{__version__}-ngramspec"
"""Name of this build. As in llama-server it begins with "b", which clients expect."""


def timings(
    prompt_tokens: int, stats: Stats, cached_tokens: int, prompt_seconds: float, seconds: float
) -> dict[str, Any]:
    """Return llama-server's `timings`; counts of drafts and close calls are present only if they are not 0."""
    fields = {
        "cache_n": cached_tokens,
        **_rate_fields("prompt", prompt_tokens - cached_tokens, prompt_seconds),
        # The first token comes from the logits of the prompt, so the rate is that of the others.
        **_rate_fields("predicted", stats.tokens, seconds),
        "predicted_n": stats.generated,
    }
    if stats.drafted:
        fields |= {"draft_n": stats.drafted, "draft_n_accepted": stats.accepted}
    if stats.estimated_gain is not None:
        fields["gain"] = stats.estimated_gain
    if stats.close_calls:
        fields["close_calls"] = stats.close_calls
    return fields


def prediction_usage(prediction: Sequence[int], texts: Sequence[Sequence[int]]) -> dict[str, int]:
    """Return how many tokens of a prediction follow the same token in the texts; empty without a prediction."""

    def count_pairs(tokens: Sequence[int]) -> Counter[tuple[int | None, int]]:
        return Counter(zip((None, *tokens), tokens, strict=False))

    if not prediction:
        return {}
    n_accepted = sum([(count_pairs(prediction) & count_pairs(text)).total() for text in texts])
    n_rejected = len(prediction) * len(texts) - n_accepted
    return {"accepted_prediction_tokens": n_accepted, "rejected_prediction_tokens": n_rejected}


def _rate_fields(what: str, tokens: int, seconds: float) -> dict[str, Any]:
    return {
        f"{what}_n": tokens,
        f"{what}_ms": 1000 * seconds,
        f"{what}_per_token_ms": 1000 * seconds / tokens if tokens else 0.0,
        f"{what}_per_second": tokens / seconds if seconds else 0.0,
    }


class Telemetry:
    """Fields that a stream adds to the chunks of an answer on request: progress of the prompt, and timings so far."""

    def __init__(self, body: Any) -> None:
        self._body, self._stats = body, Stats()
        self._started_at = self._first_at = 0.0  # times of the start and of the first token; 0 before

    def update(self, answer: Answer) -> dict[str, Any]:
        """Return the fields of the chunks of an event of the engine; it must be called for every event, in order."""
        fields: dict[str, Any] = {}
        now = monotonic()
        self._started_at = self._started_at or now
        if answer.steps:
            self._first_at = self._first_at or now
        for step in answer.steps:
            self._stats.add(step)
        cached, done = answer.cached_tokens, answer.evaluated_tokens
        if self._body.return_progress and answer.is_progress:
            fields["prompt_progress"] = {"total": answer.prompt_tokens, "cache": cached, "processed": done}
        if self._body.timings_per_token:
            first_at = self._first_at or now
            fields["timings"] = timings(done, self._stats, cached, first_at - self._started_at, now - first_at)
        return fields


def logprobs_content(model: ServedModel, tokens: Sequence[Logprobs], post_sampling: bool = False) -> Encoded:
    """Return logprobs in the form of a chat, with llama-server's ids; `post_sampling` gives probabilities instead."""
    top = "top_probs" if post_sampling else "top_logprobs"
    return Encoded.join(
        _token(model, entry.token, entry.logprob, post_sampling)
        | {top: [_token(model, *alternative, post_sampling) for alternative in entry.top]}
        for entry in tokens
    )


def _token(model: ServedModel, token: int, logprob: float, post_sampling: bool) -> dict[str, Any]:
    raw = model.vocabulary.display_piece(token)
    value = {"prob": math.exp(logprob)} if post_sampling else {"logprob": clamp_logprob(logprob)}
    return {"id": token, "token": raw.decode("utf-8", "replace"), "bytes": list(raw), **value}


def clamp_logprob(logprob: float) -> float:
    """Return a logprob as a finite number; as at OpenAI, that of an impossible token is -9999."""
    return max(logprob, -9999.0)


def token_text(model: ServedModel, token: int) -> str:
    """Return a token as a key of a table; as at OpenAI, an incomplete character is written as bytes."""
    raw: bytes = model.vocabulary.display_piece(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def native_answer(call: Call[Any], answer: Answer, *, has_prompt: bool = True) -> dict[str, Any]:
    """Return a completion that ended, with its text, its settings, and its prompt, which takes milliseconds if long."""
    model, request, done = call.model, answer.request, answer.done
    assert done is not None
    settings = generation_settings(request.sampling, call.body.max_tokens, request.stop)
    text = "".join([block.text for block in answer.blocks if block.kind == "text"])
    return {
        "index": 0,
        "content": text,
        "tokens": answer.tokens,
        "id_slot": answer.slot,
        "stop": True,
        "model": model.name,
        "tokens_predicted": done.stats.generated,
        "tokens_evaluated": answer.prompt_tokens,
        "generation_settings": settings | {"n_probs": request.logprobs or 0, "stream": call.body.stream},
        **({"prompt": prompt_text(model, request.prompt)} if has_prompt else {}),
        "has_new_line": "\n" in text,
        "truncated": answer.is_full,
        "stop_type": "limit" if answer.reason == "length" else "eos" if answer.stop_string is None else "word",
        "stopping_word": answer.stop_string or "",
        # The last token was never evaluated.
        "tokens_cached": answer.prompt_tokens + max(0, len(answer.tokens) - 1),
        "timings": timings(answer.prompt_tokens, *done[1:]),
    }


def prompt_text(model: ServedModel, tokens: Sequence[int]) -> str:
    """Return a prompt with the names of its control tokens."""
    return b"".join(map(model.vocabulary.display_piece, tokens)).decode("utf-8", "replace")


def generation_settings(sampling: Sampling, max_tokens: int, stop: Sequence[str]) -> dict[str, Any]:
    """Return the settings of a response: every field of `Sampling` under its own name, and a few more."""
    settings: dict[str, Any] = {f.name: getattr(sampling, f.name) for f in fields(sampling)}
    # JSON has no infinity; llama-server writes null.
    biases = [{"id": token, "bias": None if bias == -math.inf else bias} for token, bias in sampling.logit_bias]
    constants = {"n_keep": 0, "n_discard": 0, "min_keep": 0, "adaptive_target": -1.0, "adaptive_decay": 0.9}
    return {
        **settings,
        "logit_bias": biases,
        "grammar": sampling.grammar or "",
        **constants,
        "n_predict": max_tokens,
        "max_tokens": max_tokens,
        "stop": list(stop),
    }
