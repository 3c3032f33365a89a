"""What is timed of a setting, and how much each of these times weighs in a typical request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from ngramspec.tuning.settings import Settings

LEAST_READ = 64
"""From so many tokens on, a pass reads a prompt: logits are computed after its last token only."""


class Measure(NamedTuple):
    """A time to take.

    Attributes:
        size: tokens of the pass. From LEAST_READ on they are a prompt, and the time is that of one of them.
        deep: whether after a long context, and not after next to nothing.
    """

    size: int
    deep: bool = False

    @property
    def reads(self) -> bool:
        """Whether it is the time of a prompt, per token."""
        return self.size >= LEAST_READ

    def named(self, depth: int) -> str:
        """What it is called in a report, where `depth` is the length of the long context in tokens."""
        name = f"reading {self.size}" if self.reads else f"T({self.size})"
        return f"{name} at {depth}" if self.deep else name


SINGLE, DRAFTS, READING, LONG_READING = Measure(1), (Measure(4), Measure(8)), Measure(LEAST_READ), Measure(1024)
DEEP = (Measure(1, deep=True), Measure(4, deep=True), Measure(LEAST_READ, deep=True))

WEIGHTS: Mapping[int, float] = {1: 128, 4: 64, 8: 32, LEAST_READ: 1000, 1024: 1000}
"""A request that reads 1,000 tokens and then has 128 passes over one token, 64 over four and 32 over eight. It decides
only where a setting makes one of these faster and another slower."""

Times = Mapping[Measure, float]
"""Seconds of each; of reading, per token."""


def score(times: Times) -> float:
    """Seconds of that request, as far as these measures make it up."""
    return sum(WEIGHTS[measure.size] * seconds for measure, seconds in times.items())


class Bench(Protocol):
    """What settings are timed on."""

    def seconds(self, settings: Settings, measure: Measure) -> float:
        """Take one time, after the passes that warm it up.

        Raises:
            TargetError, ModelError: these settings cannot be had on this machine.
        """
