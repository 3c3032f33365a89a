"""The self-check passes what is sound, and fails every kind of target, verifier and sampler that is not."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.mock_target import Clock, MockTarget
from support.numpy_sampler import NumpySampler

import ngramspec.acceptance.verifier
import ngramspec.selfcheck.check
import ngramspec.selfcheck.law
from ngramspec.acceptance.rules import Verdict
from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.decoding.step import Step
from ngramspec.drafting.draft import Draft
from ngramspec.errors import GrammarError
from ngramspec.prompts import Case
from ngramspec.sampling.logprobs import Logprobs
from ngramspec.sampling.settings import Sampling
from ngramspec.selfcheck.check import SelfCheck
from ngramspec.selfcheck.report import Check, report, verdict

VOCAB = 16
CATEGORIES = ("code", "json", "prose", "qa", "chat")
TICK = 5e-4
"""What a look at the clock takes: time passes as the self-check looks at it, and tests do not depend on the machine."""


def cases(length: int = 40, prompts: int = 2) -> list[Case]:
    rng = np.random.default_rng(5)
    return [
        Case(category, f"{category}-{i}", tuple(int(t) for t in rng.integers(0, VOCAB, length + 7 * i)))
        for category in CATEGORIES
        for i in range(prompts)
    ]


def mock(kind: type[MockTarget] = MockTarget, **options: Any) -> MockTarget:
    return kind(VOCAB, **{"peak": 4.0, "n_ctx": 2048, **options})


@pytest.fixture(autouse=True)
def _a_quick_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its draws take longer than all else."""
    monkeypatch.setattr(ngramspec.selfcheck.check, "PROMPTS", 1)
    monkeypatch.setattr(ngramspec.selfcheck.law, "DRAWS", 1600)


class WithoutLaw(SelfCheck):
    """For tests of other things."""

    def _check_law(self) -> Iterator[str]:
        yield from ()


def make(target: MockTarget, tmp_path: Path, kind: type[SelfCheck] = SelfCheck, **options: Any) -> SelfCheck:
    settings = {"max_tokens": 40, "seconds": 6.0, "clock": Clock(TICK).perf_counter, "calibration_folder": tmp_path}
    return kind(target, options.pop("cases", cases()), **{**settings, **options})


def finish(found: SelfCheck) -> dict[str, Check]:
    for _ in found.run():
        pass
    return {check.name: check for check in report(found)}


def statuses(checks: dict[str, Check]) -> dict[str, str]:
    return {name: check.status for name, check in checks.items()}


MEMORY = ("rollback", "reuse", "probe", "calibration")
SOUND = dict.fromkeys(("greedy", "same seed", "logprobs", *MEMORY, "law"), "passed")
SOUND_TEXTS = {**SOUND, "law": "skipped"}


@pytest.mark.parametrize("exact", [False, True])
def test_a_sound_target_passes_and_everything_was_looked_at(tmp_path: Path, exact: bool) -> None:
    found = make(mock(), tmp_path, exact=exact)
    checks = finish(found)
    assert statuses(checks) == SOUND
    assert verdict(list(checks.values()), complete=found.complete) == "all that must hold does"
    assert not any(check.reason or check.missing for check in checks.values())
    greedy = [pair for pair in found.pairs if pair.setting == "greedy"]
    assert [pair.category for pair in greedy[:5]] == list(CATEGORIES)
    assert {pair.prompt for pair in greedy} == {case.id for case in found.cases}
    assert {pair.setting for pair in found.pairs} == {"greedy", "coupled", "match", "penalties", "grammar"}
    assert all(pair.tokens == 40 and not pair.cut for pair in found.pairs)
    assert sum(pair.accepted for pair in found.pairs) > 50
    assert sum(pair.drafted - pair.accepted for pair in found.pairs) > 50
    assert {(test.depth, test.size) for test in found.rollbacks} == {(d, n) for d in (24, 300) for n in (1, 2, 5, 16)}
    assert {(test.method, test.temperature) for test in found.laws} == {
        (method, t) for method in ("coupled", "rejection") for t in (0.8, 1.2)
    }
    for method in ("coupled", "rejection"):
        tests = [test for test in found.laws if test.method == method]
        assert sum(t.accepted for t in tests if t.after is None) > 500
        assert sum(t.refused for t in tests if t.after is None) > 500
        assert sum(t.draws for t in tests if t.after is not None) > 500


def test_the_same_seed_finds_the_same_and_another_one_other_texts(tmp_path: Path) -> None:
    def found(seed: int) -> SelfCheck:
        check = make(mock(), tmp_path, seed=seed, seconds=2.0)
        finish(check)
        return check

    first, again, other = found(0), found(0), found(1)
    assert (first.pairs, first.laws) == (again.pairs, again.laws)
    assert first.laws != other.laws
    assert [p.logprob_difference for p in other.pairs] == [0.0] * len(other.pairs)


# ------------------------------------------------------------------ rounding that depends on the batch size


def several(n: int, _depth: int) -> int:
    return int(n > 1)


def test_differences_within_the_probe_s_bound_are_explained_and_exact_mode_has_none(tmp_path: Path) -> None:
    found = make(mock(kernels=several, noise=0.3), tmp_path, WithoutLaw)
    checks = finish(found)
    assert statuses(checks) == {**SOUND_TEXTS, "greedy": "explained", "same seed": "explained"}
    differences = [pair.difference for pair in found.pairs if pair.difference is not None]
    assert len(differences) > 4
    for difference in differences:
        assert difference.needed is not None
        assert 0 < difference.needed <= difference.bound == found.bound()
        assert difference.plain != difference.drafted
        assert difference.plain_text == chr(97 + difference.plain)
    greedy = [pair.difference for pair in found.pairs if pair.setting == "greedy" and pair.difference is not None]
    for d in greedy:
        assert d.needed == pytest.approx((d.plain_logit - d.drafted_logit) / 2, abs=d.bound / 1000)
    line = verdict(list(checks.values()), complete=True)
    assert line.startswith("all that must hold does; some texts differ by the batch size alone")

    exact = make(mock(kernels=several, noise=0.3), tmp_path, WithoutLaw, exact=True)
    assert statuses(finish(exact)) == SOUND_TEXTS
    assert exact.exact_sizes is not None
    assert all(pair.logprobs_identical and pair.difference is None for pair in exact.pairs)


@pytest.mark.parametrize("exact", [False, True])
def test_rounding_beyond_what_the_probe_saw_fails(tmp_path: Path, exact: bool) -> None:
    # The probe looks at depths of 96 and 640.
    target = mock(kernels=lambda n, depth: n if depth > 690 else 0, noise=0.3)
    found = make(target, tmp_path, WithoutLaw, exact=exact, cases=cases(700, 1), seconds=60.0)
    checks = finish(found)
    assert {checks[name].status for name in ("greedy", "same seed", "logprobs")} == {"failed"}
    assert checks["rollback"].status == "passed"
    assert verdict(list(checks.values()), complete=True) == "FAILED: greedy, same seed, logprobs"
    assert "texts that differ unexplained" in checks["greedy"].reason


def test_a_difference_larger_than_the_bound_is_not_explained(tmp_path: Path) -> None:
    # Some kernels differ more than others: those of the sizes that drafts use, but at depths that were not probed.
    def deep(n: int, depth: int) -> int:
        return int(n > 1) if depth <= 690 else 2 * n

    class Rough(MockTarget):
        def _inexact(self, length: int) -> NDArray[np.float32]:
            row = super()._inexact(length)
            if length > 690 and self._marks[length - 1] in (6, 8, 10):
                row[::2] += np.float32(3.0)
            return row

    found = make(mock(Rough, kernels=deep, noise=0.01), tmp_path, WithoutLaw, cases=cases(700, 1), seconds=60.0)
    checks = finish(found)
    assert found.bound() > 0
    assert checks["greedy"].status == "failed"
    unexplained = [p.difference for p in found.pairs if p.difference is not None and not p.difference.explained]
    assert unexplained
    assert all(difference.needed is None for difference in unexplained)


@pytest.mark.parametrize(
    ("noise", "probed", "logprobs"), [(0.0, False, "passed"), (1e-4, False, "skipped"), (2.0, True, "passed")]
)
def test_a_slow_probe_waits_until_a_difference_asks_for_it(
    tmp_path: Path, noise: float, probed: bool, logprobs: str
) -> None:
    clock = Clock(TICK)
    target = mock(kernels=several if noise else None, noise=noise, seconds=lambda n: 0.3, clock=clock)
    found = make(target, tmp_path, WithoutLaw, clock=clock.perf_counter, seconds=50.0)
    checks = finish(found)
    assert any(pair.difference is not None for pair in found.pairs) == probed
    assert (found.probed is not None) == probed
    assert checks["logprobs"].status == logprobs
    if found.probed is not None:
        assert found.probed.depths == (96,)


# ------------------------------------------------------------------ rollback


class LeavesOne(MockTarget):
    """One token of those taken back stays."""

    def rollback(self, length: int) -> None:
        super().rollback(min(length + 1, len(self.tokens)))


class LeavesTrace(MockTarget):
    """What was taken back stays in the logits, however slightly."""

    trace = 0.0

    def rollback(self, length: int) -> None:
        self.trace += sum(self.tokens[length:])
        super().rollback(length)

    def _inexact(self, length: int) -> NDArray[np.float32]:
        return super()._inexact(length) + np.float32(1e-5 * (self.trace % 7))

    def clear(self) -> None:
        super().clear()
        self.trace = 0.0


def test_a_rollback_that_leaves_a_token_behind_fails(tmp_path: Path) -> None:
    checks = finish(make(mock(LeavesOne), tmp_path))
    assert checks["rollback"].status == "failed"
    assert checks["rollback"].reason == "1 tokens too many in the cache after a batch of 5 at 24"
    # Decoding notices it too, and the law's drafts stand in the wrong place.
    assert checks["greedy"].status == "failed"
    assert checks["greedy"].reason.startswith("RuntimeError: another generation began")


def test_a_rollback_that_leaves_a_trace_in_the_logits_fails(tmp_path: Path) -> None:
    found = make(mock(LeavesTrace), tmp_path, WithoutLaw)
    checks = finish(found)
    assert checks["rollback"].status == "failed"
    assert any(test.kept and not test.identical for test in found.rollbacks)
    assert 0 < max(test.difference for test in found.rollbacks) < 1e-4


def test_logits_that_become_nan_fail_the_rollback(tmp_path: Path) -> None:
    class Decays(MockTarget):
        def evaluate(self, tokens: Sequence[int]) -> NDArray[np.float32]:
            rows = super().evaluate(tokens)
            if len(self.batches) == 4:  # the first batch again
                rows[-1, 0] = np.nan
            return rows

    found = make(mock(Decays), tmp_path, WithoutLaw)
    assert finish(found)["rollback"].status == "failed"
    assert max(test.difference for test in found.rollbacks) == math.inf


def test_logits_that_are_nan_fail_what_reads_them(tmp_path: Path) -> None:
    class Broken(MockTarget):
        def _inexact(self, length: int) -> NDArray[np.float32]:
            return super()._inexact(length) * np.float32(np.nan)

    checks = finish(make(mock(Broken), tmp_path))
    assert checks["greedy"].reason.startswith("BadLogits: ")
    assert checks["law"].status == "failed"


# ------------------------------------------------------------------ verifiers, samplers and logprobs


def accepts_all(*args: Any, **_: Any) -> Verdict:
    rows, draft, sampler = args[0], args[1], next(a for a in args[2:] if isinstance(a, NumpySampler))
    tokens = (*draft, int(np.argmax(list(rows)[-1])))
    for token in tokens:
        sampler.accept(token)
    return Verdict(tokens, len(draft))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(
    ("rule", "failing"),
    [
        ("verify_greedy", {"greedy"}),
        ("verify_coupled", {"same seed", "law"}),
        ("verify_rejection", {"law"}),
    ],
)
def test_a_verifier_that_accepts_every_draft_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: str, failing: set[str], exact: bool
) -> None:
    monkeypatch.setattr(ngramspec.acceptance.verifier, rule, accepts_all)
    target = mock(kernels=None if exact else several, noise=1e-3)
    checks = finish(make(target, tmp_path, exact=exact, seconds=3.0))
    assert {name for name, check in checks.items() if check.status == "failed"} == failing
    assert {name for name, check in checks.items() if check.status == "skipped"} == set()


def test_a_coupled_verifier_that_draws_anew_after_a_refusal_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The law stays right, and a seed's text does not."""
    sound = ngramspec.acceptance.verifier.verify_coupled

    def shifted(rows: Any, draft: Sequence[int], sampler: NumpySampler, position: int, watch: Any = None) -> Verdict:
        return sound(rows, draft, sampler, position + 1000 * bool(draft), watch)

    monkeypatch.setattr(ngramspec.acceptance.verifier, "verify_coupled", shifted)
    checks = finish(make(mock(), tmp_path, WithoutLaw))
    assert checks["same seed"].status == "failed"
    assert checks["greedy"].status == "passed"


class Biased(MockTarget):
    """Its sampler is a little warmer than it was told."""

    warmth = 1.25

    def sampler(self, sampling: Sampling) -> NumpySampler:
        return super().sampler(replace(sampling, temperature=sampling.temperature * self.warmth))


def test_a_biased_sampler_fails_the_law_and_nothing_else(tmp_path: Path) -> None:
    checks = finish(make(mock(Biased), tmp_path))
    assert statuses(checks) == {**SOUND, "law": "failed"}


def test_a_sampler_that_emits_what_the_filters_drop_fails_the_law(tmp_path: Path) -> None:
    class Unfiltered(MockTarget):
        def sampler(self, sampling: Sampling) -> NumpySampler:
            return super().sampler(replace(sampling, min_p=0.0, top_p=1.0, top_k=0))

    checks = finish(make(mock(Unfiltered), tmp_path))
    assert checks["law"].status == "failed"
    assert "are not in the law at all" in checks["law"].reason


@pytest.mark.parametrize(("bias", "status"), [(-math.inf, "passed"), (0.7, "failed")])
def test_the_law_knows_of_tokens_that_the_model_forbids_and_of_no_other_bias(
    tmp_path: Path, bias: float, status: str
) -> None:
    class Leaning(MockTarget):
        def sampler(self, sampling: Sampling) -> NumpySampler:
            return super().sampler(replace(sampling, logit_bias=tuple((token, bias) for token in (1, 4, 9, 11, 12))))

    checks = finish(make(mock(Leaning), tmp_path))
    assert statuses(checks) == {**SOUND, "law": status}


def tampered(generate: Callable[..., Iterator[Step]], change: Callable[[Logprobs], Logprobs]) -> Any:
    def tampering(*args: Any, **options: Any) -> Iterator[Step]:
        for step in generate(*args, **options):
            yield replace(step, logprobs=tuple(change(each) for each in step.logprobs))

    return tampering


@pytest.mark.parametrize(
    ("change", "exact", "both"),
    [
        (lambda each: replace(each, logprob=each.logprob + 1e-9), True, False),
        (lambda each: replace(each, top=each.top[:-1]), True, False),
        (lambda each: replace(each, logprob=each.logprob + 0.1), False, False),
        (lambda each: replace(each, logprob=math.nan), False, False),
        (lambda each: replace(each, logprob=each.logprob + 0.01), True, True),
        (lambda each: replace(each, logprob=each.logprob + 0.01), False, True),
    ],
)
def test_logprobs_that_are_off_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Logprobs], Logprobs], exact: bool, both: bool
) -> None:
    found = make(mock(kernels=several, noise=1e-3), tmp_path, WithoutLaw, exact=exact, seconds=2.0)
    for decoder in (found.plain, found.drafted) if both else (found.drafted,):
        monkeypatch.setattr(decoder, "generate", tampered(decoder.generate, change))
    checks = finish(found)
    assert checks["logprobs"].status == "failed"
    assert {name for name, check in checks.items() if check.status == "failed"} == {"logprobs"}


def test_a_drafted_text_that_ends_early_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = make(mock(kernels=several, noise=1e-3), tmp_path, WithoutLaw, seconds=2.0)
    whole = found.drafted.generate

    def short(*args: Any, max_tokens: int, **options: Any) -> Iterator[Step]:
        return whole(*args, max_tokens=max_tokens - 1, **options)

    monkeypatch.setattr(found.drafted, "generate", short)
    checks = finish(found)
    assert checks["greedy"].status == "failed"
    assert found.pairs[0].difference is not None
    assert found.pairs[0].difference.drafted is None


def test_drafts_that_were_not_drawn_from_what_they_claim_fail_the_law(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = ngramspec.acceptance.verifier.RuleVerifier.verify

    def understating(self: Any, rows: Any, draft: Draft, position: int) -> Verdict:
        q = [{t: q[t] / 4, (t + 1) % VOCAB: 1 - q[t] / 4} for t, q in zip(draft.tokens, draft.q, strict=True)]
        return sound(self, rows, replace(draft, q=tuple(q)), position)

    found = make(mock(), tmp_path, seconds=2.0)
    monkeypatch.setattr(ngramspec.acceptance.verifier.RuleVerifier, "verify", understating)
    monkeypatch.setattr(found, "_check_texts", lambda: iter(()))
    assert finish(found)["law"].status == "failed"
    assert {test.method for test in found.laws if not test.held} == {"rejection"}


# ------------------------------------------------------------------ what cannot be checked, and what breaks


def test_without_rollback_only_the_law_is_checked(tmp_path: Path) -> None:
    found = make(mock(fail_rollback=True), tmp_path)
    checks = finish(found)
    assert statuses(checks) == {**dict.fromkeys(SOUND, "skipped"), "reuse": "passed", "law": "passed"}
    assert all(
        "cannot be taken back" in check.reason + check.missing for check in checks.values() if check.name != "reuse"
    )
    assert {(test.after, test.accepted) for test in found.laws} == {(None, 0)}
    line = verdict(list(checks.values()), complete=found.complete)
    skipped = "greedy, same seed, logprobs, rollback, probe, calibration"
    assert line == f"all that must hold does; checked in part: law; not checked: {skipped}"


def test_what_a_check_raises_is_its_failure_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = make(mock(), tmp_path, seconds=2.0)

    def broken(*_: Any, **__: Any) -> Iterator[Step]:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr(found.drafted, "generate", broken)
    checks = finish(found)
    assert found.complete
    assert checks["greedy"].status == "failed"
    assert checks["greedy"].reason == "ZeroDivisionError: oh"
    assert checks["rollback"].status == "passed"


def test_a_grammar_that_the_vocabulary_cannot_follow_is_left_out_unless_drafting_is_to_blame(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(decoder: SpeculativeDecoder) -> Any:
        plain = decoder.generate

        def generate(*args: Any, sampling: Sampling, **options: Any) -> Iterator[Step]:
            if sampling.grammar is not None:
                raise GrammarError("a dead end")
            return plain(*args, sampling=sampling, **options)

        return generate

    found = make(mock(), tmp_path, WithoutLaw, seconds=2.0)
    monkeypatch.setattr(found.plain, "generate", refusing(found.plain))
    checks = finish(found)
    assert checks["same seed"].status == "passed"
    assert "cannot be held to the grammar: a dead end" in checks["same seed"].missing
    assert verdict(list(checks.values()), complete=True).startswith(
        "all that must hold does; checked in part: same seed"
    )

    found = make(mock(), tmp_path, WithoutLaw, seconds=2.0)
    monkeypatch.setattr(found.drafted, "generate", refusing(found.drafted))
    checks = finish(found)
    assert checks["same seed"].status == "failed"
    assert "stops drafting: a dead end" in checks["same seed"].reason


def test_what_was_found_before_a_stop_is_reported(tmp_path: Path) -> None:
    found = make(mock(), tmp_path)
    work = found.run()
    while len(found.pairs) < 3:
        next(work)
    work.close()
    checks = {check.name: check for check in report(found)}
    assert statuses(checks) == {**SOUND, "law": "skipped"}
    assert checks["law"].reason == "not reached"
    assert checks["greedy"].missing == "no time for prose, qa, chat"
    assert checks["same seed"].missing == "no time for penalties, grammar"
    assert verdict(list(checks.values()), complete=found.complete) == "INCOMPLETE: what was checked holds"


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("seconds_per_pass", [0.02, 0.3])
def test_a_slow_model_is_checked_in_about_the_time_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds_per_pass: float, exact: bool
) -> None:
    """Reading takes time too: a quarter of a pass per token, as on a CPU."""
    clock = Clock(TICK)
    monkeypatch.setattr("ngramspec.cost.measure.time.perf_counter", clock.perf_counter)

    class Slow(MockTarget):
        def prefill(self, tokens: Sequence[int], **options: Any) -> NDArray[np.float32]:
            row = super().prefill(tokens, **options)
            clock.now += seconds_per_pass / 4 * self.prefilled[-1]
            return row

    target = mock(Slow, seconds=lambda n: seconds_per_pass * (0.8 + 0.2 * n), clock=clock, n_batch=128)
    # What exact mode costs is settled once per model and machine.
    make(target, tmp_path, exact=exact).drafted.calibration.ensure_exact(target)
    found = make(
        target, tmp_path, exact=exact, cases=cases(300, 4), max_tokens=64, seconds=50.0, clock=clock.perf_counter
    )
    began = clock.now
    checks = finish(found)
    assert clock.now - began < 60.0
    assert clock.now - began > 25.0
    # A probe takes some hundred passes.
    assert statuses(checks) == (SOUND if seconds_per_pass < 0.1 else {**SOUND, "probe": "skipped"})
    assert {pair.category for pair in found.pairs if pair.setting == "greedy"} == set(CATEGORIES)
    assert any(pair.setting != "greedy" for pair in found.pairs)
    assert ("cut to their ends" in checks["greedy"].covered) == (seconds_per_pass > 0.1 or exact)


def test_texts_without_drafts_are_said_to_be(tmp_path: Path) -> None:
    found = make(mock(), tmp_path, WithoutLaw, max_tokens=2)
    checks = finish(found)
    assert sum(pair.drafted for pair in found.pairs if pair.setting == "greedy") == 0
    assert checks["greedy"].missing == "nothing was drafted"


@pytest.mark.parametrize("exact", [False, True])
def test_prompts_are_cut_to_a_small_context(tmp_path: Path, exact: bool) -> None:
    found = make(mock(n_ctx=64), tmp_path, exact=exact)
    checks = finish(found)
    assert statuses(checks) == SOUND
    assert {pair.prompt_tokens for pair in found.pairs} == {24}
    assert checks["greedy"].covered.endswith("; 10 prompts cut to their ends")
    assert {test.depth for test in found.rollbacks} == {24, 32}


@pytest.mark.parametrize("wrong", [{"cases": []}, {"max_tokens": 1}, {"seconds": 0.0}, {"seconds": math.nan}])
def test_bad_arguments(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="a self-check needs"):
        make(mock(), tmp_path, **wrong)
    with pytest.raises(ValueError, match="40 tokens leave no room for a prompt in a context of 47"):
        make(mock(n_ctx=47), tmp_path)
    with pytest.raises(ValueError, match="unknown drafter 'magic'"):
        make(mock(), tmp_path, drafter="magic")
