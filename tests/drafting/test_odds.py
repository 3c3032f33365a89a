"""`ChanceMixer`: what it learns of sources with known rates, compiled and as plain Python.

The sources here are synthetic and their seeds fixed, so every figure is the same in every run.
"""

from __future__ import annotations

import math
import random
from types import ModuleType
from typing import Any

import pytest
from support.uncompiled import plain_modules

from ngramspec.drafting.mixture import odds

PLAIN = plain_modules()["odds"]
BOTH = pytest.mark.parametrize("module", [odds, PLAIN], ids=["installed", "plain"])

SOURCES, EXPERTS, BIASES, STATES, ABSENT = 8, 4, 13, 128, -1
FREE_ROOM = 1 << 12
ROOM = FREE_ROOM + (1 << 17) + (1 << 18)


def made(module: ModuleType, cells: int = 4, sets: tuple[int, ...] = (3, 2, 2, 2, 2)) -> Any:
    """No source sees anything, and every fact of every cell has a place of its own."""
    made_ = module.ChanceMixer(cells, sets)
    for i in range(cells * SOURCES):
        made_.states[i] = ABSENT
    for i in range(cells * BIASES):
        made_.facts[i] = i
    return made_


def expect(o: Any, source: int, state: int, p: float) -> None:
    """Have a state start from a probability."""
    learnt = o.shared()
    learnt["rate"][source * STATES + state] = p
    learnt["odds"][source * STATES + state] = math.log(p / (1 - p))


@BOTH
@pytest.mark.parametrize("rate", [0.0, 0.03, 0.5, 0.9, 1.0])
def test_it_finds_the_rate_of_a_state(module: ModuleType, rate: float) -> None:
    rng = random.Random(0)
    o = made(module)
    o.states[2] = 17
    seen = []
    for _ in range(4000):
        seen.append(o.judge(0))
        o.learn(0, rng.random() < rate)
    assert sum(seen[-1000:]) / 1000 == pytest.approx(rate, abs=0.03)


@BOTH
def test_a_state_starts_where_it_was_told_to(module: ModuleType) -> None:
    o = made(module)
    o.states[3] = 5
    chances = []
    for p in (0.1, 0.5, 0.9):
        expect(o, 3, 5, p)
        chances.append(o.judge(0))
    # One source of weight a quarter says the same less firmly.
    assert chances[0] < chances[1] < chances[2]
    assert chances[1] == pytest.approx(0.5, abs=0.05)
    assert o.p[0] == chances[2]


@BOTH
def test_it_follows_a_change(module: ModuleType) -> None:
    o = made(module)
    o.states[0] = 1
    for _ in range(3000):
        o.judge(0)
        o.learn(0, True)
    assert o.judge(0) > 0.97
    for _ in range(300):
        o.judge(0)
        o.learn(0, False)
    assert o.judge(0) < 0.1


@BOTH
def test_cells_and_states_keep_to_themselves(module: ModuleType) -> None:
    o = made(module)
    o.states[0] = 1
    o.states[SOURCES] = 2
    for i in range(EXPERTS + 1):
        o.views[EXPERTS + 1 + i] = 1
    before = o.judge(1)
    for _ in range(500):
        o.judge(0)
        o.learn(0, False)
    assert o.judge(1) == before  # other state, other weights, other facts
    assert o.judge(0) < 0.05
    o.states[SOURCES] = 1
    assert o.judge(1) < before


@BOTH
def test_an_absent_source_says_nothing(module: ModuleType) -> None:
    o = made(module)
    o.states[0] = 1
    expect(o, 0, 1, 0.8)
    alone = o.judge(0)
    for i in range(1, SOURCES):
        for state in range(STATES):
            expect(o, i, state, 0.01)
    assert o.judge(0) == alone
    o.states[1] = 0
    assert o.judge(0) < alone


@BOTH
def test_a_fact_tells_two_guesses_apart(module: ModuleType) -> None:
    rng = random.Random(2)
    o = made(module, cells=2)
    shared = [o.facts[i] for i in range(BIASES)]
    for i, fact in enumerate(shared):
        o.facts[BIASES + i] = fact
    o.facts[4], o.facts[BIASES + 4] = ROOM - 2, ROOM - 1
    for cell in range(2):
        o.states[cell * SOURCES] = 1
    for _ in range(3000):
        for cell, rate in ((0, 0.9), (1, 0.1)):
            o.judge(cell)
            o.learn(cell, rng.random() < rate)
    assert o.judge(0) == pytest.approx(0.9, abs=0.06)
    assert o.judge(1) == pytest.approx(0.1, abs=0.06)


def mixed(module: ModuleType, count: int, seed: int) -> list[tuple[float, bool, float, float]]:
    """(judged, right, by the first source alone, by the second alone) of guesses on which two sources have a word.

    The odds of a guess are those of its two states multiplied, which is what the mixture can express.
    """
    rng = random.Random(seed)
    o = made(module, cells=1)
    first, second = [-2.0, -0.5, 0.7, 2.0], [-1.5, 0.0, 2.5]
    out = []
    for _ in range(count):
        a, b = rng.randrange(4), rng.randrange(3)
        o.states[0], o.states[6] = 10 + a, 100 + b
        o.views[0], o.views[1], o.views[4] = rng.randrange(3), rng.randrange(2), rng.randrange(2)
        right = rng.random() < 1 / (1 + math.exp(-first[a] - second[b]))
        out.append((o.judge(0), right, 1 / (1 + math.exp(-first[a])), 1 / (1 + math.exp(-second[b]))))
        o.learn(0, right)
    return out


def cost(chances: list[float], outcomes: list[bool]) -> float:
    """Bits per outcome."""
    return -sum(math.log2(p if y else 1 - p) for p, y in zip(chances, outcomes, strict=True)) / len(outcomes)


@BOTH
def test_it_is_calibrated_and_better_than_each_source(module: ModuleType) -> None:
    count = 20_000
    late = mixed(module, 2 * count, seed=3)[count:]
    outcomes = [right for _, right, _, _ in late]
    bins: dict[int, list[tuple[float, bool]]] = {}
    for p, right, _, _ in late:
        bins.setdefault(int(p * 10), []).append((p, right))
    error = sum(abs(sum(p - right for p, right in inside)) for inside in bins.values()) / count
    assert len(bins) > 7
    assert error < 0.02
    whole = cost([p for p, *_ in late], outcomes)
    singles = []
    for which in (2, 3):
        # What a source says, at its true rate.
        rates: dict[float, list[bool]] = {}
        for row in late:
            rates.setdefault(row[which], []).append(row[1])
        singles.append(cost([sum(rates[row[which]]) / len(rates[row[which]]) for row in late], outcomes))
    assert whole < min(singles) - 0.05


@BOTH
def test_probabilities_stay_probabilities(module: ModuleType) -> None:
    rng = random.Random(4)
    o = made(module, cells=3)
    for step in range(6000):
        for cell in range(3):
            for i in range(SOURCES):
                o.states[cell * SOURCES + i] = rng.choice((ABSENT, 0, STATES - 1))
            for i in range(BIASES):
                o.facts[cell * BIASES + i] = rng.choice((0, ROOM - 1))  # all the facts may be one
            for i in range(EXPERTS + 1):
                o.views[cell * (EXPERTS + 1) + i] = rng.randrange(2)
            assert 0 < o.judge(cell) < 1
            o.learn(cell, step < 3000)


@BOTH
def test_each_expert_learns_from_its_own_error(module: ModuleType) -> None:
    """Weights go on learning where facts already explain what comes: guesses with other facts gain by it."""
    o = made(module)
    o.states[0] = o.states[SOURCES] = 1
    for i in range(BIASES):
        o.facts[BIASES + i] = 100 + i
    for _ in range(2000):
        o.judge(0)
        o.learn(0, True)
    # The state's rate is at its highest by then, and its weight of a quarter alone would make that 0.83.
    assert o.judge(1) > 0.95


@BOTH
def test_mixers_beside_each_other_learn_together_about_tokens_alone(module: ModuleType) -> None:
    first, stranger = made(module), made(module)
    second = first.beside()
    for o in (first, second, stranger):
        for i in range(SOURCES):
            o.states[i] = i
        for i in range(BIASES):
            o.facts[i] = i if i < BIASES // 2 else FREE_ROOM + i
        for i in range(EXPERTS + 1):
            o.views[i] = 1
        o.judge(0)
    for _ in range(50):
        first.judge(0)
        first.learn(0, True)
    for name, array in first.about_tokens().items():
        assert array == second.about_tokens()[name] != stranger.about_tokens()[name], name
    for name, array in first.shared().items():
        assert array != second.shared()[name] == stranger.shared()[name], name
    assert first.judge(0) > second.judge(0) > stranger.judge(0)
    before = first.judge(0)
    second.learn(0, False)
    assert first.judge(0) < before


@BOTH
def test_weights_chosen_by_a_token_are_told_from_the_others(module: ModuleType) -> None:
    o = made(module, cells=1, sets=(3, 2, 4, 2, 2))
    o.states[0] = 1
    for i in range(EXPERTS):
        o.views[i] = 1
    expect(o, 0, 1, 0.9)
    o.judge(0)
    o.learn(0, True)
    row = SOURCES + 1
    shared, about = o.shared(), o.about_tokens()
    moved = [
        [at // row for at, weight in enumerate(weights) if weight != 0.25]
        for weights in (shared["first_weights"], about["weights"], shared["last_weights"])
    ]
    assert [len(shared["first_weights"]), len(about["weights"]), len(shared["last_weights"])] == [
        5 * row,
        4 * row,
        2 * row,
    ]
    # The state and the constant, of the set that each expert's view chose.
    assert moved == [[1, 1, 4, 4], [1, 1], [1, 1]]


def test_compiled_and_plain_agree() -> None:
    one, other = (mixed(module, 3000, seed=5) for module in (odds, PLAIN))
    # A compiler may fuse a multiplication with an addition, which rounds once less.
    assert [row[0] for row in one] == pytest.approx([row[0] for row in other], rel=1e-9)
