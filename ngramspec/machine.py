"""What this machine is: its cores and its name."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from functools import cache
from pathlib import Path

import psutil

_CORES = Path("/sys/devices/system/cpu")


def physical_cores() -> int:
    """Cores this process may run on; hyper-threads of one count once, as they add little to matrix products."""
    with suppress(OSError, AttributeError):
        # They name the same siblings.
        own = os.sched_getaffinity(0)
        return len({(_CORES / f"cpu{n}/topology/thread_siblings_list").read_text() for n in own})
    physical: int = psutil.cpu_count(logical=False) or psutil.cpu_count() or 1
    return max(1, min(physical, logical_cores()))


def logical_cores() -> int:
    """Threads that this process may run at once, hyper-threads among them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else psutil.cpu_count() or 1


def busy_seconds() -> tuple[float, float]:
    """Seconds for which the cores have worked since the machine started, and for this process since that started.

    Of two calls the differences tell what other programs took meanwhile.
    """
    whole = psutil.cpu_times()
    own = psutil.Process().cpu_times()
    others = (getattr(whole, name, 0.0) for name in ("nice", "irq", "softirq", "steal"))
    return whole.user + whole.system + sum(others), own.user + own.system


@cache
def name() -> str:
    """The processor and system, to tell one machine's measurements from another's."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            if line.startswith(("model name", "Hardware")):
                model = line.split(":", 1)[1].strip()
                break
    return f"{model}, {psutil.cpu_count() or 1} threads, {platform.system()} {platform.machine()}"
