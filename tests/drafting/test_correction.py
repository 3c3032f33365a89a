"""`Correction`: what it makes of a judge that is wrong in a way that facts tell, compiled and as plain Python."""

from __future__ import annotations

import math
import random
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.uncompiled import plain_modules

from ngramspec.drafting.mixture import correction

PLAIN = plain_modules()["correction"]
BOTH = pytest.mark.parametrize("module", [correction, PLAIN], ids=["installed", "plain"])

FACTS, FREE_CURVES = 6, 512


def made(module: ModuleType, cells: int = 2) -> Any:
    """Every fact of every cell has a curve of its own."""
    made_ = module.Correction(cells)
    for i in range(cells * FACTS):
        made_.facts[i] = i
    return made_


@BOTH
@settings(max_examples=60, deadline=None, derandomize=True)
@given(p=st.floats(1e-5, 1 - 1e-5))
def test_it_changes_nothing_at_first(module: ModuleType, p: float) -> None:
    o = made(module)
    assert o.judge(1, p) == pytest.approx(p, rel=1e-9)
    assert o.p[1] == o.judge(1, p)


@BOTH
@pytest.mark.parametrize("shift", [-1.5, 0.0, 1.0])
def test_it_finds_what_a_judge_means_that_is_too_sure(module: ModuleType, shift: float) -> None:
    rng = random.Random(1)
    o = made(module)
    late = []
    for _ in range(20_000):
        p = rng.uniform(0.03, 0.97)
        truth = 1 / (1 + math.exp(-math.log(p / (1 - p)) - shift))
        late.append((o.judge(0, p), truth))
        o.learn(0, rng.random() < truth)
    late = late[-5000:]
    assert abs(sum(p - truth for p, truth in late)) / 5000 < 0.02
    assert sum(abs(p - truth) for p, truth in late) / 5000 < 0.04


@BOTH
def test_a_fact_has_a_curve_of_its_own(module: ModuleType) -> None:
    """The judge says a half; in truth one fact makes it a tenth, and another nine tenths."""
    rng = random.Random(2)
    o = made(module)
    for i in range(FACTS - 1):
        o.facts[FACTS + i] = o.facts[i]
    for _ in range(5000):
        for cell, rate in ((0, 0.1), (1, 0.9)):
            o.judge(cell, 0.5)
            o.learn(cell, rng.random() < rate)
    assert o.judge(0, 0.5) == pytest.approx(0.1, abs=0.05)
    assert o.judge(1, 0.5) == pytest.approx(0.9, abs=0.05)
    # Far from there nothing was learnt.
    assert o.judge(0, 0.99) == pytest.approx(0.99, abs=0.001)


@BOTH
def test_those_beside_each_other_learn_together_about_tokens_alone(module: ModuleType) -> None:
    first, stranger = made(module), made(module)
    second = first.beside()
    for o in (first, second, stranger):
        for i in range(FACTS):
            o.facts[i] = i if i < FACTS - 1 else FREE_CURVES
    for _ in range(100):
        first.judge(0, 0.5)
        first.learn(0, False)
    assert first.judge(0, 0.5) < second.judge(0, 0.5) < stranger.judge(0, 0.5)
    before = first.judge(0, 0.5)
    second.learn(0, False)
    assert first.judge(0, 0.5) < before


@BOTH
def test_curves_about_tokens_are_told_from_the_others(module: ModuleType) -> None:
    o = made(module, cells=1)
    o.facts[FACTS - 1] = 512
    o.judge(0, 0.5)
    o.learn(0, False)
    for held, curves in ((o.shared(), FACTS - 1), (o.about_tokens(), 1)):
        assert held.keys() == {"height", "slope"}
        assert sum(height != 0 for height in held["height"]) == curves
        assert sum(slope != 1 for slope in held["slope"]) == curves
    assert o.about_tokens()["height"][4] != 0  # its first curve's middle


@BOTH
def test_probabilities_stay_probabilities(module: ModuleType) -> None:
    o = made(module)
    for i in range(FACTS):
        o.facts[i] = 7  # all the facts may be one
    for right in (True, False):
        for p in (1e-6, 0.5, 1 - 1e-6):
            for _ in range(2000):
                assert 0 < o.judge(0, p) < 1
                o.learn(0, right)


def test_compiled_and_plain_agree() -> None:
    chances: list[list[float]] = [[], []]
    for module, out in zip((correction, PLAIN), chances, strict=True):
        rng = random.Random(5)
        o = made(module)
        for _ in range(2000):
            p = rng.random() * 0.98 + 0.01
            o.facts[0] = rng.randrange(20)
            out.append(o.judge(0, p))
            o.learn(0, rng.random() < p * p)
    # A compiler may fuse a multiplication with an addition, which rounds once less.
    assert chances[0] == pytest.approx(chances[1], rel=1e-9)
