"""Tests of the usable cores on systems described by files, and of their use by other programs."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from ngramspec.cpu import cores
from ngramspec.cpu.cores import CpuLoad, CpuSeconds, cpu_quota, physical_cores, read_cpu_seconds, usable_cores

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system has no CPU affinity")

CPU = "devices/system/cpu/cpu{}/"


def siblings(*texts: str) -> dict[str, str]:
    """Return the files that list the hyper-threads of the core of each CPU."""
    return {f"{CPU.format(n)}topology/thread_siblings_list": text for n, text in enumerate(texts)}


THREADS, EIGHT = siblings("0,2", "1,3", "0,2", "1,3", "4-5", "4-5"), siblings(*map(str, range(8)))
HYBRID = siblings("0-1", "0-1", "2-3", "2-3", *"4567") | {"devices/cpu_core/cpus": "0-3"}
ARM = {f"{CPU.format(n)}cpu_capacity": "290" if n < 4 else "870" if n < 7 else "1024" for n in range(8)}
V1 = {"cgroup/cpu/c/cpu.cfs_quota_us": "400000", "cgroup/cpu/c/cpu.cfs_period_us": "100000"}
NO_LIMIT = {"cgroup/cpu/cpu.cfs_quota_us": "-1", "cgroup/cpu/cpu.cfs_period_us": "100000"}
NESTED = {"cgroup/a/cpu.max": "50000 100000", "cgroup/a/b/cpu.max": "max 100000"}


@pytest.mark.parametrize(
    ("allowed", "files", "physical", "usable", "quota"),
    [
        ("0123", THREADS, 2, 2, math.inf),
        ("02", THREADS, 1, 1, math.inf),
        ("01", THREADS, 2, 2, math.inf),
        ("012345", THREADS, 3, 3, math.inf),
        ("01234567", HYBRID, 6, 2, math.inf),
        ("01234567", EIGHT | ARM, 8, 4, math.inf),
        ("01234567", {}, 1, 1, math.inf),
        ("01234567", EIGHT | {"own": "0::/", "cgroup/cpu.max": "max 100000"}, 8, 8, math.inf),
        ("01234567", EIGHT | {"own": "0::/", "cgroup/cpu.max": "250000 100000"}, 8, 2, 2.5),
        ("01234567", EIGHT | {"own": "0::/a/b"} | NESTED, 8, 1, 0.5),
        ("01234567", EIGHT | {"own": "0::/outside/the/container", "cgroup/cpu.max": "300000 100000"}, 8, 3, 3.0),
        ("01234567", EIGHT | {"own": "4:cpu,cpuacct:/c"} | V1, 8, 4, 4.0),
        ("01234567", EIGHT | {"own": "4:cpu:/"} | NO_LIMIT, 8, 8, math.inf),
        ("01234567", EIGHT | {"own": "not a cgroup"}, 8, 8, math.inf),
    ],
)
def test_usable_cores_on_described_system_returns_performance_cores_within_quota(
    allowed: str,
    files: Mapping[str, str],
    physical: int,
    usable: int,
    quota: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, folder in (("SYSTEM", "devices"), ("CGROUPS", "cgroup"), ("OWN_CGROUPS", "own")):
        monkeypatch.setattr(cores, name, tmp_path / folder)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(map(int, allowed)))
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: None)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert (physical_cores(), usable_cores(), cpu_quota()) == (physical, usable, quota)


@pytest.mark.parametrize(("priority", "expected"), [(0, (1.5, 0.5, 3.0)), (5, (4.5, 0.5, 0.0)), (-5, (1.5, 0.5, 3.0))])
def test_read_cpu_seconds_separates_low_priority_time(
    monkeypatch: pytest.MonkeyPatch, priority: int, expected: tuple[float, ...]
) -> None:
    assert min(read_cpu_seconds()[:2]) > 0.0
    times = SimpleNamespace(user=1.25, system=0.5, irq=0.25, nice=3.0)
    monkeypatch.setattr(cores, "available_cpus", lambda: {1})
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: [SimpleNamespace(), times])
    monkeypatch.setattr(time, "process_time", lambda: 0.5)
    monkeypatch.setattr(os, "getpriority", lambda which, who: priority)
    assert read_cpu_seconds() == expected


class Clock:
    """Virtual clock of a machine on which other programs use `others` cores, and the next reads take `stops`."""

    def __init__(self, others: float) -> None:
        self.now, self.used, self.others, self.stops = 0.0, 0.0, others, list[float]()
        self.load = CpuLoad(self.read, lambda: self.now)

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.used += seconds * self.others

    def read(self) -> CpuSeconds:
        used = self.used
        self.wait(self.stops.pop(0) if self.stops else 0.0)
        return CpuSeconds(used)


@pytest.mark.parametrize("others", [0.0, 9.0])
@pytest.mark.parametrize("stops", [[0.5], [0.5, 0.5], [100.0, 0.5]])
def test_cpu_load_after_preempted_reads_stays_right(others: float, stops: list[float]) -> None:
    clock = Clock(others)
    for seconds in (0.2, 0.2, 3.0):
        clock.stops = [0.0, *stops]
        for _ in range(3):
            clock.wait(seconds)
            used = clock.load.sample()
            assert used is None or used.others >= 0.99 * others
            assert clock.load.is_quiet is (others == 0.0 and used is not None)
    for _ in range(2):  # the second one does not depend on the slow reads
        clock.wait(0.2)
        used = clock.load.sample()
    assert used == pytest.approx((others, 0.0, 0.0))


def test_cpu_load_without_two_recent_reads_is_unknown() -> None:
    clock = Clock(0.0)
    for seconds, is_quiet in ((0.15, False), (0.15, True), (0.15, True), (100.0, False), (0.15, False), (0.15, True)):
        clock.wait(seconds)
        assert clock.load.is_quiet is is_quiet
        assert (clock.load.sample() is not None) is is_quiet
