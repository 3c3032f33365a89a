"""Tests of branches next to the text on real contexts: their logits and their removal.

`test_exact_models` tests the texts."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from support.hold_pass import hold_one_pass
from support.tiny_models import write_model

from ngramspec.beams.search import BeamSearch
from ngramspec.data import TargetError
from ngramspec.llama.branches import Branch, BranchingSequence
from ngramspec.llama.target import MAX_BRANCHES, Target

OPTIONS = {"ctx_size": 512, "threads": 1, "exact": "on", "n_seq": 1 + MAX_BRANCHES}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "llama.gguf", "llama")


@pytest.fixture(scope="module")
def target(model: Path) -> Iterator[Target]:
    with Target(model, **OPTIONS) as target:  # type: ignore[arg-type]
        yield target


def some_branches(rng: random.Random, tokens: Sequence[int], n_vocab: int) -> list[Branch]:
    found = [(rng.randrange(len(tokens)), (rng.randrange(3, n_vocab),))]
    for _ in range(rng.randint(0, 6)):
        fork, path = rng.choice([*found, (rng.randrange(len(tokens)), ())])
        found.append((fork, (*path, rng.randrange(3, n_vocab))))
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("settings", [{}, {"flash_attn": "on"}])
def test_target_ask_returns_same_logits_as_separate_evaluation(model: Path, settings: dict[str, str]) -> None:
    rng = random.Random(3)
    one = Target(model, **{**OPTIONS, **settings, "n_seq": 1})  # type: ignore[arg-type]
    asked = Target(model, **{**OPTIONS, **settings})  # type: ignore[arg-type]
    text = [rng.randrange(3, one.vocabulary.n_vocab) for _ in range(20)]
    assert (one.sequences[0].prefill(text) == asked.sequences[0].prefill(text)).all()
    for turn in range(30):
        tokens = [rng.randrange(3, one.vocabulary.n_vocab) for _ in range(rng.randint(1, 4))]
        branches = some_branches(rng, tokens, one.vocabulary.n_vocab)
        for fork, path in branches[-2:]:
            wanted = np.array(one.sequences[0].evaluate([*tokens[: fork + 1], *path]))[-1]
            one.sequences[0].rollback(len(text))
            rows = np.array(asked.sequences[0].ask(tokens, branches))
            asked.sequences[0].rollback(len(text))
            at = len(tokens) + branches.index((fork, path))
            np.testing.assert_allclose(rows[at], wanted, atol=2e-2 if settings else 1e-4)
        rows = np.array(asked.sequences[0].ask(tokens, branches))
        assert asked.sequences[0].tokens == [*text, *tokens]
        # The padding gives both batches the same number of rows.
        assert (rows[: len(tokens)] == one.sequences[0].evaluate([*tokens, *[3] * len(branches)])[: len(tokens)]).all()
        text += tokens[: rng.randint(1, len(tokens))]
        if turn % 5 == 4:
            del text[-rng.randint(1, 6) :]
        one.sequences[0].rollback(len(text))
        asked.sequences[0].rollback(len(text))
        assert asked.sequences[0].tokens == text
    one.close()
    asked.close()


def test_target_ask_removes_branches_before_next_evaluation(target: Target) -> None:
    target.sequences[0].prefill([5, 6, 7])
    target.sequences[0].ask([8, 9], [(0, (10,)), (0, (10, 11)), (1, (12,))])
    assert target.sequences[0].leaves == MAX_BRANCHES
    assert target.sequences[0].tokens == [5, 6, 7, 8, 9]
    row = np.array(target.sequences[0].evaluate([13]))
    search = BeamSearch(target, 2)
    for _ in search.run(target.sequences[0].tokens, max_tokens=4):
        pass
    assert len(search.hypotheses()) == 2
    target.sequences[0].rollback(3)
    target.sequences[0].evaluate([8, 9])
    assert (target.sequences[0].evaluate([13]) == row).all()


def test_target_ask_rejects_oversized_branches_and_keeps_state(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    target.sequences[0].prefill([5, 6, 7])
    with pytest.raises(ValueError, match=f"more than {MAX_BRANCHES} sequences"):
        target.sequences[0].ask([8], [(0, (10 + i,)) for i in range(MAX_BRANCHES + 1)])
    with pytest.raises(ValueError, match="do not fit"):
        target.sequences[0].ask([8] * 60, [(0, (10,) * i) for i in range(1, 6)])
    with pytest.raises(ValueError, match="do not fit"):
        target.sequences[0].ask([], [(0, (10,))])
    with monkeypatch.context() as patch:
        patch.setattr("ngramspec.llama.target.llama.llama_decode", lambda *_: 1)
        with pytest.raises(TargetError, match="returned 1"):
            target.sequences[0].ask([8], [(0, (9,))])
    assert target.sequences[0].tokens == [5, 6, 7]
    row = np.array(target.sequences[0].ask([8], [(0, (9,))])[0])
    target.sequences[0].rollback(3)
    assert (target.sequences[0].evaluate([8, 8])[0] == row).all()


def test_target_ask_rejects_use_from_second_thread(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    target.sequences[0].prefill([5, 6, 7])
    with hold_one_pass(monkeypatch) as (held, go_on), ThreadPoolExecutor(1) as other:
        first = other.submit(target.sequences[0].ask, [8], [(0, (9,))])
        assert held.wait(60)
        with pytest.raises(RuntimeError, match="two threads at once"):
            target.sequences[0].evaluate([1])
        go_on.set()
        first.result()
    assert target.sequences[0].tokens == [5, 6, 7, 8]


def test_target_with_one_sequence_has_no_branches(model: Path) -> None:
    with Target(model, **{**OPTIONS, "n_seq": 1}) as target:  # type: ignore[arg-type]
        assert not isinstance(target.sequences[0], BranchingSequence)
