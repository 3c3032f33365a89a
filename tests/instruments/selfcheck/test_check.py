"""Tests that the self-check passes with correct targets and verifiers, fails with wrong ones, and explains rounding."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
from numpy.typing import NDArray
from support.llama_chain import make_chain
from support.mock_target import Clock, MockTarget

from ngramspec.acceptance.rules import Rule
from ngramspec.acceptance.verifier import RULES
from ngramspec.data import GrammarError
from ngramspec.instruments.prompts import Case
from ngramspec.instruments.selfcheck.check import Check, SelfCheck, list_checks, verdict
from ngramspec.instruments.selfcheck.texts import movement
from ngramspec.sampling.distribution import gumbel_one
from ngramspec.sampling.settings import Sampling
from ngramspec.steps import Step

EXHAUSTIVE = pytest.mark.exhaustive
VOCAB = 16
CATEGORIES = ("code", "json", "prose", "qa", "chat")
TICK = 5e-4
"""Clock that advances with each reading, so that tests do not depend on the machine."""


def cases(length: int = 40, prompts: int = 1) -> list[Case]:
    rng = np.random.default_rng(5)
    return [
        Case(category, f"{category}-{i}", tuple(int(t) for t in rng.integers(0, VOCAB, length + 7 * i)))
        for category in CATEGORIES
        for i in range(prompts)
    ]


def mock(kind: type[MockTarget] = MockTarget, **options: Any) -> MockTarget:
    return kind(VOCAB, **{"peak": 4.0, "n_ctx": 2048, **options})


class Watched(SelfCheck):
    """Self-check with a report by the names of the checks."""

    def finish(self) -> Self:
        for _ in self.run():
            pass
        return self

    def __getitem__(self, name: str) -> Check:
        return next(check for check in list_checks(self) if check.name == name)

    @property
    def statuses(self) -> dict[str, str]:
        return {check.name: check.status for check in list_checks(self)}

    @property
    def verdict(self) -> str:
        return verdict(list_checks(self), complete=self.complete)


Make = Callable[..., Watched]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def made(target: MockTarget, **options: Any) -> Watched:
        settings = {"max_tokens": 24, "seconds": 6.0, "clock": Clock(TICK).perf_counter, "calibration_folder": tmp_path}
        return Watched(target, options.pop("cases", cases()), **{**settings, **options})

    return made


SOUND = dict.fromkeys(("rollback", "greedy", "same seed"), "passed")


@pytest.mark.parametrize("exact", [False, pytest.param(True, marks=EXHAUSTIVE)])
def test_self_check_of_correct_target_passes_and_covers_all(make: Make, exact: bool) -> None:
    found = make(mock(), exact=exact, cases=cases(prompts=2), max_tokens=40).finish()
    assert found.statuses == SOUND
    assert found.verdict == "all checks passed"
    assert not any(check.reason or check.missing for check in list_checks(found))
    greedy = [pair for pair in found.pairs if pair.setting == "greedy"]
    assert [pair.category for pair in greedy[:5]] == list(CATEGORIES)
    assert {pair.prompt for pair in greedy} == {case.id for case in found.cases}
    assert {pair.setting for pair in found.pairs} == {"greedy", "coupled", "match", "penalties", "grammar"}
    assert all(pair.tokens == 40 and not pair.cut for pair in found.pairs)
    assert sum(pair.accepted for pair in found.pairs) > 50
    assert sum(pair.drafted - pair.accepted for pair in found.pairs) > 50
    assert {(test.depth, test.size) for test in found.rollbacks} == {(d, n) for d in (24, 300) for n in (1, 2, 5, 16)}


def test_self_check_of_short_texts_accepts_drafts_and_repeats_results(make: Make) -> None:
    greedy = [pair for pair in make(mock(), max_tokens=10).finish().pairs if pair.setting == "greedy"]
    assert sum(pair.accepted for pair in greedy) > len(greedy) * 4
    assert sum(pair.drafted - pair.accepted for pair in greedy) > 0
    first, again, other = (make(mock(), seed=seed, seconds=1.0).finish() for seed in (0, 0, 1))
    assert first.pairs == again.pairs
    assert [pair for pair in first.pairs if pair.setting == "greedy"] != first.pairs != other.pairs


def several(n: int, _depth: int) -> int:
    return int(n > 1)


def test_self_check_explains_differences_within_rounding_bound(make: Make) -> None:
    found = make(mock(kernels=several, noise=0.3)).finish()
    assert found.statuses == {**SOUND, "greedy": "explained", "same seed": "explained"}
    differing = [(pair.setting, pair.difference) for pair in found.pairs if pair.difference is not None]
    assert len(differing) > 4
    for setting, d in differing:
        assert 0 < d.needed <= d.bound == found.bound()
        assert d.plain != d.drafted
        assert d.plain_text == chr(97 + d.plain)
        if setting == "greedy":
            assert d.needed == pytest.approx((d.plain_logit - d.drafted_logit) / 2, abs=d.bound / 1000)
    assert found.verdict.startswith("all checks passed; some texts differ because of the batch size")

    exact = make(mock(kernels=several, noise=0.3), exact=True).finish()
    assert exact.statuses == SOUND
    assert exact.kernels.exact_sizes is not None
    assert not any(pair.difference for pair in exact.pairs)


@pytest.mark.parametrize("exact", [False, pytest.param(True, marks=EXHAUSTIVE)])
def test_self_check_with_rounding_beyond_bound_fails(make: Make, exact: bool) -> None:
    # The probe tests depths of 96 and 640.
    target = mock(kernels=lambda n, depth: n if depth > 690 else 0, noise=0.3)
    found = make(target, exact=exact, cases=cases(700, 1), seconds=60.0).finish()
    assert found["rollback"].status == "passed"
    assert found.verdict == "FAILED: greedy, same seed"
    assert "texts with an unexplained difference" in found["greedy"].reason


@pytest.mark.parametrize(
    ("noise", "slow", "depths"), [(1e-4, False, None), (2.0, True, (96,)), (2.0, False, (96, 640))]
)
def test_self_check_probes_only_after_a_difference(
    make: Make, noise: float, slow: bool, depths: tuple[int, ...] | None
) -> None:
    clock = Clock(TICK)
    target = mock(kernels=several, noise=noise, seconds=lambda n: 0.3 if slow else 0.003, clock=clock)
    found = make(target, clock=clock.perf_counter, seconds=50.0).finish()
    assert any(pair.difference is not None for pair in found.pairs) == (depths is not None)
    assert (found.kernels.probe.depths if found.kernels.probe else None) == depths


def test_self_check_with_incomplete_rollback_fails(make: Make) -> None:
    class LeavesOne(MockTarget):
        def rollback(self, length: int) -> None:
            super().rollback(min(length + 1, len(self.tokens)))

    found = make(mock(LeavesOne)).finish()
    assert found["rollback"].reason == "1 extra tokens in the cache after a batch of 5 at 24"
    # Decoding detects it too.
    assert (found["rollback"].status, found["greedy"].status) == ("failed", "failed")
    assert found["greedy"].reason.startswith("RuntimeError: another generation was started")


def test_self_check_with_logits_changed_by_rollback_fails(make: Make) -> None:
    class LeavesTrace(MockTarget):
        trace = 0.0

        def rollback(self, length: int) -> None:
            self.trace += sum(self.tokens[length:])
            super().rollback(length)

        def _inexact(self, length: int) -> NDArray[np.float32]:
            return super()._inexact(length) + np.float32(1e-5 * (self.trace % 7))

        def clear(self) -> None:
            super().clear()
            self.trace = 0.0

    found = make(mock(LeavesTrace)).finish()
    assert found["rollback"].status == "failed"
    assert any(test.kept and not test.identical for test in found.rollbacks)
    assert 0 < max(test.difference for test in found.rollbacks) < 1e-4


def test_self_check_with_nan_logits_fails(make: Make) -> None:
    class Decays(MockTarget):
        def evaluate(self, tokens: Sequence[int]) -> NDArray[np.float32]:
            rows = super().evaluate(tokens)
            if len(self.batches) == 4:  # repeats the first batch
                rows[-1, 0] = np.nan
            return rows

    class Broken(MockTarget):
        def _inexact(self, length: int) -> NDArray[np.float32]:
            return super()._inexact(length) * np.float32(np.nan)

    found = make(mock(Decays)).finish()
    assert found["rollback"].status == "failed"
    assert max(test.difference for test in found.rollbacks) == math.inf
    assert make(mock(Broken)).finish()["greedy"].reason.startswith("BadLogits: ")


class OneByOne(MockTarget):
    """Target with a bias, because of which no compiled call verifies all rows of a greedy text at once."""

    def sampler(self, sampling: Sampling) -> Any:
        return super().sampler(replace(sampling, logit_bias=((0, 0.0),)))


class AcceptsAll(Rule):
    def decide(self, row: Any, guess: int | None, position: int, _q: Any) -> tuple[int, bool]:
        return (int(np.argmax(row)), False) if guess is None else (guess, True)


class DrawsAnew(Rule):
    """Only the position after a draft is wrong: the distribution stays correct, but the text of a seed changes."""

    def decide(self, row: Any, guess: int | None, position: int, _q: Any) -> tuple[int, bool]:
        return super().decide(row, guess, position + 1000 * (guess is not None), _q)


@pytest.mark.parametrize(
    ("rule", "wrong", "failing", "exact"),
    [
        ("greedy", AcceptsAll, "greedy", False),
        ("coupled", AcceptsAll, "same seed", True),
        pytest.param("coupled", AcceptsAll, "same seed", False, marks=EXHAUSTIVE),
        ("coupled", DrawsAnew, "same seed", False),
    ],
)
def test_self_check_with_wrong_verifier_fails(
    make: Make, monkeypatch: pytest.MonkeyPatch, rule: str, wrong: type[Rule], failing: str, exact: bool
) -> None:
    monkeypatch.setitem(RULES, rule, wrong)
    target = mock(OneByOne, kernels=None if exact else several, noise=1e-3)
    found = make(target, exact=exact, seconds=3.0).finish()
    assert [name for name, status in found.statuses.items() if status == "failed"] == [failing]
    assert "skipped" not in found.statuses.values()


def with_texts(found: Watched, change: Callable[..., Iterator[Step]], decoder: str = "drafted") -> Watched:
    """Return a finished self-check in which `change` replaces one decoder's `generate`; it gets the original first."""
    changed = getattr(found, decoder)
    changed.generate = partial(change, changed.generate)
    return found.finish()


def test_self_check_with_truncated_text_fails(make: Make) -> None:
    def short(whole: Any, *args: Any, max_tokens: int, **options: Any) -> Iterator[Step]:
        return whole(*args, max_tokens=max_tokens - 1, **options)

    found = with_texts(make(mock(kernels=several, noise=1e-3), seconds=2.0), short)
    assert found["greedy"].status == "failed"
    assert found.pairs[0].difference is not None
    assert found.pairs[0].difference.drafted is None


def test_self_check_after_exception_fails_only_that_check(make: Make) -> None:
    def broken(*_: Any, **__: Any) -> Iterator[Step]:
        raise ZeroDivisionError("oh")

    found = with_texts(make(mock(), seconds=2.0), broken)
    assert found.complete
    assert (found["greedy"].status, found["greedy"].reason) == ("failed", "ZeroDivisionError: oh")
    assert found["rollback"].status == "passed"


@pytest.mark.parametrize("to_blame", ["plain", "drafted"])
def test_self_check_skips_grammar_unless_only_drafts_fail(make: Make, to_blame: str) -> None:
    def refusing(whole: Any, *args: Any, sampling: Sampling, **options: Any) -> Iterator[Step]:
        if sampling.grammar is not None:
            raise GrammarError("dead end")
        return whole(*args, sampling=sampling, **options)

    found = with_texts(make(mock(), seconds=2.0), refusing, to_blame)
    check = found["same seed"]
    if to_blame == "plain":
        assert check.status == "passed"
        assert check.missing == "the grammar does not work with this vocabulary: dead end"
        assert found.verdict.startswith("all checks passed; checked in part: same seed")
    else:
        assert check.status == "failed"
        assert "fails with drafts: dead end" in check.reason


def test_self_check_without_rollback_skips_all_checks(make: Make) -> None:
    found = make(mock(fail_rollback=True)).finish()
    assert found.statuses == dict.fromkeys(SOUND, "skipped")
    assert all("cannot be rolled back" in check.reason for check in list_checks(found))
    assert found.verdict == "all checks passed; not checked: rollback, greedy, same seed"


def test_self_check_when_interrupted_reports_partial_results(make: Make) -> None:
    found = make(mock())
    work = found.run()
    while len(found.pairs) < 3:
        next(work)
    work.close()
    assert found.statuses == SOUND
    assert found["greedy"].missing == "no time for prose, qa, chat"
    assert found["same seed"].missing == "no time for penalties, grammar"
    assert found.verdict == "INCOMPLETE: no check failed so far"


@pytest.mark.parametrize("seconds_per_pass", [0.3, pytest.param(0.02, marks=EXHAUSTIVE)])
@pytest.mark.parametrize("exact", [False, pytest.param(True, marks=EXHAUSTIVE)])
def test_self_check_of_slow_model_keeps_within_time_limit(make: Make, seconds_per_pass: float, exact: bool) -> None:
    """A prefill takes time too: a quarter of a pass per token, as on a CPU."""
    clock = Clock(TICK)
    timed: dict[str, Any] = {"reading": lambda n: seconds_per_pass / 4 * n, "clock": clock}
    target = mock(seconds=lambda n: seconds_per_pass * (0.8 + 0.2 * n), n_batch=128, **timed)
    # The sizes of exact mode are chosen once per model, machine and settings.
    make(target, exact=exact).drafted.kernels.ensure_exact(target)
    options = {"cases": cases(300, 4), "max_tokens": 64, "seconds": 50.0, "clock": clock.perf_counter}
    found = make(target, exact=exact, **options)
    began = clock.now
    found.finish()
    assert 25.0 < clock.now - began < 60.0
    assert found.statuses == SOUND
    assert {pair.category for pair in found.pairs if pair.setting == "greedy"} == set(CATEGORIES)
    assert any(pair.setting != "greedy" for pair in found.pairs)
    assert ("cut to their ends" in found["greedy"].covered) == (seconds_per_pass > 0.1 or exact)


@pytest.mark.parametrize("exact", [False, pytest.param(True, marks=EXHAUSTIVE)])
def test_self_check_with_small_context_truncates_prompts(make: Make, exact: bool) -> None:
    found = make(mock(n_ctx=64), exact=exact, max_tokens=40).finish()
    assert found.statuses == SOUND
    assert {pair.prompt_tokens for pair in found.pairs} == {24}
    assert found["greedy"].covered.endswith("; 5 prompts cut to their ends")
    assert {test.depth for test in found.rollbacks} == {24, 32}


def test_self_check_without_drafts_reports_it(make: Make) -> None:
    found = make(mock(), max_tokens=2).finish()
    assert sum(pair.drafted for pair in found.pairs if pair.setting == "greedy") == 0
    assert found["greedy"].missing == "nothing was drafted"


def test_self_check_rejects_invalid_arguments(make: Make) -> None:
    needs: list[dict[str, Any]] = [{"cases": []}, {"max_tokens": 1}, {"seconds": 0.0}, {"seconds": math.nan}]
    little = "40 tokens leave no room for a prompt in a context of 47"
    wrong = [*((options, "a self-check requires") for options in needs), ({"max_tokens": 40}, little)]
    for options, words in [*wrong, ({"drafter": "magic"}, "unknown drafter 'magic'")]:
        with pytest.raises(ValueError, match=words):
            make(mock(n_ctx=47), **options)


def greedy(row: NDArray[np.float32]) -> int:
    return int(np.argmax(row))


def test_movement_with_greedy_returns_required_logit_change() -> None:
    row = np.array([1.0, 4.0, 3.0, -np.inf], np.float32)
    far = np.array([9.0, 4.0, 8.0, 20.0], np.float32)
    for token, bound, needed in ((2, 1.0, 0.5), (2, 0.51, 0.5), (2, 0.49, None), (0, 1.6, 1.5), (0, 1.4, None)):
        drafted = far.copy()
        drafted[token] = 30.0
        got = movement(greedy, row, drafted, 1, token, bound)
        assert got == (needed if needed is None else pytest.approx(needed, abs=1e-3))
    assert movement(greedy, row, far, 1, 3, 100.0) is None
    near = np.array([1.0, 3.4, 3.6, -np.inf], np.float32)
    assert movement(greedy, row, near, 1, 2, 0.6) == pytest.approx(0.5, abs=1e-3)
    assert movement(greedy, row, near, 1, 2, 0.0) is None
    assert movement(greedy, row, near, 1, 1, 0.6) is None  # The token does not follow from its logits.
    assert movement(greedy, row, near, 2, 2, 0.6) is None


def sampler_of(sampling: Sampling, seed: int, size: int) -> Callable[[NDArray[np.float32]], int]:
    sampler = make_chain(replace(sampling, seed=seed), size)
    sampler.begin([1, 2, 3])
    return lambda row: sampler.draw(row, 7)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.8),
        Sampling(temperature=1.3, repeat_penalty=1.2),
        pytest.param(Sampling(0.8, top_k=3, top_p=1.0, min_p=0.0), marks=pytest.mark.exhaustive),
        pytest.param(Sampling(0.8, top_k=0, top_p=0.7, min_p=0.0), marks=pytest.mark.exhaustive),
        pytest.param(Sampling(0.8, top_k=0, top_p=1.0, min_p=0.4), marks=pytest.mark.exhaustive),
    ],
)
def test_movement_explains_any_change_within_bound(sampling: Sampling) -> None:
    rng = np.random.default_rng(3)
    bound, others = 0.3, 0
    for trial in range(200):
        row = rng.normal(0, 1.0, 12).astype(np.float32)
        moved = row + rng.uniform(-bound, bound, row.size).astype(np.float32)
        draw = sampler_of(sampling, trial, row.size)
        plain, drafted = draw(row), draw(moved)
        if plain != drafted:
            others += 1
            needed = movement(draw, row, moved, plain, drafted, bound * 1.0001)
            assert 0 < needed <= bound * 1.0001
    assert others > 8


def test_movement_without_filters_explains_only_close_scores() -> None:
    """The two scores of argmax(log p + noise) differ by at most 2 * bound / temperature."""
    sampling = Sampling(temperature=0.5, top_k=0, top_p=1.0, min_p=0.0)
    rng = np.random.default_rng(4)
    bound, explained = 0.2, 0
    for trial in range(200):
        row, moved = (rng.normal(0, 1.0, 12).astype(np.float32) for _ in range(2))
        draw = sampler_of(sampling, trial, row.size)
        plain, drafted = draw(row), draw(moved)
        noise = [gumbel_one(trial, 7, token) for token in (plain, drafted)]
        apart = (row[plain] - row[drafted]) / sampling.temperature + noise[0] - noise[1]
        needed = movement(draw, row, moved, plain, drafted, bound)
        close = apart * sampling.temperature / 2 <= bound
        assert (needed is not None) == close, (trial, apart)
        explained += close and plain != drafted
    assert explained > 10
