"""Tests of `exact="auto"` on a mock model: the order of measurements, their storage, and the choice."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.mock_target import Clock, MockTarget

from ngramspec.cpu.cores import CpuLoad, CpuSeconds
from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.errors import TargetError
from ngramspec.exactness import decision
from ngramspec.exactness.decision import (
    DEFAULT_LOGIT_SHIFT,
    DEPTHS,
    PASSES,
    SIZES,
    DecodingMode,
    ExactnessMode,
    ExactnessSelector,
    Identity,
    Times,
)

ALL, SPLIT = Identity(SIZES, SIZES[1:]), Identity((1,), SIZES[1:])
FAST_STEPS = [*(f"fast {depth}" for depth in DEPTHS), "times"]
ALL_STEPS = FAST_STEPS + [f"exact {depth}" for depth in DEPTHS]


def slow(seconds: float) -> Times:
    """Return the times of a way for which a pass of any size takes the same time."""
    return Times((seconds,) * len(PASSES), 0.001)


class Model:
    """Model with two settings; a trial finds `identity_of` and `times_of`, and a pass takes `single` seconds."""

    settings: tuple[str, ...] = ("fast", "exact")
    identity = "mock"
    clock: Clock
    measured: list[str]

    def __init__(self, single: float = 0.001, slowdown: float = 1.0) -> None:
        self.single, self.slowdown = single, slowdown
        self.opened: list[str] = []
        self.identity_of = {"fast": SPLIT, "exact": ALL}
        self.times_of = {"fast": slow(0.01), "exact": slow(0.01), "padded": slow(0.02)}

    def trial(self, setting: str) -> Any:
        self.opened.append(setting)
        return Trial(self, setting)


class Trial:
    deadline = math.inf

    def __init__(self, model: Model, setting: str) -> None:
        self.model, self.setting = model, setting

    def __enter__(self) -> Trial:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def note(self, what: str) -> None:
        clock, model = self.model.clock, self.model
        ends = clock.now + model.single * decision.COST * model.slowdown
        clock.now = min(ends, self.deadline)
        if ends > self.deadline:
            raise TargetError("measuring takes too long")
        model.measured.append(what)

    def single(self) -> float:
        return self.model.single

    def identity(self, depth: int) -> Identity:
        self.note(f"{self.setting} {depth}")
        return self.model.identity_of[self.setting]

    def rounding(self, text: Sequence[int]) -> float:
        assert [*text] == [1, 2]
        self.note("rounding")
        return 0.5


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list of measurements in order; each takes its expected time."""
    monkeypatch.setattr(Model, "clock", clock := Clock(0.0), raising=False)
    monkeypatch.setattr(Model, "measured", done := list[str](), raising=False)
    monkeypatch.setattr(decision, "time", clock)
    monkeypatch.setattr(decision, "BUDGET", 0.1 * decision.COST + 2)

    def times(trials: Mapping[str, Trial]) -> dict[str, Times]:
        fast = trials["fast"]
        fast.note("times")
        return {way: fast.model.times_of[way] for way in (*trials, "padded")}

    monkeypatch.setattr(decision, "times", times)
    return done


def idle() -> CpuLoad:
    """Return the load of a machine on which nothing else runs."""
    return CpuLoad(lambda: CpuSeconds(0.0, 0.0), running=lambda: None)


def chosen(model: Model, folder: Path, **options: Any) -> tuple[DecodingMode, ExactnessMode]:
    """Return the choice of a process that loads the model."""
    auto = ExactnessSelector(model, folder=folder, **{"load": idle()} | options)
    auto.measure()
    return auto.mode, auto.exactness


def test_exact_auto_selects_settings_with_agreeing_sizes(tmp_path: Path, measured: list[str]) -> None:
    assert chosen(Model(), tmp_path, text=[1, 2]) == ("exact", ExactnessMode(SIZES, bit_identical=True))
    assert measured == ALL_STEPS


def test_exact_auto_measures_only_what_decides(tmp_path: Path, measured: list[str]) -> None:
    model = Model()
    model.identity_of["fast"] = ALL
    assert chosen(model, tmp_path) == ("fast", ExactnessMode(SIZES, bit_identical=True))
    assert measured == FAST_STEPS[:2]
    model.identity_of["fast"], model.settings = SPLIT, ("fast",)
    assert chosen(model, tmp_path / "other", modes=("fast", "exact"))[0] == "fast"
    assert measured == FAST_STEPS[:2] * 2


def test_exact_auto_with_expensive_exact_settings_measures_rounding(tmp_path: Path, measured: list[str]) -> None:
    model = Model()
    model.times_of["exact"] = slow(0.012)
    assert chosen(model, tmp_path) == ("fast", ExactnessMode(max_logit_shift=DEFAULT_LOGIT_SHIFT))
    assert measured == FAST_STEPS
    assert chosen(model, tmp_path, text=[1, 2]) == ("fast", ExactnessMode(max_logit_shift=0.5))
    assert measured == [*FAST_STEPS, "rounding"]


def test_exact_auto_with_free_padding_selects_padded(tmp_path: Path, measured: list[str]) -> None:
    model = Model()
    model.times_of["padded"] = model.times_of["fast"]
    assert chosen(model, tmp_path) == ("padded", ExactnessMode(SIZES[1:], bit_identical=True))
    assert measured == FAST_STEPS


def test_exact_auto_in_later_process_keeps_stored_choice(tmp_path: Path, measured: list[str]) -> None:
    first = chosen(Model(), tmp_path)
    later = Model()
    later.times_of["exact"] = slow(9.0)
    later.identity_of["exact"] = SPLIT
    assert chosen(later, tmp_path) == first
    assert (measured, later.opened) == (ALL_STEPS, [])


def test_exact_auto_in_concurrent_processes_keeps_first_choice(tmp_path: Path) -> None:
    late = Model()
    late.times_of["exact"] = slow(9.0)
    both = [
        ExactnessSelector(model, folder=tmp_path, load=idle()) for model in (Model(), late)
    ]  # Both have read an empty folder.
    for auto in both:
        auto.measure()
    assert [auto.mode for auto in both] == ["exact", "exact"]


def test_exact_auto_with_slow_model_measures_one_step_per_load(tmp_path: Path, measured: list[str]) -> None:
    found = []
    for number in range(len(ALL_STEPS)):
        found.append(chosen(Model(0.1), tmp_path))
        assert len(measured) == number + 1
    assert measured == ALL_STEPS
    assert found[0] == ("fast", ExactnessMode(max_logit_shift=DEFAULT_LOGIT_SHIFT))
    assert [way for way, _ in found] == ["fast"] * 4 + ["exact"]


def test_exact_auto_with_very_slow_model_measures_only_without_limit(tmp_path: Path, measured: list[str]) -> None:
    assert chosen(Model(4.0), tmp_path)[0] == "fast"
    assert measured == []
    ExactnessSelector(Model(4.0), folder=tmp_path, load=idle()).measure(math.inf)
    assert measured == ALL_STEPS
    assert chosen(Model(4.0), tmp_path)[0] == "exact"


def test_exact_auto_with_slowed_step_stops_in_time(tmp_path: Path, measured: list[str]) -> None:
    model = Model(0.05, slowdown=50)
    assert chosen(model, tmp_path)[0] == "fast"
    assert measured == []
    assert model.clock.now <= decision.BUDGET + decision.GRACE
    assert chosen(Model(), tmp_path)[0] == "exact"


def test_exact_auto_under_load_postpones_timing(tmp_path: Path, measured: list[str]) -> None:
    busy = idle()
    busy.cores = 1.0
    assert chosen(Model(), tmp_path, load=busy)[0] == "fast"
    assert measured == FAST_STEPS[:2]
    assert chosen(Model(), tmp_path)[0] == "exact"
    assert measured == ALL_STEPS


def test_exact_auto_after_load_during_timing_drops_times(tmp_path: Path) -> None:
    model, used = Model(0.01), iter((0.0, 0.0, 100.0))
    load = CpuLoad(lambda: CpuSeconds(next(used), 0.0), lambda: model.clock.now, running=lambda: 0)
    auto = ExactnessSelector(model, folder=tmp_path, load=load)
    auto.measure()
    assert not auto.measurements.times


def test_exact_auto_without_memory_for_trial_selects_fast(tmp_path: Path) -> None:
    def refuse(_: str) -> Any:
        raise TargetError("no memory")

    model = Model()
    model.trial = refuse  # type: ignore[method-assign]
    assert chosen(model, tmp_path) == ("fast", ExactnessMode(max_logit_shift=DEFAULT_LOGIT_SHIFT))


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"identities": {}, "times": {"fast": [1]}}', "\0"])
def test_exact_auto_with_damaged_file_measures_again(content: str, tmp_path: Path, measured: list[str]) -> None:
    (tmp_path / "mock-exact.json").write_text(content)
    assert chosen(Model(), tmp_path)[0] == "exact"
    assert measured == ALL_STEPS


def test_exact_auto_without_model_identity_stores_nothing(tmp_path: Path) -> None:
    model = Model()
    model.identity = ""
    assert chosen(model, tmp_path)[0] == "exact"
    assert not list(tmp_path.iterdir())


def test_exact_auto_after_forget_measures_again(tmp_path: Path, measured: list[str]) -> None:
    chosen(Model(), tmp_path)
    ExactnessSelector(Model(), folder=tmp_path, load=idle()).forget()
    chosen(Model(), tmp_path)
    assert measured == ALL_STEPS * 2


@pytest.mark.parametrize("exact", ["auto", "on", "off"])
def test_decoder_follows_exactness_of_target_unless_off(exact: Any, tmp_path: Path) -> None:
    target: Any = MockTarget(8, seed=1, max_batch=16)
    target.exactness = ExactnessMode((2, 4, 32), bit_identical=True)
    decoder = SpeculativeDecoder(target, policy="fixed", exact=exact, calibration_folder=tmp_path)
    steps = list(decoder.generate([1, 2, 3, 4, 5, 6] * 10, max_tokens=20))
    assert decoder.exactness.bit_identical is (exact != "off")
    if exact == "auto":
        assert {step.batch for step in steps[1:]} <= {2, 4}, "no draft is longer than the maximum rollback"
