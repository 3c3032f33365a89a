"""`Answer`: what was generated so far, in blocks; `Reply`: how an API tells answers, whole or as a stream of chunks;
usage, timings and logprobs in the words of OpenAI and llama-server.

An answer of a chat is a row of thoughts, texts and tool calls, each of which opens, grows and closes.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any, Literal

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ngramspec.batching.request import Started
from ngramspec.errors import NGramSpecError
from ngramspec.sampling.distribution import Logprobs
from ngramspec.server.call import ApiError, Call, ServedModel, dumped, json_answer, of_failure, worded
from ngramspec.server.generate import End, Piece, TextEvent, TextEvents
from ngramspec.steps import Stats
from ngramspec.tool_calls.deltas import Delta
from ngramspec.version import __version__

Kind = Literal["thought", "text", "call"]


@dataclass(slots=True)
class Block:
    """A block of an answer."""

    index: int  # counts the blocks from 0 on
    kind: Kind  # what its text is; that of a call is its arguments, a JSON object
    id: str = ""  # of a call
    name: str = ""
    pieces: list[str] = field(default_factory=list)  # of its text, so far
    logprobs: list[Logprobs] = field(default_factory=list)  # of the tokens of its text, where they were asked for

    @property
    def text(self) -> str:
        """All of its text so far."""
        return "".join(self.pieces)


Change = tuple[Literal["opened", "grown", "closed"], Block, str, tuple[Logprobs, ...]]
"""Event of a block: it opened, received text and its logprobs, or closed."""


class Answer:
    """One answer as it grows. At most one block is open at a time; a text that nobody parses is one block."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.tokens: list[int] = []  # emitted
        self.logprobs: list[Logprobs] = []  # of all tokens whose text is out
        self.slot = self.cached = self.prompt_tokens = 0  # as in `Started`
        self.end: End | None = None  # how it ended; None before
        self._open: Block | None = None
        self._early: tuple[Logprobs, ...] = ()  # of tokens whose text is still held back

    def text(self, kind: Kind = "text") -> str:
        """The text of all blocks of a kind."""
        return "".join([block.text for block in self.blocks if block.kind == kind])

    @property
    def calls(self) -> list[Block]:
        """The complete tool calls of an answer that ended; a limit may have cut off the last one."""
        calls = [block for block in self.blocks if block.kind == "call"]
        was_cut = self.end is not None and self.end.reason == "length" and self.blocks[-1:] == calls[-1:]
        return calls[:-1] if was_cut and calls and not _is_json(calls[-1].text) else calls

    def take(self, event: TextEvent) -> None:
        """Take in an event."""
        for _ in self.changes(event):
            pass

    def changes(self, event: TextEvent) -> Iterator[Change]:
        """Take in an event; what it does to the blocks, each change as it is made. Empty pieces are left out."""
        match event:
            case Piece(deltas, logprobs, step):
                self.tokens += step.tokens if step is not None else ()
                for delta in deltas:
                    yield from self._add(delta)
                if logprobs:
                    yield from self._likely(logprobs)
            case End():
                self.end = event
                yield from self._close()
            case Started():
                self.slot, self.cached, self.prompt_tokens = event

    def _add(self, delta: Delta) -> Iterator[Change]:
        if delta.kind == "call":
            yield from self._next("call", delta.id, delta.name)
        else:
            yield from self._extend("call" if delta.kind == "arguments" else delta.kind, delta.text)

    def _likely(self, logprobs: tuple[Logprobs, ...]) -> Iterator[Change]:
        self.logprobs += logprobs
        if self._open is None or self._open.kind != "text":
            self._early += logprobs
        else:
            self._open.logprobs += logprobs
            yield "grown", self._open, "", logprobs

    def _extend(self, kind: Kind, text: str) -> Iterator[Change]:
        if not text:
            return
        if self._open is None or self._open.kind != kind:
            yield from self._next(kind)
        assert self._open is not None
        logprobs: tuple[Logprobs, ...] = ()
        if kind == "text":
            logprobs, self._early = self._early, ()
        self._open.pieces.append(text)
        self._open.logprobs += logprobs
        yield "grown", self._open, text, logprobs

    def _next(self, kind: Kind, id: str = "", name: str = "") -> Iterator[Change]:
        yield from self._close()
        self._open = Block(len(self.blocks), kind, id, name)
        self.blocks.append(self._open)
        yield "opened", self._open, "", ()

    def _close(self) -> Iterator[Change]:
        if self._open is not None:
            yield "closed", self._open, "", ()
            self._open = None


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


class Reply:
    """How an API tells its answers; each API has one of its own."""

    media_type = "text/event-stream"  # type of the chunks

    def __init__(self, count: int = 1) -> None:
        self.answers: Sequence[Answer] = [Answer() for _ in range(count)]

    def add(self, number: int, event: TextEvent) -> None:
        """Take in what happened to an answer, where the answers are told as a whole."""
        self.answers[number].take(event)

    def whole(self) -> Any:
        """The JSON of the answers, which have all ended."""
        raise NotImplementedError

    def chunks(self, number: int, event: TextEvent) -> Iterator[str]:
        """The chunks of a stream that tell what happened to an answer."""
        raise NotImplementedError

    def last_chunks(self) -> Iterator[str]:
        """The chunks after the ends of all answers."""
        return iter(())

    def silence(self) -> str:
        """Chunk that keeps a silent stream alive."""
        return ":\n\n"

    def failed(self, error: ApiError) -> str:
        """The last chunk of a stream that an error ends."""
        return event(worded(error))


# --------------------------------------------------------------------------- streams

Chunks = AsyncGenerator[str, None]


def event(data: Any, name: str | None = None) -> str:
    """A chunk; `name`: the event's, in APIs that have several."""
    text = f"data: {data if isinstance(data, str) else dumped(data)}\n\n"
    return text if name is None else f"event: {name}\n{text}"


DONE = event("[DONE]")
"""The last chunk of OpenAI's older streams."""


def chunk_maker(head: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], str]:
    """Makes chunks that begin with the same fields, which are turned into JSON once."""
    begun = f"data: {dumped(dict(head))[:-1]},"
    return lambda rest: f"{begun}{dumped(rest)[1:]}\n\n"


async def respond(call: Call, events: TextEvents, reply: Reply) -> Response:
    """Answer a call with what is generated, as a stream or at its end. Closes `events`.

    An error before a stream's first chunk is a plain HTTP error; one after it is a chunk. What breaks the silence is a
    first chunk too: clients give up on a server that sends no headers.
    """
    if call.streamed:
        chunks = _chunks(events, reply, call.server.ping_seconds)
        return _Stream(await anext(chunks, ""), chunks, reply)
    async with aclosing(events):
        async for number, one in events:
            if one is not None:
                reply.add(number, one)
    return json_answer(reply.whole())


async def _chunks(events: TextEvents, reply: Reply, seconds: float) -> Chunks:
    """The chunks of a stream; a silence is broken after so many seconds."""
    now = asyncio.get_running_loop().time
    told = now()
    async with aclosing(events):
        async for number, one in events:
            for chunk in reply.chunks(number, one) if one is not None else ():
                yield chunk
                told = now()
            if now() - told >= seconds:
                yield reply.silence()
                told = now()
    for chunk in reply.last_chunks():
        yield chunk


class _Stream(Response):
    def __init__(self, first: str, chunks: Chunks, reply: Reply) -> None:
        # A proxy must neither keep nor gather what it passes on.
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(headers=headers, media_type=reply.media_type)
        del self.headers["content-length"]
        self._first, self._chunks, self._reply = first, chunks, reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def write(chunk: str, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": chunk.encode(), "more_body": more})

        async with aclosing(self._chunks):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                await write(self._first)
                async for chunk in self._chunks:
                    await write(chunk)
            except (ApiError, NGramSpecError) as error:
                await write(self._reply.failed(of_failure(error, started=True)))
            except Exception:
                await write(self._reply.failed(ApiError(500, "internal error")), more=False)
                raise
            await write("", more=False)


# --------------------------------------------------------------------------- what answers tell of themselves


FINGERPRINT = f"b{__version__}-ngramspec"
"""Name of this build. As in llama-server it begins with "b", which clients expect."""


def timings(prompt_tokens: int, stats: Stats, cached: int, prompt_seconds: float, seconds: float) -> dict[str, Any]:
    """llama-server's `timings`; what was drafted is told only where something was, and so are close calls.

    `gain` is the time that the tokens would have taken one by one, by the cost curve, over the time they took.
    """
    told = {
        "cache_n": cached,
        **_rates("prompt", prompt_tokens - cached, prompt_seconds),
        # The first token comes from the logits of the prompt, so the rate is that of the others.
        **_rates("predicted", stats.tokens, seconds),
        "predicted_n": stats.generated,
    }
    if stats.drafted:
        told |= {"draft_n": stats.drafted, "draft_n_accepted": stats.accepted}
    if stats.estimated_gain is not None:
        told["gain"] = stats.estimated_gain
    if stats.close_calls:
        told["close_calls"] = stats.close_calls
    return told


def prediction_usage(model: ServedModel, prediction: str, texts: Sequence[Sequence[int]]) -> dict[str, int]:
    """How many tokens of a prediction came in the texts, and how many did not; nothing where there is none."""
    if not prediction:
        return {}
    tokens = model.vocabulary.tokenize(prediction, add_bos=False)
    blocks = [block for text in texts for block in SequenceMatcher(None, tokens, text).get_matching_blocks()]
    accepted = sum([block.size for block in blocks])
    rejected = len(tokens) * len(texts) - accepted
    return {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}


def _rates(what: str, tokens: int, seconds: float) -> dict[str, Any]:
    return {
        f"{what}_n": tokens,
        f"{what}_ms": 1000 * seconds,
        f"{what}_per_token_ms": 1000 * seconds / tokens if tokens else 0.0,
        f"{what}_per_second": tokens / seconds if seconds else 0.0,
    }


def totals(answers: Sequence[Answer], each: int, usage_too: bool = True) -> dict[str, Any]:
    """Final chunk after all texts: the last timings and the usage; `each`: answers to one prompt."""
    ends = [answer.end for answer in answers if answer.end is not None]
    told: dict[str, Any] = {"timings": timings(answers[-1].prompt_tokens, *ends[-1].done[1:])}
    if usage_too:
        cached = sum(min(end.done.cached for end in ends[i : i + each]) for i in range(0, len(ends), each))
        prompt_tokens = sum(answer.prompt_tokens for answer in answers[::each])
        generated = sum(end.done.stats.generated for end in ends)
        told["usage"] = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": generated,
            "total_tokens": prompt_tokens + generated,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
    return told


def logprobs_content(
    model: ServedModel, tokens: Sequence[Logprobs], post_sampling: bool = False
) -> list[dict[str, Any]]:
    """Return logprobs in the form of a chat, with llama-server's ids; `post_sampling` gives probabilities instead."""
    top = "top_probs" if post_sampling else "top_logprobs"
    return [
        _token(model, one.token, one.logprob, post_sampling)
        | {top: [_token(model, *other, post_sampling) for other in one.top]}
        for one in tokens
    ]


def _token(model: ServedModel, token: int, logprob: float, post_sampling: bool) -> dict[str, Any]:
    raw = model.vocabulary.shown(token)
    value = {"prob": math.exp(logprob)} if post_sampling else {"logprob": finite(logprob)}
    return {"id": token, "token": raw.decode("utf-8", "replace"), "bytes": list(raw), **value}


def finite(logprob: float) -> float:
    """A logprob that JSON can hold: that of a token which cannot come is OpenAI's, -9999."""
    return max(logprob, -9999.0)


def token_text(model: ServedModel, token: int) -> str:
    """A token as a key of a table: half a character is spelled in bytes, as OpenAI does it."""
    raw: bytes = model.vocabulary.shown(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
