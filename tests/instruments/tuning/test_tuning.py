"""Tests of tuning on a simulated machine: noise is not mistaken for a gain, and gains are found and stored."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from ngramspec.errors import NGramSpecError, TargetError
from ngramspec.instruments.tuning.candidates import Candidate, candidates
from ngramspec.instruments.tuning.search import (
    FALSE_ALARMS,
    NO_TIME,
    Rounds,
    Tuning,
    compare,
    rounds_needed,
    sign_chance,
)
from ngramspec.machine import DRAFTS, READING, SINGLE, Measure, Settings, Tuned, flags, load_tuned, save_tuned

PRESENT = Settings(4, 4)
SCOPE: dict[str, Any] = {"physical": 4, "logical": 8, "on_cpu": True, "flash_free": True, "quantised_cache": True}
FEWER: dict[Any, float] = {("threads", 3, 1): 0.8}
"""Effect on a machine on which three threads help passes over one token."""
OTHERS = {str(n): Candidate("threads", {"threads": n}, (SINGLE, *DRAFTS)) for n in (1, 2, 3, 6, 8)}


@dataclass
class Machine:
    """Machine whose passes take a time by their size, times factors of the settings; nothing else takes time."""

    # factor on the time, by changed field, its value, and the size that it affects (0: all)
    effects: Mapping[tuple[str, object, int], float] = field(default_factory=dict)
    unit: float = 0.01  # duration of a pass over one token in seconds
    noise: float = 0.02
    missing: tuple[str, ...] = ()  # fields that cannot be changed here
    interrupt: int = -1  # index of the call during which Ctrl-C arrives
    seed: int = 1
    now: float = 1000.0
    calls: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def clock(self) -> float:
        return self.now

    def seconds(self, settings: Settings, measure: Measure) -> float:
        if self.calls == self.interrupt:
            raise KeyboardInterrupt
        self.calls += 1
        changes = settings.changes(PRESENT)
        if changes.keys() & set(self.missing):
            raise TargetError("there is no memory")
        taken = self.unit * (0.1 if measure.is_prefill else 1 + measure.size / 8)
        for (name, value, size), factor in self.effects.items():
            if changes.get(name) == value and size in (0, measure.size):
                taken *= factor
        self.now += taken * (measure.size if measure.is_prefill else 4)
        return taken * self.random.lognormvariate(0, self.noise)


# --------------------------------------------------------------------------- rounds


def measured(machine: Machine, count: int = 10) -> Rounds:
    rounds = Rounds(machine.seconds, PRESENT, OTHERS)
    for number in range(count):
        # The machine slows down from round to round, which affects all candidates equally.
        machine.unit = 1.0 + number
        list(rounds.run())
    return rounds


def gaining(rounds: Rounds) -> list[str]:
    return [name for name, c in rounds.compare_all().items() if c.gains]


@pytest.mark.parametrize("noise", [0.1, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (0.03, 0.4))])
def test_rounds_with_only_noise_keep_false_alarm_rate(noise: float) -> None:
    alarms = sum(bool(gaining(measured(Machine(seed=seed, noise=noise)))) for seed in range(400))
    # The limit is the promised rate plus three standard deviations.
    assert alarms <= 400 * FALSE_ALARMS + 3 * math.sqrt(400 * FALSE_ALARMS * (1 - FALSE_ALARMS))


def test_rounds_with_real_gain_find_it_after_enough_rounds() -> None:
    machines = [Machine({("threads", 2, 0): 0.9}, seed=seed, noise=0.03) for seed in range(100)]
    assert sum(gaining(measured(machine)) == ["2"] for machine in machines) >= 95
    quiet = {"noise": 0.0001, "effects": {("threads", 2, 0): 0.5}}
    assert gaining(measured(Machine(**quiet), rounds_needed(len(OTHERS)) - 1)) == []
    assert gaining(measured(Machine(**quiet), rounds_needed(len(OTHERS)))) == ["2"]
    assert gaining(measured(Machine({("threads", 2, 0): 0.98}, noise=0.001))) == []  # too small a gain


def test_rounds_time_each_setting_once_in_rotating_order() -> None:
    rounds = Rounds(Machine().seconds, PRESENT, OTHERS)
    orders = [list(rounds.run()) for _ in range(12)]
    assert all(sorted(order) == sorted(["", *OTHERS]) for order in orders)
    assert {order[0] for order in orders} == {"", *OTHERS}
    before = {(order[i - 1], order[i]) for order in orders for i in range(1, len(order)) if order[i] == "1"}
    assert before == {("", "1"), ("2", "1")}
    assert set(rounds.times["1"][0]) == {SINGLE, *DRAFTS}  # only sizes that a candidate may change
    broken = rounds.run()
    next(broken)
    broken.close()
    assert {len(times) for times in rounds.times.values()} == {len(rounds)} == {12}


def test_sign_chance_and_compare_return_expected_values() -> None:
    faster, slower = [0.9], [1.1]
    for ratios, chance in ((slower * 5, 1), (faster * 5, 1 / 32), (faster * 4 + slower, 6 / 32)):
        assert sign_chance(ratios) == chance
    assert all(sign_chance(faster * rounds_needed(k)) <= FALSE_ALARMS / k for k in range(1, 20))
    same = {SINGLE: 1.0}
    assert compare([same], [{SINGLE: 3.0}]).spread == 0
    assert compare([same] * 5, [{SINGLE: n} for n in (1.0, 2.0, 3.0, 4.0, 5.0)]).spread == 2.0
    found = compare([{SINGLE: 1.0, READING: 0.10}] * 10, [{SINGLE: 0.5, READING: 0.12}] * 10)
    assert found.ratio == pytest.approx((128 * 0.5 + 1000 * 0.12) / (128 + 1000 * 0.1))
    assert (found.faster, found.slower) == ((SINGLE,), (READING,))
    assert found.each == {SINGLE: 0.5, READING: pytest.approx(1.2)}
    assert not found.gains  # A setting that slows something down is a trade-off.


# --------------------------------------------------------------------------- the whole search


def tuning_of(machine: Machine) -> Tuning:
    return Tuning(machine.seconds, PRESENT, candidates(PRESENT, **SCOPE), 60.0, machine.clock)


def tuned(machine: Machine) -> Tuning:
    tuning = tuning_of(machine)
    list(tuning.run())
    return tuning


def test_tuning_without_faster_settings_recommends_nothing() -> None:
    # Both comparisons would have to be wrong, with a probability of at most 1/400.
    assert sum(tuned(Machine(seed=seed, noise=0.1)).best_settings is not None for seed in range(60)) <= 1


def test_tuning_with_faster_settings_recommends_and_confirms_them() -> None:
    batches = {("threads_batch", 8, size): 0.8 for size in (4, 8, 64)}
    tuning = tuned(Machine({("threads", 3, 1): 0.9, ("repack", False, 0): 1.5, **batches}))
    assert tuning.complete
    assert tuning.best_settings == replace(PRESENT, threads=3, threads_batch=8)
    assert flags(tuning.best_settings.changes(PRESENT)) == "-t 3 -tb 8"
    assert 0.75 < tuning.gain.ratio < 0.9
    assert tuning.gain.each[Measure(1)] == pytest.approx(0.9, abs=0.03)
    assert tuning.comparisons["--no-repack"].ratio == pytest.approx(1.5, abs=0.05)
    assert tuning.times[Measure(1)] == pytest.approx(0.01 * 9 / 8, rel=0.05)


def test_tuning_rejects_combination_that_is_slower() -> None:
    class Quarrelling(Machine):
        def seconds(self, settings: Settings, measure: Measure) -> float:
            both = settings.threads == 3 and settings.threads_batch == 8
            return super().seconds(settings, measure) * (2 if both else 1)

    tuning = tuned(Quarrelling({("threads", 3, 1): 0.8, ("threads_batch", 8, 0): 0.8}))
    assert set(tuning.winners) == {"threads", "threads_batch"}
    assert tuning.gain.ratio > 1
    assert tuning.best_settings is None


def test_tuning_reports_trade_offs_without_recommending_them() -> None:
    effects = {("flash_attn", "off", 1): 0.7, ("flash_attn", "off", 4): 0.7, ("flash_attn", "off", 64): 1.3}
    tuning = tuned(Machine({**effects, ("cache_types", ("q8_0", "q8_0"), 0): 0.7}))
    assert (tuning.trades, tuning.advice_names) == (["-fa off"], ["-ctk q8_0 -ctv q8_0"])
    assert (tuning.winners, tuning.best_settings) == ({}, None)


def test_tuning_skips_unavailable_and_slow_candidates() -> None:
    tuning = tuned(Machine(FEWER, unit=0.005, missing=("mmap", "repack")))
    assert tuning.left_out == dict.fromkeys(["--no-mmap", "--no-repack"], "there is no memory")
    assert tuning.best_settings == replace(PRESENT, threads=3)
    slow = Machine(FEWER, unit=0.25)
    tuning = tuned(slow)
    assert NO_TIME in tuning.left_out.values()
    assert tuning.best_settings == replace(PRESENT, threads=3)
    assert slow.now - 1000.0 < 120.0


def test_tuning_without_flash_attention_keeps_micro_batch() -> None:
    effects = {("flash_attn", "off", 0): 0.7, ("micro_batch", 1024, 1024): 0.7, **FEWER}
    assert tuned(Machine(effects)).best_settings == replace(PRESENT, threads=3, flash_attn="off")
    del effects["flash_attn", "off", 0]
    assert tuned(Machine(effects)).best_settings == replace(PRESENT, threads=3, micro_batch=1024)


REST = [pytest.param(share, marks=pytest.mark.exhaustive) for share in (0.02, 0.3, 0.95)]


@pytest.mark.parametrize("share", [0.0, 0.6, *REST])
def test_tuning_when_interrupted_keeps_partial_results(share: float) -> None:
    whole = Machine(FEWER)
    tuned(whole)
    tuning = tuning_of(Machine(FEWER, interrupt=int(share * whole.calls)))
    with pytest.raises(KeyboardInterrupt):
        list(tuning.run())
    assert (tuning.complete, tuning.best_settings) == (False, None)
    assert len({c.rounds for c in tuning.comparisons.values()}) <= 1
    if share >= 0.3:
        assert tuning.comparisons["-t 3 -tb 4"].ratio == pytest.approx(0.8, abs=0.05)
        assert tuning.times


# --------------------------------------------------------------------------- candidates


def test_candidates_are_named_by_their_options() -> None:
    names = ["-t 8 -tb 4", "-t 3 -tb 4", "-t 2 -tb 4", "-t 4 -tb 8", "-fa off", "--no-mmap", "--no-repack"]
    assert list(candidates(PRESENT, **SCOPE)) == [*names, "-ctk q8_0 -ctv q8_0", "-ub 256", "-ub 1024"]


def test_candidates_exclude_what_the_machine_does_not_support() -> None:
    on_gpu = candidates(PRESENT, **SCOPE | {"on_cpu": False})
    assert {c.parameter for c in on_gpu.values()} == {"flash_attn", "cache_types", "micro_batch"}
    taken = Settings(2, 2, flash_attn="off", mmap=False, repack=False)
    small = {"physical": 2, "logical": 2, "quantised_cache": False}
    assert list(candidates(taken, **SCOPE | small)) == ["-t 1 -tb 2", "-fa on"]


# --------------------------------------------------------------------------- what is kept of it


DAMAGED = ["", "{}", "[]", "null", '{"changes": {}, "ratio": "x", "date": "", "applied": true}']
NEVER_FOUND: list[Any] = [
    *({"threads": "3"}, {"threads": 0}, {"threads_batch": 513}, {"micro_batch": 8}, {"mmap": True}),
    *({"flash_attn": "auto"}, {"flash_attn": ["off"]}, {"cache_types": ["q4_0", "q4_0"]}, {"psychic": 1}, [], None),
]


def test_recalled_with_damaged_or_invalid_file_returns_none(tmp_path: Path) -> None:
    path = tmp_path / "key.json"
    kept = {"ratio": 0.9, "date": "2026-11-22", "applied": True}
    for text in [*DAMAGED, *(json.dumps({"changes": changes, **kept}) for changes in NEVER_FOUND)]:
        path.write_text(text)
        assert load_tuned(path) is None, text
    path.write_text(json.dumps({"changes": {"threads": 3}, **kept}))
    assert load_tuned(path) is not None


def test_keep_round_trips_settings_and_raises_if_unwritable(tmp_path: Path) -> None:
    path = tmp_path / "new" / "key.json"
    assert load_tuned(path) is None
    faster = Settings(3, 4, flash_attn="off", mmap=False, repack=False, micro_batch=256)
    kept = Tuned(faster.changes(PRESENT), 0.9, "2026-11-22", applied=True)
    save_tuned(path, kept)
    assert load_tuned(path) == kept
    assert flags(kept.changes) == "-t 3 -tb 4 -fa off -ub 256 --no-mmap --no-repack"
    save_tuned(path / "below", Tuned({}, None, "2026-11-22", applied=False))
    with pytest.raises(NGramSpecError, match="cannot save the settings"):
        save_tuned(path / "below", kept)
