"""Tests of the comparison of quantisations on an imagined machine: scaling, order of passes, and conclusions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from ngramspec.cost.fixed_curves import find_curves, make_fixed_curve
from ngramspec.quants.costs import (
    MAX_ROUNDS,
    MIN_ROUNDS,
    RUN,
    SIZES,
    QuantCost,
    QuantTiming,
    advise,
    keep_costs,
    load_costs,
    recommend,
    typical_gain,
)
from ngramspec.quants.models import PROMPT, SyntheticModels

LAYERS, TIMED = 28, 4
LAYER: Mapping[str, float] = {"Q4_0": 0.001, "Q4_1": 0.002, "Q8_0": 0.003}  # seconds of a layer in a one-token pass
OUTPUT: Mapping[str, float] = {"wide": 0.010, "wider": 0.015}  # the same of an output layer
FILES = {
    "Q8_0": (800, "wider"),
    "Q4_0": (400, "wide"),
    "Q4_1": (450, "wide"),
}


class Machine:
    """Machine whose passes take a time by model and size; noise only adds to it."""

    files, outputs, layers = FILES, {"wide": "Q4_0", "wider": "Q8_0"}, TIMED

    def __init__(self) -> None:
        self.now, self.calls = 0.0, list[tuple[str, int]]()

    def clock(self) -> float:
        return self.now

    def seconds(self, name: str, size: int) -> float:
        self.calls.append((name, size))
        noise = 1.5 if len(self.calls) % 7 == 0 else 1.0
        layers = TIMED if name in LAYER else 1
        own = self.outputs.get(name, name)
        took = noise * growth(size) * (layers * LAYER[own] + OUTPUT.get(name, 0.0))
        self.now += took
        return took

    def timing(self, deadline: float) -> QuantTiming:
        return QuantTiming(cast("SyntheticModels", self), LAYERS, deadline, self.clock)


def growth(size: int) -> float:
    return 1 + 0.2 * (size - 1)


def test_costs_are_those_of_the_whole_model() -> None:
    timing = Machine().timing(1e9)
    list(timing.run())
    costs = timing.costs()
    assert [cost.name for cost in costs] == ["Q4_0", "Q4_1", "Q8_0"], "ordered by size"
    for cost in costs:
        single = LAYERS * LAYER[cost.name] + OUTPUT[FILES[cost.name][1]]
        assert cost.size_bytes == FILES[cost.name][0]
        assert cost.seconds == pytest.approx({size: growth(size) * single for size in SIZES})
        prompt = LAYERS * LAYER[cost.name] * growth(PROMPT) + OUTPUT[FILES[cost.name][1]]
        assert cost.prompt_seconds == pytest.approx(prompt / PROMPT)
        assert cost.steepness == pytest.approx(growth(4))
        assert cost.draft_speed == pytest.approx(cost.gain / cost.seconds[1])
    assert timing.spread < 0.5, "a median is not affected by one slow pass in seven"


def test_models_take_turns_and_the_time_limit_ends_the_rounds() -> None:
    machine = Machine()
    timing = machine.timing(1e9)
    list(timing.run())
    assert timing.rounds == MAX_ROUNDS
    models, passes = 5, len(SIZES) * RUN
    calls = machine.calls[: models * passes]
    for start in range(0, len(calls), models):
        assert len({name for name, _ in calls[start : start + models]}) == models
        assert len({size for _, size in calls[start : start + models]}) == 1
    counts = Counter(machine.calls)
    assert counts["wide", 4] == counts["Q4_1", 4] == MAX_ROUNDS * RUN
    assert (counts["Q4_1", PROMPT], counts["wide", PROMPT]) == (MAX_ROUNDS, 0)
    assert len(timing.times["Q4_0", 4]) == MAX_ROUNDS * (RUN - 1), "the first pass of a size does not count"
    short = Machine().timing(0.0)
    steps = short.run()
    assert next(steps) == "T(1)"
    assert short.costs() == [], "the first round is not complete"
    list(steps)
    assert short.rounds == MIN_ROUNDS


def test_the_gain_from_drafts_follows_the_cost_of_a_batch() -> None:
    # These are the means over recorded conversations in README.md, which the model approximates.
    replayed = {"flat": 1.94, "apple-silicon-akunu": 1.48, "metal-3b-q4_0": 1.23, "cpu-1.5b-q4_0": 1.24}
    replayed |= {"cpu-1.5b-q8_0": 1.11}
    gains = {name: typical_gain(find_curves(name)[name]) for name in replayed}
    assert gains == pytest.approx(replayed, rel=0.15)
    assert gains["flat"] > gains["apple-silicon-akunu"] > gains["cpu-1.5b-q4_0"] > gains["cpu-1.5b-q8_0"]
    assert typical_gain(make_fixed_curve({1: 1.0, 16: 16.0})) == pytest.approx(1.0, abs=0.02), "no draft can gain"


SHARED: Mapping[str, tuple[int, float, float, float]] = {
    # MiB, tokens/s, T(4) / T(1) and prompt tokens/s of a model with 1.5 billion weights on two cores
    "Q4_0": (886, 38.8, 1.34, 227),
    "IQ4_NL": (892, 38.3, 1.40, 224),
    "Q4_K_M": (935, 38.9, 2.09, 200),
    "Q4_1": (964, 24.1, 2.82, 49),
    "Q5_0": (1042, 27.4, 2.78, 49),
    "Q5_K_M": (1067, 27.1, 2.44, 290),
    "Q6_K": (1208, 26.5, 1.94, 252),
    "Q8_0": (1565, 23.6, 2.19, 57),
}
COSTS = [
    QuantCost(
        name,
        mib * 2**20,
        {size: (1 + (steep - 1) * (size - 1) / 3) / speed for size in SIZES},
        1 / prompt,
        1 + 0.4 / steep**2,
    )
    for name, (mib, speed, steep, prompt) in SHARED.items()
]


def test_recommend_names_the_fastest_and_a_more_precise_quantisation() -> None:
    line = recommend(COSTS)
    assert line.startswith("Recommended: IQ4_NL, 3."), "about as fast as Q4_0, and more precise"
    assert "times as fast as Q4_1 for a prompt of 1,000 tokens and an answer of 250; more precise: Q6_K, 0." in line
    assert recommend([*COSTS, replace(COSTS[0], name="F16", size_bytes=2**32)]) == line, "no usual quantisation"
    only = [cost for cost in COSTS if cost.name == "Q8_0"]
    assert recommend(only) == "Recommended: Q8_0 for a prompt of 1,000 tokens and an answer of 250."


def test_advice_names_a_faster_quantisation_of_about_the_same_size() -> None:
    line = advise("Q4_1", 2.8, COSTS)
    assert line is not None
    assert line.startswith(
        "note: a batch of 4 tokens costs 2.8 times one token here (Q4_1); with IQ4_NL, this model would"
    )
    assert "answer about 1.8 times as fast, and read prompts 4.6 times as fast" in line
    line = advise("Q8_0", 2.2, COSTS)
    assert line is not None
    assert "with Q6_K, " in line, "a file of half the size is no replacement"


def test_advice_is_silent_if_batches_are_cheap_or_nothing_is_faster() -> None:
    assert advise("Q4_1", 1.9, COSTS) is None
    assert advise("Q4_1", 5.4, COSTS) is None, "more than four passes over one token: the measurement was disturbed"
    assert advise("Q4_0", 2.5, COSTS) is None
    assert advise("Q6_K", 2.5, COSTS) is None
    assert advise("Q3_K_S", 2.5, [cost for cost in COSTS if cost.name == "Q4_1"]) is None


def test_advice_without_a_cost_of_the_own_quantisation() -> None:
    for name in ("Q4_1", None):
        line = advise(name, 2.54, [])
        assert line is not None
        assert "a batch of 4 tokens costs 2.5 times one token here; ngramspec tune --quants measures" in line
    line = advise("Q3_K_S", 2.54, COSTS)
    assert line is not None
    assert line.endswith("2.5 times one token here, but 1.4 times in a file with IQ4_NL (ngramspec tune --quants)")


def test_costs_are_stored_and_invalid_files_ignored(tmp_path: Path) -> None:
    path = tmp_path / "new" / "costs.json"
    assert not load_costs(path)
    keep_costs(path, COSTS)
    assert list(load_costs(path)) == COSTS
    keep_costs(path, [replace(COSTS[0], name="Q9")])
    assert not load_costs(path)
    keep_costs(path, [replace(COSTS[0], seconds={1: 1.0})])
    assert not load_costs(path)
    path.write_text("[")
    assert not load_costs(path)
