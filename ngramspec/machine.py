"""The name of this machine, and the passes that are timed on it (`Measure`)."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path
from typing import NamedTuple

import psutil


@cache
def name() -> str:
    """Return the processor and system, which distinguish the measurements of different machines."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            if line.startswith(("model name", "Hardware")):
                model = line.split(":", 1)[1].strip()
                break
    return f"{model}, {psutil.cpu_count() or 1} threads, {platform.system()} {platform.machine()}"


# --------------------------------------------------------------------------- measures

MIN_PREFILL = 64  # minimum size of a pass that counts as prefill, which computes logits only after its last token


class Measure(NamedTuple):
    size: int  # tokens of the pass; from MIN_PREFILL on the pass is a prefill, and its time is divided by its tokens
    deep: bool = False  # whether the pass follows a long context instead of a nearly empty one

    @property
    def is_prefill(self) -> bool:
        return self.size >= MIN_PREFILL

    def label(self, depth: int) -> str:
        """Return the name of the measure in a report, where the long context has `depth` tokens."""
        name = f"prefill {self.size}" if self.is_prefill else f"T({self.size})"
        return f"{name} at {depth}" if self.deep else name


SINGLE, DRAFTS, READING, LONG_READING = Measure(1), (Measure(4), Measure(8)), Measure(MIN_PREFILL), Measure(1024)
DEEP = (Measure(1, deep=True), Measure(4, deep=True), Measure(MIN_PREFILL, deep=True))
