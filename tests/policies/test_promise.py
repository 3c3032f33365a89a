"""The promise: no past can make the choice of draft lengths wrong for long, and no clock needs to be trusted.

A simulated machine knows what each pass really costs. The policy sees noisy times, after a past that was drawn at
random: a stored file whose costs are up to 40 times too high or too low, jagged, with invented costs of changes of
size, and up to 300 passes of any duration from 0.1 ms to 100 s. Its speed is compared with that of the same policy on
known costs, and with plain decoding. The score is counted without noise and load, so that luck does not decide.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import cycle, pairwise
from statistics import fmean
from typing import NamedTuple

import pytest
from support.grid import grid
from support.passes import make_step, propose
from support.recordings import make_recordings

from ngramspec.cost.fixed_curves import CURVES, make_fixed_curve
from ngramspec.cost.times import PassTimes
from ngramspec.drafting.draft import NO_DRAFT, Draft, MarginalCost
from ngramspec.drafting.mixture.drafter import MixtureDrafter
from ngramspec.policies.cost import CostPolicy

SIZES = range(1, 65)
LEVEL = 0.01  # seconds of a plain pass
PART = 1000  # passes; the promise holds after the first ones
WINDOW = 256  # tokens


class Position(NamedTuple):
    """A place in a text: the longest draft there, and how many of its tokens are right."""

    draft: Draft
    right: int


@cache
def read_texts() -> list[list[Position]]:
    """Return the drafts of the real drafter at each position of recordings, half of which repeat much."""
    drafter, price, texts = MixtureDrafter(), MarginalCost(1.0, [0.02] * 65), []
    for recording in make_recordings(60, vocabulary=60):
        answer = recording.response
        drafter.begin(recording.prompt)
        drafter.accept(answer[:1])
        positions = []
        for i in range(1, len(answer)):
            draft = drafter.propose(63, price=price)
            right = 0
            while right < min(len(draft), len(answer) - i) and draft.tokens[right] == answer[i + right]:
                right += 1
            positions.append(Position(draft, right))
            drafter.accept(answer[i : i + 1])
        texts.append(positions)
    return texts


@dataclass
class Machine:
    """Real costs of passes, in plain passes, and the time that a clock shows."""

    curve: str
    seed: int = 0
    noise: float = 0.05  # standard deviation of the logarithm of times
    interrupted: float = 0.0  # share of passes that last up to 50 times as long
    load: bool = False  # whether all passes take two to five times as long, for a while at a time
    changes: tuple[float, float] = (0.0, 0.0)  # cost of a change of size for the two passes after it
    _last: tuple[int, int] = field(default=(1, 9), init=False)  # size of the last pass, and passes of this size

    def __post_init__(self) -> None:
        known = make_fixed_curve(CURVES[self.curve][0])
        self.ratios = {n: known.ratio(n) for n in SIZES}
        self.random, self._now, self._until, self._slowness = random.Random(self.seed), 0.0, 1.0, 1.0

    def run(self, size: int) -> tuple[float, float]:
        """Return the seconds that a pass seems to take, and its true cost."""
        last, count = self._last
        self._last = (size, 0 if size != last else count + 1)
        cost = self.ratios[size] + (self.changes[self._last[1]] if self._last[1] < 2 else 0.0)
        if self.load and self._now >= self._until:
            self._slowness = self.random.uniform(2, 5) if self._slowness == 1.0 else 1.0
            self._until = self._now + self.random.expovariate(1.0)
        seconds = cost * LEVEL * self._slowness * math.exp(self.random.gauss(0, self.noise))
        if self.random.random() < self.interrupted:
            seconds *= math.exp(self.random.uniform(math.log(3), math.log(50)))
        self._now += seconds
        return seconds, cost


class Run(NamedTuple):
    """The result of `decode`."""

    ends: list[float]  # true time after each token, in plain passes
    marks: list[int]  # number of tokens after each `PART` passes


def decode(machine: Machine, times: PassTimes, passes: int, tokens: int = 1 << 30) -> Run:
    """Decode texts until this number of passes, or of tokens."""
    policy, ends, marks, done = CostPolicy(), [0.0], [0], 0
    for text in cycle(read_texts()):
        policy.begin()
        i = 0
        while i < len(text):
            draft, right = NO_DRAFT, 0
            if limit := policy.limit():
                draft = propose(text[i].draft, limit, policy.price(times, SIZES))
                right = min(text[i].right, len(draft))
            k, size = policy.plan(draft, times, SIZES)
            kept = min(k, right)
            seconds, cost = machine.run(size)
            charge = times.observe(size, cost if times.is_fixed else seconds)
            step = make_step(1 + kept, k, right, charge.cost, 0.0)
            step.correction = charge.correction
            policy.record(step)
            ends += [ends[-1] + cost * (j + 1) / (1 + kept) for j in range(1 + kept)]
            i, done = i + 1 + kept, done + 1
            if done % PART == 0:
                marks.append(len(ends) - 1)
            if done >= passes or len(ends) > tokens:
                return Run(ends, marks)
    raise AssertionError


@cache
def know(curve: str, changes: tuple[float, float] = (0.0, 0.0)) -> list[float]:
    """Return the ends of tokens if all costs are known."""
    machine = Machine(curve, changes=changes)
    return decode(machine, PassTimes(machine.ratios, changes, is_fixed=True), 1 << 30, 30_000).ends


def compare(machine: Machine, run: Run) -> list[float]:
    """Return the speed of each `PART` passes, relative to known costs."""
    known, ends = know(machine.curve, machine.changes), run.ends
    return [(known[b] - known[a]) / (ends[b] - ends[a]) for a, b in pairwise(run.marks)]


def make_past(machine: Machine) -> PassTimes:
    """Return times after a random past."""
    rng = machine.random
    factor = math.exp(rng.uniform(-math.log(40), math.log(40)))
    prior = {n: max(1.0, 1 + factor * (cost - 1) * rng.uniform(0.5, 1.5)) for n, cost in machine.ratios.items()}
    change = [rng.choice((0.0, 0.0, rng.uniform(0, 5))) for _ in range(2)]
    times = PassTimes(prior, (change[0], change[1]))
    for _ in range(rng.randrange(300)):
        times.observe(rng.choice((1, 1, 1, 2, 3, 5, 8, 16, 30, 64)), 10 ** rng.uniform(-4, 2))
    return times


def slowest(ends: Sequence[float]) -> float:
    """Return the lowest speed of `WINDOW` tokens after the first ones, relative to plain decoding."""
    return min(WINDOW / (ends[i + WINDOW] - ends[i]) for i in range(WINDOW, len(ends) - WINDOW))


@pytest.mark.parametrize(
    ("curve", "pasts", "passes"),
    [
        ("cuda-4090-8b-q4_0", 3, 2 * PART),
        *(
            pytest.param(curve, 10, 5 * PART, marks=pytest.mark.exhaustive)
            for curve in ("cpu-1.5b-q4_0", "moe-mlx", "cuda-4090-8b-q4_0", "cuda-34b-q8_0")
        ),
    ],
)
def test_after_any_past_speed_is_near_that_of_known_costs(curve: str, pasts: int, passes: int) -> None:
    ratios = []
    for seed in range(pasts):
        machine = Machine(curve, seed)
        run = decode(machine, make_past(machine), passes)
        ratios.append(compare(machine, run))
        assert slowest(run.ends) > 0.95
    for number, part in enumerate(list(zip(*ratios, strict=True))[1:]):
        assert fmean(part) > (0.95 if number else 0.92)
        assert min(part) > 0.8


DISTURBANCES = {
    "noise": {"noise": 0.15},
    "interruptions": {"interrupted": 0.1},
    "load": {"load": True},
    "all": {"noise": 0.1, "interrupted": 0.05, "load": True},
}


@grid(disturbance=DISTURBANCES, curve=("moe-mlx", "cpu-1.5b-q4_0", "cuda-34b-q8_0", "cuda-4090-8b-q4_0"))
def test_whatever_disturbs_speed_is_near_that_of_known_costs(disturbance: str, curve: str) -> None:
    machine = Machine(curve, **DISTURBANCES[disturbance])  # type: ignore[arg-type]
    run = decode(machine, PassTimes(), 3 * PART)
    assert fmean(compare(machine, run)[1:]) > 0.85
    assert slowest(run.ends) > 0.95


@grid(switch=(0.0, 0.3, 1.0), curve=("cpu-1.5b-q4_0", "cuda-34b-q8_0", "cuda-4090-8b-q4_0"))
def test_cost_of_changes_of_size_is_learned(switch: float, curve: str) -> None:
    """Nothing is known at first. What is never learned must not matter."""
    machine, times = Machine(curve, changes=(switch, 0.0)), PassTimes()
    run = decode(machine, times, 4 * PART)
    speed = fmean(compare(machine, run)[1:])
    assert times.change == pytest.approx(switch, abs=0.2) or speed > 0.95
    assert speed > 0.8
