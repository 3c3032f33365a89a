"""Candidates: settings worth trying on a machine, and advice on a cheaper quantisation."""

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

    knob: str  # name of the setting that changes; at most one candidate per knob is recommended
    change: Mapping[str, Any]  # values of the changed settings, by name
    measures: Sequence[Measure]  # measures that may change
    advice: bool = False  # whether it is reported but never applied, because it changes logits by more than rounding


def candidates(
    present: Settings, *, physical: int, logical: int, on_cpu: bool, flash_free: bool, quantised_cache: bool
) -> dict[str, Candidate]:
    """Return the candidates to compare with the present settings, by their command line options.

    Args:
        present: Present settings.
        physical: Number of physical cores.
        logical: Number of logical cores.
        on_cpu: Whether the CPU may compute a part of the model.
        flash_free: Whether flash attention can be switched on and off.
        quantised_cache: Whether the cache can have 8 bits per value.
    """
    found: list[Candidate] = []

    def add(knob: str, measures: Sequence[Measure], advice: bool = False, **change: Any) -> None:
        if replace(present, **change) != present:
            found.append(Candidate(knob, change, measures, advice))

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
    return {flags(replace(present, **one.change).changes(present)): one for one in found}


# --------------------------------------------------------------------------- quantisation

# For the types that it repacks, llama.cpp has kernels for several rows at once. It processes the other types row by
# row, so a batch of four costs nearly four passes. The lists below are from ggml-cpu/repack.cpp and
# ggml-cpu/amx/common.h of llama-cpp-python 0.3.36.

STEEP = 2.0
"""Minimum T(4) / T(1) for advice; from here on a draft of three tokens costs as much as a second pass."""

MUCH = 0.25
"""Minimum part of the weights for a type to be mentioned."""

_TYPES = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"]
NAMES = dict(zip((2, 3, 6, 7, 8, 10, 11, 12, 13, 14, 20, 23, 39), _TYPES, strict=True))
"""Quantised types by their numbers in ggml.h."""

_X86, _ARM = ("Q4_0", "Q4_K", "IQ4_NL", "MXFP4"), ("Q4_0", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "IQ4_NL", "MXFP4")
REPACKED = {"x86_64": _X86, "amd64": _X86, "arm64": _ARM, "aarch64": _ARM}
"""Repacked types by the value of `platform.machine()`, in lower case."""

AMX = ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")
"""Further types with kernels for several rows on processors with AMX."""


def advice(types: Mapping[int, int], processor: str, steepness: float, *, amx: bool = False) -> str | None:
    """Return a sentence that recommends a quantisation with cheaper verification; `None` if there is no such advice.

    Args:
        types: Bytes of the model's tensors by ggml type.
        processor: Value of `platform.machine()`.
        steepness: Measured T(4) / T(1).
        amx: Whether the processor has AMX.
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
