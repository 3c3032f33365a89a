"""`run_requests`: the requests of a call at work in the engine, and what happens to their answers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from time import monotonic
from typing import Self

from ngramspec.batching.request import Done, Event, Listener
from ngramspec.request import Request
from ngramspec.server.answer import Answer, TextEvent
from ngramspec.server.call import Call
from ngramspec.server.errors import context_length_error
from ngramspec.steps import Step


@asynccontextmanager
async def run_requests(
    call: Call, requests: Sequence[Request], answers: Sequence[Answer]
) -> AsyncIterator[RequestStream]:
    """Run requests in the engine while the block lasts, one for each answer. The call counts their cost.

    It raises an ApiError if a prompt is too long, and a GrammarError if a grammar is unusable.
    """
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
        async with RequestStream(call, requests, answers) as running:
            yield running
    finally:
        for grammar in grammars:
            vocabulary.grammars.release(grammar)


_CANCEL_SECONDS = 5.0
"""Maximum time to wait for a cancelled request, so that it is counted. It ends after the current decode call."""


class RequestStream:
    """Requests at work, whose events can be awaited. They are cancelled, and counted, when the `with` block ends.

    An event loop that wakes up takes a core from the decode call, and Python's lock from the engine. So the engine
    wakes it once for all events that arrive until the next `arrival`, and only at the end if nothing is streamed.
    """

    def __init__(self, call: Call, requests: Sequence[Request], answers: Sequence[Answer]) -> None:
        call.requests = requests
        self.unfinished = len(requests)  # number of answers whose `End` was not returned yet
        self.sent_at = monotonic()  # time of the last chunk
        self._loop = asyncio.get_running_loop()
        self._requests, self._answers, self._counters = requests, answers, call.counters
        has_limits = any(answer.reader is not None and answer.reader.ended is not None for answer in answers)
        self._wakes_always = call.streamed or has_limits  # otherwise at the end or for an error
        has_logprobs = any(request.logprobs is not None for request in requests)
        # True if steps of one answer that waited are one piece
        self._merges = call.streamed and not (has_logprobs or call.fields.boolean("timings_per_token"))
        self._ping_seconds = call.server.ping_seconds
        self._events: deque[tuple[int, Event]] = deque()
        self._ended: list[tuple[int, Event]] = []  # the last events; any thread can append to a list safely
        self._is_woken = False  # True from the call that wakes the loop until the loop waits again
        self._waiter: asyncio.Future[None] | None = None
        self._timer = self._loop.call_later(self._ping_seconds, self._check_silence) if call.streamed else None
        submit = call.model.service.submit
        self._tickets = [submit(request, self._listener(number), number) for number, request in enumerate(requests)]

    def _listener(self, number: int) -> Listener:
        def listen(event: Event) -> None:
            self._events.append((number, event))
            is_last = not isinstance(event, Step) and isinstance(event, (Done, Exception))
            if is_last:
                self._ended.append((number, event))
            must_wake = self._wakes_always or (is_last and (isinstance(event, Exception) or self._all_ended))
            if must_wake and not self._is_woken:
                self._is_woken = True
                try:  # noqa: SIM105 (`suppress` would call three functions for every token)
                    self._loop.call_soon_threadsafe(self._wake)
                except RuntimeError:  # the loop is closed
                    pass

        return listen

    @property
    def _all_ended(self) -> bool:
        return len(self._ended) == len(self._requests)

    # ------------------------------------------------------------------ on the event loop

    def arrival(self) -> asyncio.Future[None]:
        """Return a future that completes when events wait, or when no chunk was sent for too long."""
        self._is_woken = False
        self._waiter = asyncio.Future(loop=self._loop)
        if self._events:
            self._is_woken = True
            self._loop.call_soon(self._wake)  # a completed future would not let other clients have a turn
        return self._waiter

    def next_events(self) -> Sequence[tuple[int, TextEvent]]:
        """Return the next event with the number of its answer; several if steps waited, none if nothing did.

        It raises an ApiError if the engine could not complete an answer.
        """
        if not self._events:
            return ()
        number, event = self._events[0]
        if not isinstance(event, Step):
            self._events.popleft()
            self.unfinished -= isinstance(event, Done)
            return [(number, text_event) for text_event in self._answers[number].add_event(event)]
        steps: dict[int, list[Step]] = {}
        while isinstance(event, Step):
            self._events.popleft()
            steps.setdefault(number, []).append(event)
            if not (self._merges and self._events):
                break
            number, event = self._events[0]
        pieces = []
        for number, waiting_steps in steps.items():
            if not (answer := self._answers[number]).ended:
                pieces.append((number, answer.write(waiting_steps)))
                if answer.ended:
                    self._tickets[number].cancel()
        return pieces

    @property
    def is_silent(self) -> bool:
        """True if it is time for a ping."""
        return monotonic() - self.sent_at >= self._ping_seconds

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _check_silence(self) -> None:
        remaining_seconds = self.sent_at + self._ping_seconds - monotonic()
        if remaining_seconds <= 0:  # also true while a client does not read, when there is no waiter
            self._wake()
            remaining_seconds = self._ping_seconds
        self._timer = self._loop.call_later(remaining_seconds, self._check_silence)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for ticket in self._tickets:
            ticket.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(_CANCEL_SECONDS):
                while not self._all_ended:
                    self._events.clear()
                    await self.arrival()
        for number, event in self._ended:
            if isinstance(event, Done):
                self._counters.add(len(self._requests[number].prompt), event)
