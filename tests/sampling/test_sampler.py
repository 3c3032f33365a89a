"""Tests of the samplers that wrap another one: forbidden tokens, budgets of reasoning, close calls and records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.mock_target import MockTarget
from support.numpy_sampler import NumpySampler

from ngramspec.acceptance.verifier import RuleVerifier
from ngramspec.backend import ExactnessMode, Logits
from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.drafting.draft import NO_DRAFT, Draft
from ngramspec.sampling.distribution import distribution_logprobs, gumbel_pick
from ngramspec.sampling.sampler import (
    BudgetSampler,
    CloseCalls,
    RecordingSampler,
    Sampler,
    TokenBanSampler,
)
from ngramspec.sampling.settings import Sampling, TextRules, budget_for

LOGITS = np.arange(8, dtype=np.float32)


def sampler(rules: TextRules, temperature: float = 1.0) -> Sampler:
    found = TokenBanSampler(NumpySampler(Sampling(temperature, top_k=0, top_p=1, min_p=0), len(LOGITS)), rules, [6, 7])
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


TAGS = {"<t>\n": "</t>"}
LETTERS = MockTarget(256)


class Words:
    """Vocabulary of arbitrary strings: a token is an index into the list of all strings so far."""

    n_vocab = 1000

    def __init__(self) -> None:
        self.texts: list[bytes] = []

    def of(self, *texts: str | bytes) -> list[int]:
        raw = [text.encode() if isinstance(text, str) else text for text in texts]
        self.texts += [text for text in raw if text not in self.texts]
        return [self.texts.index(text) for text in raw]

    def tokenize(self, text: str, *, special: bool = False, add_bos: bool = True) -> list[int]:
        return self.of(*([text] if special else text))

    def piece(self, token: int) -> bytes:
        return self.texts[token]

    def display_piece(self, token: int) -> bytes:
        return self.piece(token)

    def is_eog(self, token: int) -> bool:
        return False


def closed(
    text: Sequence[str | bytes],
    limit: int,
    *,
    prompt: Sequence[str] = (),
    start: str | None = None,
    message: str = "",
    tags: Mapping[str, str] = TAGS,
    forbidden_until: int = 0,
) -> str:
    """Return the text of a model that emits `text`, with the forced tokens in brackets."""
    words, written = Words(), list[str]()
    budget = budget_for(limit, message, tags, words, prompt=words.of(*prompt), start=start)
    assert budget is not None
    inside, forbidden = Mock(), [True] * forbidden_until
    inside.grammar.count_allowed = lambda tokens: 0 if forbidden and forbidden.pop() else len(tokens)
    sampler, left = BudgetSampler(inside, budget), words.of(*text)
    sampler.begin(())
    while left or sampler.closing:
        forced = bool(sampler.closing)
        token = sampler.closing[0] if forced else left.pop(0)
        piece = words.piece(token).decode("utf-8", "replace")
        written.append(f"[{piece}]" if forced else piece)
        sampler.accept(token)
    return "".join(written)


def test_reasoning_budget_closes_blocks_after_their_limit() -> None:
    assert closed(["a", "<t>", "b", "c", "d"], 2) == "a<t>bc[</t>]d"
    assert closed(["<t>", "\n", "b", "c"], 2) == "<t>\nb[</t>]c"
    assert closed(["a", "b", "c"], 1) == "abc"
    # A limit of 0 closes a block as soon as it is opened.
    assert closed(["a", "<t>", "b"], 0) == "a<t>[</t>]b"
    # The model may close a block itself.
    assert closed(["<t>", "a", "</t>", "b", "c"], 2) == "<t>a</t>bc"
    assert closed(["<t>", "a", "b", "</t>", "c"], 2) == "<t>ab[</t>]</t>c"  # llama.cpp closes it too.
    # Each block has the whole budget, and is closed with its own tag.
    text = ["<t>", "a", "b", "c", "<t>", "d", "</t>", "e", "f", "<t>", "g", "h", "i"]
    assert closed(text, 2) == "<t>ab[</t>]c<t>d</t>ef<t>gh[</t>]i"
    tags = {"<t>": "</t>", "[T]": "[/T]"}
    assert closed(["[T]", "a", "</t>", "b"], 3, tags=tags) == "[T]a</t>b[[/T]]"


def test_reasoning_budget_of_block_open_in_prompt_counts_prompt_tokens() -> None:
    assert closed(["a", "b", "c"], 3, prompt=["x", "<t>", "\n"], start="<t>\n") == "ab[</t>]c"
    assert closed(["a", "b", "c"], 3, prompt=["<t>", "x", "<t>"], start="<t>\n") == "abc[</t>]"
    assert closed(["a", "b", "c"], 3, prompt=["x<", "t", ">\n", "so", " far"], start="<t>\n") == "a[</t>]bc"
    assert closed(["a", "b"], 3, prompt=["<t>", "so", "very", "far", "on"], start="<t>\n") == "[</t>]ab"
    assert closed(["a"], 0, prompt=["<t>", "\n"], start="<t>\n") == "[</t>]a"


def test_reasoning_budget_inserts_message_before_closing_tag() -> None:
    assert closed(["<t>", "a", "b"], 1, message="so") == "<t>a[s][o][</t>]b"
    assert closed(["<t>", "a", "</t>", "b"], 9, message="so") == "<t>a</t>b"


def test_reasoning_budget_detects_tags_across_token_borders() -> None:
    assert closed(["<", "t", ">\n", "a", "b", "c"], 2) == "<t>\nab[</t>]c"
    assert closed(["a<t", ">b", "c", "d"], 2) == "a<t>bcd[</t>]"
    assert closed(["<t>", "a", "b<", "/", "t>c", "d", "e", "f", "g"], 5) == "<t>ab</t>cdefg"
    assert closed(["<t", "<t", ">", "a", "b"], 1) == "<t<t>a[</t>]b"


def test_reasoning_budget_waits_for_whole_character_and_grammar() -> None:
    euro = "€".encode()
    assert closed(["<t>", "a", euro[:1], euro[1:2], euro[2:], "b"], 2) == "<t>a\ufffd\ufffd\ufffd[</t>]b"
    assert closed(["<t>", "a", "b", "c", "d"], 1, forbidden_until=2) == "<t>abc[</t>]d"


def test_reasoning_budget_of_model_without_reasoning_is_none() -> None:
    assert budget_for(5, "", {}, LETTERS) is None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_budget_sampler_draws_closing_tokens_for_any_settings(temperature: float) -> None:
    budget = budget_for(1, "", {"b": "cd"}, LETTERS)
    assert budget is not None
    sampling = Sampling(temperature, logit_bias=((2, -np.inf),), top_k=1)
    sampler = BudgetSampler(NumpySampler(sampling, 16), budget)
    sampler.begin([0])
    logits = np.arange(16, dtype=np.float32)
    logits[2] = np.nan

    for token in (1, 9):
        sampler.accept(token)
    for token in (2, 3):
        assert sampler.draw(logits, 1) == token
        assert sampler.distribution(logits).probability(token) == 1
        sampler.accept(token)
    logits[2] = 0
    assert sampler.draw(logits, 1) == 15


VOCAB = 16


def counted(sampling: Sampling, row: Logits, bound: float | None) -> tuple[int, int]:
    """Return (token, close calls) of one draw at position 3."""
    calls = CloseCalls(NumpySampler(sampling, row.size))
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
    calls = CloseCalls(NumpySampler(settings, VOCAB))  # Counting draws a second time.
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
    calls = CloseCalls(NumpySampler(sampling, VOCAB))
    calls.begin([1])
    calls.arm(5.0)
    token = RuleVerifier(calls, None, seen.append).verify([row], NO_DRAFT, 1).tokens[0]
    law = NumpySampler(sampling, VOCAB).distribution(row)
    assert token == gumbel_pick(5, 1, law)
    assert calls.take() == 1
    assert seen[-1].p == pytest.approx(law.probability(token))


class LoadedModel(MockTarget):
    """Mock target that chose its exactness when it was loaded."""

    def __init__(self, exactness: ExactnessMode) -> None:
        super().__init__(12, seed=3)
        self.exactness = exactness


def total(folder: Path, exactness: ExactnessMode, drafter: str | None = "mixture") -> tuple[int, int]:
    """Return (number of draft tokens, close calls) of a text on a mock model whose logits are all within 20."""
    decoder = SpeculativeDecoder(LoadedModel(exactness), drafter=drafter, policy="fixed", calibration_folder=folder)
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
