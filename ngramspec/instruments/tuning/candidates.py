"""Candidates: settings worth trying on a machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ngramspec.machine import DEEP, DRAFTS, LONG_READING, READING, SINGLE, Measure, Settings, flags

WHOLE = (SINGLE, *DRAFTS, READING)
ATTENTION = (SINGLE, DRAFTS[0], READING, *DEEP)
"""Measurements affected by attention, more for longer contexts."""

MICRO_BATCHES = (256, 1024)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A setting that may be faster than the present one."""

    parameter: str  # name of the setting that changes; at most one candidate per parameter is recommended
    change: Mapping[str, Any]  # values of the changed settings, by name
    measures: Sequence[Measure]  # measures that may change
    advice: bool = False  # whether it is reported but never applied, because it changes logits by more than rounding


def candidates(
    present: Settings, *, physical: int, logical: int, on_cpu: bool, flash_free: bool, quantised_cache: bool
) -> dict[str, Candidate]:
    """Return the candidates to compare with the present settings, by their command line options.

    `on_cpu` means that the CPU may compute a part of the model, `flash_free` that flash attention can be switched on
    and off, and `quantised_cache` that the cache can have 8 bits per value.
    """
    result: list[Candidate] = []

    def add(parameter: str, measures: Sequence[Measure], advice: bool = False, **change: Any) -> None:
        if replace(present, **change) != present:
            result.append(Candidate(parameter, change, measures, advice))

    if on_cpu:
        # On a machine with many cores a few threads saturate the memory.
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
    return {flags(replace(present, **candidate.change).changes(present)): candidate for candidate in result}
