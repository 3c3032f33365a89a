"""Deltas as blocks: an answer is a row of thoughts, texts and tool calls, each of which opens, grows and closes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from ngramspec.sampling.logprobs import Logprobs
from ngramspec.server.dialogue import ChatDelta, Finish, Likely, Progress
from ngramspec.tool_calls.deltas import CallArguments, CallBegin, Content, Reasoning

Kind = Literal["thought", "text", "call"]


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


Change = Opened | Grown | Closed | Finish | Progress

Deltas = AsyncGenerator[ChatDelta, None] | AsyncGenerator[ChatDelta | None, None]
"""An answer as it comes; None after some seconds of silence."""


async def changes(deltas: Deltas) -> AsyncGenerator[Change | None, None]:
    """What deltas do to the blocks, in order: at most one block is open at a time. Empty pieces are left out.

    None, which tells of silence, is passed on. Closes the deltas at the end.
    """
    row = _Row()
    async with aclosing(deltas):
        async for delta in deltas:
            if delta is None:
                yield None
                continue
            for change in row.take(delta):
                yield change


class _Row:
    """The blocks of an answer, one after the other."""

    def __init__(self) -> None:
        self._count = 0
        self._open: Block | None = None
        self._early: tuple[Logprobs, ...] = ()  # of tokens whose text is still held back

    def take(self, delta: ChatDelta) -> Iterator[Change]:
        match delta:
            case Finish():
                yield from self._close()
                yield delta
            case Progress():
                yield delta
            case Likely(logprobs):
                if self._open is not None and self._open.kind == "text":
                    yield self._grow(self._open, "", logprobs)
                else:
                    self._early += logprobs
            case CallBegin(_, id, name):
                yield from self._next("call", id, name)
            case Content(text) if text:
                yield from self._extend("text", text)
            case Reasoning(text) if text:
                yield from self._extend("thought", text)
            case CallArguments(_, text) if text:
                yield from self._extend("call", text)

    def _extend(self, kind: Kind, text: str) -> Iterator[Change]:
        if self._open is None or self._open.kind != kind:
            yield from self._next(kind)
        assert self._open is not None
        logprobs = self._early if kind == "text" else ()
        if logprobs:
            self._early = ()
        yield self._grow(self._open, text, logprobs)

    def _next(self, kind: Kind, id: str = "", name: str = "") -> Iterator[Change]:
        yield from self._close()
        self._open = Block(self._count, kind, id, name)
        self._count += 1
        yield Opened(self._open)

    def _grow(self, block: Block, piece: str, logprobs: tuple[Logprobs, ...]) -> Grown:
        if piece:
            block.pieces.append(piece)
        block.logprobs.extend(logprobs)
        return Grown(block, piece, logprobs)

    def _close(self) -> Iterator[Change]:
        if self._open is not None:
            yield Closed(self._open)
            self._open = None
