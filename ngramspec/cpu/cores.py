"""The name of this machine, the CPU cores that this process may use, and the load on them by other programs."""

from __future__ import annotations

import ctypes
import ctypes.util
import math
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

import psutil

SYSTEM = Path("/sys/devices")
CGROUPS, OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
LITTLE = 0.5  # share of the largest core's capacity below which an Arm core is an efficiency core


@cache
def machine_name() -> str:
    """Return the processor and system, which distinguish the measurements of different machines."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            if line.startswith(("model name", "Hardware")):
                model = line.split(":", 1)[1].strip()
                break
    return f"{model}, {psutil.cpu_count() or 1} threads, {platform.system()} {platform.machine()}"


def available_cpus() -> set[int]:
    """Return the numbers of the logical CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(psutil.cpu_count() or 1))


def logical_cores() -> int:
    """Return the number of threads that this process may run at once, including hyper-threads."""
    return len(available_cpus())


def physical_cores() -> int:
    """Return the number of physical cores that this process may run on."""
    return len(_siblings(available_cpus())) or _physical_count()


def usable_cores() -> int:
    """Return the fastest number of threads on an idle machine: one per performance core, within the CPU quota.

    Threads of a decode call wait for the slowest one, so efficiency cores would slow the others down. Hyper-threads
    of one core count once, because they share the units that multiply matrices.
    """
    cpus = available_cpus()
    fast = cpus & _performance_cpus(cpus)
    cores = len(_siblings(fast or cpus)) or min(_performance_count() or _physical_count(), _physical_count())
    quota = cpu_quota()
    return max(1, cores if quota == math.inf else min(cores, math.floor(quota + 0.01)))


def _siblings(cpus: set[int]) -> set[str]:
    """Return one entry for each physical core of these CPUs; empty if the system does not describe them."""
    with suppress(OSError):
        return {(SYSTEM / f"system/cpu/cpu{n}/topology/thread_siblings_list").read_text() for n in cpus}
    return set()


def _physical_count() -> int:
    return max(1, min(psutil.cpu_count(logical=False) or psutil.cpu_count() or 1, logical_cores()))


def _performance_cpus(cpus: set[int]) -> set[int]:
    """Return the performance cores among these CPUs; all of them if the system does not distinguish kinds of cores."""
    with suppress(OSError, ValueError):  # Intel's hybrid processors list them, such as "0-3,8"
        ranges = [part.split("-") for part in (SYSTEM / "cpu_core/cpus").read_text().split(",")]
        return {n for ends in ranges for n in range(int(ends[0]), int(ends[-1]) + 1)}
    with suppress(OSError, ValueError):
        capacity = {n: int((SYSTEM / f"system/cpu/cpu{n}/cpu_capacity").read_text()) for n in cpus}  # Arm
        return {n for n, value in capacity.items() if value >= LITTLE * max(capacity.values())}
    return cpus


def _performance_count() -> int | None:
    """Return how many performance cores macOS reports; `None` on other systems."""
    if sys.platform != "darwin":
        return None
    count, size = ctypes.c_int(0), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(ctypes.util.find_library("c"))
        if libc.sysctlbyname(b"hw.perflevel0.physicalcpu", ctypes.byref(count), ctypes.byref(size), None, 0) == 0:
            return count.value or None
    return None


def cpu_quota() -> float:
    """Return how many CPUs' time the cgroups of this process may use; infinite without a limit."""
    quotas = [math.inf]
    with suppress(OSError, ValueError):
        for line in OWN_CGROUPS.read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            if not controllers:
                quotas += _quotas(CGROUPS, name)
            elif "cpu" in controllers.split(","):
                quotas += [*_quotas(CGROUPS / controllers, name), *_quotas(CGROUPS / "cpu", name)]
    return min(quotas)


def _quotas(root: Path, name: str) -> Iterator[float]:
    """Yield the quotas of a cgroup and of its parents. In a container, the root is the container's group."""
    folder = root / name.lstrip("/")
    for group in (folder, *folder.parents):
        with suppress(OSError, ValueError):  # version 2; without a limit the quota is "max"
            quota, period = map(int, (group / "cpu.max").read_text().split())
            yield quota / period
        with suppress(OSError, ValueError):  # version 1
            quota, period = (int((group / f"cpu.cfs_{kind}_us").read_text()) for kind in ("quota", "period"))
            yield quota / period if quota > 0 else math.inf
        if group == root:
            return


class CpuSeconds(NamedTuple):
    """CPU time since a fixed moment, in seconds; per second of wall time, it is a number of cores."""

    others: float  # of other programs on the allowed CPUs, and what a hypervisor gave to other machines
    own: float = 0.0  # of all threads of this process
    low: float = 0.0  # of programs with lower priority than this process, which `others` does not contain


def read_cpu_seconds() -> CpuSeconds:
    """Return the CPU time used so far on the CPUs that this process may use."""
    cpus, total, nice = available_cpus(), 0.0, 0.0
    for number, times in enumerate(psutil.cpu_times(percpu=True)):
        if number in cpus:
            irq_times = (getattr(times, name, 0.0) for name in ("irq", "softirq", "steal"))
            total += times.user + times.system + sum(irq_times)
            nice += getattr(times, "nice", 0.0)
    own = time.process_time()
    if hasattr(os, "getpriority") and os.getpriority(os.PRIO_PROCESS, 0) > 0:
        return CpuSeconds(total + nice - own, own)  # the system reports this process and similar ones together
    return CpuSeconds(total - own, own, nice)


class CpuLoad:
    """The number of cores that programs use: CPU time between the last two reads of the counters, per second.

    The load is unknown, and so never quiet, if there is only one read, or if the last two are more than `LONGEST`
    seconds apart. The next read is due `INTERVAL` seconds after the last one, whatever that one took: it may have been
    preempted. A read of more than `SLOW` seconds is repeated once, because its CPU time may be older or newer than
    its time. If the second one is slow too, the load is overestimated and not underestimated: the time between two
    reads is counted from the end of one to the start of the next.
    """

    INTERVAL, LONGEST, SLOW = 0.2, 10.0, 0.02
    QUIET = 0.2  # cores used by other programs up to which the machine counts as idle, as with a desktop at rest

    def __init__(self, read: Callable[[], CpuSeconds], clock: Callable[[], float]) -> None:
        self.clock, self._read = clock, read
        self.latest: CpuSeconds | None = None  # number of cores used, by the last two reads; `None` if unknown
        self._last, self._ended = read(), clock()
        self.due = self._ended + self.INTERVAL  # time of the next read, by `clock`
        self._lock = threading.Lock()  # the engine's and the server's threads ask

    @property
    def is_quiet(self) -> bool:
        """True if other programs, including those with low priority, use too little CPU time to slow decode calls."""
        cores = self.sample()
        return cores is not None and cores.others + cores.low <= self.QUIET

    def sample(self) -> CpuSeconds | None:
        """Return the number of cores used, after a new read if one is due; `None` if unknown."""
        if self.clock() >= self.due:
            with self._lock:
                if self.clock() >= self.due:  # no other thread read in the meantime
                    self._update()
        return self.latest

    def wait(self) -> None:
        """Wait until the next sample is due, so that it is about the present."""
        self.sample()
        time.sleep(1.1 * self.INTERVAL)

    def _update(self) -> None:
        for _ in range(2):
            began, now, ended = self.clock(), self._read(), self.clock()
            if ended - began <= self.SLOW:
                break
        seconds = began - self._ended
        used = (max(0.0, after - before) / seconds for before, after in zip(self._last, now, strict=True))
        self.latest = CpuSeconds(*used) if seconds <= self.LONGEST else None
        self._last, self._ended, self.due = now, ended, ended + self.INTERVAL


@cache
def process_load() -> CpuLoad:
    """Return the load that all models of this process share."""
    return CpuLoad(read_cpu_seconds, time.perf_counter)
