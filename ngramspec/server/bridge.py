"""From the engine's thread to the server's loop: `Running`, a request whose events can be awaited."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Self

from ngramspec.batching.request import Done, Event, Failed, Request, Service
from ngramspec.server import tally
from ngramspec.server.tally import Tally


class Running:
    """A request at work, which is cancelled when the `with` block ends, or the HTTP request that it belongs to."""

    def __init__(self, service: Service, request: Request) -> None:
        loop = asyncio.get_running_loop()
        self._arrived: asyncio.Queue[Event] = asyncio.Queue()

        def listen(event: Event) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(self._arrived.put_nowait, event)

        self._request = request
        self._tally = tally.current.get() or Tally()
        self._ticket = service.submit(request, listen)
        self._tally.tickets.append(self._ticket)

    async def next(self) -> Event:
        """The next event; the last is `Done` or `Failed`."""
        event = await self._arrived.get()
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
