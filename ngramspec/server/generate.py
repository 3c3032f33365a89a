"""`generate`: the texts of one or more requests of the engine, as pieces and ends; what goes wrong is an `ApiError`.

What every endpoint that generates text is made of, chats included. `DraftedText` tells what of a text was drafted.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import suppress
from typing import Literal, NamedTuple, Protocol, Self

from ngramspec.batching.engine import Engine
from ngramspec.batching.request import Done, Event, Listener, Prefilled, Scored, Started
from ngramspec.errors import GrammarError
from ngramspec.request import Request
from ngramspec.sampling.distribution import Logprobs
from ngramspec.server.call import Call, Counters, leaving, of_failure, overflow
from ngramspec.steps import Step
from ngramspec.tool_calls.deltas import Delta, append


class Piece(NamedTuple):
    """Some more of a text."""

    deltas: Sequence[Delta] = ()  # what can be shown now; of a text that nobody parses, its content
    # Where they were asked for: of the tokens whose text is out by now, those that end a text left out.
    logprobs: tuple[Logprobs, ...] = ()
    step: Step | None = None  # the engine's; None: it was held back to the end

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
    reasoning_tokens: int = 0  # tokens of reasoning, with its opening tag


TextEvent = Started | Prefilled | Scored | Piece | End

TextEvents = AsyncGenerator[tuple[int, TextEvent | None], None]
"""Events of texts, each with its number; None: nothing happened for a while."""

_LOOKS = 16  # how often a stream looks, in the time after which its silence is broken, whether that has come


class TextReader(Protocol):
    """Reads a text as it is written, and tells what can be shown of it."""

    ended: bool | None  # whether the text ends here, before the engine ends it; None: it never does

    def push(self, text: str) -> Sequence[Delta]: ...

    def finish(self, cut: bool = False) -> Sequence[Delta]:
        """Return the held-back text at the end; `cut`: a limit ended the text."""


async def generate(call: Call, requests: Sequence[Request], readers: Sequence[TextReader] = ()) -> TextEvents:
    """Generate texts at once: what happens to each, as it comes, with the text's number. The first error ends all.

    Where the call is not streamed, all may come at the end. The call counts what they cost.

    Args:
        readers: of each text; none: the texts are content.

    Raises:
        ApiError: a request is wrong, the engine failed, or the server is being stopped.
    """
    call.requests = requests
    for request in requests:
        # A prompt must leave room for a token, unless none is asked for.
        if len(request.prompt) + (request.max_tokens != 0) > call.model.n_ctx:
            raise overflow(len(request.prompt), call.model.n_ctx)
    left, texts = len(requests), [_Text(reader) for reader in readers] or [_Text(None) for _ in requests]
    streamed = call.streamed or any(reader.ended is not None for reader in readers)
    patience = call.server.ping_seconds / _LOOKS if call.streamed else None
    breakers = {r.sampling.dry_sequence_breakers: r.sampling for r in requests if r.sampling.dry_multiplier > 0}
    for sampling in breakers.values():
        await asyncio.to_thread(call.model.vocabulary.prepare, sampling)
    async with (
        _Grammars(call, requests),
        Running(call.model.service, requests, call.counters, streamed=streamed) as running,
    ):
        while left:
            number, event = await running.next(patience)
            if event is None:
                yield number, None
                continue
            for told in texts[number].take(event):
                if texts[number].ended and isinstance(told, Piece):
                    running.cancel(number)
                left -= isinstance(told, End)
                yield number, told


class _Grammars:
    """The grammars of requests, compiled while the block lasts, so that the engine never waits for one.

    Raises:
        ApiError: on entry, if a grammar cannot be used.
    """

    def __init__(self, call: Call, requests: Sequence[Request]) -> None:
        self._grammars = call.model.vocabulary.grammars
        self._texts = {request.sampling.grammar for request in requests} - {None}
        self._held: list[str] = []

    async def __aenter__(self) -> None:
        try:
            for text in self._texts:
                assert text is not None
                await asyncio.to_thread(self._grammars.hold, text)
                self._held.append(text)
        except GrammarError as error:
            await self.__aexit__()
            raise of_failure(error) from error

    async def __aexit__(self, *_: object) -> None:
        for text in self._held:
            self._grammars.release(text)


class _Text:
    """A text that the engine writes."""

    def __init__(self, reader: TextReader | None) -> None:
        self.ended = False
        self._reader = reader
        self._started = self._written = self._called = False
        self._stop_string: str | None = None
        self._held: list[Logprobs] = []  # of tokens whose text is held back
        self._untold = self._reasoning = 0  # tokens of which nothing was told yet; tokens of reasoning

    def take(self, event: Event) -> Iterator[TextEvent]:
        """Convert an event of the engine for the readers of the text."""
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
        self._stop_string = step.stop_string
        deltas: Sequence[Delta] = (Delta("text", step.text),) if step.text else ()
        if self._reader is not None:
            deltas = self._read(self._reader, step)
        return Piece(deltas, self._logprobs(step), step)

    def _read(self, reader: TextReader, step: Step) -> Sequence[Delta]:
        """Parse a step token by token, so that the number of tokens of reasoning does not depend on drafts."""
        deltas: list[Delta] = []
        for piece in step.pieces:
            self._untold += 1
            for delta in self._noted(reader.push(piece)):
                append(deltas, delta)
            self.ended = bool(reader.ended)
            if self.ended:
                break
        return deltas

    def _end(self, done: Done) -> Iterator[Piece | End]:
        if done.reason == "cancelled" and not self._written:
            raise leaving()  # else what is written is told: the server is being stopped
        by_itself = not self.ended and done.reason in ("eog", "stop")
        full = done.reason == "context" and not self.ended
        if self._reader is not None and (deltas := self._noted(self._reader.finish(cut=not by_itself))):
            yield Piece(deltas)
        reason: Literal["stop", "length", "tool_calls"] = "stop" if by_itself else "length"
        if by_itself and self._called:
            reason = "tool_calls"
        yield End(reason, self._stop_string if by_itself else None, full, done, self._reasoning)

    def _noted(self, deltas: Sequence[Delta]) -> Sequence[Delta]:
        """Count the tokens of reasoning, and see calls."""
        if deltas:
            self._reasoning += self._untold if deltas[0].kind == "thought" else 0
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

        self._tickets = [service.submit(request, listener(number), number) for number, request in enumerate(requests)]

    @property
    def _all_ended(self) -> bool:
        return len(self._ended) == len(self._requests)

    def _wake(self) -> None:
        self._waking = False
        self._arrived.set()

    async def next(self, patience: float | None = None) -> tuple[int, Event | None]:
        """The next event, and the number of its request; the last of each is `Done` or an error.

        `patience`: seconds after which the event is None if none came; None: no end of them.
        """
        while not self._events:
            self._arrived.clear()
            try:
                async with asyncio.timeout(patience):
                    await self._arrived.wait()
            except TimeoutError:
                return 0, None
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


# --------------------------------------------------------------------------- what was drafted


Span = tuple[int, int]  # where a part of a text begins and ends, in characters


class DraftedText:
    """Finds what a parser tells in the text that it was given, in order, and so the tokens that it is of.

    What it tells in other words than it read is not found, and nothing is said of it.
    """

    def __init__(self) -> None:
        self._text = ""  # that nothing was told of yet
        self._spans: list[Span] = []  # of this text

    def mark(self, piece: Piece) -> list[tuple[Delta, list[Span]]]:
        """The deltas of a further piece, each with the spans of its text that were drafted, in order."""
        if piece.step is not None:
            # A token's text that is held back comes out with the next one's, and is its.
            for i, text in enumerate(piece.step.pieces):
                start = len(self._text)
                self._text += text
                if text and i < piece.step.accepted:
                    self._spans.append((start, len(self._text)))
        return [(delta, self._found(delta.text)) for delta in piece.deltas]

    def _found(self, text: str) -> list[Span]:
        """Return the drafted spans of the following text; adjacent spans are merged."""
        at = self._text.find(text)
        if not text or at < 0:
            return []
        end = at + len(text)
        joined: list[Span] = []
        for first, last in self._spans:
            start, stop = max(first, at) - at, min(last, end) - at
            if joined and joined[-1][1] == start:
                joined[-1] = (joined[-1][0], stop)
            elif start < stop:
                joined.append((start, stop))
        self._text = self._text[end:]
        self._spans = [(max(a - end, 0), b - end) for a, b in self._spans if b > end]
        return joined
