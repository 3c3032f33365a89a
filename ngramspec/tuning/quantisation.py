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

NAMES: Mapping[int, str] = {
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    20: "IQ4_NL",
    23: "IQ4_XS",
    39: "MXFP4",
}
"""Quantised types by their numbers in ggml.h."""

REPACKED: Mapping[str, tuple[str, ...]] = {
    "x86": ("Q4_0", "Q4_K", "IQ4_NL", "MXFP4"),
    "arm": ("Q4_0", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "IQ4_NL", "MXFP4"),
}

AMX = ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")
"""What has kernels for several rows besides, on processors with AMX."""


def family(processor: str) -> str | None:
    """The row of REPACKED for what `platform.machine()` says; None for processors without one."""
    name = processor.lower()
    if name in ("x86_64", "amd64"):
        return "x86"
    return "arm" if name in ("arm64", "aarch64") else None


def advice(types: Mapping[int, int], processor: str, steepness: float, *, amx: bool = False) -> str | None:
    """A line on which quantisation would be cheaper to verify; None where there is nothing to say.

    Args:
        types: bytes of the model's tensors by ggml type.
        processor: as `platform.machine()` names it.
        steepness: T(4) / T(1) as measured.
        amx: whether the AMX kernels are used.
    """
    kind = family(processor)
    if kind is None or steepness < STEEP:
        return None
    total = sum(types.values())
    known = tuple(dict.fromkeys((*REPACKED[kind], *(AMX if amx else ()))))
    rows = {NAMES[t]: size / total for t, size in types.items() if t in NAMES and NAMES[t] not in known}
    slow = {name: share for name, share in rows.items() if share >= MUCH}
    if not slow:
        return None
    told = " and ".join(f"{share:.0%} of its weights are {name}" for name, share in slow.items())
    return (
        f"A batch of 4 costs {steepness:.1f} passes here: {told}, which this processor's kernels take row by row. A"
        f" quantisation that they repack ({', '.join(known)}) would be cheaper to verify drafts with."
    )
