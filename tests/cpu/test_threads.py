"""Tests of the usable cores of described systems, their use by other programs, and the number of threads for both."""

from __future__ import annotations

import math
import os
import random
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from ngramspec.cpu import cores
from ngramspec.cpu.cores import CpuLoad, CpuSeconds, cpu_quota, physical_cores, read_cpu_seconds, usable_cores
from ngramspec.cpu.thread_governor import PROMPT, ThreadGovernor

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


# --------------------------------------------------------------------------- number of threads

CALL = 0.008  # seconds of a call over one token with all cores
BARRIER = 4.0  # factor on a call's time if a thread has to wait for the scheduler
STOP = 0.5  # seconds of a preempted read

CHANGING = random.Random(2).choices((0, 1, 2, 4), k=1000)  # numbers of ready threads of other programs

Load = Callable[[float], int]


class Machine:
    """Machine with a virtual clock, whose scheduler shares the cores fairly among threads that are always ready.

    `others` threads of other programs are ready at a time. The counters contain their CPU time (`is_shown`), or report
    it as time of low priority. A share of the reads of the counters is preempted.
    """

    def __init__(
        self, cores: int, others: Load, *, preempted: float = 0.0, is_shown: bool = True, **options: tuple[bool, bool]
    ) -> None:
        self.cores, self.others, self.preempted, self.is_shown = cores, others, preempted, is_shown
        self.low_priority, self.random, self.now, self.used = False, random.Random(1), 0.0, CpuSeconds(0.0)
        self.work = CALL  # a model with longer contexts has more
        self.waits = lambda size: BARRIER
        self.load = CpuLoad(self.read, lambda: self.now)
        self.governor = ThreadGovernor(cores, cores, load=self.load, cores=cores, **options)

    def read(self) -> CpuSeconds:
        is_preempted, is_before = self.random.random() < self.preempted, self.random.random() < 0.5
        self.wait(STOP * (is_preempted and is_before))
        used = self.used
        self.wait(STOP * (is_preempted and not is_before))
        return used

    def wait(self, seconds: float, threads: int = 0) -> None:
        share = min(1.0, self.cores / max(1, threads + self.others(self.now)))
        theirs, own = seconds * share * self.others(self.now) * self.is_shown, seconds * share * threads
        low = theirs * self.low_priority
        self.used = CpuSeconds(self.used.others + theirs - low, self.used.own + own, self.used.low + low)
        self.now += seconds

    def seconds(self, threads: int, size: int = 1) -> float:
        share = min(1.0, self.cores / (threads + self.others(self.now)))
        waits = self.waits(size) if threads > 1 and share < 1.0 else 1.0
        return self.work * size * self.cores / threads / share * waits

    def call(self, size: int = 1) -> int:
        threads = self.governor.begin_call(size)
        seconds = self.seconds(threads, size) * self.random.uniform(0.95, 1.1)
        self.wait(seconds, threads)
        self.governor.end_call(size, threads, seconds)
        return threads

    def speeds(self, seconds: float) -> dict[int, float]:
        """Return the speed relative to the best fixed number of threads, by the number of other threads."""
        best, actual, end = defaultdict[int, float](float), defaultdict[int, float](float), self.now + seconds
        while self.now < end:
            others = self.others(self.now)
            best[others] += min(map(self.seconds, range(1, self.cores + 1)))
            actual[others] += self.seconds(self.governor.begin_call(1))
            self.call()
        return {others: best[others] / actual[others] for others in actual}


@pytest.mark.parametrize("preempted", [0.0, 0.02])
@pytest.mark.parametrize("cores", [2, 8])
@pytest.mark.parametrize(
    ("others", "speed"),
    [
        (lambda _: 0, 0.998),
        (lambda _: 1, 0.99),
        (lambda _: 4, 0.99),
        (lambda now: CHANGING[int(now / 3)], 0.92),
        (lambda now: CHANGING[int(now / 30)], 0.95),
        (lambda now: 4 if now % 20 < 10 else 0, 0.92),  # a compiler
    ],
)
def test_thread_governor_approaches_best_fixed_number_at_each_load(
    others: Load, speed: float, cores: int, preempted: float
) -> None:
    machine = Machine(cores, others, preempted=preempted)
    other = ThreadGovernor(cores, cores, load=machine.load, cores=cores)
    speeds = machine.speeds(90.0)
    assert min(speeds.values()) >= speed, speeds
    assert machine.governor.begin_call(1) == other.begin_call(1), "governors that share a load all follow it"


@pytest.mark.parametrize(("is_busy", "first", "later"), [((False, True, False), 2, 2), ((True, False, True), 1, 1)])
def test_thread_governor_after_a_pause_begins_as_before_it(is_busy: tuple[bool, ...], first: int, later: int) -> None:
    """An agent that runs tests and then asks leaves the cores to the answer; the load during the pause is past."""
    machine = Machine(2, lambda now: 2 * is_busy[0 if now < 10 else 1 if now < 15 else 2])
    machine.speeds(10.0)
    machine.wait(15.01 - machine.now)
    assert machine.call(512) == first
    machine.speeds(1.0)
    assert machine.governor.begin_call(1) == later


@pytest.mark.parametrize("cores", [2, 8])
def test_thread_governor_finds_hidden_load_by_slow_calls(cores: int) -> None:
    machine = Machine(cores, lambda now: cores // 2 if 10 <= now < 60 else 0, is_shown=False)
    for seconds, threads, reason in ((9.9, cores, "idle"), (8.0, cores // 2, "cannot see"), (60.0, cores, "idle")):
        machine.speeds(seconds)
        assert machine.governor.state.threads == threads
        assert reason in machine.governor.state.reason


def test_thread_governor_with_longer_context_keeps_all_threads() -> None:
    machine = Machine(2, lambda _: 0)
    machine.speeds(5.0)
    machine.work *= 4
    assert machine.speeds(30.0)[0] >= 0.98
    assert machine.governor.state.reason == "the machine is idle"


def test_thread_governor_under_low_priority_load_starts_with_all_threads() -> None:
    machine = Machine(2, lambda _: 2)
    machine.low_priority = True
    assert {machine.call() for _ in range(100)} == {2}
    assert "other programs use" in machine.governor.state.reason


@pytest.mark.parametrize(
    ("begins", "is_shown", "adapts", "threads"),
    [
        # Without the counters, trials show that a second thread helps prompts, but not single tokens and drafts.
        (10, False, (True, True), (1, 1, 2)),
        (0, True, (True, False), (1, 2, 2)),
        (0, True, (False, False), (2, 2, 2)),
    ],
)
def test_thread_governor_adapts_threads_per_kind_of_call(
    begins: float, is_shown: bool, adapts: tuple[bool, bool], threads: tuple[int, ...]
) -> None:
    machine = Machine(2, lambda now: 2 if now >= begins else 0, is_shown=is_shown, adapts=adapts)
    machine.waits = lambda size: BARRIER if size < PROMPT else 1.0
    for _ in range(300):
        for size in (1, 4, 128):
            machine.call(size)
    assert machine.governor.state[:3] == threads == tuple(map(machine.call, (1, 4, 128)))
    assert (machine.governor.state.reason == "set by the user") is not any(adapts)
