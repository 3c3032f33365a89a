"""Tests of tuning on a simulated machine: noise is not mistaken for a gain, and gains are found and stored."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from ngramspec.cost.paired import CHANCE, pairs_needed
from ngramspec.data import NGramSpecError, TargetError
from ngramspec.instruments.tuning.search import MAX_LOSSES, Candidate, Tuning, candidates
from ngramspec.llama.trial import SINGLE, Measure
from ngramspec.loading.settings import Tuned, load_tuned, save_tuned
from ngramspec.model_settings import ModelSettings, flags

PRESENT = ModelSettings(threads=4, threads_batch=4)
SCOPE: dict[str, Any] = {"physical": 4, "logical": 8, "on_cpu": True, "flash_free": True, "quantised_cache": True}
FEWER: dict[Any, float] = {("threads", 3, 1): 0.8}
"""Effect on a machine on which three threads help passes over one token."""
OTHERS = {f"-t {n}": Candidate("threads", {"threads": n}, (SINGLE,)) for n in (1, 2, 3, 8)}
START = 1000.0

Load = Callable[["Machine", int], float]
"""Factor by which other programs slow a pass down, by the machine and the number of threads."""


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
    load: Load = lambda _machine, _threads: 1.0
    now: float = START
    calls: int = 0
    reload_seconds: float = 0.0  # duration of loading the weights
    weights: set[tuple[bool, bool]] = field(default_factory=lambda: {(False, False)})

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def clock(self) -> float:
        return self.now

    def seconds(self, settings: ModelSettings, measure: Measure) -> float:
        if self.calls == self.interrupt:
            raise KeyboardInterrupt
        self.calls += 1
        if (settings.no_mmap, settings.no_repack) not in self.weights:
            self.weights.add((settings.no_mmap, settings.no_repack))
            self.now += self.reload_seconds
        if any(getattr(settings, name) != getattr(PRESENT, name) for name in self.missing):
            raise TargetError("there is no memory")
        taken = self.unit * (0.1 if measure.is_prefill else 1 + measure.size / 8) * self.load(self, settings.threads)
        for (name, value, size), factor in self.effects.items():
            if getattr(settings, name) == value and size in (0, measure.size):
                taken *= factor
        self.now += taken * (measure.size if measure.is_prefill else 4)
        return taken * self.random.lognormvariate(0, self.noise)


def tuning_of(machine: Machine, trials: Mapping[str, Candidate] | None = None, seconds: float = 60.0) -> Tuning:
    trials = candidates(PRESENT, **SCOPE) if trials is None else trials
    return Tuning(machine.seconds, PRESENT, trials, seconds, machine.reload_seconds, machine.clock)


def tuned(machine: Machine, trials: Mapping[str, Candidate] | None = None, seconds: float = 60.0) -> Tuning:
    tuning = tuning_of(machine, trials, seconds)
    list(tuning.run())
    return tuning


def half(factor: Callable[[int], float]) -> Load:
    """Return a load for half of a tuning of `OTHERS`, which takes about 2 s; `factor` depends on the threads."""

    def load(machine: Machine, threads: int) -> float:
        elapsed = machine.now - START - random.Random(-machine.seed).uniform(0, 1.1)
        return factor(threads) if 0 <= elapsed <= 1.1 else 1.0

    return load


LOADS: dict[str, tuple[float, Load, float, float]] = {
    # name: noise, load, and range of the share of tunings that are refused
    "quiet": (0.02, lambda *_: 1.0, 0.0, 0.0),
    "noisy": (0.08, lambda *_: 1.0, 0.0, 0.05),
    "half slowed a little": (0.05, half(lambda _: 1.15), 0.0, 0.05),
    "half slowed": (0.05, half(lambda _: 2.0), 0.5, 1.0),
    "one thread is faster for half the time": (0.02, half(lambda threads: 1.0 if threads == 1 else 6.0), 0.2, 1.0),
    "two threads wait": (0.02, lambda m, threads: 1 if threads == 1 else m.random.lognormvariate(1.8, 0.5), 0.9, 1.0),
    "every second pass": (0.02, lambda machine, _: 1.0 + 0.2 * (machine.calls % 2), 0.0, 0.0),
    "interruptions": (0.02, lambda machine, _: 5.0 if machine.random.random() < 0.05 else 1.0, 0.0, 0.3),
    "very noisy": (0.4, lambda *_: 1.0, 0.9, 1.0),
}
RUNS = settings.default.max_examples


@pytest.mark.parametrize("name", LOADS)
def test_tuning_of_equal_settings_saves_almost_nothing(name: str) -> None:
    noise, load, low, high = LOADS[name]
    saved = refused = 0
    for seed in range(RUNS):
        try:
            saved += tuned(Machine(seed=seed, noise=noise, load=load), OTHERS).best_settings is not None
        except NGramSpecError:
            refused += 1
    assert saved <= 0.02 * RUNS
    assert low <= refused / RUNS <= high


@pytest.mark.parametrize(("noise", "slowdown"), [(0.02, 0.0), (0.05, 0.0), (0.02, 0.35)])
def test_tuning_with_a_faster_setting_finds_it(noise: float, slowdown: float) -> None:
    """A machine that becomes hot slows down gradually."""

    def load(machine: Machine, _threads: int) -> float:
        return 1.0 + slowdown * min(1.0, (machine.now - START) / 1.5)

    machines = [Machine({("threads", 3, 1): 1 / 1.2}, seed=seed, noise=noise, load=load) for seed in range(RUNS)]
    found = sum(tuned(machine, OTHERS).best_settings == replace(PRESENT, threads=3) for machine in machines)
    assert found >= 0.9 * RUNS
    assert tuned(Machine({("threads", 3, 1): 0.98}, noise=0.001), OTHERS).best_settings is None, "too small a gain"


@pytest.mark.parametrize("seconds", [5.0, 15.0, 60.0])
@pytest.mark.parametrize("unit", [0.001, 0.01, 0.05, 0.3])
def test_tuning_ends_within_its_time_limit(seconds: float, unit: float) -> None:
    """The first pass over one token takes 4.5 units, before anything is known, and must fit."""
    for load in (lambda *_: 1.0, lambda machine, _: 1.2 if machine.now > START + seconds / 2 else 1.0):
        machine = Machine(FEWER, unit=unit, load=load, reload_seconds=10.0)
        tuning = tuned(machine, seconds=seconds)
        assert machine.now - START <= seconds + 0.2 * 1024 * 0.1 * unit, "only the slowdown of one call"
        assert tuning.complete


def test_tuning_times_pairs_on_the_same_work_in_both_orders() -> None:
    machine, calls = Machine(FEWER), []

    def seconds(settings: ModelSettings, measure: Measure) -> float:
        calls.append((measure, settings.threads))
        return machine.seconds(settings, measure)

    list(Tuning(seconds, PRESENT, {"-t 3": OTHERS["-t 3"]}, clock=machine.clock).run())
    assert {(*a, *b) for a, b in zip(calls[::2], calls[1::2], strict=True)} == {
        (SINGLE, 3, SINGLE, 4),
        (SINGLE, 4, SINGLE, 3),
    }


def test_tuning_with_faster_settings_recommends_and_confirms_them() -> None:
    batches = {("threads_batch", 8, size): 0.8 for size in (4, 8, 64)}
    tuning = tuned(Machine({("threads", 3, 1): 0.9, ("no_repack", True, 0): 1.5, **batches}))
    assert tuning.complete
    assert tuning.best_settings == replace(PRESENT, threads=3, threads_batch=8)
    assert flags(tuning.best_settings.changes(PRESENT)) == "-t 3 -tb 8"
    assert 1 / 0.9 < tuning.together.speed.median < 1 / 0.75
    assert tuning.together.each[SINGLE].median == pytest.approx(1 / 0.9, abs=0.03)
    assert tuning.comparisons["--no-repack"].speed.median == pytest.approx(1 / 1.5, abs=0.05)
    assert len(tuning.comparisons["--no-repack"].pairs) == 2, "it cannot win after two lost pairs"
    needed = pairs_needed(MAX_LOSSES, CHANCE / len(tuning.comparisons))
    assert len(tuning.comparisons["-t 3 -tb 4"].pairs) == needed > len(tuning.together.pairs)
    assert tuning.times[SINGLE] == pytest.approx(0.01 * 9 / 8, rel=0.05)


@pytest.mark.parametrize("since", [0.0, 10.0, 600.0])
def test_tuning_while_cores_are_used_recommends_no_number_of_threads(since: float) -> None:
    """Next to two busy programs, two threads are 13 times as fast, in every pair and until the program ends."""
    machine = Machine({("flash_attn", "off", 0): 0.8}, load=lambda _, threads: 1.0 if threads == 2 else 13.0)
    tuning = tuning_of(machine, seconds=600.0)
    tuning.is_quiet = lambda: machine.now - START < since
    list(tuning.run())
    assert tuning.best_settings is not None
    changes = tuning.best_settings.changes(PRESENT)
    assert ("threads" in changes) == (since == 600.0)
    assert "flash_attn" in changes


def test_tuning_rejects_combination_that_is_slower() -> None:
    class Quarrelling(Machine):
        def seconds(self, settings: ModelSettings, measure: Measure) -> float:
            both = settings.threads == 3 and settings.threads_batch == 8
            return super().seconds(settings, measure) * (2 if both else 1)

    tuning = tuned(Quarrelling({("threads", 3, 1): 0.8, ("threads_batch", 8, 0): 0.8}))
    assert set(tuning.winners) == {"threads", "threads_batch"}
    assert tuning.together.speed.median < 1
    assert tuning.best_settings is None


def test_tuning_recommends_neither_trade_offs_nor_changes_of_the_text() -> None:
    effects = {("flash_attn", "off", 1): 0.5, ("flash_attn", "off", 4): 0.5, ("flash_attn", "off", 64): 1.1}
    tuning = tuned(Machine({**effects, ("cache_type_k", "q8_0", 0): 0.7}))
    assert tuning.comparisons["-fa off"].speed.is_faster
    assert (tuning.winners, tuning.best_settings) == ({}, None)
    assert tuning.find_gaining(advice=True) == ["-ctk q8_0 -ctv q8_0"]


def test_tuning_skips_settings_that_do_not_work() -> None:
    tuning = tuned(Machine(FEWER, unit=0.005, missing=("no_mmap", "no_repack")))
    assert tuning.left_out == dict.fromkeys(["--no-mmap", "--no-repack"], "there is no memory")
    assert tuning.best_settings == replace(PRESENT, threads=3)


def test_tuning_without_flash_attention_keeps_micro_batch() -> None:
    effects = {("flash_attn", "off", 0): 0.7, ("ubatch_size", 1024, 1024): 0.7, **FEWER}
    assert tuned(Machine(effects), seconds=120.0).best_settings == replace(PRESENT, threads=3, flash_attn="off")
    del effects["flash_attn", "off", 0]
    assert tuned(Machine(effects), seconds=120.0).best_settings == replace(PRESENT, threads=3, ubatch_size=1024)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.95])
def test_tuning_when_interrupted_keeps_partial_results(share: float) -> None:
    whole = Machine(FEWER)
    tuned(whole)
    tuning = tuning_of(Machine(FEWER, interrupt=int(share * whole.calls)))
    with pytest.raises(KeyboardInterrupt):
        list(tuning.run())
    assert (tuning.complete, tuning.best_settings) == (False, None)
    if share >= 0.6:
        assert tuning.comparisons["-t 3 -tb 4"].speed.median == pytest.approx(1 / 0.8, abs=0.05)
        assert tuning.times


def test_candidates_are_named_by_their_options() -> None:
    names = ["-t 8 -tb 4", "-t 3 -tb 4", "-t 2 -tb 4", "-t 4 -tb 8", "-fa off", "--no-mmap", "--no-repack"]
    assert list(candidates(PRESENT, **SCOPE)) == [*names, "-ctk q8_0 -ctv q8_0", "-ub 256", "-ub 1024"]


def test_candidates_exclude_what_the_machine_does_not_support() -> None:
    on_gpu = candidates(PRESENT, **SCOPE | {"on_cpu": False})
    assert {c.parameter for c in on_gpu.values()} == {"flash_attn", "cache_types", "ubatch_size"}
    taken = ModelSettings(threads=2, threads_batch=2, flash_attn="off", no_mmap=True, no_repack=True)
    small = {"physical": 2, "logical": 2, "quantised_cache": False}
    assert list(candidates(taken, **SCOPE | small)) == ["-t 1 -tb 2", "-fa on"]


DAMAGED = ["", "{}", "[]", "null", '{"changes": {}, "ratio": "x", "date": ""}']
NEVER_FOUND: list[Any] = [
    *({"threads": "3"}, {"threads": 0}, {"threads_batch": 513}, {"ubatch_size": 8}),
    *({"flash_attn": "maybe"}, {"flash_attn": ["off"]}, {"cache_type_k": "q4_0"}, {"psychic": 1}, [], None),
]


def test_recalled_with_damaged_or_invalid_file_returns_none(tmp_path: Path) -> None:
    path = tmp_path / "key.json"
    kept = {"ratio": 0.9, "date": "2026-11-22"}
    for text in [*DAMAGED, *(json.dumps({"changes": changes, **kept}) for changes in NEVER_FOUND)]:
        path.write_text(text)
        assert load_tuned(path) is None, text
    path.write_text(json.dumps({"changes": {"threads": 3}, **kept}))
    assert load_tuned(path) is not None


def test_keep_round_trips_settings_and_raises_if_unwritable(tmp_path: Path) -> None:
    path = tmp_path / "new" / "key.json"
    assert load_tuned(path) is None
    faster = ModelSettings(threads=3, threads_batch=4, flash_attn="off", no_mmap=True, no_repack=True, ubatch_size=256)
    kept = Tuned(faster.changes(PRESENT), 0.9, "2026-11-22")
    save_tuned(path, kept)
    assert load_tuned(path) == kept
    assert flags(kept.changes) == "-t 3 -tb 4 -ub 256 -fa off --no-mmap --no-repack"
    with pytest.raises(NGramSpecError, match="cannot save the settings"):
        save_tuned(path / "below", kept)
