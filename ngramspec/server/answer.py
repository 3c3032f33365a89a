"""Answers at work in the engine (`run_answers`), and their blocks (`Answer`): reasoning, text and tool calls."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from time import monotonic
from typing import Any, Literal, Protocol

from ngramspec.batching.request import ActiveRequest, Done, Event, Prefilled, Scored, Started
from ngramspec.chat.stream import Delta
from ngramspec.request import Request
from ngramspec.sampling.distribution import Logprobs
from ngramspec.server.json_text import context_length_error, read_arguments, shutdown_error, to_api_error
from ngramspec.server.limits import MAX_EVENTS
from ngramspec.server.state import Call
from ngramspec.steps import Step

Kind = Literal["reasoning", "text", "call"]


@dataclass(slots=True)
class Block:
    index: int  # index of the block, from 0
    kind: Kind  # the text of a call is its arguments, a JSON object
    id: str = ""  # id of a call
    name: str = ""  # name of the tool
    call: int = 0  # counts the calls from 0 on
    pieces: list[str] = field(default_factory=list)  # pieces of its text so far

    @property
    def text(self) -> str:
        return "".join(self.pieces)


Change = tuple[Literal["opened", "grown", "closed"], Block, str, tuple[Logprobs, ...]]
"""A block that opened, received text and its logprobs, or closed."""


class TextReader(Protocol):
    """Parser of a text while it is generated."""

    ended: bool | None  # True if the text ends here, before the engine ends it; `None` if it never does

    def push(self, text: str) -> Sequence[Delta]: ...

    def finish(self, cut: bool = False) -> Sequence[Delta]: ...  # `cut` means that a limit ended the text


class Answer:
    """An answer to a request as it grows: at most one block is open at a time; without a `reader`, the text is one."""

    def __init__(self, request: Request, number: int = 0, reader: TextReader | None = None) -> None:
        self.request, self.number, self.reader = request, number, reader  # `number` counts the answers of a call
        self.blocks: list[Block] = []
        self.tokens: list[int] = []  # all generated tokens
        self.scored: tuple[Logprobs, ...] = ()  # logprobs of the prompt
        self.slot = self.cached_tokens = self.prompt_tokens = 0  # as in `Started`
        self.evaluated_tokens = 0  # tokens of the prompt that are evaluated or cached
        self.ended = False  # True after the reader ended the text; the engine's further steps are ignored
        self.done: Done | None = None  # the engine's last event; the answer is complete
        self.reason: Literal["stop", "length", "tool_calls"] = "stop"  # "stop" also after a stop string
        self.stop_string: str | None = None  # stop string that ended the text
        self.reasoning_tokens = 0  # number of tokens of reasoning, with its opening tag
        self.ticket: ActiveRequest | None = None  # the request in the engine; `None` before it is submitted
        self._open: Block | None = None
        self._held_logprobs: list[Logprobs] = []  # logprobs of tokens whose text the engine holds back
        self._early_logprobs: list[Logprobs] = []  # logprobs of tokens whose text the reader holds back
        self._unread = 0  # tokens without deltas so far
        # Additions of the last event of the engine, or of several steps
        self.changes: list[Change] = []
        self.logprobs: list[Logprobs] = []  # of tokens whose text became complete
        self.steps: list[Step] = []
        self.is_progress = False  # whether a part of the prompt was evaluated

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
        # While a client waits, only a server that stops cancels its request. No finish reason would be true.
        if done.reason == "cancelled" and not self.ended:
            raise shutdown_error()
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
        return self.done is not None and self.done.reason == "context" and not self.ended

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
        """Add the logprobs of tokens with complete text to the open text, or to the next one if none is open."""
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


@asynccontextmanager
async def run_answers(call: Call[Any], answers: Sequence[Answer]) -> AsyncIterator[EventQueue]:
    """Run the requests of answers in the engine while the block lasts, then cancel and count them."""
    requests = [answer.request for answer in answers]
    for request in requests:
        # A prompt must leave room for a token, unless none is requested.
        if len(request.prompt) + (request.max_tokens != 0) > call.model.n_ctx:
            raise context_length_error(len(request.prompt), call.model.n_ctx)
    vocabulary, grammars = call.model.vocabulary, list[str]()
    breakers = {r.sampling.dry_sequence_breakers: r.sampling for r in requests if r.sampling.dry_multiplier > 0}
    for sampling in breakers.values():
        await asyncio.to_thread(vocabulary.prepare, sampling)
    try:
        # The engine must not wait for a grammar, so they are compiled here, and kept until its requests end.
        for grammar in {request.sampling.grammar for request in requests if request.sampling.grammar is not None}:
            await asyncio.to_thread(vocabulary.grammars.hold, grammar)
            grammars.append(grammar)
        has_limits = any(answer.reader is not None and answer.reader.ended is not None for answer in answers)
        has_logprobs = any(request.logprobs is not None for request in requests)
        merges = not (call.body.stream and (has_logprobs or call.body.timings_per_token))
        ping_seconds = call.server.ping_seconds if call.body.stream else math.inf
        queue = EventQueue(ping_seconds, wakes_always=call.body.stream or has_limits, merges=merges)
        for answer in answers:
            answer.ticket = call.model.service.submit(answer.request, partial(queue.put, answer.number), answer.number)
        try:
            yield queue
        finally:
            queue.stop_pings()
            for answer in answers:
                answer.cancel()
            with suppress(TimeoutError):  # a request ends after the current decode call, and is counted then
                async with asyncio.timeout(5.0):
                    while len(queue.ended) < len(answers):
                        await queue.wait()
                        queue.take()
            for number, event in queue.ended:
                if isinstance(event, Done):
                    call.counters.add(len(requests[number].prompt), event)
    finally:
        for grammar in grammars:
            vocabulary.grammars.release(grammar)


class EventQueue:
    """Events on their way from the engine's thread, which only calls `put`, to the event loop, which does the rest.

    An event loop that wakes up takes a core from the decode call, and Python's lock from the engine. So the engine
    wakes it once for all events that arrive until the next `wait`, and only for last events unless `wakes_always`.
    """

    def __init__(self, ping_seconds: float, *, wakes_always: bool, merges: bool) -> None:
        self.ended: list[tuple[int, Done | Exception]] = []  # last events that were taken
        self.ping_seconds, self._wakes_always, self._merges = ping_seconds, wakes_always, merges
        self._loop = asyncio.get_running_loop()
        self._events = SimpleQueue[tuple[int, Event]]()
        self._is_woken = False  # True from the call that wakes the loop until the next `wait`
        self._waiter: asyncio.Future[None] = asyncio.Future(loop=self._loop)
        self.ping_at = monotonic() + ping_seconds  # time of the next ping if no chunk is sent until then
        self._timer = self._loop.call_later(ping_seconds, self._check_silence) if ping_seconds < math.inf else None

    def put(self, number: int, event: Event) -> None:
        """Add an event of an answer, and wake the loop if necessary."""
        self._events.put((number, event))
        if not self._is_woken and (self._wakes_always or isinstance(event, (Done, Exception))):
            self._is_woken = True
            try:  # noqa: SIM105 (`suppress` would call three functions for every token)
                self._loop.call_soon_threadsafe(self._wake)
            except RuntimeError:  # the loop is closed
                pass

    def wait(self) -> asyncio.Future[None]:
        """Return a future that completes when events wait, or when it is time for a ping."""
        self._is_woken = False
        self._waiter = asyncio.Future(loop=self._loop)
        if not self._events.empty():
            self._is_woken = True
            self._loop.call_soon(self._wake)  # a completed future would not let other clients have a turn
        return self._waiter

    def take(self) -> list[tuple[int, Event | list[Step]]]:
        """Return waiting events with the numbers of their answers; consecutive steps of an answer are one event."""
        events: list[tuple[int, Event | list[Step]]] = []
        steps: dict[int, list[Step]] = {}  # the last event of each answer, if it is one of steps
        for _ in range(MAX_EVENTS):
            if self._events.empty():
                break
            number, event = self._events.get_nowait()
            if not isinstance(event, Step):
                steps.pop(number, None)
                events.append((number, event))
                if isinstance(event, (Done, Exception)):
                    self.ended.append((number, event))
            elif self._merges and number in steps:
                steps[number].append(event)
            else:
                steps[number] = [event]
                events.append((number, steps[number]))
        return events

    def _wake(self) -> None:
        if not self._waiter.done():
            self._waiter.set_result(None)

    def _check_silence(self) -> None:
        """Wake the loop if it is time for a ping."""
        remaining_seconds = self.ping_at - monotonic()
        if remaining_seconds <= 0:  # also true while a client does not read, when nothing waits
            self._wake()
            remaining_seconds = self.ping_seconds
        self._timer = self._loop.call_later(remaining_seconds, self._check_silence)

    def stop_pings(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
