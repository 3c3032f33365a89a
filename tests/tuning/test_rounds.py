"""Settings timed in turns on an invented machine: noise is not taken for a gain, and a gain is found."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import pytest

from ngramspec.tuning.candidates import DRAFTS, READING, SINGLE, Candidate, Measure
from ngramspec.tuning.settings import Settings
from ngramspec.tuning.tuning import FALSE_ALARMS, Rounds, compare, rounds_needed, sign_chance

PRESENT = Settings(4, 4)
OTHERS = {str(n): Candidate("threads", {"threads": n}, (SINGLE, *DRAFTS)) for n in (1, 2, 3, 6, 8)}


@dataclass
class Machine:
    """Times with noise; `faster` has what some settings take of the usual time."""

    seed: int
    noise: float = 0.05
    faster: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def seconds(self, settings: Settings, measure: Measure) -> float:
        return self.faster.get(settings.threads, 1.0) * self.random.lognormvariate(0, self.noise)


def measured(machine: Machine, count: int = 10) -> Rounds:
    rounds = Rounds(machine.seconds, PRESENT, OTHERS)
    for _ in range(count):
        list(rounds.run())
    return rounds


def gaining(rounds: Rounds) -> list[str]:
    return [name for name, c in rounds.compared().items() if c.gains(len(rounds.candidates))]


@pytest.mark.parametrize("noise", [0.1, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (0.03, 0.4))])
def test_noise_alone_is_no_gain(noise: float) -> None:
    alarms = sum(bool(gaining(measured(Machine(seed, noise)))) for seed in range(400))
    # As many as are promised, and three standard deviations more.
    assert alarms <= 400 * FALSE_ALARMS + 3 * math.sqrt(400 * FALSE_ALARMS * (1 - FALSE_ALARMS))


@pytest.mark.parametrize("slowed", [1.0, pytest.param(0.0, marks=pytest.mark.exhaustive)])
def test_a_true_gain_is_found(slowed: float) -> None:
    found = 0
    for seed in range(100):
        machine = Machine(seed, 0.03)
        rounds = Rounds(machine.seconds, PRESENT, OTHERS)
        for number in range(10):
            # The machine takes longer from round to round, and that hits all alike.
            machine.faster = {n: (1 + slowed * number) * (0.9 if n == 2 else 1) for n in (1, 2, 3, 4, 6, 8)}
            list(rounds.run())
        found += gaining(rounds) == ["2"]
    assert found >= 95


def test_too_few_rounds_and_a_gain_too_small_prove_nothing() -> None:
    machine = Machine(1, 0.0001, {2: 0.5})
    assert gaining(measured(machine, rounds_needed(len(OTHERS)) - 1)) == []
    assert gaining(measured(machine, rounds_needed(len(OTHERS)))) == ["2"]
    assert gaining(measured(Machine(1, 0.001, {2: 0.98}))) == []


def test_what_makes_something_slower_is_a_trade() -> None:
    present = [{SINGLE: 1.0, READING: 0.10}] * 10
    other = [{SINGLE: 0.5, READING: 0.12}] * 10
    found = compare(present, other)
    assert found.ratio == pytest.approx((128 * 0.5 + 1000 * 0.12) / (128 + 1000 * 0.1))
    assert (found.faster, found.slower) == ((SINGLE,), (READING,))
    assert found.each == {SINGLE: 0.5, READING: pytest.approx(1.2)}
    assert not found.gains(1)


def test_every_round_times_each_setting_once_and_begins_elsewhere() -> None:
    rounds = Rounds(Machine(1).seconds, PRESENT, OTHERS)
    orders = [list(rounds.run()) for _ in range(12)]
    assert all(sorted(order) == sorted(["", *OTHERS]) for order in orders)
    assert {order[0] for order in orders} == {"", *OTHERS}
    before = {(order[i - 1], order[i]) for order in orders for i in range(1, len(order)) if order[i] == "1"}
    assert before == {("", "1"), ("2", "1")}
    assert {len(times) for times in rounds.times.values()} == {len(rounds)} == {12}


def test_a_round_that_is_broken_off_counts_for_nothing() -> None:
    rounds = Rounds(Machine(1).seconds, PRESENT, OTHERS)
    assert rounds.compared() == {}
    list(rounds.run())
    broken = rounds.run()
    for _ in range(3):
        next(broken)
    broken.close()
    assert {len(times) for times in rounds.times.values()} == {len(rounds)} == {1}
    assert {c.rounds for c in rounds.compared().values()} == {1}


def test_only_what_a_candidate_may_change_is_compared() -> None:
    rounds = Rounds(Machine(1).seconds, PRESENT, {"one": Candidate("threads", {"threads": 1}, (SINGLE,))})
    list(rounds.run())
    assert set(rounds.times[""][0]) == {SINGLE}


def test_chances() -> None:
    faster, slower = [0.9], [1.1]
    assert sign_chance(slower * 5) == 1
    assert sign_chance(faster * 5) == 1 / 32
    assert sign_chance(faster * 4 + slower) == 6 / 32
    assert all(sign_chance(faster * rounds_needed(k)) <= FALSE_ALARMS / k for k in range(1, 20))
    same = {SINGLE: 1.0}
    assert compare([same], [{SINGLE: 3.0}]).spread == 0
    assert compare([same] * 5, [{SINGLE: n} for n in (1.0, 2.0, 3.0, 4.0, 5.0)]).spread == 2.0
