"""Tests of branches next to the text, and of beam search, in real contexts.

llama.cpp rejects passes that break its rules or ends the process. `test_exact_models` tests the texts.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import llama_cpp.llama_cpp as llama
import numpy as np
import pytest
from architectures.files import architecture
from support.cli_runner import DEMO
from support.hold_pass import hold_one_pass
from support.mock_target import Clock
from support.model_files import WINDOW, tiny

from ngramspec.beams.search import SEQUENCES, BeamSearch
from ngramspec.cost.fixed_curves import make_fixed_curve
from ngramspec.cost.store import StoredTimes
from ngramspec.data import ModelError, TargetError
from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.llama.branches import Branch, BranchingSequence
from ngramspec.llama.target import MAX_BRANCHES, Target
from ngramspec.llama.trial import random_tokens
from ngramspec.sampling.distribution import logprobs

OPTIONS: dict[str, Any] = {"ctx_size": 512, "threads": 1, "exact": "on", "n_seq": 1 + MAX_BRANCHES}


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    with Target(tiny("llama"), **OPTIONS) as target:
        yield target


def some_branches(rng: random.Random, tokens: Sequence[int], n_vocab: int) -> list[Branch]:
    found = [(rng.randrange(len(tokens)), (rng.randrange(3, n_vocab),))]
    for _ in range(rng.randint(0, 6)):
        fork, path = rng.choice([*found, (rng.randrange(len(tokens)), ())])
        found.append((fork, (*path, rng.randrange(3, n_vocab))))
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("settings", [{}, {"flash_attn": "on"}])
def test_target_ask_returns_same_logits_as_separate_evaluation(settings: dict[str, str]) -> None:
    rng = random.Random(3)
    one, asked = (Target(tiny("llama"), **OPTIONS | settings | n_seq) for n_seq in ({"n_seq": 1}, {}))
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
    decode = llama.llama_decode

    def interrupt(*arguments: Any) -> None:
        decode(*arguments)
        raise KeyboardInterrupt

    for failing, error in ((lambda *_: 1, TargetError), (interrupt, KeyboardInterrupt)):
        with monkeypatch.context() as patch:
            patch.setattr(llama, "llama_decode", failing)
            with pytest.raises(error):
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


def test_target_with_one_sequence_has_no_branches() -> None:
    with Target(tiny("llama"), **OPTIONS | {"n_seq": 1}) as target:
        assert not isinstance(target.sequences[0], BranchingSequence)


SEARCHED = (pytest.param("demo", marks=pytest.mark.exhaustive), "llama", "gemma2", "deepseek2")


@pytest.fixture(scope="module", params=SEARCHED)
def searched_target(request: pytest.FixtureRequest) -> Iterator[Target]:
    # Without flash attention and with an exact cache, only the demo model's quantisation rounds.
    options: dict[str, Any] = {"flash_attn": "off", "cache_type_k": "f32", "cache_type_v": "f32"}
    files = {"demo": DEMO, "deepseek2": architecture("deepseek2", half=False)}
    # With fewer tokens in a batch, a sliding-window cache is smaller and reuses cells sooner.
    path = files.get(request.param) or tiny(request.param)
    with Target(path, ctx_size=1000, threads=1, n_seq=SEQUENCES, ubatch_size=64, **options) as opened:
        yield opened


def score(target: Target, prompt: Sequence[int], tokens: Sequence[int]) -> float:
    """Return the score of a text, evaluated token by token in a separate sequence."""
    row = target.sequences[0].prefill(prompt)
    total = 0.0
    for token in tokens:
        total += logprobs(row, token, 0).logprob
        row = target.sequences[0].evaluate([token])[0]
    return total


def searched(
    target: Target, beams: int, prompt: Sequence[int], drafts: bool, max_tokens: int | None = None
) -> BeamSearch:
    """Return a beam search that has ended, after which the cache contains only the prompt."""
    stored = StoredTimes(target.sequences[0])
    stored.times = make_fixed_curve({1: 1.0})
    search = BeamSearch(target, beams, stored=stored if drafts else None, clock=Clock(0.0).perf_counter)
    for _ in search.run(prompt, max_tokens=max_tokens):
        pass
    assert target.sequences[0].tokens == prompt
    lengths = [target.passes.length(sequence) for sequence in range(target.n_seq)]
    assert lengths == [len(prompt), *[0] * (target.n_seq - 1)]
    return search


@pytest.mark.parametrize("beams", [1, 3])
def test_beam_search_with_drafts_keeps_hypotheses_and_scores(beams: int, searched_target: Target) -> None:
    """The search goes far beyond gemma2's window; one beam is greedy decoding."""
    target = searched_target
    prompt = random_tokens(target.vocabulary.n_vocab, 0, 20) * 3
    n_tokens = 5 * WINDOW if target.weights.window else 2 * WINDOW
    found = [searched(target, beams, prompt, drafts, n_tokens) for drafts in (False, True)]
    plain, drafted = (search.hypotheses() for search in found)
    assert found[0].stats.passes == n_tokens - 1
    if beams > 1 or target.weights.architecture != "deepseek2":  # With one beam, deepseek2 never repeats itself.
        assert found[1].stats.passes < found[0].stats.passes
        assert found[1].stats.accepted > 0
    loose = 1.0 if target.weights.path == DEMO else 0.01  # Quantised weights cause more rounding.
    for one, other in zip(plain, drafted, strict=True):
        assert one.score == pytest.approx(other.score, abs=loose)
        assert one.score == pytest.approx(score(target, prompt, one.tokens), abs=loose)
        if target.weights.path != DEMO:
            assert one.tokens == other.tokens
    if beams == 1:
        decoder = SpeculativeDecoder(target, drafter=None, exact="off")
        greedy = [token for step in decoder.generate(prompt, max_tokens=n_tokens) for token in step.tokens]
        assert list(plain[0].tokens) == greedy


@pytest.mark.parametrize("drafts", [False, True])
def test_beam_search_fills_cache_to_its_last_cell(drafts: bool) -> None:
    with Target(tiny("llama"), ctx_size=40 + 5 * 30, threads=1, n_seq=SEQUENCES) as target:
        found = searched(target, 5, random_tokens(target.vocabulary.n_vocab, 0, 40), drafts).hypotheses()
    assert [(len(one.tokens), one.stop) for one in found] == [(30, "context")] * 5


@pytest.mark.parametrize(
    ("function", "result", "message"),
    [("llama_decode", 1, "returned 1 for 2 tokens"), ("llama_memory_seq_rm", False, "did not cut")],
)
def test_beam_search_reports_failure_of_llama(
    monkeypatch: pytest.MonkeyPatch, function: str, result: int, message: str
) -> None:
    with Target(tiny("llama"), ctx_size=64, threads=1, n_seq=4) as target:
        search = BeamSearch(target, 2)
        run = search.run([3, 4, 5])
        next(run)
        with monkeypatch.context() as patch:
            patch.setattr(llama, function, lambda *_: result)
            with pytest.raises(TargetError, match=message):
                next(run)
        assert [len(one.tokens) for one in search.hypotheses()] == [1, 1]
        assert len(searched(target, 2, [3, 4, 5], drafts=True, max_tokens=9).hypotheses()) == 2


def test_beam_search_rejects_recurrent_models() -> None:
    with Target(tiny("mamba"), ctx_size=64, threads=1, n_seq=4) as target, pytest.raises(ModelError, match="recurrent"):
        BeamSearch(target, 2)
