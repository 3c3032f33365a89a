"""Tests that rules which change the output do so exactly as their papers describe."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.distributions import ALARM, Path, Text, check_sample, follows, make_next_distribution, next_distribution
from support.mock_target import MockTarget
from support.numpy_sampler import NumpySampler
from support.small_loop import make_certain_draft, make_count_drafter, speculate

from ngramspec.acceptance.rejection import rejection_choice
from ngramspec.acceptance.rules import TokenDecision, Verdict
from ngramspec.acceptance.settings import Acceptance
from ngramspec.acceptance.verifier import RuleVerifier
from ngramspec.drafting.draft import Draft
from ngramspec.sampling.settings import Sampling

if TYPE_CHECKING:
    from ngramspec.llama.vocabulary import Vocabulary

ALL: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
PROMPT = [3, 1, 2]
P = np.array([0.4, 0.3, 0.2, 0.1])
Q = {0: 1, 1: 2, 2: 5, 3: 2}


@pytest.mark.parametrize("lenience", [0.5, *(pytest.param(x, marks=pytest.mark.exhaustive) for x in (1.0, 0.2))])
def test_rejection_rule_with_lenience_samples_published_distribution(lenience: float) -> None:
    """A draw from q is accepted with probability min(1, p / (L q)), otherwise norm(max(0, p - L q)) is sampled.

    A token is then emitted with probability min(q, p / L) + (1 - sum min(q, p / L)) norm(max(0, p - L q)), which is
    never above p / L (Leviathan, Kalman, Matias 2023, appendix A.5).
    """
    q = np.array([0.1, 0.2, 0.5, 0.2])
    kept = np.minimum(q, P / lenience)
    rest = np.maximum(0, P - lenience * q)
    law = kept + (1 - kept.sum()) * rest / rest.sum()
    assert (law <= P / lenience + 1e-12).all()
    row = np.log(P).astype(np.float32)
    n, accepted = 3000, 0
    sample: Counter[Path] = Counter()
    for seed in range(n):
        s = Sampling(1.0, seed=seed, **ALL)
        token = rejection_choice(s, 9)(0, Q)
        verifier = RuleVerifier(NumpySampler(s, 4), Acceptance("rejection", lenience=lenience))
        verdict = verifier.verify([row, row], Draft((token,), (dict(enumerate(q.tolist())),)), 9)
        sample[verdict.tokens[:1]] += 1
        accepted += verdict.accepted
    check_sample(sample, {(token,): p for token, p in enumerate(law.tolist())})
    assert abs(accepted / n - kept.sum()) < math.sqrt(math.log(2 / ALARM) / (2 * n))
    assert (lenience == 1) == np.allclose(law, P)


def test_greedy_rule_with_lenience_accepts_sufficiently_likely_tokens() -> None:
    """At temperature 0, a token is accepted if its softmax probability is at least L times that of the best token."""
    rows = np.log(np.array([[0.5, 0.26, 0.24], [0.6, 0.31, 0.09], [0.1, 0.1, 0.8]])).astype(np.float32)
    seen: list[TokenDecision] = []

    def verify(draft: list[int], lenience: float) -> Verdict:
        seen.clear()
        verifier = RuleVerifier(NumpySampler(Sampling(), 3), Acceptance(lenience=lenience), seen.append)
        return verifier.verify(rows, make_certain_draft(draft), 0)

    assert verify([1, 1], 0.5) == Verdict((1, 1, 2), 2)
    assert [(j.token, j.accepted, round(j.p, 5)) for j in seen] == [(1, True, 0.26), (1, True, 0.31), (2, None, 0.8)]
    assert seen[0].why == pytest.approx({"margin": math.log(0.5 / 0.26), "slack": math.log(2)}, rel=1e-5)
    assert verify([2, 1], 0.5) == Verdict((0,), 0)
    assert verify([1, 2], 0.5) == Verdict((1, 0), 1)
    assert verify([1, 2], 0.1) == Verdict((1, 2, 2), 2)
    assert verify([0, 0], 0.9) == Verdict((0, 0, 2), 2)


def test_greedy_rule_with_tiny_lenience_accepts_every_draft() -> None:
    everything = Acceptance(lenience=1e-30)
    taken, _ = speculate(MockTarget(12), PROMPT, 40, Sampling(), lambda _t, _c: make_certain_draft([5, 6]), everything)
    assert taken[:2] == taken[3:5] == [5, 6]


def test_lenience_without_draft_keeps_target_distribution() -> None:
    """Lenience only applies to draft tokens: without a draft, the distribution is the target's."""
    mock = MockTarget(4, peak=1.0, seed=11)
    plain = Sampling(1.0, **ALL, repeat_penalty=1.4, repeat_last_n=4)
    texts: list[Text] = []
    for seed in range(40):
        seeded = replace(plain, seed=seed)
        tokens, _ = speculate(mock, PROMPT, 30, seeded, lambda _t, _c: make_certain_draft([]), Acceptance(lenience=0.3))
        texts.append((PROMPT, tokens))
    assert follows(texts, make_next_distribution(mock, plain))


def bar(p: np.ndarray[Any, Any], epsilon: float = 0.09, delta: float = 0.3) -> float:
    """Return min(epsilon, delta exp(-H(p))): Cai et al. 2024, section 2.3.1, with the values of Medusa's code."""
    p = p[p > 0]
    return min(epsilon, delta * math.exp(float((p * np.log(p)).sum())))


def test_typical_acceptance_accepts_tokens_above_threshold() -> None:
    rng = np.random.default_rng(2)
    s = Sampling(0.7, seed=3, **ALL)
    kept = 0
    for position in range(300):
        row = (rng.uniform(0.2, 4) * rng.standard_normal(20)).astype(np.float32)
        p = next_distribution(row, s)
        token = int(rng.integers(20)) if position % 3 else int(row.argmax())
        seen: list[TokenDecision] = []
        verifier = RuleVerifier(NumpySampler(s, 20), Acceptance(typical=True), seen.append)
        verdict = verifier.verify([row, row], make_certain_draft([token]), position)
        assert verdict.accepted == (p[token] > bar(p))
        assert seen[0].why == pytest.approx({"threshold": bar(p)}, rel=1e-6)
        assert seen[0].p == pytest.approx(p[token], rel=1e-5)
        kept += verdict.accepted
    assert 60 < kept < 240


def test_typical_acceptance_after_rejection_samples_from_target() -> None:
    row = np.log(np.array([0.97, 0.02, 0.01])).astype(np.float32)
    sample: Counter[Path] = Counter()
    for seed in range(1000):
        verifier = RuleVerifier(NumpySampler(Sampling(1.0, seed=seed, **ALL), 3), Acceptance(typical=True))
        verdict = verifier.verify([row, row], make_certain_draft([2]), 4)
        assert verdict.accepted == 0
        sample[verdict.tokens] += 1
    check_sample(sample, {(0,): 0.97, (1,): 0.02, (2,): 0.01})


@pytest.mark.parametrize("how", [Acceptance(lenience=0.01), Acceptance(typical=True)], ids=str)
def test_acceptance_with_grammar_emits_only_allowed_tokens(how: Acceptance, word_vocabulary: Vocabulary) -> None:
    a, b, c = (259, 260, 261)
    grammar = 'root ::= ("a" | "b" "c")*'
    mock = MockTarget(vocabulary=word_vocabulary, words=(a, b, c), peak=0.5)
    for seed in range(60):
        s = Sampling(1.0, seed=seed, grammar=grammar, **ALL)
        tokens, _ = speculate(mock, [a, b], 12, s, make_count_drafter([{a: 1, c: 3}, {c: 1, b: 2}, {b: 1, a: 1}]), how)
        here = word_vocabulary.grammar(grammar)
        for token in tokens:
            assert here.allows(token)
            here.accept(token)
