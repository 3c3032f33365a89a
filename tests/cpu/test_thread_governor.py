"""Tests of the number of threads on a simulated machine with other programs that start and end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from ngramspec.cpu.cores import CpuLoad, CpuSeconds
from ngramspec.cpu.thread_governor import PROMPT, ThreadGovernor

CALL = 0.008  # seconds that one core works on a call over one token
BARRIER = 4.0  # factor on a call's time, per thread, if a thread has to wait for the scheduler


@dataclass
class Machine:
    """Machine whose scheduler shares the cores fairly among threads that are always ready."""

    cores: int = 2
    others: Callable[[float], float] = lambda _: 0.0  # number of ready threads of other programs at a time
    shows_others: bool = True  # True if the system reports their CPU time
    has_low_others: bool = False  # True if the system reports it as low priority
    gain: Callable[[int], float] = float  # speed of n threads with a core each
    now: float = 0.0
    used: CpuSeconds = field(default=CpuSeconds(0.0, 0.0))

    def governor(self, threads: int | None = None, **options: object) -> ThreadGovernor:
        load = CpuLoad(lambda: self.used, lambda: self.now, lambda: None)
        n = threads or self.cores
        return ThreadGovernor(n, n, load=load, cores=self.cores, **options)  # type: ignore[arg-type]

    def call_seconds(self, threads: int, size: int) -> float:
        others = self.others(self.now)
        share = min(1.0, self.cores / (threads + others))
        waits = BARRIER * threads if threads > 1 and share < 1.0 else 1.0
        return CALL * size / self.gain(threads) / share * waits

    def call(self, governor: ThreadGovernor, size: int = 1) -> int:
        threads = governor.begin_call(size)
        seconds = self.call_seconds(threads, size)
        self.pass_time(seconds, threads)
        governor.end_call(size, threads, seconds)
        return threads

    def pass_time(self, seconds: float, threads: int = 0) -> None:
        others = self.others(self.now)
        share = min(1.0, self.cores / max(1.0, threads + others))
        self.now += seconds
        own, theirs = threads * share * seconds, min(others * share, self.cores) * seconds * self.shows_others
        low = theirs if self.has_low_others else 0.0
        self.used = CpuSeconds(self.used.system + own + theirs - low, self.used.process + own, self.used.low + low)

    def rate(self, governor: ThreadGovernor, seconds: float) -> float:
        """Return the calls per second over some time."""
        end, began, calls = self.now + seconds, self.now, 0
        while self.now < end:
            self.call(governor)
            calls += 1
        return calls / (self.now - began)

    def best_rate(self) -> float:
        """Return the calls per second with the best fixed number of threads."""
        return max(1 / self.call_seconds(threads, 1) for threads in range(1, self.cores + 1))


def test_thread_governor_on_idle_machine_keeps_all_threads() -> None:
    machine = Machine()
    governor = machine.governor()
    assert {machine.call(governor) for _ in range(5000)} == {2}
    assert governor.is_quiet
    assert governor.state.reason == "the machine is idle"


@pytest.mark.parametrize(("cores", "others"), [(2, 1), (2, 2), (2, 4), (4, 1), (4, 2), (8, 3), (16, 5), (16, 40)])
def test_thread_governor_under_load_approaches_best_rate(cores: int, others: int) -> None:
    machine = Machine(cores, lambda _: others)
    governor = machine.governor()
    assert machine.rate(governor, 20.0) >= 0.9 * machine.best_rate()
    assert not governor.is_quiet
    assert governor.state.threads < cores
    assert "other programs use" in governor.state.reason


def test_thread_governor_under_low_priority_load_starts_with_all_threads() -> None:
    machine = Machine(others=lambda _: 2.0, has_low_others=True)
    governor = machine.governor()
    assert {machine.call(governor) for _ in range(3)} == {2}
    assert machine.rate(governor, 30.0) >= 0.85 * machine.best_rate()
    assert not governor.is_quiet
    assert governor.state.other_cores == pytest.approx(1.3, abs=0.4)
    assert "other programs use" in governor.state.reason


def test_thread_governor_follows_changing_load_within_a_second() -> None:
    machine = Machine(others=lambda now: 2.0 if now % 20 >= 10 else 0.0)
    governor = machine.governor()
    for _ in range(4):
        machine.rate(governor, 1.0)
        assert machine.rate(governor, 8.8) >= 0.95 * machine.best_rate()
        machine.pass_time(10 - machine.now % 10)


def test_thread_governor_corrects_low_guess_by_trials() -> None:
    # The system prefers our threads, so that others get only the remaining time.
    machine = Machine(4, lambda _: 0.0)

    def read() -> CpuSeconds:
        return CpuSeconds(machine.used.system + 2.0 * machine.now, machine.used.process)

    load = CpuLoad(read, lambda: machine.now, lambda: None)
    governor = ThreadGovernor(4, 4, load=load, cores=4)
    machine.rate(governor, 1.0)
    assert governor.state.threads < 4
    machine.rate(governor, 10.0)
    assert governor.state.threads == 4


def test_thread_governor_detects_hidden_load_by_slow_calls() -> None:
    machine = Machine(2, lambda now: 4.0 if 10 <= now < 60 else 0.0, shows_others=False)
    governor = machine.governor()
    machine.rate(governor, 10.0)
    machine.rate(governor, 5.0)
    assert governor.state.threads == 1
    assert not governor.is_quiet
    assert machine.rate(governor, 40.0) >= 0.85 * machine.best_rate()
    machine.now = 60.0
    machine.rate(governor, 20.0)
    assert machine.rate(governor, 10.0) >= 0.97 * machine.best_rate()
    assert governor.is_quiet


def test_thread_governor_with_longer_context_keeps_all_threads() -> None:
    machine = Machine()
    governor = machine.governor()
    machine.rate(governor, 5.0)
    machine.gain = lambda threads: threads / 4  # From here on, every call takes four times as long.
    machine.rate(governor, 5.0)
    assert machine.rate(governor, 20.0) >= 0.99 * machine.best_rate()
    assert governor.is_quiet
    assert governor.state.threads == 2


def test_thread_governor_adapts_threads_per_kind_of_call() -> None:
    # Under load, a second thread helps prompts, but not single tokens.
    machine = Machine(2, lambda _: 2.0)
    plain = machine.call_seconds
    machine.call_seconds = (  # type: ignore[method-assign]
        lambda threads, size: plain(threads, size) / (BARRIER * threads if threads > 1 and size >= PROMPT else 1.0)
    )
    governor = machine.governor()
    for _ in range(200):
        machine.call(governor)
        machine.call(governor, 4)
        machine.call(governor, 128)
    state = governor.state
    assert (state.threads, state.threads_batch, state.threads_prompt) == (1, 1, 2)


def test_thread_governor_trials_take_bounded_share_of_time() -> None:
    machine = Machine(2, lambda _: 4.0)
    governor = machine.governor()
    machine.rate(governor, 2.0)
    assert machine.rate(governor, 300.0) >= 0.96 * machine.best_rate()


def test_thread_governor_ends_hopeless_trial_after_one_call() -> None:
    machine = Machine(2, lambda _: 4.0)
    governor = machine.governor()
    machine.rate(governor, 1.0)
    numbers = [machine.call(governor) for _ in range(2000)]
    assert 2 in numbers
    assert (2, 2) not in pairwise(numbers)


def test_thread_governor_with_fixed_threads_never_changes_them() -> None:
    machine = Machine(2, lambda _: 4.0)
    governor = machine.governor(adapts=(False, False))
    assert {machine.call(governor, size) for size in (1, 4, 128) for _ in range(20)} == {2}
    assert governor.state.reason == "set by the user"
    assert not governor.adapts
    single = machine.governor(adapts=(True, False))
    for _ in range(20):
        machine.call(single)
        machine.call(single, 4)
    assert (single.state.threads, single.state.threads_batch) == (1, 2)


def test_thread_governor_starts_new_period_when_load_changes() -> None:
    machine = Machine(2, lambda now: 0.0 if now < 5 else 3.0)
    governor = machine.governor()
    machine.rate(governor, 4.9)
    before = governor.conditions.period
    machine.rate(governor, 2.0)
    assert governor.conditions.period > before
