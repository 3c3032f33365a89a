"""Which quantisation of a model would be cheaper to verify drafts with on this processor.

llama.cpp has kernels for several rows at once for the types that it repacks, and goes row by row through the others, so
that a batch of four costs nearly four passes there. From ggml-cpu/repack.cpp and ggml-cpu/amx/common.h of
llama-cpp-python 0.3.36.
"""

from __future__ import annotations

from collections.abc import Mapping

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
"""What has kernels for several rows besides, on processors with AMX."""


def advice(types: Mapping[int, int], processor: str, steepness: float, *, amx: bool = False) -> str | None:
    """A line on which quantisation would be cheaper to verify; None where there is nothing to say.

    Args:
        types: bytes of the model's tensors by ggml type.
        processor: as `platform.machine()` names it.
        steepness: T(4) / T(1) as measured.
        amx: whether the AMX kernels are used.
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
        f"A batch of 4 costs {steepness:.1f} passes here: {' and '.join(slow)}, which this processor's kernels take row"
        f" by row. A quantisation that they repack ({', '.join(known)}) would be cheaper to verify drafts with."
    )
