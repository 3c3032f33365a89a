"""Conversion of the engine's events to the blocks of an answer (`Answer`): reasoning, text and tool calls.

Each block opens, grows and closes. At most one block is open at a time; without a parser, the text is one block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from ngramspec.batching.request import ActiveRequest, Done, Event, Prefilled, Scored, Started
from ngramspec.chat.stream import Delta
from ngramspec.request import Request
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

    @property
    def text(self) -> str:
        """Complete text of the block so far."""
        return "".join(self.pieces)


Change = tuple[Literal["opened", "grown", "closed"], Block, str, tuple[Logprobs, ...]]
"""A block that opened, received text and its logprobs, or closed."""


class TextReader(Protocol):
    """Parses a text while it is generated."""

    ended: bool | None  # True if the text ends here, before the engine ends it; `None` if it never does

    def push(self, text: str) -> Sequence[Delta]:
        """Return what a further piece of the text adds to the answer."""

    def finish(self, cut: bool = False) -> Sequence[Delta]:
        """Return the held-back text at the end; `cut` means that a limit ended the text."""


class Answer:
    """An answer to a request as it grows.

    `number` counts the answers of a call from 0 on. Without a `reader`, all text is content.
    """

    def __init__(self, request: Request, number: int = 0, reader: TextReader | None = None) -> None:
        self.request, self.number, self.reader = request, number, reader
        self.blocks: list[Block] = []
        self.tokens: list[int] = []  # all generated tokens
        self.scored: tuple[Logprobs, ...] = ()  # logprobs of the prompt
        self.slot = self.cached_tokens = self.prompt_tokens = 0  # as in `Started`
        self.evaluated_tokens = 0  # tokens of the prompt that are evaluated or cached
        self.ended = False  # True after the reader ended the text; the engine's further steps are ignored
        self.done: Done | None = None  # the engine's last event; the answer is complete
        # "stop" for an end by the model or a stop string; "length" for a limit of tokens or context, or for `n_indent`
        # or `t_max_predict_ms` (`LineLimits` in `llama_server.py`).
        self.reason: Literal["stop", "length", "tool_calls"] = "stop"
        self.stop_string: str | None = None  # stop string that ended the text
        self.reasoning_tokens = 0  # number of tokens of reasoning, with its opening tag
        self.ticket: ActiveRequest | None = None  # the request in the engine; `None` before it is submitted
        self._open: Block | None = None
        self._held_logprobs: list[Logprobs] = []  # logprobs of tokens whose text the engine holds back
        self._early_logprobs: list[Logprobs] = []  # logprobs of tokens whose text the reader holds back
        self._unread = 0  # tokens without deltas so far
        # Additions of the last event of the engine, or of several steps
        self.changes: list[Change] = []
        self.logprobs: list[Logprobs] = []  # logprobs of the tokens whose text became complete, if requested
        self.steps: list[Step] = []
        self.is_progress = False  # whether a part of the prompt was evaluated

    def text(self, kind: Kind = "text") -> str:
        """Return the text of all blocks of a kind."""
        return "".join([block.text for block in self.blocks if block.kind == kind])

    @property
    def calls(self) -> list[Block]:
        """Complete tool calls of an answer that ended; a limit may have cut off the last one."""
        calls = [block for block in self.blocks if block.kind == "call"]
        was_cut = self.reason == "length" and self.blocks[-1:] == calls[-1:]
        return calls[:-1] if was_cut and calls and read_arguments(calls[-1].text) is None else calls

    @property
    def new_text(self) -> str:
        """Text that the last event added, without reasoning and calls."""
        return "".join([text for _, block, text, _ in self.changes if block.kind == "text"])

    def cancel(self) -> None:
        """End the answer before the next decode call."""
        if self.ticket is not None:
            self.ticket.cancel()

    def write(self, steps: Sequence[Step]) -> None:
        """Add the tokens of consecutive steps; adjacent text of one block becomes one change."""
        self.changes, self.logprobs, self.steps, self.is_progress = [], [], [], False
        for step in steps:
            if self.ended:
                return
            self.steps.append(step)
            self.tokens += step.tokens
            self.stop_string = step.stop_string
            if self.reader is None:
                self._read([Delta("text", "".join(step.pieces))])
            else:  # token by token, so that the number of tokens of reasoning does not depend on drafts
                for piece in step.pieces:
                    self._unread += 1
                    if deltas := self.reader.push(piece):
                        self._read(deltas)
                    self.ended = bool(self.reader.ended)
                    if self.ended:
                        break
            if step.logprobs:
                self._add_logprobs(step)

    def add_event(self, event: Event) -> None:
        """Add an event of the engine other than a step; raise an ApiError if the engine failed."""
        self.changes, self.logprobs, self.steps, self.is_progress = [], [], [], False
        match event:
            case Started():
                self.slot, self.cached_tokens, self.prompt_tokens = event
                self.evaluated_tokens, self.is_progress = event.n_cached, True
            case Prefilled():
                self.evaluated_tokens, self.is_progress = event.done, True
            case Scored():
                self.scored = event.logprobs
            case Done():
                self._finish(event)
            case Exception():
                raise to_api_error(event, started=self.prompt_tokens > 0)

    def _finish(self, done: Done) -> None:
        if done.reason == "cancelled" and not self.tokens:
            raise shutdown_error()  # otherwise the response ends with the tokens that were generated before
        has_calls = any(block.kind == "call" for block in self.blocks)
        # A reader with calls ended the text after a call, and others at a limit.
        by_itself = has_calls if self.ended else done.reason in ("eog", "stop")
        if self.reader is not None and (deltas := self.reader.finish(cut=not by_itself)):
            self._read(deltas)
        self._close()
        if not by_itself:
            self.reason, self.stop_string = "length", None
        elif any(block.kind == "call" for block in self.blocks):
            self.reason = "tool_calls"
        self.done = done

    @property
    def is_full(self) -> bool:
        """True if the answer ended because the context was full."""
        return self.done is not None and self.done.reason == "context" and not self.ended

    # ------------------------------------------------------------------ blocks

    def _read(self, deltas: Sequence[Delta]) -> None:
        if deltas[0].kind == "reasoning":
            self.reasoning_tokens += self._unread
        self._unread = 0
        for delta in deltas:
            if delta.kind == "call":
                self._begin("call", delta.id, delta.name, delta.call)
            elif delta.text:
                kind: Kind = "call" if delta.kind == "arguments" else delta.kind
                block = self._open
                if block is None or block.kind != kind:
                    block = self._begin(kind)
                block.pieces.append(delta.text)
                text = delta.text
                logprobs: tuple[Logprobs, ...] = ()
                if self._early_logprobs and kind == "text":
                    logprobs = tuple(self._early_logprobs)
                    self._early_logprobs.clear()
                if self.changes and self.changes[-1][0] == "grown" and self.changes[-1][1] is block:
                    _, _, text_before, logprobs_before = self.changes.pop()
                    text, logprobs = text_before + text, logprobs_before + logprobs
                self.changes.append(("grown", block, text, logprobs))

    def _begin(self, kind: Kind, id: str = "", name: str = "", call: int = 0) -> Block:
        self._close()
        self._open = Block(len(self.blocks), kind, id, name, call)
        self.blocks.append(self._open)
        self.changes.append(("opened", self._open, "", ()))
        return self._open

    def _close(self) -> None:
        if self._open is not None:
            self.changes.append(("closed", self._open, "", ()))
            self._open = None

    def _add_logprobs(self, step: Step) -> None:
        """Add the logprobs of the tokens whose text is complete after a step; tokens that end a text have none.

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
            self.changes.append(("grown", self._open, "", tuple(complete)))
