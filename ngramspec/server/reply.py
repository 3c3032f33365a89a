"""Formatting of answers, whole or as a stream of chunks (`Reply`), and the HTTP response with them (`respond`).

This module also has the usage, the timings and the logprobs in the formats of OpenAI and llama-server.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from time import monotonic
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ngramspec.data import NGramSpecError, __version__
from ngramspec.request import Request
from ngramspec.sampling.distribution import Logprobs
from ngramspec.server.answer import Answer, TextEvent, TextReader
from ngramspec.server.call import COUNTERS, Call
from ngramspec.server.errors import ApiError, error_body, to_api_error
from ngramspec.server.generate import run_requests
from ngramspec.server.json_text import MAX_SENT, Encoded, JsonResponse, encode_json
from ngramspec.server.state import ServedModel
from ngramspec.steps import Stats


class Reply:
    """Base class for the format of answers; each API has a subclass."""

    media_type = "text/event-stream"  # type of the chunks

    def __init__(self, count: int = 1) -> None:
        self.answers = [Answer() for _ in range(count)]

    def add(self, number: int, event: TextEvent) -> None:
        """Record an event that an answer has taken, if the answers are returned as a whole."""

    def response_body(self) -> Any:
        """Return the JSON of the answers, which have all ended."""
        raise NotImplementedError

    def chunks(self, number: int, event: TextEvent) -> str:
        """Return the chunks of a stream for an event that an answer has taken; empty if it has no chunk."""
        raise NotImplementedError

    def last_chunks(self) -> str:
        """Return the chunks after the ends of all answers."""
        return ""

    def keepalive(self) -> str:
        """Return the chunk that keeps a silent stream alive."""
        return ":\n\n"

    def error_chunk(self, error: ApiError) -> str:
        """Return the last chunk of a stream that an error ends."""
        return chunk(error_body(error))


# --------------------------------------------------------------------------- streams


def chunk(data: Any, name: str | None = None) -> str:
    """Return a chunk; `name` is the name of the event in APIs that have several."""
    text = f"data: {data if isinstance(data, str) else encode_json(data)}\n\n"
    return text if name is None else f"event: {name}\n{text}"


DONE = chunk("[DONE]")
"""The last chunk of OpenAI's older streams."""

_BATCH = 64
"""Maximum number of events of a whole response that are read before other clients have a turn."""


async def respond(
    call: Call, requests: Sequence[Request], reply: Reply, readers: Sequence[TextReader] = ()
) -> Response:
    """Answer a call with what requests generate, as a stream or as a whole.

    An error before the first chunk of a stream is a plain HTTP error, and a later one is a chunk. A ping is a chunk
    too, because clients disconnect from a server that sends no headers.

    There is one request for each answer of the reply, and one reader, or none if the text is content.
    """
    for answer, reader in zip(reply.answers, readers, strict=False):
        answer.reader = reader
    if call.streamed:
        chunks = _chunks(call, requests, reply)
        return _Stream(await anext(chunks, ""), chunks, reply)
    async with run_requests(call, requests, reply.answers) as running:
        while running.unfinished:
            await running.arrival()
            for _ in range(_BATCH):
                if not (events := running.next_events()):
                    break
                for number, event in events:
                    reply.add(number, event)
    # A response with logprobs, or with many answers, takes seconds.
    return await asyncio.to_thread(lambda: JsonResponse(reply.response_body()))


async def _chunks(call: Call, requests: Sequence[Request], reply: Reply) -> AsyncGenerator[str, None]:
    async with run_requests(call, requests, reply.answers) as running:
        while running.unfinished:
            await running.arrival()
            chunks = ""
            for number, event in running.next_events():
                if requests[number].logprobs is not None:  # those of a long prompt or text take seconds
                    chunks += await asyncio.to_thread(reply.chunks, number, event)
                else:
                    chunks += reply.chunks(number, event)
            if chunks or running.is_silent:
                yield chunks or reply.keepalive()
                running.sent_at = monotonic()
    if chunks := reply.last_chunks():
        yield chunks


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
            await send({**body, "body": b"", "more_body": False})


# --------------------------------------------------------------------------- usage, timings and logprobs


FINGERPRINT = f"b{__version__}-ngramspec"
"""Name of this build. As in llama-server it begins with "b", which clients expect."""


def timings(
    prompt_tokens: int, stats: Stats, cached_tokens: int, prompt_seconds: float, seconds: float
) -> dict[str, Any]:
    """Return llama-server's `timings`; counts of drafts and close calls are present only if they are not 0.

    `gain` is the estimated time of plain decoding, by the costs of passes, divided by the actual time.
    """
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
    """Return how many tokens of a prediction occur in the texts and how many do not; empty without a prediction.

    A token occurs if it follows the same token as in the prediction, or begins the text. The time is linear.
    """
    if not prediction:
        return {}
    pairs = _count_pairs(prediction)
    n_accepted = sum([(pairs & _count_pairs(text)).total() for text in texts])
    n_rejected = len(prediction) * len(texts) - n_accepted
    return {"accepted_prediction_tokens": n_accepted, "rejected_prediction_tokens": n_rejected}


def _count_pairs(tokens: Sequence[int]) -> Counter[tuple[int | None, int]]:
    return Counter(zip((None, *tokens), tokens, strict=False))


def _rate_fields(what: str, tokens: int, seconds: float) -> dict[str, Any]:
    return {
        f"{what}_n": tokens,
        f"{what}_ms": 1000 * seconds,
        f"{what}_per_token_ms": 1000 * seconds / tokens if tokens else 0.0,
        f"{what}_per_second": tokens / seconds if seconds else 0.0,
    }


def totals(answers: Sequence[Answer], n_answers: int, with_usage: bool = True) -> dict[str, Any]:
    """Return the last timings and the usage of answers; `n_answers` is the number of answers to one prompt."""
    ends = [answer.end for answer in answers if answer.end is not None]
    fields: dict[str, Any] = {"timings": timings(answers[-1].prompt_tokens, *ends[-1].done[1:])}
    if with_usage:
        cached_tokens = sum(
            min(end.done.n_cached for end in ends[i : i + n_answers]) for i in range(0, len(ends), n_answers)
        )
        prompt_tokens = sum(answer.prompt_tokens for answer in answers[::n_answers])
        generated_tokens = sum(end.done.stats.generated for end in ends)
        fields["usage"] = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": generated_tokens,
            "total_tokens": prompt_tokens + generated_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
        }
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
