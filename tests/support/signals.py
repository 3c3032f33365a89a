"""Signals to a command line in this process, sent at a fixed point of its work, however fast the machine is."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest

from ngramspec.decoding.decoder import SpeculativeDecoder

SIGNALS = [(signal.SIGINT, 130), (signal.SIGTERM, 143)]
by_signal = pytest.mark.parametrize(("number", "code"), SIGNALS)
"""Mark that runs a test for each signal that ends a command, with the resulting exit code."""


@contextmanager
def signal_at(number: int, owner: type, name: str, count: int) -> Iterator[None]:
    """Send this process a signal when a method is called for the `count`-th time."""
    original, calls = getattr(owner, name), itertools.count(1)

    def call(*arguments: Any, **options: Any) -> Any:
        if next(calls) == count:
            os.kill(os.getpid(), number)
        return original(*arguments, **options)

    with mock.patch.object(owner, name, call):
        yield


@contextmanager
def signal_after(number: int, steps: int = 5) -> Iterator[None]:
    """Send this process a signal after `steps` decoding steps, counted over all texts."""
    original, step_numbers = SpeculativeDecoder.generate, itertools.count()

    def generate(*arguments: Any, **options: Any) -> Iterator[Any]:
        for step in original(*arguments, **options):
            if next(step_numbers) == steps:
                os.kill(os.getpid(), number)
            yield step

    with mock.patch.object(SpeculativeDecoder, "generate", generate):
        yield
