"""`generate`: the texts of one or more requests of the engine, as pieces and ends; what goes wrong is an `ApiError`.

What every endpoint that generates text is made of, chats included. `LineLimits` ends an editor's suggestion early.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import suppress
from typing import Literal, NamedTuple, Self

from ngramspec.batching.engine import Engine
from ngramspec.batching.request import Done, Event, Listener, Prefilled, Request, Scored, Started
from ngramspec.sampling.distribution import Logprobs
from ngramspec.server.call import Call, Counters, leaving, of_failure, overflow
from ngramspec.steps import Step
from ngramspec.tool_calls.deltas import Delta
from ngramspec.tool_calls.parser import AnswerParser


class Piece(NamedTuple):
    """Some more of a text."""

    deltas: Sequence[Delta] = ()  # what can be shown now; of a text that nobody parses, its content
    # Where they were asked for: of the tokens whose text is out by now, those that end a text left out.
    logprobs: tuple[Logprobs, ...] = ()
    step: Step | None = None  # the engine's; None: a parser had held it back to the end

    @property
    def text(self) -> str:
        return "".join([delta.text for delta in self.deltas if delta.kind == "text"])


class End(NamedTuple):
    """The end of a text."""

    # "stop" at the model's own end or a stop string, "length" at the most tokens, a full context or limits of lines.
    reason: Literal["stop", "length", "tool_calls"]
    stop_string: str | None  # that ended it, where one did
    full: bool  # whether the context was full
    done: Done  # what the engine says
    thought: int = 0  # how many of the tokens it emitted told thoughts, the ones around these included


TextEvent = Started | Prefilled | Scored | Piece | End


async def generate(
    call: Call, requests: Sequence[Request], limits: Sequence[LineLimits] = (), parsers: Sequence[AnswerParser] = ()
) -> AsyncGenerator[tuple[int, TextEvent], None]:
    """Generate texts at once: what happens to each, as it comes, with the text's number. The first error ends all.

    Where the call is not streamed, all may come at the end.

    Args:
        call: that they belong to; counts what they cost.
        limits: where each text ends before the engine ends it; none: nowhere.
        parsers: read each text as an answer of a chat; none: the texts are content.

    Raises:
        ApiError: a request is wrong, the engine failed, or the server is being stopped.
    """
    for request in requests:
        # A prompt must leave room for a token, unless none is asked for.
        if len(request.prompt) + (request.max_tokens != 0) > call.model.n_ctx:
            raise overflow(len(request.prompt), call.model.n_ctx)
    left, nothing = len(requests), [None] * len(requests)
    texts = [_Text(*one) for one in zip(limits or nothing, parsers or nothing, strict=True)]
    async with Running(call.model.service, requests, call.counters, streamed=call.streamed or bool(limits)) as running:
        while left:
            number, event = await running.next()
            for told in texts[number].take(event):
                if texts[number].ended and isinstance(told, Piece):
                    running.cancel(number)
                left -= isinstance(told, End)
                yield number, told


class _Text:
    """A text that the engine writes."""

    def __init__(self, limits: LineLimits | None, parser: AnswerParser | None) -> None:
        self.ended = False
        self._limits, self._parser = limits, parser
        self._started = self._written = self._called = False
        self._stop_string: str | None = None
        self._held: list[Logprobs] = []  # of tokens whose text is held back
        self._untold = self._thought = 0  # tokens of which nothing was told yet; tokens of thoughts

    def take(self, event: Event) -> Iterator[TextEvent]:
        """What an event of the engine is to those who read the text."""
        if isinstance(event, Step):
            if not self.ended:  # steps come while the engine is told of the end
                yield self._piece(event)
        elif isinstance(event, Done):
            yield from self._end(event)
        elif isinstance(event, Exception):
            raise of_failure(event, started=self._started)
        else:
            self._started = True
            yield event

    def _piece(self, step: Step) -> Piece:
        self._written = True
        self._stop_string, text = step.stop_string, step.text
        if self._limits is not None:
            text = self._limits.push(text) + (self._limits.finish() if step.stop is not None else "")
            self.ended = self._limits.ended
        deltas: Sequence[Delta] = (Delta("text", text),) if text else ()
        if self._parser is not None:
            self._untold += len(step.tokens)
            deltas = self._noted(self._parser.push(text))
        return Piece(deltas, self._logprobs(step), step)

    def _end(self, done: Done) -> Iterator[Piece | End]:
        if done.reason == "cancelled" and not self._written:
            raise leaving()  # else what is written is told: the server is being stopped
        by_itself = not self.ended and done.reason in ("eog", "stop")
        full = done.reason == "context" and not self.ended
        if self._parser is not None and (deltas := self._noted(self._parser.finish(cut=not by_itself))):
            yield Piece(deltas)
        reason: Literal["stop", "length", "tool_calls"] = "stop" if by_itself else "length"
        if by_itself and self._called:
            reason = "tool_calls"
        yield End(reason, self._stop_string if by_itself else None, full, done, self._thought)

    def _noted(self, deltas: Sequence[Delta]) -> Sequence[Delta]:
        """Count the tokens of thoughts, and see calls."""
        if deltas:
            self._thought += self._untold if deltas[0].kind == "thought" else 0
            self._untold = 0
            self._called = self._called or any(delta.kind == "call" for delta in deltas)
        return deltas

    def _logprobs(self, step: Step) -> tuple[Logprobs, ...]:
        """Those that are due with a step; tokens that end a text never have any."""
        if not step.logprobs:
            return ()
        due: list[Logprobs] = []
        for one, piece in zip(step.logprobs, step.pieces, strict=True):
            self._held.append(one)
            if piece:
                due += self._held
                self._held.clear()
        if step.stop in ("length", "context"):
            due += self._held
        return tuple(due)


_LEAVING_SECONDS = 5.0  # how long what a client left is waited for, to be counted: a pass, as a rule


class Running:
    """Requests at work, whose events can be awaited; they are cancelled, and counted, when the `with` block ends.

    A loop's thread that wakes up takes a core from the pass that is being made, and Python's lock from the engine. So
    it is woken once for all that came meanwhile, and where nothing is streamed only at the end.
    """

    def __init__(self, service: Engine, requests: Sequence[Request], counters: Counters, *, streamed: bool) -> None:
        loop = asyncio.get_running_loop()
        self._requests, self._counters = requests, counters
        self._events: deque[tuple[int, Event]] = deque()
        self._arrived = asyncio.Event()
        self._waking = False
        self._ended: list[int] = []  # numbers; a list, since appending to one is safe from any thread

        def listener(number: int) -> Listener:
            def listen(event: Event) -> None:
                self._events.append((number, event))
                if isinstance(event, Done | Exception):
                    self._ended.append(number)
                if not self._waking and (streamed or self._all_ended or isinstance(event, Exception)):
                    self._waking = True
                    with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                        loop.call_soon_threadsafe(self._wake)

            return listen

        self._tickets = [service.submit(request, listener(number)) for number, request in enumerate(requests)]

    @property
    def _all_ended(self) -> bool:
        return len(self._ended) == len(self._requests)

    def _wake(self) -> None:
        self._waking = False
        self._arrived.set()

    async def next(self) -> tuple[int, Event]:
        """The next event, and the number of its request; the last of each is `Done` or an error."""
        while not self._events:
            self._arrived.clear()
            await self._arrived.wait()
        number, event = self._events.popleft()
        if isinstance(event, Done):
            self._counters.add(len(self._requests[number].prompt), event)
        return number, event

    def cancel(self, number: int) -> None:
        """End a request soon; `Done` follows. After its end this does nothing."""
        self._tickets[number].cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for ticket in self._tickets:
            ticket.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(_LEAVING_SECONDS):
                while self._events or not self._all_ended:
                    await self.next()


# --------------------------------------------------------------------------- limits of lines


class LineLimits:
    """Where an editor's suggestion ends before the model ends it.

    What a line's indentation is shows with its first other character: until then it is held back, so that the text
    depends on no token's or draft's length.

    Args:
        seconds: from the first token on, after which the text ends with the next line end (`t_max_predict_ms`).
        indent: the text ends before a line, other than its first, that begins with fewer spaces and tabs (`n_indent`).
            A blank line has none, so it ends a text, as in llama-server, for which editors set this.
        clock: seconds from some moment on.
    """

    def __init__(
        self, seconds: float | None = None, indent: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.ended = False  # what comes afterwards is no part of the text
        self._seconds, self._indent, self._clock = seconds, indent, clock
        self._began: float | None = None
        self._at_margin = False
        self._held = ""

    def push(self, text: str) -> str:
        """What can be shown, now that `text` was generated; call it for tokens without text as well."""
        if self.ended:
            return ""
        now = self._clock()
        if self._began is None:
            self._began = now
        line_end = text.find("\n")
        if self._seconds is not None and now - self._began > self._seconds and line_end >= 0:
            self.ended = True
            text = text[: line_end + 1]
        return self._indented(text) if self._indent else text

    def finish(self) -> str:
        """What was held back of a text that has ended in another way."""
        rest, self._held = self._held, ""
        return "" if self.ended else rest

    def _indented(self, text: str) -> str:
        text, self._held = self._held + text, ""
        line = 0
        while True:
            if self._at_margin:
                margin = len(text) - line - len(text[line:].lstrip(" \t"))
                if line + margin == len(text):
                    self._held = text[line:]
                    return text[:line]
                if margin < self._indent:
                    self.ended = True
                    return text[:line]
            line_end = text.find("\n", line)
            self._at_margin = line_end >= 0
            if not self._at_margin:
                return text
            line = line_end + 1
