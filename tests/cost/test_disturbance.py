"""Passes that another process slows down are noticed, and ordinary ones are not."""

from __future__ import annotations

import random

from ngramspec.cost.calibration import FACTOR, Disturbance

USUAL = 0.01


def watch(*passes: tuple[float, int]) -> Disturbance:
    watched = Disturbance()
    for seconds, batch in passes:
        watched.see(seconds, batch, USUAL)
    return watched


def test_ordinary_passes_are_none() -> None:
    rng = random.Random(1)
    noisy = [(USUAL * rng.uniform(0.8, 4.0), 1) for _ in range(500)]
    assert watch(*noisy).note is None
    # A batch is measured by what its tokens take one by one, and single hitches happen.
    assert watch(*[(USUAL * 30, 32)] * 100).note is None
    assert watch(*[(5.0, 1), (USUAL, 1), (5.0, 1), (5.0, 1), (USUAL, 1)] * 20).note is None


def test_a_run_of_slow_passes_is_told() -> None:
    watched = watch(*[(USUAL, 1)] * 10, *[(100 * USUAL, 1)] * 3)
    assert watched.slowdown == 100
    assert watched.note is not None
    assert "up to 100 times as long as usual" in watched.note
    assert "\n" not in watched.note


def test_what_costs_nothing_is_not_told() -> None:
    watched = Disturbance()
    for _ in range(40):
        watched.see(10 * 1e-3, 1, 1e-3)
    assert watched.note is None  # 0.36 seconds
    for _ in range(100):
        watched.see(10 * 1e-3, 1, 1e-3)
    assert watched.note is not None


def test_a_curve_that_learns_from_slow_passes_hides_nothing() -> None:
    watched = Disturbance()
    for i in range(20):
        watched.see(FACTOR * 2 * USUAL, 1, USUAL * (1 + i))
    assert watched.slowdown == FACTOR * 2


def test_without_a_curve_nothing_is_known() -> None:
    watched = Disturbance()
    for _ in range(20):
        watched.see(60.0, 1, 0.0)
        watched.see(60.0, 0, USUAL)  # the prefill
    assert watched.note is None
