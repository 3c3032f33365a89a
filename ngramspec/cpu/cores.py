"""The CPU cores that this process may use, and the load on them by other programs."""

from __future__ import annotations

import ctypes
import ctypes.util
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

import psutil

SYSTEM = Path("/sys/devices")
CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")

LITTLE = 0.5
"""An Arm core with less than this share of the largest core's capacity is an efficiency core."""


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
    try:
        return {(SYSTEM / f"system/cpu/cpu{n}/topology/thread_siblings_list").read_text() for n in cpus}
    except OSError:
        return set()


def _physical_count() -> int:
    return max(1, min(psutil.cpu_count(logical=False) or psutil.cpu_count() or 1, logical_cores()))


def _performance_cpus(cpus: set[int]) -> set[int]:
    """Return the performance cores among these CPUs; all of them if the system does not distinguish kinds of cores."""
    with suppress(OSError, ValueError):
        return set(_cpu_list((SYSTEM / "cpu_core/cpus").read_text()))  # Intel's hybrid processors
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


def _cpu_list(text: str) -> Iterator[int]:
    """Parse a list of CPUs as Linux writes it, such as "0-3,8"."""
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def cpu_quota() -> float:
    """Return how many CPUs' time the cgroups of this process may use; infinite without a limit."""
    quotas = [math.inf]
    with suppress(OSError, ValueError):
        for line in OWN_CGROUPS.read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            if not controllers:
                quotas += _quotas(CGROUPS, name, _read_v2)
            elif "cpu" in controllers.split(","):
                quotas += _quotas(CGROUPS / controllers, name, _read_v1)
                quotas += _quotas(CGROUPS / "cpu", name, _read_v1)
    return min(quotas)


def _quotas(root: Path, name: str, read: Callable[[Path], float]) -> Iterator[float]:
    """Yield the quotas of a cgroup and of its parents. In a container, the root is the container's group."""
    folder = root / name.lstrip("/")
    for group in (folder, *folder.parents):
        with suppress(OSError, ValueError):
            yield read(group)
        if group == root:
            return


def _read_v2(group: Path) -> float:
    quota, period = (group / "cpu.max").read_text().split()
    return math.inf if quota == "max" else int(quota) / int(period)


def _read_v1(group: Path) -> float:
    quota, period = (int((group / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
    return math.inf if quota <= 0 else quota / period


# --------------------------------------------------------------------------- load by other programs


class CpuSeconds(NamedTuple):
    """CPU time since a fixed moment in the past, in seconds."""

    # Time of all programs on the allowed CPUs except those in `low`, and time that a hypervisor gave to other machines.
    system: float
    process: float  # time of all threads of this process
    low: float = 0.0  # time of programs with lower priority than this process


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
        return CpuSeconds(total + nice, own)  # the system reports this process and similar ones together
    return CpuSeconds(total, own, nice)


QUIET = 0.2
"""Cores used by other programs up to which the machine counts as idle: about what a desktop uses at rest."""


REPEATS, REPEAT_SECONDS = 5, 0.002
"""Number of counts of running threads, and the time between two counts. The lowest count is used, because many threads
run only for a moment."""


def count_running() -> int | None:
    """Return the number of running or ready threads of other programs; `None` if unknown for the allowed CPUs."""
    if logical_cores() < (os.cpu_count() or 1):
        return None
    fewest = _count_running_once()
    for _ in range(REPEATS - 1):
        if not fewest:
            break
        time.sleep(REPEAT_SECONDS)
        fewest = min(fewest, _count_running_once() or 0)
    return fewest


def _count_running_once() -> int | None:
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/stat").read_text().splitlines()
        everything = int(next(line for line in lines if line.startswith("procs_running")).split()[1])
        # The state is the first field after the name, which is in brackets and may contain any character.
        stats = [(task / "stat").read_text() for task in Path("/proc/self/task").iterdir()]
        return max(0, everything - sum(text.rpartition(")")[2].split()[0] == "R" for text in stats))
    return None


class CpuLoad:
    """The number of cores that other programs use, averaged over a fraction of a second.

    Args:
        read: Function that returns the CPU time used so far.
        clock: Function that returns the wall time in seconds.
        running: Function that returns the number of running or ready threads of other programs; `None` if unknown.
        count: Number of CPUs that this process may use.
    """

    INTERVAL = 0.1  # minimum seconds between two samples; the system counts in steps of 10 ms
    MEMORY = 0.2  # time constant of the average, in seconds
    PAUSE = 0.15  # seconds without a decode call after which the average is out of date
    SHARE = 0.005  # maximum share of the time spent on reading the counters, which takes long on many cores

    def __init__(
        self,
        read: Callable[[], CpuSeconds] = read_cpu_seconds,
        clock: Callable[[], float] = time.perf_counter,
        running: Callable[[], int | None] = count_running,
        count: int | None = None,
    ) -> None:
        self.clock = clock
        self._read, self._running = read, running
        self._count = count or logical_cores()
        self.cores = 0.0  # cores that other programs use, except those of lower priority
        self.low_cores = 0.0  # cores that programs of lower priority use
        self._before, self._at = read(), clock()
        self.due = self._at + self.INTERVAL  # time of the next sample, by `clock`
        self.call_ended = self._at  # time at which the last decode call ended
        self._is_guess = True  # whether `cores` is a guess and not an average

    @property
    def is_quiet(self) -> bool:
        """True if other programs, including those with low priority, use too little CPU time to slow decode calls."""
        return self.total_cores <= QUIET

    @property
    def total_cores(self) -> float:
        """Number of cores that all other programs use."""
        return self.cores + self.low_cores

    def sample(self) -> bool:
        """Update the number of used cores if the last sample is old enough; return True if it was updated."""
        now = self.clock()
        if now < self.due:
            return False
        seconds = now - self._at
        current = self._read()
        reading_seconds = self.clock() - now
        used = (current.system - self._before.system) - (current.process - self._before.process)
        weight = 1.0 if self._is_guess else 1.0 - math.exp(-seconds / self.MEMORY)
        self.cores += weight * (max(0.0, used / seconds) - self.cores)
        self.low_cores += weight * ((current.low - self._before.low) / seconds - self.low_cores)
        self._is_guess = False
        if now - max(self.call_ended, self._at) > self.PAUSE and (running := self._running()) is not None:
            # Programs that ran in the pause may have ended, and others may have started at its end.
            self.cores, self.low_cores, self._is_guess = float(min(running, self._count)), 0.0, True
        self._before, self._at = current, now
        self.due = self.clock() + max(self.INTERVAL, reading_seconds / self.SHARE)
        return True


@cache
def process_load() -> CpuLoad:
    """Return the load that all models of this process share."""
    return CpuLoad()
