"""Tests of the samplers that wrap another one: forbidden tokens, close calls and records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.llama_chain import make_chain
from support.mock_target import MockTarget

from ngramspec.acceptance.verifier import RuleVerifier
from ngramspec.backend import ExactnessMode, Logits
from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.drafting.draft import NO_DRAFT, Draft
from ngramspec.sampling.distribution import distribution_logprobs, gumbel_pick
from ngramspec.sampling.sampler import (
    CloseCalls,
    RecordingSampler,
    Sampler,
    TokenBanSampler,
)
from ngramspec.sampling.settings import Sampling, TextRules

LOGITS = np.arange(8, dtype=np.float32)


def sampler(rules: TextRules, temperature: float = 1.0) -> Sampler:
    found = TokenBanSampler(make_chain(Sampling(temperature, top_k=0, top_p=1, min_p=0), len(LOGITS)), rules, [6, 7])
    found.begin([1, 2])
    return found


def possible(one: Sampler) -> set[int]:
    law = one.distribution(LOGITS)
    return {int(token) for token, p in zip(law.ids, law.probs, strict=True) if p > 0}


def test_forbidding_sampler_excludes_end_before_minimum_length() -> None:
    one = sampler(TextRules(min_tokens=2))
    for _ in range(2):
        assert possible(one) == set(range(6))
        one.accept(5)
    assert possible(one) == set(range(8))
    assert LOGITS[7] == 7  # Others read this array too.


def test_forbidding_sampler_excludes_token_that_completes_forbidden_word() -> None:
    one = sampler(TextRules(bad_words=((1, 2, 3), (2, 5), (2, 2))))
    found = []
    for token in (2, 1, 2, 4):  # The end of the prompt is not part of the text.
        found.append(set(range(8)) - possible(one))
        one.accept(token)
    assert found == [set(), {2, 5}, set(), {2, 3, 5}]
    assert possible(one) == set(range(8))


def test_forbidding_sampler_greedy_selects_next_best_token() -> None:
    one = sampler(TextRules(min_tokens=1), 0.0)
    assert one.draw(LOGITS, 0) == 5


VOCAB = 16


def counted(sampling: Sampling, row: Logits, bound: float | None) -> tuple[int, int]:
    """Return (token, close calls) of one draw at position 3."""
    calls = CloseCalls(make_chain(sampling, row.size))
    calls.begin([1, 2, 3])
    if bound is not None:
        calls.arm(bound)
    token = RuleVerifier(calls).verify([row], NO_DRAFT, 3).tokens[0]
    return token, calls.take()


@pytest.mark.parametrize(("bound", "count"), [(None, 0), (0.0, 0), (0.2, 0), (0.3, 1)])
def test_close_calls_greedy_counts_margin_below_twice_the_bound(bound: float | None, count: int) -> None:
    row = np.zeros(VOCAB, np.float32)
    row[3], row[5] = 2.0, 1.5
    assert counted(Sampling(), row, bound) == (3, count)


@given(seed=st.integers(0, 2**32), bound=st.floats(0.01, 1), temperature=st.sampled_from([0.0, 0.7, 1.5]))
def test_close_calls_without_filters_counts_every_changeable_token(seed: int, bound: float, temperature: float) -> None:
    rng = np.random.default_rng(seed)
    row = (3 * rng.standard_normal(VOCAB)).astype(np.float32)
    sampling = Sampling(temperature=temperature, top_k=0, top_p=1.0, min_p=0.0, seed=seed)
    token, count = counted(sampling, row, bound)
    assert counted(sampling, row, None)[0] == token
    others = [counted(sampling, row + rng.uniform(-bound, bound, VOCAB).astype(np.float32), None)[0] for _ in range(20)]
    if count == 0:
        assert others == [token] * 20


@pytest.mark.parametrize("writeable", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_close_calls_keep_row_unchanged(temperature: float, writeable: bool) -> None:
    row = np.linspace(0, 1, VOCAB, dtype=np.float32)
    before = row.copy()
    row.flags.writeable = writeable
    assert counted(Sampling(temperature=temperature), row, 5.0)[1] == 1
    assert np.array_equal(row, before)


@pytest.mark.parametrize("own", [{"mirostat": 2}, {"xtc_probability": 1.0}])
def test_close_calls_with_stateful_sampler_draw_once(own: Any) -> None:
    row = np.zeros(VOCAB, np.float32)
    row[3] = 30.0
    assert counted(Sampling(temperature=1.0, **own), row, 0.01) == (3, 1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_recording_sampler_keeps_distribution_of_every_token_once(temperature: float) -> None:
    rows = np.random.default_rng(3).standard_normal((3, VOCAB)).astype(np.float32)
    settings = Sampling(temperature=temperature, top_k=2, top_p=1.0, min_p=0.0, seed=1)
    calls = CloseCalls(make_chain(settings, VOCAB))  # Counting draws a second time.
    recorder = RecordingSampler(calls)
    recorder.begin([1, 2, 3])
    calls.arm(0.5)
    likely = int(rows[0].argmax()) if temperature == 0 else gumbel_pick(1, 3, calls.distribution(rows[0]))
    verdict = RuleVerifier(recorder).verify(rows, Draft((likely, VOCAB - 1)), 3)
    assert verdict.accepted == 1
    distributions = recorder.pop_distributions()
    assert len(distributions) == len(verdict.tokens) == 2
    for row, token, p in zip(rows, verdict.tokens, distributions, strict=False):
        logprobs = distribution_logprobs(p, token, 5)
        best = [int(i) for i in np.argsort(-row)[: 2 if temperature else 1]]
        assert [token for token, _ in logprobs.top] == best
        assert np.isclose(sum(np.exp(logprob) for _, logprob in logprobs.top), 1)
        assert logprobs.logprob == dict(logprobs.top)[token]
    assert recorder.pop_distributions() == []


def test_verifier_with_close_calls_reports_probability_of_sampled_token() -> None:
    seen: list[Any] = []
    row = np.linspace(0, 1, VOCAB, dtype=np.float32)
    sampling = Sampling(temperature=1.0, seed=5)
    calls = CloseCalls(make_chain(sampling, VOCAB))
    calls.begin([1])
    calls.arm(5.0)
    token = RuleVerifier(calls, None, seen.append).verify([row], NO_DRAFT, 1).tokens[0]
    law = make_chain(sampling, VOCAB).distribution(row)
    assert token == gumbel_pick(5, 1, law)
    assert calls.take() == 1
    assert seen[-1].p == pytest.approx(law.probability(token))


def total(folder: Path, exactness: ExactnessMode, drafter: str | None = "mixture") -> tuple[int, int]:
    """Return (number of draft tokens, close calls) of a text on a mock model whose logits are all within 20."""
    target = MockTarget(12, seed=3)
    target.exactness = exactness
    decoder = SpeculativeDecoder(target, drafter=drafter, policy="fixed", calibration_folder=folder)
    steps = list(decoder.generate([1, 2, 3] * 20, max_tokens=60))
    assert all(step.close_calls <= len(step.tokens) for step in steps)
    return sum(len(step.drafted) for step in steps), sum(step.close_calls for step in steps)


def test_close_calls_count_only_batches_of_other_sizes(tmp_path: Path) -> None:
    drafted, calls = total(tmp_path, ExactnessMode(max_logit_shift=1000.0))
    assert drafted
    assert 0 < calls < 60
    assert total(tmp_path, ExactnessMode(max_logit_shift=1000.0, agreeing=tuple(range(1, 65))))[1] == 0
    assert total(tmp_path, ExactnessMode(max_logit_shift=1e-6))[1] == 0
    assert total(tmp_path, ExactnessMode(max_logit_shift=1000.0), drafter=None)[1] == 0
