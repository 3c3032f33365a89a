"""`Telemetry`: progress of prompt processing and running timings of one answer, in llama-server's fields."""

from __future__ import annotations

import time
from typing import Any

from ngramspec.batching.request import Prefilled, Started
from ngramspec.server.answer import Piece, TextEvent
from ngramspec.server.call import Call
from ngramspec.server.reply import timings
from ngramspec.steps import Stats


def read_telemetry(call: Call) -> Telemetry | None:
    """Return the telemetry of an answer if the request asks for it with `return_progress` or `timings_per_token`."""
    has_progress, has_timings = call.fields.boolean("return_progress"), call.fields.boolean("timings_per_token")
    return Telemetry(has_progress, has_timings) if call.streamed and (has_progress or has_timings) else None


class Telemetry:
    """Fields that a stream adds to its chunks: the progress of prompt processing, and the timings so far."""

    def __init__(self, has_progress: bool, has_timings: bool) -> None:
        self._has_progress, self._has_timings = has_progress, has_timings
        self._stats = Stats()
        self._started = self._now = time.monotonic()
        self._first: float | None = None  # time of the first token
        self._evaluated = self._cached = self._prompt_tokens = 0

    def update(self, event: TextEvent) -> dict[str, Any]:
        """Record an event of the answer and return the fields of its chunks. Every event must be recorded, in order.

        Events of prompt processing have `prompt_progress`, if requested.
        """
        fields: dict[str, Any] = {}
        match event:
            case Started(_, cached, prompt_tokens):
                self._started = self._now = time.monotonic()
                self._evaluated = self._cached = cached
                self._prompt_tokens = prompt_tokens
            case Prefilled(done, _):
                self._now = time.monotonic()
                self._evaluated = done
            case Piece(_, _, steps) if steps:
                self._now = time.monotonic()
                self._first = self._first or self._now
                for step in steps:
                    self._stats.add(step)
        if self._has_progress and isinstance(event, Started | Prefilled):
            progress = {"total": self._prompt_tokens, "cache": self._cached, "processed": self._evaluated}
            fields["prompt_progress"] = progress
        if self._has_timings:
            first = self._first or self._now
            seconds = first - self._started, self._now - first
            fields["timings"] = timings(self._evaluated, self._stats, self._cached, *seconds)
        return fields
