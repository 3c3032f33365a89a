"""`Answer`: what was generated so far, in blocks; `Reply`: how an API tells answers, whole or as a stream of chunks.

An answer of a chat is a row of thoughts, texts and tool calls, each of which opens, grows and closes.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from starlette.responses import Response

from ngramspec.sampling.distribution import Logprobs
from ngramspec.server.chat import ChatEvent, ChatPiece
from ngramspec.server.errors import ApiError, worded
from ngramspec.server.generate import Begun, End, Piece, TextEvent
from ngramspec.server.http import JsonAnswer
from ngramspec.server.sse import COMMENT, event, event_stream
from ngramspec.server.state import Call
from ngramspec.tool_calls.deltas import CallArguments, CallBegin, Content, Delta, Reasoning

Kind = Literal["thought", "text", "call"]
Event = TextEvent | ChatEvent


@dataclass(slots=True)
class Block:
    """A block of an answer.

    Attributes:
        index: counts the blocks from 0 on.
        kind: what its text is; that of a call is its arguments, a JSON object.
        id, name: of a call.
        pieces: of its text, so far.
        logprobs: of the tokens of its text, where they were asked for.
    """

    index: int
    kind: Kind
    id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All of its text so far."""
        return "".join(self.pieces)


class Opened(NamedTuple):
    block: Block


class Grown(NamedTuple):
    """A block has got a further piece of text, and the logprobs of what it holds."""

    block: Block
    piece: str
    logprobs: tuple[Logprobs, ...] = ()


class Closed(NamedTuple):
    block: Block


Change = Opened | Grown | Closed | End


class Answer:
    """One answer as it grows. At most one block is open at a time.

    Attributes:
        blocks: so far.
        tokens: emitted.
        logprobs: of all tokens whose text is out.
        slot, cached, prompt_tokens: as in `Begun`.
        end: how it ended; None before.
    """

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.tokens: list[int] = []
        self.logprobs: list[Logprobs] = []
        self.slot = self.cached = self.prompt_tokens = 0
        self.end: End | None = None
        self._open: Block | None = None
        self._pieces: list[str] = []  # of a text to continue, which has no blocks
        self._early: tuple[Logprobs, ...] = ()  # of tokens whose text is still held back

    def text(self, kind: Kind = "text") -> str:
        """The text of all blocks of a kind, or all of a text to continue."""
        return "".join([*self._pieces, *[block.text for block in self.blocks if block.kind == kind]])

    def take(self, event: Event) -> None:
        """Take in an event."""
        if isinstance(event, Piece):
            self.tokens += event.step.tokens
            self._pieces.append(event.text)
            self.logprobs += event.logprobs
            return
        for _ in self.changes(event):
            pass

    def changes(self, event: Event) -> Iterator[Change]:
        """Take in an event of a chat; what it does to the blocks, one after the other. Empty pieces are left out."""
        match event:
            case ChatPiece(deltas, logprobs, step):
                self.tokens += step.tokens if step is not None else ()
                for delta in deltas:
                    yield from self._add(delta)
                if logprobs:
                    yield from self._likely(logprobs)
            case End():
                self.end = event
                yield from self._close()
                yield event
            case Begun():
                self.slot, self.cached, self.prompt_tokens = event

    def _add(self, delta: Delta) -> Iterator[Change]:
        match delta:
            case CallBegin(_, id, name):
                yield from self._next("call", id, name)
            case Content(text):
                yield from self._extend("text", text)
            case Reasoning(text):
                yield from self._extend("thought", text)
            case CallArguments(_, text):
                yield from self._extend("call", text)

    def _likely(self, logprobs: tuple[Logprobs, ...]) -> Iterator[Change]:
        self.logprobs += logprobs
        if self._open is None or self._open.kind != "text":
            self._early += logprobs
        else:
            self._open.logprobs += logprobs
            yield Grown(self._open, "", logprobs)

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
        yield Grown(self._open, text, logprobs)

    def _next(self, kind: Kind, id: str = "", name: str = "") -> Iterator[Change]:
        yield from self._close()
        self._open = Block(len(self.blocks), kind, id, name)
        self.blocks.append(self._open)
        yield Opened(self._open)

    def _close(self) -> Iterator[Change]:
        if self._open is not None:
            yield Closed(self._open)
            self._open = None


class Reply:
    """How an API tells its answers; each API has one of its own.

    Args:
        count: of answers.
    """

    def __init__(self, count: int = 1) -> None:
        self.answers = [Answer() for _ in range(count)]

    def add(self, number: int, event: Event) -> None:
        """Take in what happened to an answer, where the answers are told as a whole."""
        self.answers[number].take(event)

    def whole(self) -> Any:
        """The JSON of the answers, which have all ended."""
        raise NotImplementedError

    def chunks(self, number: int, event: Event) -> Iterator[str]:
        """The chunks of a stream that tell what happened to an answer."""
        raise NotImplementedError

    def last_chunks(self) -> Iterator[str]:
        """The chunks after the ends of all answers."""
        return iter(())

    def silence(self) -> str:
        """What breaks the silence of a stream."""
        return COMMENT

    def failed(self, error: ApiError) -> str:
        """The last chunk of a stream that an error ends."""
        return event(worded(error))


async def respond(call: Call, events: AsyncGenerator[tuple[int, Event], None], reply: Reply) -> Response:
    """Answer a call with what is generated, as a stream or at its end. Closes `events`."""
    if call.streamed:
        return await event_stream(_chunks(events, reply), call.server.ping_seconds, reply.silence, reply.failed)
    async with aclosing(events):
        async for number, one in events:
            reply.add(number, one)
    return JsonAnswer(reply.whole())


async def _chunks(events: AsyncGenerator[tuple[int, Event], None], reply: Reply) -> AsyncGenerator[str, None]:
    async with aclosing(events):
        async for number, one in events:
            for chunk in reply.chunks(number, one):
                yield chunk
    for chunk in reply.last_chunks():
        yield chunk
