"""A pass of llama.cpp that waits until a test lets it continue, so that another thread can run meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event
from typing import Any

import llama_cpp.llama_cpp as llama
import pytest


@contextmanager
def hold_one_pass(patch: pytest.MonkeyPatch) -> Iterator[tuple[Event, Event]]:
    """Hold only the next pass of this process; yield an event for its start and one that lets it continue."""
    start, resume, decode = Event(), Event(), llama.llama_decode

    def hold(*args: Any) -> int:
        if not start.is_set():
            start.set()
            resume.wait(60)
        return int(decode(*args))

    with patch.context() as context:
        context.setattr(llama, "llama_decode", hold)
        try:
            yield start, resume
        finally:
            resume.set()
