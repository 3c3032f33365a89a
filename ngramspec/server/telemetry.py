"""`Telemetry`: progress of prompt processing and running timings of one answer, in llama-server's fields."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ngramspec.batching.request import Prefilled, Started
from ngramspec.server.call import Call
from ngramspec.server.generate import Piece, TextEvent
from ngramspec.server.reply import timings
from ngramspec.steps import Stats


class Telemetry:
    """Fields that a stream adds to its chunks if the request asks for them.

    Args:
        call: The request, with `return_progress` and `timings_per_token`.
        clock: Function that returns the time in seconds.
    """

    def __init__(self, call: Call, clock: Callable[[], float] = time.monotonic) -> None:
        self.has_timings = call.streamed and call.given.flag("timings_per_token")
        self._has_progress = call.streamed and call.given.flag("return_progress")
        self._clock = clock
        self._stats = Stats()
        self._started = self._now = clock()
        self._first: float | None = None  # time of the first token
        self._evaluated = self._cached = self._prompt_tokens = 0

    def update(self, event: TextEvent) -> None:
        """Record an event of the answer; every event must be recorded, in order."""
        if not (self.has_timings or self._has_progress):
            return
        match event:
            case Started(_, cached, prompt_tokens):
                self._started = self._now = self._clock()
                self._evaluated = self._cached = cached
                self._prompt_tokens = prompt_tokens
            case Prefilled(done, _):
                self._now = self._clock()
                self._evaluated = done
            case Piece(_, _, step) if step is not None:
                self._now = self._clock()
                self._first = self._first or self._now
                self._stats.add(step)

    def progress(self, event: TextEvent) -> dict[str, Any]:
        """Return the progress after an event of prompt processing; empty for other events and if not requested."""
        if not self._has_progress or not isinstance(event, Started | Prefilled):
            return {}
        progress = {"total": self._prompt_tokens, "cache": self._cached, "processed": self._evaluated}
        return {"prompt_progress": progress, **self.timings()}

    def timings(self) -> dict[str, Any]:
        """Return the timings so far; empty if not requested."""
        if not self.has_timings:
            return {}
        first = self._first or self._now
        return {
            "timings": timings(self._evaluated, self._stats, self._cached, first - self._started, self._now - first)
        }
