"""Tests of the rules: the probabilities of acceptance, the distribution of the output, and the rows that they read.

`decoding/test_same_*.py` cover the tokens of plain decoding, and grammars. The sample of tests of frequencies are
seeds or positions 0, 1, 2, ..., so they always pass or always fail. With exact sampling, each would fail with
probability below `distributions.ALARM`. Limit for frequencies (Hoeffding):
P(|mean - expectation| >= sqrt(log(2 / alarm) / (2 n))) <= alarm.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.distributions import ALARM, Path, Text, check_sample, follows, make_next_distribution, next_distribution
from support.grid import grid
from support.llama_chain import make_chain
from support.mock_target import MockTarget
from support.small_loop import make_certain_draft, make_count_drafter, speculate

from ngramspec.acceptance import rules
from ngramspec.acceptance.rules import TokenDecision, Verdict, rejection_choice
from ngramspec.acceptance.verifier import Acceptance, RuleVerifier
from ngramspec.drafting.draft import NO_DRAFT, Draft
from ngramspec.llama.samplers import SamplerChain
from ngramspec.llama.vocabulary import Vocabulary
from ngramspec.sampling import distribution as noise
from ngramspec.sampling.settings import Sampling

ALL: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
PROMPT = [3, 1, 2]

SETTINGS: dict[str, dict[str, Any]] = {
    "all": ALL,
    "cut": {"top_k": 3, "top_p": 0.9, "min_p": 0.05, "temperature": 1.3},
    "penalties": {
        **ALL,
        "repeat_penalty": 1.5,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "repeat_last_n": 3,
        "logit_bias": ((1, 0.7), (3, -0.5)),
    },
}


@grid(name=SETTINGS, method=("coupled", "rejection"))
def test_verifier_with_sampling_settings_follows_target_distribution(name: str, method: str) -> None:
    """Drafts have two tokens, so that accepted tokens, refused tokens and ends of drafts are all frequent."""
    mock, texts, counts = MockTarget(4, peak=1.0, seed=11), list[Text](), Counter[int]()
    sampling = Sampling(**{"temperature": 1.0} | SETTINGS[name])
    propose = make_count_drafter([{0: 5, 1: 2, 2: 2, 3: 1}, {0: 1, 2: 3, 3: 2}])
    for seed in range(40):
        tokens, accepted = speculate(mock, PROMPT, 60, replace(sampling, seed=seed), propose, method)
        texts.append((PROMPT, tokens))
        counts.update(accepted)
    assert all(counts[k] > 15 for k in range(3)), counts
    assert follows(texts, make_next_distribution(mock, sampling))
    # At temperature 0, one token has probability 1.
    greedy = replace(sampling, temperature=0.0)
    tokens, _ = speculate(mock, PROMPT, 60, greedy, propose, "greedy")
    law = make_next_distribution(mock, greedy)
    assert all(law(PROMPT, tokens[:i])[token] == 1 for i, token in enumerate(tokens))


def sampler(sampling: Sampling, n_vocab: int = 4) -> SamplerChain:
    return make_chain(sampling, n_vocab)


def test_coupled_rule_emits_argmax_of_noisy_logits() -> None:
    rng = np.random.default_rng(5)
    s = sampler(Sampling(0.7, seed=99, **ALL), 50)
    rows = rng.standard_normal((4, 50)).astype(np.float32)
    noisy = [rows[i] / 0.7 + noise.gumbel(99, 1000 + i, np.arange(50)) for i in range(4)]
    right = [int(x.argmax()) for x in noisy]
    assert RuleVerifier(s, "coupled").verify(rows, make_certain_draft(right[:3]), 1000).tokens == tuple(right)


@pytest.fixture(scope="module")
def words(word_vocabulary: Vocabulary) -> dict[str, int]:
    return {word_vocabulary.piece(t).decode(): t for t in range(259, word_vocabulary.n_vocab)}


def test_coupled_rule_after_grammar_rejection_uses_independent_noise(
    word_vocabulary: Vocabulary, words: dict[str, int]
) -> None:
    """If the grammar refuses a token, the second draw is independent of the first."""
    row = np.full(word_vocabulary.n_vocab, -np.inf, np.float32)
    a, b, c = words["a"], words["b"], words["c"]
    row[[a, b, c]] = 0.0
    seen = Counter[tuple[int, ...]]()
    for seed in range(300):
        sampling = Sampling(1.0, seed=seed, grammar='root ::= "a" | "b"', **ALL)
        emitted = RuleVerifier(word_vocabulary.sampler(sampling)).verify([row], NO_DRAFT, 7).tokens[0]
        noisy = noise.gumbel(seed, 7, np.array([a, b, c]))
        if noisy.argmax() == 2:
            seen[int(noisy[0] > noisy[1]), emitted] += 1
        else:
            assert emitted == [a, b][noisy.argmax()]
    # With the same noise, the token in second place at the refused draw would now always be first.
    law: dict[tuple[int, ...], float] = {(sign, token): 0.25 for sign in (0, 1) for token in (a, b)}
    check_sample(seen, law)


P = np.log(np.array([0.4, 0.3, 0.2, 0.1])).astype(np.float32)
Q = {0: 1, 1: 2, 2: 5, 4: 2}  # A drafter may know tokens, such as 4, that p lacks.
Q_LAW = {t: c / 10 for t, c in Q.items()}
ALPHA = 0.1 + 0.2 + 0.2  # sum min(p, q)


def rejection_verdicts(n: int, watch: Callable[[TokenDecision], None] | None = None) -> Iterator[tuple[int, Verdict]]:
    """Yield (draft token, verdict) of n passes with one draft token, at different positions of a text."""
    s = Sampling(1.0, seed=4, **ALL)
    verifier = RuleVerifier(sampler(s), "rejection", watch)
    for position in range(0, 2 * n, 2):
        token = rejection_choice(s, position)(0, Q)
        yield token, verifier.verify([P, P], Draft((token,), (Q_LAW,)), position)


def test_rejection_rule_accepts_with_probability_sum_of_min() -> None:
    n = 4_000
    tolerance = math.sqrt(math.log(2 / ALARM) / (2 * n))  # 0.046
    drafted: Counter[int] = Counter()
    accepted: Counter[int] = Counter()
    after_refusal: Counter[tuple[int, ...]] = Counter()
    for token, verdict in rejection_verdicts(n):
        drafted[token] += 1
        accepted[token] += verdict.accepted
        if not verdict.accepted:
            after_refusal[verdict.tokens] += 1
    assert abs(accepted.total() / n - ALPHA) < tolerance
    for token, q in Q_LAW.items():
        assert abs(drafted[token] / n - q) < tolerance
        # accepted: q min(1, p/q) = min(p, q)
        p = math.exp(P[token]) if token < 4 else 0.0
        assert abs(accepted[token] / n - min(p, q)) < tolerance
    check_sample(after_refusal, {(0,): 0.6, (1,): 0.2, (3,): 0.2})  # norm(max(0, p - q))


def test_rejection_rule_uses_each_uniform_once(monkeypatch: pytest.MonkeyPatch) -> None:
    used: Counter[tuple[int, int, int]] = Counter()

    def recorded(seed: int, position: int, stream: int) -> float:
        used[seed, position, stream] += 1
        return noise.uniform(seed, position, stream)

    monkeypatch.setattr(rules, "uniform", recorded)
    mock = MockTarget(8, peak=1.0)
    propose = make_count_drafter([{t: 1 + (t + i) % 8 for t in range(8)} for i in range(4)])
    speculate(mock, PROMPT, 300, Sampling(1.0), propose, "rejection")
    assert len(used) > 800
    assert used.most_common(1)[0][1] == 1


def test_greedy_rule_reports_token_decisions() -> None:
    seen: list[TokenDecision] = []
    rows = np.log(np.array([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25], [0.2, 0.2, 0.6]])).astype(np.float32)
    verifier = RuleVerifier(sampler(Sampling(), 3), watch=seen.append)
    assert verifier.verify(rows, make_certain_draft([0, 2]), 0) == Verdict((0, 1), 1)
    assert [(j.token, j.accepted, round(j.p, 6)) for j in seen] == [(0, True, 0.5), (2, False, 0.25), (1, None, 0.5)]
    assert seen[0].why == {"margin": 0.0}
    assert seen[1].why == pytest.approx({"margin": math.log(2)})
    assert seen[2].why == {}
    seen.clear()
    verifier.verify(rows, make_certain_draft([0, 1]), 0)
    assert [(j.token, j.accepted) for j in seen] == [(0, True), (1, True), (2, None)]


def test_rejection_rule_reports_values_that_decided() -> None:
    seen: list[TokenDecision] = []
    for token, verdict in rejection_verdicts(300, seen.append):
        guess = seen[0]
        p = math.exp(P[token]) if token < 4 else 0.0
        assert (guess.token, guess.p) == (token, pytest.approx(p))
        assert guess.why["q"] == Q_LAW[token]
        assert guess.why["overlap"] == pytest.approx(ALPHA)
        assert guess.accepted is bool(verdict.accepted) is (guess.why["u"] < p / Q_LAW[token])
        own = seen[1]
        assert (own.token, own.accepted, own.p) == (verdict.tokens[-1], None, pytest.approx(math.exp(P[own.token])))
        assert len(seen) == 2
        seen.clear()


@pytest.mark.parametrize("method", ["greedy", "coupled", "match", "rejection"])
def test_verifier_after_first_rejection_reads_no_more_rows(method: str) -> None:
    # With a bias, no compiled call verifies all rows at once.
    sampling = Sampling(0.0 if method == "greedy" else 0.5, top_k=1, logit_bias=((0, 0.0),))
    verifier = RuleVerifier(sampler(sampling), method)
    row = np.array([0, 9, 0, 0], np.float32)
    read: list[int] = []

    def rows() -> Iterator[NDArray[np.float32]]:
        for i in range(5):
            read.append(i)
            yield row if i < 3 else np.full(4, np.nan, np.float32)

    assert verifier.verify(rows(), make_certain_draft([1, 1, 2, 1]), 7) == Verdict((1, 1, 1), 2)
    assert read == [0, 1, 2]
    read.clear()
    assert verifier.verify(rows(), make_certain_draft([1, 1]), 7).accepted == 2  # Rows 3 and 4 are padding.
    assert read == [0, 1, 2]
    read.clear()
    assert verifier.verify(rows(), NO_DRAFT, 7) == Verdict((1,), 0)
    assert read == [0]
    assert verifier.verify([row, row], make_certain_draft([1, 1]), 7) == Verdict((1, 1), 2)
    with pytest.raises(ValueError, match="a draft of 3 tokens came with 2 rows"):
        verifier.verify([row, row], make_certain_draft([1, 1, 1]), 7)
    with pytest.raises(ValueError, match="a draft of 0 tokens came with 0 rows"):
        verifier.verify([], NO_DRAFT, 7)


def test_greedy_rule_with_equal_logits_selects_lowest_token_id() -> None:
    rows = np.array([[1, 3, 3], [2, 2, 2], [0, 0, 1]], np.float32)
    for biases in ((), ((0, 0.0),)):  # by argmax and by the chain
        verifier = RuleVerifier(sampler(Sampling(logit_bias=biases), 3))
        assert verifier.verify(rows, make_certain_draft([1, 0]), 0) == Verdict((1, 0, 2), 2)
        assert verifier.verify(rows, make_certain_draft([2, 0]), 0) == Verdict((1,), 0)


def test_rejection_rule_with_empty_residual_samples_from_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """If p = q except for rounding and the token is rejected, the next token comes from p."""
    row = np.zeros(3, np.float32)
    q = {0: 1 / 3 + 1e-9, 1: 1 / 3, 2: 1 / 3}
    for u in (2.0**-53, 1 - 2.0**-53):
        uniforms = iter([1 - 2.0**-53, u])
        monkeypatch.setattr(rules, "uniform", lambda *_, u=uniforms: next(u))
        verifier = RuleVerifier(sampler(Sampling(1.0, **ALL), 3), "rejection")
        verdict = verifier.verify([row, row], Draft((0,), (q,)), 0)
        assert verdict == Verdict((0 if u < 0.5 else 2,), 0)


@pytest.mark.parametrize("q", [(), ({0: 1.0},), ({1: 0.5},), ({1: 0.5, 2: 0.6},), ({1: 1.0},) * 2])
def test_rejection_rule_rejects_invalid_draft_distributions(q: tuple[dict[int, float], ...]) -> None:
    row = np.zeros(3, np.float32)
    with pytest.raises(ValueError, match=r"distributions q|not drawn from its q"):
        RuleVerifier(sampler(Sampling(1.0), 3), "rejection").verify([row, row], Draft((1,), q), 0)


# --------------------------------------------------------------------------- rules that change the output


@pytest.mark.parametrize("lenience", [0.5, *(pytest.param(x, marks=pytest.mark.exhaustive) for x in (1.0, 0.2))])
def test_rejection_rule_with_lenience_samples_published_distribution(lenience: float) -> None:
    """A draw from q is accepted with probability min(1, p / (L q)), otherwise norm(max(0, p - L q)) is sampled.

    A token is then emitted with probability min(q, p / L) + (1 - sum min(q, p / L)) norm(max(0, p - L q)), which is
    never above p / L (Leviathan, Kalman, Matias 2023, appendix A.5).
    """
    p, q = np.array([0.4, 0.3, 0.2, 0.1]), np.array([0.1, 0.2, 0.5, 0.2])
    kept = np.minimum(q, p / lenience)
    rest = np.maximum(0, p - lenience * q)
    law = kept + (1 - kept.sum()) * rest / rest.sum()
    assert (law <= p / lenience + 1e-12).all()
    n, accepted = 3000, 0
    sample: Counter[Path] = Counter()
    s, drawn_from = Sampling(1.0, seed=4, **ALL), dict(enumerate(q.tolist()))
    exact = RuleVerifier(sampler(s), "rejection")
    verifier = RuleVerifier(sampler(s), Acceptance("rejection", lenience=lenience))
    for position in range(0, 2 * n, 2):
        token = rejection_choice(s, position)(0, drawn_from)
        verdict = verifier.verify([P, P], Draft((token,), (drawn_from,)), position)
        sample[verdict.tokens[:1]] += 1
        accepted += verdict.accepted
        # Lenience applies only to draft tokens.
        assert verifier.verify([P], NO_DRAFT, position) == exact.verify([P], NO_DRAFT, position)
    check_sample(sample, {(token,): chance for token, chance in enumerate(law.tolist())})
    assert abs(accepted / n - kept.sum()) < math.sqrt(math.log(2 / ALARM) / (2 * n))
    assert (lenience == 1) == np.allclose(law, p)


def test_greedy_rule_with_lenience_accepts_sufficiently_likely_tokens() -> None:
    """At temperature 0, a token is accepted if its softmax probability is at least L times that of the best token."""
    rows = np.log(np.array([[0.5, 0.26, 0.24], [0.6, 0.31, 0.09], [0.1, 0.1, 0.8]])).astype(np.float32)
    seen: list[TokenDecision] = []

    def verify(draft: list[int], lenience: float) -> Verdict:
        seen.clear()
        verifier = RuleVerifier(sampler(Sampling(), 3), Acceptance(lenience=lenience), seen.append)
        return verifier.verify(rows, make_certain_draft(draft), 0)

    assert verify([1, 1], 0.5) == Verdict((1, 1, 2), 2)
    assert [(j.token, j.accepted, round(j.p, 5)) for j in seen] == [(1, True, 0.26), (1, True, 0.31), (2, None, 0.8)]
    assert seen[0].why == pytest.approx({"margin": math.log(0.5 / 0.26), "slack": math.log(2)}, rel=1e-5)
    assert verify([2, 1], 0.5) == Verdict((0,), 0)
    assert verify([1, 2], 0.5) == Verdict((1, 0), 1)
    assert verify([1, 2], 0.1) == Verdict((1, 2, 2), 2)
    assert verify([0, 0], 0.9) == Verdict((0, 0, 2), 2)


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
        verifier = RuleVerifier(sampler(s, 20), Acceptance(typical=True), seen.append)
        verdict = verifier.verify([row, row], make_certain_draft([token]), position)
        assert verdict.accepted == (p[token] > bar(p))
        assert seen[0].why == pytest.approx({"threshold": bar(p)}, rel=1e-6)
        assert seen[0].p == pytest.approx(p[token], rel=1e-5)
        kept += verdict.accepted
    assert 60 < kept < 240


def test_typical_acceptance_after_rejection_samples_from_target() -> None:
    row = np.log(np.array([0.97, 0.02, 0.01])).astype(np.float32)
    sample: Counter[Path] = Counter()
    verifier = RuleVerifier(sampler(Sampling(1.0, seed=4, **ALL), 3), Acceptance(typical=True))
    for position in range(1000):
        verdict = verifier.verify([row, row], make_certain_draft([2]), position)
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
