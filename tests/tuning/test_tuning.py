"""A whole search on an invented machine: what is tried, what wins, and what an interruption leaves."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import pytest

from ngramspec.errors import TargetError
from ngramspec.tuning.candidates import Scope, candidates, combined
from ngramspec.tuning.measures import Measure
from ngramspec.tuning.settings import Settings
from ngramspec.tuning.tuning import NO_TIME, Tuning

PRESENT = Settings(4, 4)
SCOPE = Scope(physical=4, logical=8, on_cpu=True, flash_free=True, quantised_cache=True)


@dataclass
class Machine:
    """Passes take a time by their size; settings take part of it, and nothing else takes time.

    Attributes:
        effects: by the changed field and its value, and the size that it acts on (0: all), what it takes of the time.
        unit: seconds of a pass over one token.
        missing: fields that cannot be changed here.
        interrupt: the call, counted from 0, in which Ctrl-C comes.
    """

    effects: Mapping[tuple[str, object, int], float] = field(default_factory=dict)
    unit: float = 0.01
    noise: float = 0.02
    missing: tuple[str, ...] = ()
    interrupt: int = -1
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
        taken = self.unit * (0.1 if measure.reads else 1 + measure.size / 8)
        for (name, value, size), factor in self.effects.items():
            if changes.get(name) == value and size in (0, measure.size):
                taken *= factor
        self.now += taken * (measure.size if measure.reads else 4)
        return taken * self.random.lognormvariate(0, self.noise)


def tuned(machine: Machine, seconds: float = 60.0) -> Tuning:
    tuning = Tuning(machine, PRESENT, candidates(PRESENT, SCOPE), seconds, machine.clock)
    list(tuning.run())
    return tuning


def test_where_nothing_is_faster_nothing_is_found() -> None:
    found = [tuned(Machine(seed=seed, noise=0.1)).found for seed in range(60)]
    # Both comparisons would have to be wrong: 1 in 400 at most.
    assert sum(one is not None for one in found) <= 1


def test_what_is_faster_is_found_and_measured_again() -> None:
    batches = {("threads_batch", 8, size): 0.8 for size in (4, 8, 64)}
    tuning = tuned(Machine({("threads", 3, 1): 0.9, ("repack", False, 0): 1.5, **batches}))
    assert tuning.complete
    assert tuning.found == replace(PRESENT, threads=3, threads_batch=8)
    assert tuning.found.flags(PRESENT) == "-t 3 -tb 8"
    assert tuning.gain is not None
    assert 0.75 < tuning.gain.ratio < 0.9
    assert tuning.gain.each[Measure(1)] == pytest.approx(0.9, abs=0.03)
    assert tuning.compared["--no-repack"].ratio == pytest.approx(1.5, abs=0.05)
    assert tuning.times[Measure(1)] == pytest.approx(0.01 * 9 / 8, rel=0.05)


def test_two_that_help_alone_need_not_help_together() -> None:
    class Quarrelling(Machine):
        def seconds(self, settings: Settings, measure: Measure) -> float:
            both = settings.threads == 3 and settings.threads_batch == 8
            return super().seconds(settings, measure) * (2 if both else 1)

    tuning = tuned(Quarrelling({("threads", 3, 1): 0.8, ("threads_batch", 8, 0): 0.8}))
    assert set(tuning.winners) == {"threads", "threads_batch"}
    assert tuning.gain is not None
    assert tuning.gain.ratio > 1
    assert tuning.found is None


def test_a_trade_is_told_and_not_recommended() -> None:
    effects = {("flash_attn", "off", 1): 0.7, ("flash_attn", "off", 4): 0.7, ("flash_attn", "off", 64): 1.3}
    tuning = tuned(Machine(effects))
    assert tuning.trades == ["-fa off"]
    assert tuning.found is None


def test_what_changes_the_text_is_advice() -> None:
    tuning = tuned(Machine({("cache_types", ("q8_0", "q8_0"), 0): 0.7}))
    assert tuning.advised == ["-ctk q8_0 -ctv q8_0"]
    assert (tuning.winners, tuning.found) == ({}, None)


def test_what_cannot_be_had_is_left_out() -> None:
    tuning = tuned(Machine({("threads", 3, 1): 0.8}, unit=0.005, missing=("mmap", "repack")))
    assert tuning.left_out == dict.fromkeys(["--no-mmap", "--no-repack"], "there is no memory")
    assert tuning.found == replace(PRESENT, threads=3)


def test_a_slow_model_is_tried_with_less_and_in_time() -> None:
    machine = Machine({("threads", 3, 1): 0.8}, unit=0.25)
    tuning = tuned(machine, 60.0)
    assert NO_TIME in tuning.left_out.values()
    assert tuning.found == replace(PRESENT, threads=3)
    assert machine.now - 1000.0 < 120.0


@pytest.mark.parametrize("share", [0.0, 0.02, 0.3, 0.6, 0.95])
def test_an_interruption_leaves_what_was_found_so_far(share: float) -> None:
    effects = {("threads", 3, 1): 0.8}
    whole = Machine(effects)
    tuned(whole)
    machine = Machine(effects, interrupt=int(share * whole.calls))
    tuning = Tuning(machine, PRESENT, candidates(PRESENT, SCOPE), 60.0, machine.clock)
    with pytest.raises(KeyboardInterrupt):
        list(tuning.run())
    assert not tuning.complete
    assert tuning.found is None
    counts = {c.rounds for c in tuning.compared.values()}
    assert len(counts) <= 1
    if share >= 0.3:
        assert tuning.compared["-t 3 -tb 4"].ratio == pytest.approx(0.8, abs=0.05)
        assert tuning.times


# --------------------------------------------------------------------------- candidates


def test_candidates_are_named_by_the_options_that_set_them() -> None:
    assert list(candidates(PRESENT, SCOPE)) == [
        "-t 8 -tb 4",
        "-t 3 -tb 4",
        "-t 2 -tb 4",
        "-t 4 -tb 8",
        "-fa off",
        "--no-mmap",
        "--no-repack",
        "-ctk q8_0 -ctv q8_0",
        "-ub 256",
        "-ub 1024",
    ]


def test_what_a_machine_does_not_offer_is_not_tried() -> None:
    on_gpu = replace(SCOPE, on_cpu=False)
    assert {c.knob for c in candidates(PRESENT, on_gpu).values()} == {"flash_attn", "cache_types", "micro_batch"}
    taken = Settings(2, 2, flash_attn="off", mmap=False, repack=False)
    scope = Scope(physical=2, logical=2, on_cpu=True, flash_free=True, quantised_cache=False)
    assert list(candidates(taken, scope)) == ["-t 1 -tb 2", "-fa on"]


def test_without_flash_attention_prompts_are_not_read_in_larger_pieces() -> None:
    off, wide = replace(PRESENT, flash_attn="off"), replace(PRESENT, micro_batch=1024)
    threads = replace(PRESENT, threads=2)
    assert combined(PRESENT, {"flash_attn": off, "micro_batch": wide, "threads": threads}) == replace(off, threads=2)
    assert combined(PRESENT, {"micro_batch": wide, "threads": threads}) == replace(wide, threads=2)
