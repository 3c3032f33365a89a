"""A simulated machine that knows what each pass costs, and a cost policy on it that sees only a clock."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from support.passes import make_step, propose

from ngramspec.cost.times import PassTimes
from ngramspec.drafting.draft import NO_DRAFT, Draft
from ngramspec.policies.cost import CostPolicy

SIZES = range(1, 65)
LEVEL = 0.01  # seconds of a plain pass


@dataclass
class Machine:
    """Real costs, in plain passes, and the time that a clock shows."""

    cost: Callable[[int], float]  # cost of a pass by its size; 1 for a plain one
    changes: tuple[float, float] = (0.0, 0.0)  # cost of a change of size for the two passes after it
    ask: float = 0.0  # cost of a call of the drafter
    restore: tuple[float, float] | None = None  # cost of a checkpoint, and of going back to it after a refusal
    noise: float = 0.0  # standard deviation of the logarithm of times
    interrupted: float = 0.0  # share of passes that last up to 50 times as long
    paused: float = 0.0  # share of the drafter's calls that last 20 plain passes longer
    load: bool = False  # whether all passes take two to five times as long, for a while at a time
    seed: int = 0

    def __post_init__(self) -> None:
        self.random, self._now, self._until, self._slowness = random.Random(self.seed), 0.0, 1.0, 1.0
        self._last, self._position = 1, 9  # size of the last pass, and passes of this size before it
        self.sizes = Counter[int]()  # number of passes by size

    def run(self, size: int) -> tuple[float, float]:
        """Return the seconds that a pass seems to take, and its true cost."""
        self._position = 0 if size != self._last else self._position + 1
        self._last = size
        self.sizes[size] += 1
        cost = self.cost(size) + (self.changes[self._position] if self._position < 2 else 0.0)
        if self.load and self._now >= self._until:
            self._slowness = self.random.uniform(2, 5) if self._slowness == 1.0 else 1.0
            self._until = self._now + self.random.expovariate(1.0)
        seconds = cost * LEVEL * self._slowness * math.exp(self.random.gauss(0, self.noise))
        if self.random.random() < self.interrupted:
            seconds *= math.exp(self.random.uniform(math.log(3), math.log(50)))
        self._now += seconds
        return seconds, cost

    def draft(self) -> float:
        """Return the cost that a call of the drafter seems to have."""
        return self.ask + (20 if self.paused and self.random.random() < self.paused else 0)


class Decoding:
    """Decoding by a cost policy. The times begin with the real costs, unless others are given."""

    def __init__(self, machine: Machine, times: PassTimes | None = None) -> None:
        self.machine, self.policy = machine, CostPolicy()
        self.times = times or PassTimes({n: machine.cost(n) for n in SIZES}, machine.changes)
        self.ends = [0.0]  # true time after each token, in plain passes
        self.passes = self.asked = self.drafted = 0
        self._owed = 0  # tokens that the next pass evaluates again

    def step(self, next_draft: Callable[[], tuple[Draft, int]]) -> int:
        """Make a pass, for which a draft and the number of its right tokens may be asked; return the emitted tokens."""
        machine, times, policy, draft, right = self.machine, self.times, self.policy, NO_DRAFT, 0
        overhead = charge = 0.0  # cost of drafting, and what the clock shows of it
        if limit := policy.limit():
            whole, right = next_draft()
            draft, overhead = propose(whole, limit, policy.price(times, SIZES)), machine.ask
            right = min(right, len(draft))
            charge = times.charge_drafting(machine.draft() * times.level)
        k, size = policy.plan(draft, times, SIZES, times.restore(self._owed) if machine.restore else None)
        size, kept = self._owed + size, min(k, right)
        if machine.restore:
            for is_load, is_due in ((False, k > 0 and not self._owed), (True, kept < k)):
                if is_due:
                    overhead += machine.restore[is_load]
                    charge += machine.restore[is_load]
                    times.observe_copy(machine.restore[is_load] * times.level, is_load=is_load)
            self._owed = self._owed + 1 + kept if kept < k else 0
        seconds, cost = machine.run(size)
        done = make_step(1 + kept, k, right, 0.0, charge)
        done.cost, done.correction, _ = times.observe(size, cost if times.is_fixed else seconds)
        policy.record(done)
        self.ends += [self.ends[-1] + (cost + overhead) * (j + 1) / (1 + kept) for j in range(1 + kept)]
        self.passes, self.asked, self.drafted = self.passes + 1, self.asked + (limit > 0), self.drafted + k
        return 1 + kept

    @property
    def speed(self) -> float:
        """Tokens per plain pass."""
        return (len(self.ends) - 1) / self.ends[-1]
