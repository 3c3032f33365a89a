"""A listener that records the events of a request."""

from __future__ import annotations

import queue
import threading

from ngramspec.batching.request import Done, Event
from ngramspec.steps import Step

WAIT = 120
"""Seconds after which a test gives up."""


class Ear:
    """Listener of one request."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.end = threading.Event()
        self.queue: queue.Queue[Event] = queue.Queue()

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        self.queue.put(event)
        if isinstance(event, Done | Exception):
            self.end.set()

    def wait(self) -> Event:
        assert self.end.wait(WAIT)
        return self.events[-1]

    @property
    def tokens(self) -> list[int]:
        return [token for event in self.events if isinstance(event, Step) for token in event.tokens]
