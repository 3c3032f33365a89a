"""`run_answers`: the answers of a call at work in the engine, and what happens to them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from queue import SimpleQueue
from time import monotonic

from ngramspec.batching.request import Done, Event
from ngramspec.server.answer import Answer
from ngramspec.server.call import Call
from ngramspec.server.errors import context_length_error
from ngramspec.steps import Step

_CANCEL_SECONDS = 5.0
"""Maximum time to wait for a cancelled request, so that it is counted. It ends after the current decode call."""

_MAX_EVENTS = 64
"""Maximum number of events that are read before other clients have a turn."""


@asynccontextmanager
async def run_answers(call: Call, answers: Sequence[Answer]) -> AsyncIterator[EventQueue]:
    """Run the requests of answers in the engine while the block lasts. The call counts their cost.

    It raises an ApiError if a prompt is too long, and a GrammarError if a grammar is unusable.
    """
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
        async with _submit(call, answers) as queue:
            yield queue
    finally:
        for grammar in grammars:
            vocabulary.grammars.release(grammar)


@asynccontextmanager
async def _submit(call: Call, answers: Sequence[Answer]) -> AsyncIterator[EventQueue]:
    """Submit the requests of answers; at the end of the block, cancel and count them."""
    has_limits = any(answer.reader is not None and answer.reader.ended is not None for answer in answers)
    has_logprobs = any(answer.request.logprobs is not None for answer in answers)
    merges = not (call.streamed and (has_logprobs or call.fields.boolean("timings_per_token")))
    ping_seconds = call.server.ping_seconds if call.streamed else math.inf
    queue = EventQueue(ping_seconds, wakes_always=call.streamed or has_limits, merges=merges)
    for answer in answers:
        answer.ticket = call.model.service.submit(answer.request, partial(queue.put, answer.number), answer.number)
    try:
        yield queue
    finally:
        queue.stop_pings()
        for answer in answers:
            answer.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(_CANCEL_SECONDS):
                while len(queue.ended) < len(answers):
                    await queue.wait()
                    queue.take()
        for number, event in queue.ended:
            if isinstance(event, Done):
                call.counters.add(len(answers[number].request.prompt), event)


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

    # ------------------------------------------------------------------ on the engine's thread

    def put(self, number: int, event: Event) -> None:
        """Add an event of an answer, and wake the loop if necessary."""
        self._events.put((number, event))
        if not self._is_woken and (self._wakes_always or isinstance(event, (Done, Exception))):
            self._is_woken = True
            try:  # noqa: SIM105 (`suppress` would call three functions for every token)
                self._loop.call_soon_threadsafe(self._wake)
            except RuntimeError:  # the loop is closed
                pass

    # ------------------------------------------------------------------ on the event loop

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
        for _ in range(_MAX_EVENTS):
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
