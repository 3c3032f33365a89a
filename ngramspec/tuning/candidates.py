"""What is timed of a setting, and which settings are worth trying on a machine, the likeliest to help first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

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

WHOLE = (SINGLE, *DRAFTS, READING)
ATTENTION = (SINGLE, DRAFTS[0], READING, *DEEP)
"""What attention has a share in, the longer the context the more."""

MICRO_BATCHES = (256, 1024)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A setting that may be faster than the present one.

    Attributes:
        knob: what it turns: of candidates with the same knob one at most is recommended.
        change: the settings that it changes, by name.
        measures: the times that it may change.
        advice: whether it is told of and never applied, since it changes more than the last bits of a text.
    """

    knob: str
    change: Mapping[str, Any]
    measures: Sequence[Measure]
    advice: bool = False


def candidates(
    present: Settings, *, physical: int, logical: int, on_cpu: bool, flash_free: bool, quantised_cache: bool
) -> dict[str, Candidate]:
    """What to compare with the present settings, by the options of the command line that set it.

    Args:
        present: the settings that are to be beaten.
        physical, logical: cores, and threads that the system runs at once on them.
        on_cpu: whether the CPU computes any of the model.
        flash_free: whether flash attention can be switched.
        quantised_cache: whether a cache of 8 bits is possible and not yet taken.
    """
    found: list[Candidate] = []

    def add(knob: str, measures: Sequence[Measure], advice: bool = False, **change: Any) -> None:
        if replace(present, **change) != present:
            found.append(Candidate(knob, change, measures, advice))

    if on_cpu:
        # Few threads saturate the memory of a machine of many cores.
        counts = {physical, logical, max(1, physical // 2), max(1, 3 * physical // 4)}
        for count in sorted(counts | ({physical // 4} if physical >= 16 else set()), reverse=True):
            add("threads", (SINGLE,), threads=count)
        for count in dict.fromkeys((logical, physical)):
            add("threads_batch", (*DRAFTS, READING), threads_batch=count)
    if flash_free:
        add("flash_attn", ATTENTION, flash_attn="on" if present.flash_attn == "off" else "off")
    if on_cpu:
        add("weights", WHOLE, mmap=False)
        add("weights", WHOLE, repack=False)
    if quantised_cache:
        add("cache_types", ATTENTION, advice=True, cache_types=("q8_0", "q8_0"))
    if present.flash_attn != "off" and present.micro_batch is None:
        for size in MICRO_BATCHES:
            add("micro_batch", (LONG_READING,), micro_batch=size)
    return {replace(present, **one.change).flags(present): one for one in found}
