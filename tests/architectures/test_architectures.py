"""Every architecture against a decoder that never rolls back; `tests/matrix.py` tries more, and says what differs.

The second half takes one guard out at a time: both the matrix and the self-check behind `ngramspec verify` must see it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from architectures.comparison import Bench, Result
from architectures.files import families, names, write_models
from architectures.others import check_beams, check_probe
from architectures.settings import CUT, QUICK, Ask, Setting, matrix
from ngramspec.llama import lane
from ngramspec.llama.snapshots import Snapshots
from ngramspec.llama.state import Cache
from ngramspec.llama.target import Target
from ngramspec.prompts import Case
from ngramspec.selfcheck.check import SelfCheck
from ngramspec.selfcheck.report import report
from ngramspec.tokens import common_prefix

AT_RISK = ("qwen35", "lfm2", "nemotron_h", "mamba", "jamba", "gemma3")
"""One of each family that goes back in a way of its own."""

BRANCHING = ("llama", "gemma3", "deepseek2")


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """All models: some seconds."""
    return write_models(tmp_path_factory.mktemp("architectures"), names())


def wrong(results: list[Result], *, exact: bool = False) -> list[Result]:
    """What must not be: corrupt requests, and in exact mode all that differ."""
    return [result for result in results if result.status == "CORRUPT" or (exact and result.status != "equal")]


def test_every_model_has_a_family() -> None:
    assert len(names()) == len(set(names())) > 40
    assert {"attention", "windows", "recurrent", "hybrid", "snapshots"} == set(families())
    assert set(AT_RISK) | set(BRANCHING) < set(names())


@pytest.mark.parametrize("name", names())
def test_drafts_change_no_architecture_s_text(name: str, files: dict[str, Path], tmp_path: Path) -> None:
    bench = Bench(files[name], tmp_path)
    try:
        for setting in QUICK:
            assert wrong(bench.run(setting)) == [], setting.label
        assert wrong([check_probe(bench)]) == []
    finally:
        bench.close()


@pytest.mark.parametrize("name", ["llama", "qwen3moe", "deepseek2", "minimax-m2"])
def test_questions_move_no_bit_of_the_text(name: str, files: dict[str, Path]) -> None:
    with Target(files[name], n_ctx=256, threads=1, exact="off") as target:
        target.prefill(list(range(40, 80)))
        rows = np.array(target.ask([5, 6], [(0, (7,)), (0, (7, 8)), (1, (9,))]))
    with Target(files[name], n_ctx=256, threads=1, exact="off", n_seq=1) as target:
        target.prefill(list(range(40, 80)))
        assert (rows[:2] == target.evaluate([5, 6, 5, 5, 5])[:2]).all()
        target.rollback(40)
        np.testing.assert_allclose(rows[3], target.evaluate([5, 7, 8])[2], atol=0.01)


@pytest.mark.parametrize("name", ["gemma3", "mamba", "minimax-m3", "qwen4exp"])
def test_whose_cache_cannot_be_shared_is_not_asked(name: str, files: dict[str, Path]) -> None:
    with Target(files[name], n_ctx=256, threads=1) as target:
        assert (target.leaves, target.n_seq) == (0, 1)


@pytest.mark.parametrize("name", AT_RISK)
@pytest.mark.parametrize(("exact", "threads"), [(True, 1), (False, 2)])
def test_nor_do_they_in_exact_mode_and_with_threads(
    name: str, exact: bool, threads: int, files: dict[str, Path], tmp_path: Path
) -> None:
    bench = Bench(files[name], tmp_path, exact=exact, threads=threads)
    try:
        for setting in (*QUICK[:2], replace(QUICK[-1], length=900)):
            assert wrong(bench.run(setting), exact=exact) == [], setting.label
    finally:
        bench.close()


@pytest.mark.parametrize("name", BRANCHING)
def test_nor_do_they_change_beams(name: str, files: dict[str, Path], tmp_path: Path) -> None:
    bench = Bench(files[name], tmp_path)
    try:
        assert wrong(check_beams(files[name], bench, 50)) == []
    finally:
        bench.close()


def test_the_matrix_has_every_kind_of_setting() -> None:
    settings = list(matrix())
    assert len({replace(s, length=0, exact=False, threads=1).name for s in settings}) >= 14
    assert {s.draft_max for s in settings} >= {1, 4, 8, 15}
    assert {(s.length, s.exact) for s in settings} == {(length, e) for length in (50, 900) for e in (False, True)}
    assert {s.threads for s in settings} == {1, 2}
    assert {s.drafter for s in settings} == {"oracle", "mixture", "plain"}


# ------------------------------------------------------------------ guards taken out


def believe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every snapshot is taken to be right, as llama.cpp says."""
    monkeypatch.setattr(Snapshots, "takes_back", lambda self, depth: depth <= self.count)


def restore_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Going back to a checkpoint leaves the recurrent state as it is."""

    class Blind:
        def __init__(self, api: Any) -> None:
            self._api = api

        def __getattr__(self, name: str) -> Any:
            if name == "llama_state_seq_set_data_ext":
                return lambda *arguments: 1
            return getattr(self._api, name)

    create = Cache.__init__

    def blindly(self: Cache, api: Any, *arguments: Any, **options: Any) -> None:
        create(self, Blind(api), *arguments, **options)

    monkeypatch.setattr(Cache, "__init__", blindly)


def mistake_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint is taken to be of one token fewer."""
    save = Cache.save

    def shorter(self: Cache, *, keep: bool = False) -> None:
        save(self, keep=keep)
        if self._mark is not None and self._mark.length == self.length > 1:
            self._mark = replace(self._mark, length=self.length - 1)
        self._kept = [replace(c, length=c.length - 1) if c.length == self.length > 1 else c for c in self._kept]

    monkeypatch.setattr(Cache, "save", shorter)


def skip_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """After going back further than asked, the tokens between are not evaluated again."""
    go_back = Cache._go_back

    def skipping(self: Cache, length: int) -> None:
        go_back(self, length)
        if self.length:  # an empty cache is noticed by llama.cpp itself
            self.length = length

    monkeypatch.setattr(Cache, "_go_back", skipping)


Mutation = Callable[[pytest.MonkeyPatch], None]
MUTATIONS = [
    pytest.param(believe, "qwen35", id="snapshots of any depth, qwen35"),
    pytest.param(believe, "lfm2", id="snapshots of any depth, lfm2"),
    pytest.param(believe, "nemotron_h", id="snapshots of any depth, nemotron_h"),
    pytest.param(restore_nothing, "qwen35", id="checkpoints not restored, qwen35"),
    pytest.param(mistake_length, "qwen35", id="checkpoints of a wrong length, qwen35"),
    pytest.param(skip_tokens, "mamba", id="tokens skipped, mamba"),
]

NASTY = Setting("fixed 15, measured", ((Ask("same", 12), *CUT, *QUICK[1].asks[0]),), draft_max=15, measured=True)


@pytest.mark.parametrize(("mutation", "name"), MUTATIONS)
def test_the_matrix_sees_a_guard_that_is_missing(
    mutation: Mutation, name: str, files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutation(monkeypatch)
    bench = Bench(files[name], tmp_path)
    try:
        sessions = (bench.requests(replace(NASTY, length=length)) for length in (50, 300))
        assert any(wrong([result]) for session in sessions for result in session)
    finally:
        bench.close()


@pytest.mark.parametrize("name", ["llama", "deepseek32"])
def test_the_matrix_sees_a_token_of_another_prompt(
    name: str, files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one in which a prompt differs stays in the cache."""
    monkeypatch.setattr(lane, "common_prefix", lambda a, b: min(common_prefix(a, b) + 1, len(a), len(b)))
    bench = Bench(files[name], tmp_path)
    try:
        first, second = bench.run(Setting("plain", ((Ask("same", 1), Ask("tail", 4)),), drafter="plain"))
        assert first.status == "equal"
        assert second.status == "CORRUPT"
    finally:
        bench.close()


def memory_checks(path: Path, folder: Path, *, exact: bool = False) -> dict[str, str]:
    """What the self-check says of a model's memory: status by name."""
    rng = np.random.default_rng(3)
    cases = [Case("random", "0", tuple(int(t) for t in rng.integers(10, 4000, 340)))]
    with Target(path, n_ctx=1024, threads=1, exact="on" if exact else "off") as target:
        found = SelfCheck(target, cases, max_tokens=8, seconds=120.0, exact=exact, calibration_folder=folder)
        for doing in found.run():
            if doing == "batch sizes":
                break
        return {check.name: check.status for check in report(found) if check.status != "skipped"}


MEMORY = ("rollback", "reuse", "probe", "calibration")


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen35", "lfm2", "mamba", "jamba"])
def test_verify_passes_a_sound_memory(name: str, exact: bool, files: dict[str, Path], tmp_path: Path) -> None:
    assert memory_checks(files[name], tmp_path, exact=exact) == dict.fromkeys(MEMORY, "passed")


@pytest.mark.parametrize(("mutation", "name"), MUTATIONS)
def test_verify_sees_a_guard_that_is_missing(
    mutation: Mutation, name: str, files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutation(monkeypatch)
    statuses = memory_checks(files[name], tmp_path)
    assert "failed" in statuses.values(), statuses
    if mutation is believe:
        assert statuses == dict.fromkeys(MEMORY, "failed")
