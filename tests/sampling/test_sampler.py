"""Tests of `TokenBanSampler`: no early end, no forbidden words, and otherwise the distribution of the inner sampler."""

from __future__ import annotations

import numpy as np
from support.numpy_sampler import NumpySampler

from ngramspec.sampling.sampler import Sampler, TokenBanSampler
from ngramspec.sampling.settings import Sampling
from ngramspec.sampling.text_rules import TextRules

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
