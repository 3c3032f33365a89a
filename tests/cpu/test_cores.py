"""Tests of the usable cores on systems described by files, and of their use by other programs."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from ngramspec.cpu import cores
from ngramspec.cpu.cores import (
    CpuLoad,
    CpuSeconds,
    cpu_quota,
    logical_cores,
    physical_cores,
    read_cpu_seconds,
    usable_cores,
)

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system has no CPU affinity")


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty description of a system whose process may run on 8 CPUs."""
    monkeypatch.setattr(cores, "SYSTEM", tmp_path / "devices")
    monkeypatch.setattr(cores, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(cores, "OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def describe_siblings(system: Path, *siblings: str) -> None:
    for number, text in enumerate(siblings):
        write(system / f"devices/system/cpu/cpu{number}/topology/thread_siblings_list", text)


def test_usable_cores_with_hyper_threads_counts_each_core_once(system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    describe_siblings(system, "0,2", "1,3", "0,2", "1,3", "4-5", "4-5")
    for allowed, expected in (({0, 1, 2, 3}, 2), ({0, 2}, 1), ({0, 1}, 2), ({3}, 1), ({0, 1, 2, 3, 4, 5}, 3)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, allowed=allowed: allowed)
        assert physical_cores() == usable_cores() == expected
        assert logical_cores() == len(allowed)


def test_usable_cores_on_intel_hybrid_excludes_efficiency_cores(system: Path) -> None:
    describe_siblings(system, "0-1", "0-1", "2-3", "2-3", "4", "5", "6", "7")
    write(system / "devices/cpu_core/cpus", "0-3")
    assert usable_cores() == 2
    assert physical_cores() == 6


def test_usable_cores_on_arm_excludes_little_cores(system: Path) -> None:
    describe_siblings(system, *map(str, range(8)))
    for number, capacity in enumerate((290, 290, 290, 290, 870, 870, 870, 1024)):
        write(system / f"devices/system/cpu/cpu{number}/cpu_capacity", str(capacity))
    assert usable_cores() == 4


def test_usable_cores_on_undescribed_system_returns_one(system: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.cpu_count", lambda logical=True: None)
    assert usable_cores() == physical_cores() == 1


@pytest.mark.parametrize(
    ("own", "files", "quota", "usable"),
    [
        ("0::/", {"cpu.max": "max 100000"}, math.inf, 8),
        ("0::/", {"cpu.max": "250000 100000"}, 2.5, 2),
        ("0::/a/b", {"a/cpu.max": "50000 100000", "a/b/cpu.max": "max 100000"}, 0.5, 1),
        ("0::/outside/the/container", {"cpu.max": "300000 100000"}, 3.0, 3),
        ("4:cpu,cpuacct:/c", {"cpu/c/cpu.cfs_quota_us": "400000", "cpu/c/cpu.cfs_period_us": "100000"}, 4.0, 4),
        ("4:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, math.inf, 8),
        ("not a cgroup", {}, math.inf, 8),
    ],
)
def test_usable_cores_with_quota_keeps_within_it(
    system: Path, own: str, files: dict[str, str], quota: float, usable: int
) -> None:
    describe_siblings(system, *map(str, range(8)))
    write(system / "own", own)
    for name, text in files.items():
        write(system / "cgroup" / name, text)
    assert cpu_quota() == quota
    assert usable_cores() == usable


@pytest.mark.parametrize(("priority", "expected"), [(0, (1.5, 0.5, 3.0)), (5, (4.5, 0.5, 0.0)), (-5, (1.5, 0.5, 3.0))])
def test_read_cpu_seconds_separates_low_priority_time(
    monkeypatch: pytest.MonkeyPatch, priority: int, expected: tuple[float, ...]
) -> None:
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
            cores = clock.load.sample()
            assert cores is None or cores.others >= 0.99 * others
            assert clock.load.is_quiet is (others == 0.0 and cores is not None)
    for _ in range(2):  # the second one does not depend on the slow reads
        clock.wait(0.2)
        cores = clock.load.sample()
    assert cores == pytest.approx((others, 0.0, 0.0))


def test_cpu_load_without_two_recent_reads_is_unknown() -> None:
    clock = Clock(0.0)
    for seconds, is_quiet in ((0.15, False), (0.15, True), (0.15, True), (100.0, False), (0.15, False), (0.15, True)):
        clock.wait(seconds)
        assert clock.load.is_quiet is is_quiet
        assert (clock.load.sample() is not None) is is_quiet


def test_read_cpu_seconds_of_this_machine_counts_all_programs() -> None:
    assert min(read_cpu_seconds()[:2]) > 0.0
