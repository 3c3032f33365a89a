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
from ngramspec.cost.calibration import Calibration
from ngramspec.cost.curve import CostCurve
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
def run_engine(model: Any, *, curve: CostCurve | None = None, **settings: Any) -> Iterator[Engine]:
    """Run an engine that drafts from n-grams.

    Args:
        model: The model.
        curve: Its cost curve; `None` means one with which drafts pay.
        settings: Arguments of `Engine`.
    """
    known = Calibration.from_curve(curve or CostCurve({1: 1e-3, 64: 2e-3}))
    defaults: dict[str, Any] = {"calibration": known, "drafter": MixtureDrafter(TextIndexSet())}
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
