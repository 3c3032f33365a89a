"""Number of threads of each decode call, according to the cores that other programs leave free (`ThreadGovernor`).

llama.cpp's threads wait for each other many times in a decode call. If another program uses one of their cores, all of
them wait for the scheduler, and a call can take 50 times as long. One thread per free core avoids that:

    threads = governor.begin_call(size)
    ...                                     # a decode call over `size` tokens with that many threads
    governor.end_call(size, threads, seconds)

The number depends on two measurements. The CPU time of other programs gives a first guess within a fraction of a
second. The time of decode calls corrects it: while other programs are active, a neighbouring number is tried for a few
calls from time to time, and the faster one is kept. Trials may lose only a small share of the time. On an idle machine
there are no trials.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from ngramspec.cpu.cores import CpuLoad, logical_cores, process_load

PROMPT = 64  # minimum tokens of a call that reads a prompt; smaller ones verify drafts

MARGIN = 0.3  # share of a core that other programs may use before the number of threads is reduced
HYSTERESIS = 0.15  # further share of a core before the number changes

EPISODE_CALLS, EPISODE_SECONDS = 3, 0.1
"""Size of one measurement of a number of threads: as many calls that take as long together, or fewer slow ones."""

BETTER = 0.95  # another number is used if it takes at most this share of the present number's time
HOPELESS = 2.0  # a trial ends early once it has lost the time of this many calls
TRIAL_SHARE = 0.02  # maximum share of the time that trials may lose
FIRST_TRIAL, LAST_TRIAL = 2.0, 60.0  # seconds of calls between trials; doubled by each trial that fails

UNSEEN = 2.5
"""Decode calls that take this many times as long as usual on an apparently idle machine may be slowed down by programs
whose CPU time the system does not report, such as those of other containers."""

DRIFT = 0.01  # weight of a slower call in what is usual: contexts grow, and processors throttle


class Conditions(NamedTuple):
    """Conditions that the time of a decode call depends on, besides the model and the batch size."""

    threads: int = 0  # CPU threads of a call over one token
    threads_batch: int = 0  # CPU threads of a call over more tokens
    period: int = 0  # counts changes of the load by other programs; times of two periods cannot be compared
    is_quiet: bool = True  # whether the machine is otherwise idle


FIXED_CONDITIONS = Conditions()  # of a context whose number of threads does not change


class ThreadState(NamedTuple):
    """The present numbers of threads, for reports."""

    threads: int  # threads of a call over one token
    threads_batch: int  # threads of a call that verifies drafts
    threads_prompt: int  # threads of a call that reads a prompt
    other_cores: float  # number of cores that other programs use
    reason: str  # reason for these numbers


@dataclass(slots=True)
class _Choice:
    """The number of threads for one kind of call."""

    maximum: int  # number of threads on an idle machine
    adapts: bool  # whether the number may change
    number: int = 0  # number of threads of the next call
    home: int = 0  # number of threads outside trials
    # Time of calls by number of threads, as a multiple of their usual time, since the load last changed.
    slowness: dict[int, float] = field(default_factory=dict)
    calls: int = 0  # number of calls in the present episode
    seconds: float = 0.0  # time of these calls
    usual: float = 0.0  # usual time of these calls
    upwards: bool = True  # direction of the next trial
    pause: float = FIRST_TRIAL  # time of calls between trials
    total_seconds: float = 0.0  # time of all calls
    next_trial: float = 0.0  # value of `total_seconds` at which the next trial starts

    def restart(self, number: int) -> None:
        """Use this number, and forget the times of calls."""
        self.number = self.home = number
        self.slowness.clear()
        self.upwards, self.pause, self.next_trial = True, FIRST_TRIAL, self.total_seconds + FIRST_TRIAL
        self.start_episode()

    def start_episode(self) -> None:
        self.calls, self.seconds, self.usual = 0, 0.0, 0.0

    @property
    def on_trial(self) -> bool:
        return self.number != self.home

    @property
    def loss(self) -> float:
        """Seconds by which the calls of the present trial took longer than with the number outside trials."""
        return self.seconds - self.slowness[self.home] * self.usual

    @property
    def has_measured(self) -> bool:
        """True if the present episode is long enough."""
        if self.on_trial and self.loss > HOPELESS * (self.seconds - self.loss) / self.calls:
            return True
        return self.seconds >= (EPISODE_SECONDS if self.calls >= EPISODE_CALLS else EPISODE_CALLS * EPISODE_SECONDS)

    def neighbour(self) -> int:
        """Return the number to try next; the present one if there is no other."""
        step = max(1, self.home // 4)
        for _ in range(2):
            number = min(self.maximum, self.home + step) if self.upwards else max(1, self.home - step)
            self.upwards = not self.upwards
            if number != self.home:
                break
        return number


class ThreadGovernor:
    """The choice of the number of threads for each decode call of one model.

    Args:
        threads: Threads for one token on an idle machine.
        threads_batch: Threads for more tokens on an idle machine.
        adapts: Whether the number for one token may change, and whether that for more tokens may.
        load: Load by other programs; `None` means the one that all models of this process share.
        cores: Number of logical cores that this process may use; `None` means the number that the system allows.
    """

    def __init__(
        self,
        threads: int,
        threads_batch: int,
        *,
        adapts: tuple[bool, bool] = (True, True),
        load: CpuLoad | None = None,
        cores: int | None = None,
    ) -> None:
        self.threads = threads  # threads for one token on an idle machine
        self._period = 0  # see `Conditions`
        self._load = load or process_load()
        self._cores = self._free = cores or logical_cores()
        self._is_unseen = False  # whether calls are slow although no other program appears to run
        self._usual: dict[int, float] = {}  # seconds of an undisturbed call by its size
        single, batch = adapts
        self._choices = (_Choice(threads, single), _Choice(threads_batch, batch), _Choice(threads_batch, batch))
        self._restart()
        self._follow_load()

    # ------------------------------------------------------------------ for each call

    def begin_call(self, size: int) -> int:
        """Return the number of threads for a call over `size` tokens."""
        load = self._load
        if load.clock() >= load.due and load.sample():
            self._follow_load()
        return self._choices[0 if size == 1 else 1 if size < PROMPT else 2].number

    def end_call(self, size: int = 0, threads: int = 0, seconds: float = 0.0) -> None:
        """Record that a call over `size` tokens has ended; `seconds` is 0 if the numbers do not depend on its time."""
        self._load.call_ended = self._load.clock()
        choice = self._choices[0 if size == 1 else 1 if size < PROMPT else 2]
        if not seconds or threads != choice.number or not choice.adapts:
            return
        if size >= PROMPT:
            size, seconds = PROMPT, seconds / size * PROMPT
        usual = min(seconds, self._usual.get(size, seconds))
        if usual < seconds < UNSEEN * usual and self.is_quiet:
            usual += DRIFT * (seconds - usual)
        self._usual[size] = usual
        choice.calls += 1
        choice.total_seconds += seconds
        choice.seconds += seconds
        choice.usual += usual
        # Few calls end an episode, so the whole condition is rarely evaluated.
        if (choice.seconds >= EPISODE_SECONDS or choice.number != choice.home) and choice.has_measured:
            self._end_episode(choice)
            self._set_conditions()

    @property
    def conditions(self) -> Conditions:
        """Conditions that the time of a call currently depends on."""
        load = self._load
        if load.clock() >= load.due and load.sample():
            self._follow_load()
        return self._conditions

    @property
    def is_quiet(self) -> bool:
        """True if the load by other programs is negligible, so that measured times are those of an idle machine."""
        return self._load.is_quiet and not self._is_unseen

    @property
    def adapts(self) -> bool:
        """True if a number may change."""
        return any(choice.adapts for choice in self._choices)

    @property
    def state(self) -> ThreadState:
        """Present numbers of threads, and the reason for them."""
        if not self.adapts:
            reason = "set by the user"
        elif self._is_unseen:
            reason = "something that this process cannot see slows decoding down"
        elif self.is_quiet:
            reason = "the machine is idle"
        else:
            reason = f"other programs use {self._load.total_cores:.1f} of {self._cores} cores"
        single, batch, prompt = (choice.home for choice in self._choices)
        return ThreadState(single, batch, prompt, self._load.total_cores, reason)

    # ------------------------------------------------------------------ decisions

    def _follow_load(self) -> None:
        """Begin again from a guess if the number of free cores changed.

        Cores of programs with low priority count as free, as these programs give way. Trials correct that.
        """
        free = self._cores - self._load.cores + MARGIN
        if self._load.is_quiet:
            guess = self._cores
        elif self._free - HYSTERESIS <= free < self._free + 1 + HYSTERESIS and self._free < self._cores:
            guess = self._free
        else:
            guess = min(self._cores, max(1, math.floor(free)))
        if guess != self._free:
            self._free, self._is_unseen = guess, False
            self._restart()
        self._set_conditions()

    def _set_conditions(self) -> None:
        single, batch, _ = self._choices
        self._conditions = Conditions(single.number, batch.number, self._period, self.is_quiet)

    def _restart(self) -> None:
        self._period += 1
        for choice in self._choices:
            choice.restart(min(choice.maximum, self._free) if choice.adapts else choice.maximum)

    def _end_episode(self, choice: _Choice) -> None:
        """Record the slowness of a number, use the fastest known one, and try another if a trial is due."""
        slowness = choice.seconds / choice.usual
        before = choice.slowness.get(choice.number)
        choice.slowness[choice.number] = slowness if before is None else (before + slowness) / 2
        if choice.on_trial:
            choice.pause = FIRST_TRIAL if self._is_unseen else min(LAST_TRIAL, 2 * choice.pause)
            choice.next_trial = choice.total_seconds + max(choice.pause, choice.loss / TRIAL_SHARE)
        best = min(choice.slowness, key=choice.slowness.__getitem__)
        if choice.slowness[best] <= BETTER * choice.slowness[choice.home]:
            choice.home, choice.pause = best, FIRST_TRIAL
            self._period += 1
        if self._load.is_quiet and choice is self._choices[0]:
            self._judge_unseen(choice)
        is_due = not self.is_quiet and choice.total_seconds >= choice.next_trial
        choice.number = choice.neighbour() if is_due else choice.home
        choice.start_episode()

    def _judge_unseen(self, choice: _Choice) -> None:
        """Decide whether something slows calls down although the machine appears to be idle."""
        is_slow = choice.slowness[choice.home] >= UNSEEN
        if is_slow and len(choice.slowness) > 1 and choice.home == choice.maximum:
            # Fewer threads are no faster, so this is the usual time now: the context is longer, for example.
            self._usual.clear()
            is_slow = False
        if is_slow != self._is_unseen and (is_slow or choice.home == choice.maximum):
            self._is_unseen = is_slow
            self._period += 1
            if not is_slow:
                choice.slowness.clear()
