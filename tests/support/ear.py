"""An engine on a shared model, and a listener that records the events of a request to it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from support.mock_shared import MockShared

from ngramspec.batching.engine import Engine
from ngramspec.batching.request import Done, Event
from ngramspec.cost.fixed_curves import make_fixed_curve
from ngramspec.cost.store import StoredTimes
from ngramspec.cost.times import PassTimes
from ngramspec.drafting.mixture.drafter import MixtureDrafter, TextIndexSet
from ngramspec.request import Request
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

    def wait_for(self, kind: type[Event]) -> None:
        """Wait for the next event of a type."""
        while not isinstance(self.queue.get(timeout=WAIT), kind):
            pass

    @property
    def steps(self) -> list[Step]:
        return [event for event in self.events if isinstance(event, Step)]

    @property
    def tokens(self) -> list[int]:
        return [token for step in self.steps for token in step.tokens]


@contextmanager
def run_engine(model: Any, *, times: PassTimes | None = None, **settings: Any) -> Iterator[Engine]:
    """Run an engine that drafts from n-grams; without `times`, passes have costs with which drafts pay."""
    stored = StoredTimes(model.sequences[0])
    stored.path = None  # the user's folder must not change
    stored.times = times or make_fixed_curve({1: 1.0, 64: 2.0})
    defaults: dict[str, Any] = {"stored": stored, "drafter": MixtureDrafter(TextIndexSet())}
    if isinstance(model, MockShared):
        defaults |= {"vocabulary": model.sequences[0], "clock": model.clock.perf_counter}
    else:
        defaults["vocabulary"] = model.vocabulary
    engine = Engine(model, **defaults | settings)
    try:
        yield engine
    finally:
        engine.stop()


def ask(engine: Engine, prompt: Sequence[int], tokens: int = 60, **fields: Any) -> Ear:
    """Submit a request, and return its listener."""
    ear = Ear()
    engine.submit(Request(prompt, tokens, **fields), ear)
    return ear
