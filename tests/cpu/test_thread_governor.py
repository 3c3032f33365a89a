"""Tests of the number of threads on a simulated machine with other programs that start and end."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable

import pytest

from ngramspec.cpu.cores import CpuLoad, CpuSeconds
from ngramspec.cpu.thread_governor import PROMPT, ThreadGovernor

CALL = 0.008  # seconds of a call over one token with all cores
BARRIER = 4.0  # factor on a call's time if a thread has to wait for the scheduler
STOP = 0.5  # seconds of a preempted read

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


def changing(period: float) -> Load:
    """Return a load of 0, 1, 2 or 4 threads that changes every `period` seconds."""
    loads = random.Random(2).choices((0, 1, 2, 4), k=1000)
    return lambda now: loads[int(now / period)]


@pytest.mark.parametrize("preempted", [0.0, 0.02])
@pytest.mark.parametrize("cores", [2, 8])
@pytest.mark.parametrize(
    ("others", "speed"),
    [
        (lambda _: 0, 0.998),
        (lambda _: 1, 0.99),
        (lambda _: 4, 0.99),
        (changing(3.0), 0.92),
        (changing(30.0), 0.95),
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
