"""Tests of every architecture against a decoder that never rolls back; `tools/matrix.py` runs more sessions.

The second half removes one guard at a time; the self-check of `ngramspec verify` must detect each removal.
`tests/test_mutations.py` checks that the first half detects them too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from architectures.comparison import Bench
from architectures.files import architecture, names
from architectures.settings import BRIEF, QUICK, Setting
from ngramspec.cost import store
from ngramspec.cost.store import time_passes
from ngramspec.cost.times import PassTimes
from ngramspec.instruments.prompts import Case
from ngramspec.instruments.selfcheck.check import SelfCheck, list_checks
from ngramspec.llama.branches import BranchingSequence
from ngramspec.llama.cache import Cache
from ngramspec.llama.target import Target

KINDS = ("llama", "qwen3moe", "deepseek2", "gemma3", "mamba", "jamba", "qwen35", "lfm2")
"""One architecture for each kind of memory: plain attention, attention with experts, MLA, a sliding window, a recurrent
state, a recurrent state next to attention, and both of these with snapshots."""

AT_RISK = ("qwen35", "lfm2", "nemotron_h", "mamba", "jamba", "gemma3")
"""One architecture of each family with a different kind of rollback."""

exhaustive = pytest.mark.exhaustive


def models(*wanted: str, also: Sequence[str] = ()) -> pytest.MarkDecorator:
    """Return a mark that sets the fixture `path` to each of these; those in `also` only run with `--exhaustive`."""
    named = [*wanted, *(pytest.param(name, marks=exhaustive) for name in also)]
    return pytest.mark.parametrize("path", named, indirect=True)


@pytest.fixture
def path(request: pytest.FixtureRequest) -> Path:
    return architecture(request.param)


def check(bench: Bench, settings: Iterable[Setting]) -> None:
    """Fail at the first request whose text or logits are not the reference's."""
    with closing(bench):
        for setting in settings:
            for result in bench.requests(setting):
                assert result.is_right, (setting, result)


@pytest.mark.parametrize("name", KINDS)
def test_drafts_on_each_memory_kind_keep_text(name: str, tmp_path: Path) -> None:
    check(Bench(name, tmp_path), BRIEF)


@exhaustive
@pytest.mark.parametrize("name", names())
def test_drafts_on_each_architecture_keep_text(name: str, tmp_path: Path) -> None:
    check(Bench(name, tmp_path), QUICK)


@exhaustive
@pytest.mark.parametrize("name", AT_RISK)
@pytest.mark.parametrize(("exact", "threads"), [(True, 1), (False, 2)])
def test_drafts_in_exact_mode_or_with_threads_keep_text(exact: bool, threads: int, name: str, tmp_path: Path) -> None:
    check(Bench(name, tmp_path, exact=exact, threads=threads), (*QUICK[:2], replace(QUICK[-1], length=900)))


@models("llama", "mamba", "qwen35", "lfm2", also=["jamba", "gemma3"])
def test_trial_passes_leave_state_of_text(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "SIZES", (1, 3, 40))
    with Target(path, ctx_size=256, threads=1, exact="off") as target:
        sequence = target.sequences[0]
        sequence.prefill(list(range(40, 80)))
        expected = sequence.evaluate([5]).copy()
        sequence.clear()
        sequence.prefill(list(range(40, 80)))
        time_passes(sequence, list(range(5, 75)), PassTimes())
        assert sequence.tokens == list(range(40, 80))
        np.testing.assert_allclose(sequence.evaluate([5]), expected, atol=0.01)


@models("llama", "qwen3moe", "deepseek2", also=["minimax-m2"])
def test_target_ask_with_branches_keeps_logits_of_text(path: Path) -> None:
    with Target(path, ctx_size=256, threads=1, exact="off", n_seq=4) as target:
        target.sequences[0].prefill(list(range(40, 80)))
        rows = np.array(target.sequences[0].ask([5, 6], [(0, (7,)), (0, (7, 8)), (1, (9,))]))
    with Target(path, ctx_size=256, threads=1, exact="off") as target:
        target.sequences[0].prefill(list(range(40, 80)))
        assert (rows[:2] == target.sequences[0].evaluate([5, 6, 5, 5, 5])[:2]).all()
        target.sequences[0].rollback(40)
        np.testing.assert_allclose(rows[3], target.sequences[0].evaluate([5, 7, 8])[2], atol=0.01)


@models("gemma3", "mamba", also=["minimax-m3", "qwen4exp"])
def test_target_with_unshareable_cache_has_no_branches(path: Path) -> None:
    with Target(path, ctx_size=256, threads=1) as target:
        assert not isinstance(target.sequences[0], BranchingSequence)
        assert target.n_seq == 1


def believe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the cache trust every snapshot that llama.cpp reports."""
    cut = Cache.cut

    def believing(self: Cache, length: int) -> None:
        self.usable_snapshots = self.snapshots
        cut(self, length)

    monkeypatch.setattr(Cache, "cut", believing)


def skip_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Omit the tokens that must be evaluated again after a rollback beyond the requested length."""
    go_back = Cache._go_back

    def skipping(self: Cache, length: int) -> None:
        go_back(self, length)
        if self.length:  # llama.cpp itself detects an empty cache.
            self.length = length

    monkeypatch.setattr(Cache, "_go_back", skipping)


def verify(path: Path, folder: Path, *, exact: bool = False, until: str = "") -> dict[str, str]:
    """Return the self-check's statuses by name, up to `until`."""
    rng = np.random.default_rng(3)
    cases = [Case("random", "0", tuple(int(t) for t in rng.integers(10, 4000, 340)))]
    with Target(path, ctx_size=1024, threads=1, exact="on" if exact else "off") as target:
        found = SelfCheck(target, cases, max_tokens=8, seconds=120.0, exact=exact, calibration_folder=folder)
        for doing in found.run():
            if doing == until:
                break
        return {check.name: check.status for check in list_checks(found) if check.status != "skipped"}


@models("lfm2")
def test_verify_distinguishes_correct_from_broken_rollback(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert verify(path, tmp_path, until="random/0") == {"rollback": "passed"}
    believe(monkeypatch)
    assert verify(path, tmp_path, until="random/0") == {"rollback": "failed"}


@exhaustive
@pytest.mark.parametrize("exact", [False, True])
@models("llama", "gemma3", "qwen35", "lfm2", "mamba", "jamba")
def test_verify_accepts_correct_rollback_of_each_memory_kind(path: Path, exact: bool, tmp_path: Path) -> None:
    assert "failed" not in verify(path, tmp_path, exact=exact).values()


@exhaustive
@pytest.mark.parametrize(
    ("mutation", "path"),
    [
        *((believe, name) for name in ("qwen35", "lfm2", "nemotron_h")),
        (skip_tokens, "mamba"),
    ],
    indirect=["path"],
)
def test_verify_detects_missing_rollback_guard(
    mutation: Callable[[pytest.MonkeyPatch], None], path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutation(monkeypatch)
    assert verify(path, tmp_path, until="random/0") == {"rollback": "failed"}
