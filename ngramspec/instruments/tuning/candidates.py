"""Candidates: the settings worth trying on a machine, and which quantisation would be cheaper."""

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

    knob: str  # what it turns: of candidates with the same knob one at most is recommended
    change: Mapping[str, Any]  # the settings that it changes, by name
    measures: Sequence[Measure]  # the times that it may change
    advice: bool = False  # whether it is told of and never applied, since it changes more than the last bits of a text


def candidates(
    present: Settings, *, physical: int, logical: int, on_cpu: bool, flash_free: bool, quantised_cache: bool
) -> dict[str, Candidate]:
    """What to compare with the present settings, by the options of the command line that set it.

    Of a machine with so many `physical` and `logical` cores, where the CPU may compute any of the model (`on_cpu`),
    flash attention may be switched (`flash_free`), and a cache of 8 bits be taken.
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
    return {flags(replace(present, **one.change).changes(present)): one for one in found}


# --------------------------------------------------------------------------- quantisation

# llama.cpp has kernels for several rows at once for the types that it repacks, and goes row by row through the others,
# so that a batch of four costs nearly four passes there. From ggml-cpu/repack.cpp and ggml-cpu/amx/common.h of
# llama-cpp-python 0.3.36.

STEEP = 2.0
"""From this T(4) / T(1) on, a draft of three tokens costs as much as a second pass."""

MUCH = 0.25
"""A type that takes this part of the weights or more is worth a word."""

_TYPES = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"]
NAMES = dict(zip((2, 3, 6, 7, 8, 10, 11, 12, 13, 14, 20, 23, 39), _TYPES, strict=True))
"""Quantised types by their numbers in ggml.h."""

_X86, _ARM = ("Q4_0", "Q4_K", "IQ4_NL", "MXFP4"), ("Q4_0", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "IQ4_NL", "MXFP4")
REPACKED = {"x86_64": _X86, "amd64": _X86, "arm64": _ARM, "aarch64": _ARM}
"""By what `platform.machine()` says, in small letters."""

AMX = ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")
"""Further types with kernels for several rows on processors with AMX."""


def advice(types: Mapping[int, int], processor: str, steepness: float, *, amx: bool = False) -> str | None:
    """A line on which quantisation would be cheaper to verify; None where there is nothing to say.

    `types` are the bytes of the model's tensors by ggml type, the `processor` is named as by `platform.machine()`, and
    `steepness` is T(4) / T(1) as measured.
    """
    repacked = REPACKED.get(processor.lower())
    if repacked is None or steepness < STEEP:
        return None
    known = tuple(dict.fromkeys((*repacked, *(AMX if amx else ()))))
    shares = {NAMES[t]: size / sum(types.values()) for t, size in types.items() if t in NAMES}
    slow = [f"{s:.0%} of its weights are {name}" for name, s in shares.items() if s >= MUCH and name not in known]
    if not slow:
        return None
    return (
        f"A batch of 4 costs {steepness:.1f} times one token here: {' and '.join(slow)}, for which this processor has"
        f" no batch kernels. Drafts would be cheaper to verify with a repacked quantisation ({', '.join(known)})."
    )
