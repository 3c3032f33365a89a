"""Tests of sampling in the loop: grammars, decisions in detail, and broken logits.

`test_same_text` tests that drafts change neither the text nor its distribution.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.decoder_loop import Coin, Oracle, drive, make_decoder, make_model
from support.mock_target import MockTarget, plain_generate
from support.model_files import END, FIRST_WORD

from ngramspec.data import GrammarError
from ngramspec.drafting.draft import NO_DRAFT
from ngramspec.sampling.distribution import BadLogits
from ngramspec.sampling.settings import Sampling
from ngramspec.steps import Stats

if TYPE_CHECKING:
    from ngramspec.llama.vocabulary import Vocabulary

OPEN: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
A, B, C = range(FIRST_WORD, FIRST_WORD + 3)


def test_decoder_with_coupled_acceptance_drafts_with_noise_of_target() -> None:
    # Two independent draws agree with probability 0.41; draws with the same noise from similar counts agree more often.
    stats = Stats()
    prompt = np.random.default_rng(4).choice(4, 400, p=Coin.probabilities).tolist()
    for seed in range(10):
        decoder = make_decoder(Coin(4), policy="fixed", draft_max=1)
        for step in drive(decoder, prompt, max_tokens=100, sampling=Sampling(1.0, **OPEN, seed=seed))[1]:
            stats.add(step)
    assert stats.drafted > 400
    assert (stats.acceptance_rate or 0) > 0.6


@pytest.mark.parametrize("method", ["coupled", "rejection", "match"])
def test_decoder_with_grammar_drafts_forced_tokens(method: str, word_vocabulary: Vocabulary) -> None:
    """If the grammar allows only one token, the loop drafts it, even if nothing in the context predicts it."""
    sampling = Sampling(1.0, seed=3, grammar='root ::= ("a,{a,{a,{a," [bc])+', **OPEN)
    mock = make_model(vocabulary=word_vocabulary, words=(A, B, C, 3 + ord(","), 3 + ord("{")), peak=0.5)
    decoder = make_decoder(mock, drafter="ngram", policy="fixed", draft_max=8)
    emitted, steps = drive(decoder, [7], max_tokens=60, sampling=sampling, acceptance=method)
    text = b"".join(map(word_vocabulary.piece, emitted)).decode()
    assert text.startswith(("a,{a,{a,{a,b", "a,{a,{a,{a,c"))
    stats = Stats()
    for step in steps:
        stats.add(step)
    assert any(step.source == "grammar" for step in steps)
    assert stats.tokens_per_pass > 3


@pytest.mark.parametrize("method", ["coupled", "match", "rejection"])
def test_generate_at_grammar_dead_end_raises_with_position(method: str, word_vocabulary: Vocabulary) -> None:
    """The model's only tokens are a and b, and the grammar requires a c; the emitted tokens remain valid."""
    mock = make_model(vocabulary=word_vocabulary, words=(A, B), peak=0.5)
    sampling = Sampling(1.0, seed=1, grammar='root ::= "a" "b" "a" "b" "c"', **OPEN)
    decoder = make_decoder(mock, drafter="ngram", policy="fixed", draft_max=3)
    prompt = [A, B, A, B, A, B]
    emitted: list[int] = []
    with pytest.raises(GrammarError, match=r"^at position 10 of the text: dead end in the grammar"):  # noqa: PT012
        for step in decoder.generate(prompt, max_tokens=20, sampling=sampling, acceptance=method):
            emitted += step.tokens
    assert emitted == [A, B, A, B]
    assert mock.tokens == [*prompt, *emitted[:-1]]


@pytest.mark.parametrize("method", ["coupled", "match", "rejection", "greedy"])
def test_generate_with_return_decisions_reports_all_decisions(method: str) -> None:
    sampling = Sampling(0.0 if method == "greedy" else 1.0, seed=5, **OPEN)
    prompt = [1, 2, 3, 1, 2, 3, 1, 2]
    decoder = make_decoder(make_model(6, peak=1.0), drafter="ngram", policy="fixed", draft_max=3)
    options: dict[str, Any] = {"max_tokens": 60, "sampling": sampling, "acceptance": method}
    emitted, steps = drive(decoder, prompt, return_decisions=True, **options)
    told: list[int] = []
    position = len(prompt)
    for step in steps:
        assert step.decisions
        assert step.position == position
        assert step.verified_draft.tokens == step.drafted
        guesses = [j for j in step.decisions if j.accepted is not None]
        assert [j.token for j in guesses] == list(step.drafted[: len(guesses)])
        assert sum(bool(j.accepted) for j in guesses) >= step.accepted
        told += [j.token for j in step.decisions if j.accepted is not False][: len(step.tokens)]
        assert all(0 <= j.p <= 1 for j in step.decisions)
        position += len(step.tokens)
    assert told == emitted
    again = make_decoder(make_model(6, peak=1.0), drafter="ngram", policy="fixed", draft_max=3)
    plain, steps = drive(again, prompt, **options)
    assert plain == emitted
    assert all(step.decisions == () and step.verified_draft == NO_DRAFT and step.logprobs == () for step in steps)


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(0.8, repeat_penalty=1.3), Sampling(0.8, mirostat=2)], ids=str
)
def test_generate_with_nan_logits_raises_after_valid_tokens(sampling: Sampling) -> None:
    """The logits after `length` tokens are broken, at any position in a pass."""
    prompt = [1, 2, 3]
    text = plain_generate(MockTarget(12), prompt, 20, sampling)
    for length in range(3, 10):
        for draft_max, policy in ((1, "fixed"), (4, "fixed"), (4, "entropy")):
            mock = MockTarget(12, broken=lambda context, length=length: len(context) == length)
            decoder = make_decoder(mock, drafter=Oracle(text), policy=policy, draft_max=draft_max)
            emitted: list[int] = []
            with pytest.raises(BadLogits, match=rf"^at position {length} of the text: the logit of token 5 is nan"):  # noqa: PT012
                for step in decoder.generate(
                    prompt, max_tokens=20, sampling=sampling, logprobs=1, return_decisions=True
                ):
                    emitted += step.tokens
                    assert step.stop is None
                    assert len(step.logprobs) == len(step.tokens)
            assert emitted == text[: length - len(prompt)]
            assert mock.tokens == [*prompt, *emitted[:-1]]
            # A text that ends before that position does not fail.
            if emitted:
                assert drive(decoder, prompt, max_tokens=len(emitted), sampling=sampling)[0] == emitted


def test_generate_ignores_bad_logits_after_end_of_text(word_vocabulary: Vocabulary) -> None:
    """Plain decoding never sees the logits after the end of the text, so broken ones there must not affect a draft."""
    options: dict[str, Any] = {"vocabulary": word_vocabulary, "broken": lambda context: context[-1] == END}
    for sampling, method in (
        (Sampling(), "greedy"),
        (Sampling(1.0, **OPEN), "coupled"),
        (Sampling(1.0, **OPEN), "match"),
        (Sampling(1.0, **OPEN), "rejection"),
        (Sampling(1.0, grammar='root ::= "a"*', **OPEN), "coupled"),
    ):
        for seed in range(20):
            mock = MockTarget(**options, words=(A, END), peak=0.3, seed=seed)
            decoder = make_decoder(mock, drafter=Oracle([A, END, A, A]), policy="fixed", draft_max=3)
            seeded = replace(sampling, seed=seed)
            emitted, _ = drive(decoder, [A, A], max_tokens=4, sampling=seeded, acceptance=method)
            assert END not in emitted[:-1]
