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
    count_running,
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


def test_cpu_load_follows_other_programs_within_a_second() -> None:
    now = system = process = 0.0
    load = CpuLoad(lambda: CpuSeconds(system, process), lambda: now, lambda: None)
    for others, expected in ((0.0, 0.0), (1.5, 1.5), (0.0, 0.0)):
        for _ in range(10):
            now += 0.11
            process += 0.22
            system += 0.22 + others * 0.11
            assert load.sample()
        assert load.cores == pytest.approx(expected, abs=0.05)
    assert not load.sample(), "too soon"


@pytest.mark.parametrize(("priority", "expected"), [(0, (2.0, 0.5, 3.0)), (5, (5.0, 0.5, 0.0)), (-5, (2.0, 0.5, 3.0))])
def test_read_cpu_seconds_separates_low_priority_time(
    monkeypatch: pytest.MonkeyPatch, priority: int, expected: tuple[float, ...]
) -> None:
    times = SimpleNamespace(user=1.25, system=0.5, irq=0.25, nice=3.0)
    monkeypatch.setattr(cores, "available_cpus", lambda: {1})
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: [SimpleNamespace(), times])
    monkeypatch.setattr(time, "process_time", lambda: 0.5)
    monkeypatch.setattr(os, "getpriority", lambda which, who: priority)
    assert read_cpu_seconds() == expected


def test_cpu_load_after_pause_counts_running_threads() -> None:
    now = system = 0.0
    counts = iter((0, 2, 9, 1))
    load = CpuLoad(lambda: CpuSeconds(system, 0.0), lambda: now, lambda: next(counts), count=4)
    for used, expected in ((10.0, 0.0), (0.4, 2.0), (20.0, 4.0), (0.0, 1.0)):
        now += 0.2
        system += used
        assert load.sample()
        assert load.cores == expected
    load.call_ended = now
    now += 0.11
    assert load.sample()
    assert load.cores == 0.0, "the first average replaces what the count suggested"


def test_cpu_load_after_slow_count_of_threads_soon_measures_again() -> None:
    now = 0.0

    def count_slowly() -> int:
        nonlocal now
        now += 0.05
        return 1

    load = CpuLoad(lambda: CpuSeconds(0.0, 0.0), lambda: now, count_slowly, count=4)
    now += 1.0
    assert load.sample()
    assert load.cores == 1.0
    load.call_ended = now
    now += CpuLoad.INTERVAL
    assert load.sample()
    assert load.cores == 0.0


def test_cpu_load_after_long_call_averages_its_time() -> None:
    now = system = 0.0
    load = CpuLoad(lambda: CpuSeconds(system, 0.0), lambda: now, lambda: 9, count=4)
    for _ in range(3):
        now += 5.0
        system += 7.5
        load.call_ended = now
        now += 0.01
        assert load.sample()
    assert load.cores == pytest.approx(1.5, abs=0.01)


def test_count_running_returns_minimum_of_several_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter((3, 1, 2, 1, 2, 0))
    monkeypatch.setattr(cores, "REPEAT_SECONDS", 0.0)
    monkeypatch.setattr(cores, "_count_running_once", lambda: next(counts))
    monkeypatch.setattr(cores, "logical_cores", lambda: os.cpu_count() or 1)
    assert count_running() == 1
    assert count_running() == 0
    monkeypatch.setattr(cores, "logical_cores", lambda: 0)
    assert count_running() is None, "some of them may run on other CPUs"


def test_cpu_load_of_this_machine_keeps_within_core_count() -> None:
    load = CpuLoad()
    while not load.sample():
        sum(range(10_000))
    assert 0 <= load.cores <= logical_cores() + 0.5
