"""`ThreadGovernor`: the number of threads of each decode call, according to the cores that other programs leave free.

llama.cpp's threads wait for each other many times in a decode call. If another program uses one of their cores, all of
them wait for the scheduler, and a call can take 50 times as long. One thread per free core avoids that.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

from ngramspec.cpu.cores import CpuLoad, CpuSeconds, logical_cores, process_load

PROMPT = 64  # minimum tokens of a call that reads a prompt; smaller ones verify drafts
MARGIN = 0.35  # share of a core that other programs may use before it counts as busy
HYSTERESIS = 0.15  # further share before the number changes
SLOW, MEMORY = 1.5, 60.0  # slow calls take this multiple of the fastest of their size in the last `MEMORY` seconds
CALLS = 3  # decode calls of a trial
BETTER = 0.95  # multiple of the time before a trial up to which it succeeds; from `SLOW` on it ends early
FIRST_PAUSE, LAST_PAUSE = 30, 240  # calls between trials; doubled by each trial that fails
PAST = 1.0  # seconds without a call after which the load since the last one does not show the present


class ThreadState(NamedTuple):
    """The present numbers of threads, for reports."""

    threads: int  # of a call over one token
    threads_batch: int  # of a call that verifies drafts
    threads_prompt: int  # of a call that reads a prompt
    other_cores: float | None  # number of cores that other programs use; `None` if unknown
    reason: str  # reason for these numbers


class _Choice:
    """The number of threads for one kind of call: a guess from the load, corrected by trials.

    Invariant: `number`, for the next call, differs from `home` only during a trial, and `home` from `guess` only after
    a trial that succeeded. `follow` sets all three when the load changes, and `record` alone starts and ends trials:
    if calls are slow, or if `home` is not the guess. So a number that has become wrong is tried again.
    """

    def __init__(self, maximum: int, adapts: bool) -> None:
        self.maximum, self.adapts = maximum, adapts
        self.follow(maximum)

    def follow(self, cores: int) -> None:
        """Use a thread per free core."""
        self.guess = self.home = self.number = min(self.maximum, cores) if self.adapts else self.maximum
        self._pause = self._wait = FIRST_PAUSE
        self._upwards = False  # direction of the next trial
        self._usual, self._calls = 1.0, deque[float](maxlen=CALLS)  # slowness before the trial, and of the last calls

    def record(self, slowness: float) -> None:
        """Take the time of a call as a multiple of the fastest of its size."""
        calls = self._calls
        calls.append(slowness)
        fastest = min(calls)  # the lower quartile of three
        if self.number == self.home:
            self._wait -= 1
            if self._wait >= 0 or len(calls) < CALLS or (fastest < SLOW and self.home == self.guess):
                return
            self._usual, self.number = fastest, self._neighbour()
        elif len(calls) < CALLS and fastest < SLOW * self._usual:
            return
        elif fastest <= BETTER * self._usual:
            self.home, self._wait, self._pause = self.number, 0, FIRST_PAUSE
        else:
            self.number, self._wait, self._pause = self.home, self._pause, min(LAST_PAUSE, 2 * self._pause)
            self._upwards = not self._upwards
        calls.clear()

    def _neighbour(self) -> int:
        """Return the number to try: half as many threads, because one busy core slows all, or a quarter more."""
        up, down = min(self.maximum, self.home + max(1, self.home // 4)), max(1, self.home // 2)
        return up if down == self.home or (self._upwards and up != self.home) else down


class ThreadGovernor:
    """The choice of the number of threads for each decode call of one model.

    On an idle machine, calls over one token have `threads`, and calls over more tokens `threads_batch`. `adapts` says
    which of both may change.
    """

    def __init__(
        self,
        threads: int,
        threads_batch: int,
        *,
        adapts: tuple[bool, bool] = (True, True),
        load: CpuLoad | None = None,  # by default that of all models of this process
        cores: int | None = None,  # number of logical cores; by default those that the system allows
    ) -> None:
        self.threads, self.adapts = threads, any(adapts)
        self._load = load or process_load()
        self._cores = self._free = cores or logical_cores()
        self._used: CpuSeconds | None = None  # load for which the numbers were chosen
        self._active, self._ended = 0, math.inf  # threads of the last call, and the time of its end
        single, batch = adapts
        self._choices = (_Choice(threads, single), _Choice(threads_batch, batch), _Choice(threads_batch, batch))
        self._fastest: dict[int, tuple[float, float]] = {}  # seconds of the fastest call by size, and its time

    def begin_call(self, size: int) -> int:
        load = self._load  # no further functions are called here and below, because every pass does this
        now = load.clock()
        if now >= load.due and now - self._ended > PAST:
            self._used = load.sample()  # programs often work before they ask, and then wait for the answer
        elif now >= load.due or load.latest is not self._used:
            self._follow_load()
        choice = self._choices[0 if size == 1 else 1 if size < PROMPT else 2]
        self._active = choice.home
        return choice.number

    def end_call(self, size: int, threads: int, seconds: float) -> None:
        """Record the time of a call; 0 if it is unknown."""
        self._ended = now = self._load.clock()
        choice = self._choices[0 if size == 1 else 1 if size < PROMPT else 2]
        if not seconds or threads != choice.number or not choice.adapts:
            return
        if size >= PROMPT:
            size, seconds = PROMPT, seconds / size * PROMPT
        fastest, at = self._fastest.get(size, (math.inf, 0.0))
        if seconds <= fastest or now - at > MEMORY:
            self._fastest[size] = seconds, now
        if fastest < math.inf:
            choice.record(max(1.0, seconds / fastest))

    @property
    def state(self) -> ThreadState:
        self._follow_load()
        used = None if self._used is None else min(self._cores, self._used.others + self._used.low)
        if not self.adapts:
            reason = "set by the user"
        elif used is None:
            reason = "the load by other programs is not known yet"
        elif used > CpuLoad.QUIET:
            reason = f"other programs use {used:.1f} of {self._cores} cores"
        elif all(choice.home == choice.guess for choice in self._choices):
            reason = "the machine is idle"
        else:
            reason = "something that this process cannot see slows decoding down"
        single, batch, prompt = (choice.home for choice in self._choices)
        return ThreadState(single, batch, prompt, used, reason)

    def _follow_load(self) -> None:
        """Begin again from a guess if the number of free cores changed.

        Cores of programs with low priority count as free, as these programs give way. If no core is idle, the other
        programs would use more: each of their threads gets as much as each of ours.
        """
        used = self._load.sample()
        if used is self._used:
            return
        self._used = used
        if used is not None:
            is_full = used.own + used.others > self._cores - 0.5
            wanted = used.others * max(1.0, self._active / max(0.1, used.own)) if is_full else used.others
            free = self._cores - wanted + MARGIN
            guess = min(self._cores, max(1, math.floor(free)))
            if guess != self._free and not self._free - HYSTERESIS <= free < self._free + 1 + HYSTERESIS:
                self._free = guess
                for choice in self._choices:
                    choice.follow(guess)
