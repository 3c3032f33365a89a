"""Tests of beam search with llama.cpp, which rejects passes that break its rules or ends the process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as llama
import numpy as np
import pytest
from architectures.files import write_model as write_architecture
from support.cli_runner import DEMO
from support.mock_target import Clock
from support.tiny_models import WINDOW, write_model

from ngramspec.beams.search import SEQUENCES, BeamSearch
from ngramspec.cost.fixed_curves import make_fixed_curve
from ngramspec.cost.store import StoredTimes
from ngramspec.data import ModelError, TargetError
from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.llama.target import Target
from ngramspec.sampling.distribution import logprobs


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    compressed = write_architecture(folder / "deepseek2.gguf", "deepseek2", half=False)
    kinds = ("llama", "gemma2", "mamba")
    return {
        **{kind: write_model(folder / f"{kind}.gguf", kind) for kind in kinds},
        "deepseek2": compressed,
        "demo": DEMO,
    }


@pytest.fixture(
    scope="module", params=[pytest.param("demo", marks=pytest.mark.exhaustive), "llama", "gemma2", "deepseek2"]
)
def target(request: pytest.FixtureRequest, files: dict[str, Path]) -> Iterator[Target]:
    # Without flash attention and with an exact cache, only the demo model's quantisation rounds.
    options: dict[str, Any] = {"flash_attn": "off", "cache_type_k": "f32", "cache_type_v": "f32"}
    # With fewer tokens in a batch, a sliding-window cache is smaller and reuses cells sooner.
    with Target(files[request.param], ctx_size=1000, threads=1, n_seq=SEQUENCES, ubatch_size=64, **options) as opened:
        yield opened


def some(target: Target, n: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(0).integers(3, target.vocabulary.n_vocab, n)]


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
def test_beam_search_with_drafts_keeps_hypotheses_and_scores(beams: int, target: Target) -> None:
    """The search goes far beyond gemma2's window, and the full cache reuses cells; one beam is greedy decoding."""
    prompt = some(target, 20) * 3
    found = [searched(target, beams, prompt, drafts, 5 * WINDOW) for drafts in (False, True)]
    plain, drafted = (search.hypotheses() for search in found)
    assert found[0].stats.passes == 5 * WINDOW - 1
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
        greedy = [token for step in decoder.generate(prompt, max_tokens=5 * WINDOW) for token in step.tokens]
        assert list(plain[0].tokens) == greedy


@pytest.mark.parametrize("drafts", [False, True])
def test_beam_search_fills_cache_to_its_last_cell(files: dict[str, Path], drafts: bool) -> None:
    with Target(files["llama"], ctx_size=40 + 5 * 30, threads=1, n_seq=SEQUENCES) as target:
        found = searched(target, 5, some(target, 40), drafts).hypotheses()
    assert [(len(one.tokens), one.stop) for one in found] == [(30, "context")] * 5


@pytest.mark.parametrize(
    ("function", "result", "message"),
    [("llama_decode", 1, "returned 1 for 2 tokens"), ("llama_memory_seq_rm", False, "did not cut")],
)
def test_beam_search_reports_failure_of_llama(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch, function: str, result: int, message: str
) -> None:
    with Target(files["llama"], ctx_size=64, threads=1, n_seq=4) as target:
        search = BeamSearch(target, 2)
        run = search.run([3, 4, 5])
        next(run)
        with monkeypatch.context() as patch:
            patch.setattr(llama, function, lambda *_: result)
            with pytest.raises(TargetError, match=message):
                next(run)
        assert [len(one.tokens) for one in search.hypotheses()] == [1, 1]
        assert len(searched(target, 2, [3, 4, 5], drafts=True, max_tokens=9).hypotheses()) == 2


def test_beam_search_rejects_recurrent_models(files: dict[str, Path]) -> None:
    with (
        Target(files["mamba"], ctx_size=64, threads=1, n_seq=4) as target,
        pytest.raises(ModelError, match="recurrent"),
    ):
        BeamSearch(target, 2)
