"""`exact="auto"` at work on a target that only pretends: what is measured when, what is kept, and what is switched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.mock_target import Clock, MockTarget

from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.errors import ModelError
from ngramspec.exactness import auto as exact_auto
from ngramspec.exactness.auto import ExactAuto
from ngramspec.exactness.choice import DEPTHS, SIZES, UNMEASURED, Identity, Times

ALL, SPLIT = Identity(SIZES, SIZES[1:]), Identity((1,), SIZES[1:])
FAST_STEPS = [f"{what} {depth}" for what in ("fast", "speed") for depth in DEPTHS]
ALL_STEPS = FAST_STEPS + [f"exact {depth}" for depth in DEPTHS]
PROMPT = [1, 2, 3, 4, 5, 6] * 10


class Switching(MockTarget):
    """A mock target with two settings. `identity_of` and `times_of` are what a trial would find, at any depth."""

    settings = ("fast", "exact")
    identity = "mock"

    def __init__(self, **options: Any) -> None:
        super().__init__(8, seed=1, **options)
        self.setting = "fast"
        self.uses: list[str] = []
        self.refuses = False
        self.single = 0.001
        self.identity_of = {"fast": SPLIT, "exact": ALL}
        self.times_of = {name: Times(0.01, 0.001) for name in self.settings}
        self.times_of["padded"] = Times(0.02, 0.001)
        self.deep_times_of: dict[str, Times] = {}

    def use(self, setting: str) -> None:
        self.uses.append(setting)
        if self.refuses and setting == "exact":
            raise ModelError("no memory")
        self.clear()
        self.setting = setting

    def trial(self, setting: str) -> Trial:
        return Trial(self, setting)


class Trial:
    def __init__(self, target: Switching, setting: str) -> None:
        self.target, self.setting = target, setting

    def __enter__(self) -> Trial:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was measured, in order; each step takes as long as is expected of it."""
    done: list[str] = []
    clock = Clock(0.0)
    monkeypatch.setattr(exact_auto, "time", clock)

    def note(target: Switching, what: str) -> None:
        done.append(what)
        clock.now += target.single * exact_auto.trial.IDENTITY_COST

    def identity(trial: Trial, depth: int) -> Identity:
        note(trial.target, f"{trial.setting} {depth}")
        return trial.target.identity_of[trial.setting]

    def times(trials: Mapping[str, Trial], depth: int) -> dict[str, Times]:
        note(trials["fast"].target, f"speed {depth}")
        found = dict(trials["fast"].target.times_of)
        if depth:
            found |= trials["fast"].target.deep_times_of
        return found

    def rounding(trial: Trial, text: Sequence[int]) -> float:
        note(trial.target, "rounding")
        return 0.5

    for function in (identity, times, rounding):
        monkeypatch.setattr(exact_auto.trial, function.__name__, function)
    monkeypatch.setattr(exact_auto.trial, "single", lambda t: t.target.single)
    return done


def test_settings_under_which_sizes_agree_are_found_and_taken(tmp_path: Path, measured: list[str]) -> None:
    for folder, drafts in ((tmp_path / "a", True), (tmp_path / "b", False)):
        target = Switching()
        footing = ExactAuto(target, folder).begin(PROMPT, 100, drafts=drafts)
        assert (footing.same, footing.sizes, footing.bound) == (True, SIZES, 0)
        assert target.setting == "exact"
    assert measured == ALL_STEPS * 2


def test_the_least_that_decides_is_measured(tmp_path: Path, measured: list[str]) -> None:
    target = Switching()
    target.identity_of["fast"] = ALL
    target.max_batch = 4  # no draft is longer than can be taken back
    footing = ExactAuto(target, tmp_path).begin(PROMPT, 100)
    assert (footing.same, footing.sizes) == (True, (1, 2, 3, 4))
    assert measured == FAST_STEPS[:2]
    assert target.uses == []


def test_dear_settings_are_not_taken_and_rounding_is_measured_for_drafts(tmp_path: Path, measured: list[str]) -> None:
    target = Switching()
    target.times_of["exact"] = Times(0.011, 0.001)
    assert not ExactAuto(target, tmp_path).begin(PROMPT, 100, drafts=False).same
    assert measured == FAST_STEPS
    footing = ExactAuto(target, tmp_path).begin(PROMPT, 100)
    assert measured == [*FAST_STEPS, "rounding"]
    assert (footing.same, footing.sizes, footing.bound, footing.harmless) == (False, None, 0.5, (1,))
    assert target.setting == "fast"


def test_a_later_process_chooses_the_same_whatever_it_would_measure(tmp_path: Path, measured: list[str]) -> None:
    ExactAuto(Switching(), tmp_path).begin(PROMPT, 100, drafts=False)
    later = Switching()
    later.times_of["exact"] = Times(9.0, 9.0)
    later.identity_of["exact"] = SPLIT
    before = list(measured)
    assert ExactAuto(later, tmp_path).begin(PROMPT, 100).same
    assert measured == before


def test_of_two_processes_at_once_the_first_word_counts(tmp_path: Path) -> None:
    early, late = Switching(), Switching()
    late.times_of["exact"] = Times(9.0, 9.0)
    first, second = ExactAuto(early, tmp_path), ExactAuto(late, tmp_path)  # both have read an empty folder
    assert first.begin(PROMPT, 100).same
    assert second.begin(PROMPT, 100).same


def test_a_slow_model_is_not_kept_waiting(tmp_path: Path, measured: list[str]) -> None:
    slow = Switching()
    slow.single = 4.0
    footing = ExactAuto(slow, tmp_path).begin(PROMPT, 10)
    assert measured == []
    assert (footing.same, footing.bound) == (False, UNMEASURED)
    opened = []
    slow.trial = lambda setting: opened.append(setting) or Trial(slow, setting)  # type: ignore[method-assign,func-returns-value]
    ExactAuto(slow, tmp_path).begin(PROMPT, 10)
    assert opened == [], "the file says that there is no time for it"
    auto = ExactAuto(slow, tmp_path)
    auto.measure(len(PROMPT), 10, budget=float("inf"))
    assert measured == ALL_STEPS
    assert ExactAuto(slow, tmp_path).begin(PROMPT, 10).same


def test_a_slow_model_is_measured_step_by_step(tmp_path: Path, measured: list[str]) -> None:
    slow = Switching()
    slow.single = 0.5  # a step takes 25 seconds, a typical request 128
    slow.times_of = {"fast": Times(0.5, 0.05), "exact": Times(0.5, 0.05), "padded": Times(0.7, 0.05)}
    chosen = []
    for number in range(len(ALL_STEPS) + 1):
        footing = ExactAuto(slow, tmp_path).begin(PROMPT, 256)  # a process each
        assert len(measured) == min(number + 1, len(ALL_STEPS))
        chosen.append(footing.same)
    assert measured == ALL_STEPS
    assert chosen == [False] * 5 + [True] * 2


def test_a_conversation_goes_on_as_it_began(tmp_path: Path) -> None:
    target = Switching(n_ctx=4096)
    target.deep_times_of["exact"] = Times(0.01, 0.003)
    auto = ExactAuto(target, tmp_path)
    long = PROMPT * 40
    assert auto.begin(PROMPT, 100).same
    target.prefill(long[: len(long) * 2 // 3])
    assert auto.begin(long, 100).same, "most of it is in the cache"
    target.clear()
    assert not auto.begin(long, 100).same
    assert target.uses == ["exact", "fast"]


def test_settings_that_do_not_fit_are_given_up(tmp_path: Path) -> None:
    target = Switching()
    target.refuses = True
    auto = ExactAuto(target, tmp_path)
    assert not auto.begin(PROMPT, 100).same
    assert not auto.begin(PROMPT[::-1], 100).same
    assert target.uses == ["exact", "fast"]


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"identity": {}, "speed": {"fast": [1]}}', "\0"])
def test_a_damaged_file_counts_as_nothing_known(content: str, tmp_path: Path, measured: list[str]) -> None:
    (tmp_path / "mock-exact.json").write_text(content)
    assert ExactAuto(Switching(), tmp_path).begin(PROMPT, 100).same
    assert measured == ALL_STEPS


def test_forgetting_measures_again(tmp_path: Path, measured: list[str]) -> None:
    auto = ExactAuto(Switching(), tmp_path)
    auto.begin(PROMPT, 100)
    auto.forget()
    ExactAuto(Switching(), tmp_path).begin(PROMPT, 100)
    assert measured == ALL_STEPS * 2


@pytest.mark.parametrize("exact", ["auto", "on", "off"])
def test_a_decoder_takes_all_three(exact: Any, tmp_path: Path) -> None:
    target = Switching()
    decoder = SpeculativeDecoder(target, exact=exact, calibration_folder=tmp_path)
    fast = decoder.calibration
    tokens = [token for step in decoder.generate(PROMPT, max_tokens=20) for token in step.tokens]
    assert len(tokens) == 20
    assert target.setting == ("exact" if exact == "auto" else "fast")
    assert (decoder.calibration is fast) == (target.setting == "fast"), "each setting has a cost curve of its own"
    assert decoder.footing.same is (exact != "off")
