"""Conversion of the engine's steps to the blocks of an answer (`Answer`): reasoning, text and tool calls.

Each block opens, grows and closes. At most one block is open at a time; without a parser, the text is one block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, Protocol

from ngramspec.batching.request import Done, Event, Prefilled, Scored, Started
from ngramspec.chat.stream import Delta
from ngramspec.sampling.distribution import Logprobs
from ngramspec.server.errors import shutdown_error, to_api_error
from ngramspec.server.transcript import read_arguments
from ngramspec.steps import Step

Kind = Literal["reasoning", "text", "call"]


@dataclass(slots=True)
class Block:
    """A block of an answer."""

    index: int  # index of the block, from 0
    kind: Kind  # the text of a call is its arguments, a JSON object
    id: str = ""  # id of a call
    name: str = ""  # name of the tool
    call: int = 0  # counts the calls from 0 on
    pieces: list[str] = field(default_factory=list)  # pieces of its text so far
    logprobs: list[Logprobs] = field(default_factory=list)  # logprobs of its text, if requested

    @property
    def text(self) -> str:
        """Complete text of the block so far."""
        return "".join(self.pieces)


Change = tuple[Literal["opened", "grown", "closed"], Block, str, tuple[Logprobs, ...]]
"""A block that opened (here empty), received text and its logprobs, or closed."""


class Piece(NamedTuple):
    """A further part of an answer."""

    changes: Sequence[Change] = ()
    logprobs: tuple[Logprobs, ...] = ()  # logprobs of the tokens whose text is complete, if requested
    steps: Sequence[Step] = ()  # steps of the engine; empty for text that was held back until the end

    @property
    def text(self) -> str:
        """Text of the piece, without reasoning and calls."""
        return "".join([text for _, block, text, _ in self.changes if block.kind == "text"])


class End(NamedTuple):
    """The end of an answer."""

    # "stop" for an end by the model or a stop string; "length" for a limit of tokens or context, or for `n_indent` or
    # `t_max_predict_ms` (`LineLimits` in `llama_server.py`).
    reason: Literal["stop", "length", "tool_calls"]
    stop_string: str | None  # the stop string that ended the text
    full: bool  # True if the context was full
    done: Done  # the engine's event
    reasoning_tokens: int = 0  # number of tokens of reasoning, with its opening tag


TextEvent = Started | Prefilled | Scored | Piece | End


class TextReader(Protocol):
    """Parses a text while it is generated."""

    ended: bool | None  # True if the text ends here, before the engine ends it; `None` if it never does

    def push(self, text: str) -> Sequence[Delta]:
        """Return what a further piece of the text adds to the answer."""

    def finish(self, cut: bool = False) -> Sequence[Delta]:
        """Return the held-back text at the end; `cut` means that a limit ended the text."""


class Answer:
    """One answer as it grows."""

    def __init__(self) -> None:
        self.reader: TextReader | None = None  # parser of the text; `None` means that the text is content
        self.blocks: list[Block] = []
        self.tokens: list[int] = []  # all generated tokens
        self.logprobs: list[Logprobs] = []  # logprobs of the tokens whose text is complete
        self.scored: tuple[Logprobs, ...] = ()  # logprobs of the prompt
        self.slot = self.cached_tokens = self.prompt_tokens = 0  # as in `Started`
        self.ended = False  # True after the reader ended the text; the engine's further steps are ignored
        self.end: End | None = None
        self._open: Block | None = None
        self._held_logprobs: list[Logprobs] = []  # logprobs of tokens whose text the engine holds back
        self._early_logprobs: list[Logprobs] = []  # logprobs of tokens whose text the reader holds back
        self._unread = self._reasoning_tokens = 0  # tokens without deltas so far; tokens of reasoning
        self._stop_string: str | None = None

    def text(self, kind: Kind = "text") -> str:
        """Return the text of all blocks of a kind."""
        return "".join([block.text for block in self.blocks if block.kind == kind])

    @property
    def calls(self) -> list[Block]:
        """Complete tool calls of an answer that ended; a limit may have cut off the last one."""
        calls = [block for block in self.blocks if block.kind == "call"]
        was_cut = self.end is not None and self.end.reason == "length" and self.blocks[-1:] == calls[-1:]
        return calls[:-1] if was_cut and calls and read_arguments(calls[-1].text) is None else calls

    def write(self, steps: Sequence[Step]) -> Piece:
        """Add the tokens of consecutive steps; adjacent text of one block becomes one change."""
        changes: list[Change] = []
        logprobs: tuple[Logprobs, ...] = ()
        for n_steps, step in enumerate(steps, 1):
            self.tokens += step.tokens
            self._stop_string = step.stop_string
            if self.reader is None:
                self._grow(changes, "text", "".join(step.pieces))
            else:  # token by token, so that the number of tokens of reasoning does not depend on drafts
                for piece in step.pieces:
                    self._unread += 1
                    if deltas := self.reader.push(piece):
                        self._read(changes, deltas)
                    self.ended = bool(self.reader.ended)
                    if self.ended:
                        break
            if step.logprobs:
                logprobs += self._add_logprobs(changes, step)
            if self.ended:
                return Piece(changes, logprobs, steps[:n_steps])
        return Piece(changes, logprobs, steps)

    def add_event(self, event: Event) -> Sequence[TextEvent]:
        """Add an event of the engine other than a step; raise an ApiError if the engine failed."""
        if isinstance(event, Exception):
            raise to_api_error(event, started=self.prompt_tokens > 0)
        if isinstance(event, Done):
            return self._finish(event)
        if isinstance(event, Started):
            self.slot, self.cached_tokens, self.prompt_tokens = event
        elif isinstance(event, Scored):
            self.scored = event.logprobs
        assert not isinstance(event, Step)
        return (event,)

    def _finish(self, done: Done) -> Sequence[TextEvent]:
        if done.reason == "cancelled" and not self.tokens:
            raise shutdown_error()  # otherwise the response ends with the tokens that were generated before
        calls = [block for block in self.blocks if block.kind == "call"]
        # A reader with calls ended the text after a call, and others at a limit.
        by_itself = bool(calls) if self.ended else done.reason in ("eog", "stop")
        changes: list[Change] = []
        if self.reader is not None and (deltas := self.reader.finish(cut=not by_itself)):
            self._read(changes, deltas)
        self._close(changes)
        reason: Literal["stop", "length", "tool_calls"] = "stop" if by_itself else "length"
        if by_itself and any(block.kind == "call" for block in self.blocks):
            reason = "tool_calls"
        stop_string = self._stop_string if by_itself else None
        self.end = End(reason, stop_string, done.reason == "context" and not self.ended, done, self._reasoning_tokens)
        return Piece(changes), self.end

    # ------------------------------------------------------------------ blocks

    def _read(self, changes: list[Change], deltas: Sequence[Delta]) -> None:
        if deltas[0].kind == "reasoning":
            self._reasoning_tokens += self._unread
        self._unread = 0
        for delta in deltas:
            if delta.kind == "call":
                self._begin(changes, "call", delta.id, delta.name, delta.call)
            else:
                self._grow(changes, "call" if delta.kind == "arguments" else delta.kind, delta.text)

    def _grow(self, changes: list[Change], kind: Kind, text: str) -> None:
        if not text:
            return
        block = self._open
        if block is None or block.kind != kind:
            block = self._begin(changes, kind)
        block.pieces.append(text)
        logprobs: tuple[Logprobs, ...] = ()
        if self._early_logprobs and kind == "text":
            logprobs = tuple(self._early_logprobs)
            self._early_logprobs.clear()
            block.logprobs += logprobs
        if changes and changes[-1][1] is block:
            _, _, text_before, logprobs_before = changes.pop()
            text, logprobs = text_before + text, logprobs_before + logprobs
        changes.append(("grown", block, text, logprobs))

    def _begin(self, changes: list[Change], kind: Kind, id: str = "", name: str = "", call: int = 0) -> Block:
        self._close(changes)
        self._open = Block(len(self.blocks), kind, id, name, call)
        self.blocks.append(self._open)
        changes.append(("opened", replace(self._open, pieces=[], logprobs=[]), "", ()))
        return self._open

    def _close(self, changes: list[Change]) -> None:
        if self._open is not None:
            changes.append(("closed", self._open, "", ()))
            self._open = None

    def _add_logprobs(self, changes: list[Change], step: Step) -> tuple[Logprobs, ...]:
        """Return the logprobs of the tokens whose text is complete after a step; tokens that end a text have none.

        They belong to the open text, or to the next one if none is open.
        """
        complete: list[Logprobs] = []
        for logprobs, piece in zip(step.logprobs, step.pieces, strict=True):
            self._held_logprobs.append(logprobs)
            if piece:
                complete += self._held_logprobs
                self._held_logprobs.clear()
        if step.stop in ("length", "context"):
            complete += self._held_logprobs
        self.logprobs += complete
        if self._open is None or self._open.kind != "text":
            self._early_logprobs += complete
        elif complete:
            self._open.logprobs += complete
            changes.append(("grown", self._open, "", tuple(complete)))
        return tuple(complete)
