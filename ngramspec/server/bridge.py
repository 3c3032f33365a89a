"""From the engine's thread to the server's loop: `Running`, a request whose events can be awaited."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from typing import Self

from ngramspec.batching.request import Done, Event, Failed, Request, Service
from ngramspec.server import tally
from ngramspec.server.tally import Tally


class Running:
    """A request at work, which is cancelled when the `with` block ends, or the HTTP request that it belongs to.

    Every time the loop's thread wakes up, it takes a core from the pass that is being made, and Python's lock from the
    engine. So it is woken once for all that came meanwhile, and where nothing is streamed only at the end.

    Args:
        service: what answers.
        request: what is asked of it.
        streamed: whether events are wanted as they come; else all may come with the last one.
    """

    def __init__(self, service: Service, request: Request, *, streamed: bool) -> None:
        loop = asyncio.get_running_loop()
        self._events: deque[Event] = deque()
        self._arrived = asyncio.Event()
        self._waking = False

        def listen(event: Event) -> None:
            self._events.append(event)
            if not self._waking and (streamed or isinstance(event, Done | Failed)):
                self._waking = True
                with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                    loop.call_soon_threadsafe(self._wake)

        self._request = request
        self._tally = tally.current.get() or Tally()
        self._ticket = service.submit(request, listen)
        self._tally.tickets.append(self._ticket)

    def _wake(self) -> None:
        self._waking = False
        self._arrived.set()

    async def next(self) -> Event:
        """The next event; the last is `Done` or `Failed`."""
        while not self._events:
            self._arrived.clear()
            await self._arrived.wait()
        event = self._events.popleft()
        if isinstance(event, Done):
            self._tally.add(len(self._request.prompt), event)
        if isinstance(event, Done | Failed):
            self._tally.tickets.remove(self._ticket)
        return event

    def cancel(self) -> None:
        """End it soon; `Done` follows. After the end this does nothing."""
        self._ticket.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()
