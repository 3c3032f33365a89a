"""Tests that `SamplerChain` has the distribution, state and random numbers of llama.cpp's chain on all candidates.

`SamplerChain` reduces the candidates first (see `SamplerChain._candidates`), so the tests compare it with a chain that
gets all of them. They cover each sampler, combinations and orders, and small and large vocabularies.
`test_samplers_edges` covers ties, edge cases and bad input.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.llama_chain import (
    INFILL,
    SETTINGS,
    LlamaChain,
    compare,
    make_chain,
    make_chains,
    random_logits,
    random_text,
)
from support.numpy_sampler import NumpySampler

from ngramspec.llama.vocabulary import Vocabulary
from ngramspec.sampling.distribution import Distribution, gumbel_pick
from ngramspec.sampling.settings import SAMPLERS, Sampling


@pytest.mark.parametrize("name", SETTINGS)
def test_sampler_chain_with_each_setting_matches_llama_cpp(name: str, word_vocabulary: Vocabulary) -> None:
    """Compare several positions of a text, so that the state counts too; `NumpySampler` must also agree."""
    rng = np.random.default_rng(1)
    s = Sampling(**{"temperature": 0.8, "seed": 5} | SETTINGS[name])
    # `NumpySampler` does not support these samplers, or they are random.
    unknown = s.dry_multiplier or s.dynatemp_range or s.typical_p < 1 or s.top_n_sigma > 0
    alike = not unknown and s.xtc_probability in (0, 1)
    for n_vocab in (7, 300, 5003):
        ours, theirs = make_chains(word_vocabulary, s, n_vocab)
        samplers = [ours, NumpySampler(s, n_vocab, n_ctx=4096)] if alike and n_vocab < 1000 else [ours]
        prompt = random_text(rng, 30, n_vocab)
        for one in (*samplers, theirs):
            one.begin(prompt)
        for i in range(16):
            logits = random_logits(rng, i, n_vocab)
            if s.logit_bias and i == 7:
                logits[3] = -np.inf
            kept, expected = logits.copy(), theirs.probabilities(logits)
            if s.greedy:
                assert ours.draw(logits, i) == max(expected, key=expected.__getitem__)
            for one in samplers:
                compare(one.distribution(logits), expected)
                assert (logits == kept).all()
            token = prompt[i] if i % 2 else int(rng.integers(n_vocab))
            for one in (*samplers, theirs):
                one.accept(token)


@pytest.mark.parametrize("name", INFILL)
def test_sampler_chain_with_infill_matches_llama_cpp(
    name: str, word_vocabulary: Vocabulary, demo_vocabulary: Vocabulary
) -> None:
    """The sampler ends the text, takes one token, or leaves a choice; the test covers all three."""
    rng = np.random.default_rng(12)
    for vocabulary in (word_vocabulary, demo_vocabulary):
        ends = [token for token in range(vocabulary.n_vocab) if vocabulary.is_eog(token)]
        s = Sampling(**{"temperature": 0.8, "seed": 5} | INFILL[name])
        ours, theirs = make_chains(vocabulary, s, vocabulary.n_vocab)
        prompt = random_text(rng, 30, vocabulary.n_vocab)
        ours.begin(prompt)
        theirs.begin(prompt)
        seen = set()
        for i in range(60):
            logits = random_logits(rng, i, vocabulary.n_vocab)
            # There are few likely tokens, some with a common prefix, and the probability of the end grows and shrinks.
            logits[rng.choice(np.arange(250, 273), 4, replace=False)] += rng.uniform(4, 14, 4)
            logits[ends[0]] += i % 16
            law = ours.distribution(logits)
            compare(law, theirs.probabilities(logits))
            seen.add("end" if law.ids[0] in ends and law.ids.size == 1 else min(law.ids.size, 2))
            ours.accept(prompt[i % 30])
            theirs.accept(prompt[i % 30])
        assert seen >= ({"end", 1} if s.greedy else {"end", 1, 2})


@given(data=st.data())
def test_sampler_chain_with_any_combination_and_order_matches_llama_cpp(
    data: st.DataObject, word_vocabulary: Vocabulary
) -> None:
    share = st.sampled_from([0.05, 0.3, 0.7, 0.95])
    order = tuple(data.draw(st.permutations(SAMPLERS)))
    temperature = data.draw(st.sampled_from([0.0, 0.5, 1.0, 3.0]))
    greedy = temperature == 0
    s = Sampling(
        temperature=temperature,
        top_k=data.draw(st.sampled_from([0, 1, 7, 40])),
        top_p=data.draw(st.one_of(st.just(1.0), share)),
        min_p=data.draw(st.one_of(st.just(0.0), share)),
        typical_p=1.0 if greedy else data.draw(st.one_of(st.just(1.0), share)),
        top_n_sigma=data.draw(st.sampled_from([-1.0, 0.7, 2.0])),
        xtc_probability=0.0 if greedy else data.draw(st.sampled_from([0.0, 0.5, 1.0])),
        xtc_threshold=data.draw(st.sampled_from([0.02, 0.2])),
        dynatemp_range=0.0 if greedy else data.draw(st.sampled_from([0.0, 0.4])),
        repeat_penalty=data.draw(st.sampled_from([1.0, 1.3, 0.8])),
        frequency_penalty=data.draw(st.sampled_from([0.0, 0.4])),
        repeat_last_n=data.draw(st.sampled_from([0, 4, 64])),
        dry_multiplier=data.draw(st.sampled_from([0.0, 1.0])),
        dry_allowed_length=1,
        logit_bias=data.draw(st.sampled_from([(), ((1, 3.0), (8, -2.0))])),
        seed=data.draw(st.integers(0, 2**32 - 2)),
        samplers=order,
    )
    n_vocab = data.draw(st.sampled_from([12, 600]))
    rng = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    ours, theirs = make_chains(word_vocabulary, s, n_vocab)
    prompt = random_text(rng, 20, n_vocab)
    ours.begin(prompt)
    theirs.begin(prompt)
    for i in range(4):
        logits = random_logits(rng, i, n_vocab)
        compare(ours.distribution(logits), theirs.probabilities(logits))
        ours.accept(prompt[i])
        theirs.accept(prompt[i])


@pytest.mark.parametrize(("version", "seed"), [(1, 0), (1, 2**32 - 2), (2, 1), (2, 2**32 - 2)])
def test_sampler_chain_with_mirostat_draws_tokens_of_llama_cpp(
    version: int, seed: int, word_vocabulary: Vocabulary
) -> None:
    rng = np.random.default_rng(3)
    s = Sampling(0.9, mirostat=version, mirostat_tau=3.0, seed=seed, logit_bias=((4, 1.0),))
    for n_vocab in (9, 2000):
        ours, theirs = make_chains(word_vocabulary, s, n_vocab)
        for i in range(100):
            logits = random_logits(rng, i, n_vocab)
            token = ours.draw(logits, i)
            assert {token: 1.0} == theirs.probabilities(logits)
            ours.accept(token)


def test_sampler_chain_with_xtc_uses_random_numbers_of_llama_cpp(word_vocabulary: Vocabulary) -> None:
    """XTC draws one random number at each position with a choice, whatever the distribution."""
    rng = np.random.default_rng(4)
    s = Sampling(1.0, xtc_probability=0.5, xtc_threshold=0.01, seed=77)
    ours, theirs = make_chains(word_vocabulary, s, 100)
    cut = 0
    for i in range(200):
        logits = random_logits(rng, i, 100)
        law = ours.distribution(logits)
        compare(law, theirs.probabilities(logits))
        cut += int(logits.argmax()) not in law.ids
    assert 50 < cut < 150


def test_sampler_chain_with_seeds_beyond_32_bits_is_deterministic() -> None:
    """llama.cpp's seeds have 32 bits, and the highest number requests a random seed."""
    logits = np.zeros(50, np.float32)

    def draws(seed: int) -> tuple[int, ...]:
        chain = make_chain(Sampling(1.0, mirostat=2, seed=seed), 50)
        return tuple(chain.draw(logits, 0) for _ in range(30))

    for seed in (2**32 - 1, 2**64 - 1, 2**63, 2**32):
        assert draws(seed) == draws(seed)
        assert len({draws(s) for s in (5, 6, seed)}) == 3


LETTERS = "root ::= [a-z]+"
RARE = 'root ::= "{" [0-9]* "}"'


@pytest.mark.parametrize("name", ["defaults", "top-k 5", "no top-k", "penalties", "biases", "dry", "greedy"])
@pytest.mark.parametrize("grammar", [LETTERS, RARE])
def test_sampler_chain_under_grammar_matches_llama_cpp(name: str, grammar: str, demo_vocabulary: Vocabulary) -> None:
    """`common_sampler_sample` draws without the grammar, and draws again with it if the grammar forbids the token."""
    rng = np.random.default_rng(6)
    s = Sampling(**{"temperature": 0.8, "seed": 5, "grammar": grammar} | SETTINGS[name])
    ours = demo_vocabulary.sampler(s)
    theirs = LlamaChain(s, demo_vocabulary.n_vocab, vocab=demo_vocabulary._vocab)
    prompt = random_text(rng, 30, 4096)
    ours.begin(prompt)
    theirs.begin(prompt)
    forbidden = 0.0
    for i in range(6):
        logits = random_logits(rng, i, 4096)
        first = theirs.probabilities(logits)
        legal = {token: p for token, p in first.items() if theirs.allows(token)}
        missing = 1 - sum(legal.values())
        forbidden += missing
        if missing > 1e-6:
            for token, p in theirs.probabilities(logits, grammar=True).items():
                legal[token] = legal.get(token, 0.0) + missing * p
        law = ours.distribution(logits)
        compare(law, {token: p for token, p in legal.items() if p > 0})
        token = int(law.ids[law.probs.argmax()])
        ours.accept(token)
        theirs.accept(token)
    assert forbidden > 1


@pytest.mark.parametrize("grammar", [LETTERS, RARE])
def test_sampler_chain_under_grammar_draws_again_only_if_forbidden(grammar: str, demo_vocabulary: Vocabulary) -> None:
    """There is a second attempt only if the first token is forbidden, and it allows no forbidden token."""
    rng = np.random.default_rng(7)
    chain = demo_vocabulary.sampler(Sampling(1.0, grammar=grammar))
    assert chain.grammar is not None
    counts = Counter[int]()
    for i in range(30):
        laws: list[Distribution] = []
        token = chain.draw(random_logits(rng, i, 4096), i, laws)
        drawn = [gumbel_pick(0, i, law, attempt) for attempt, law in enumerate(laws)]
        assert drawn[-1] == token
        assert [chain.grammar.allows(one) for one in drawn] == [False, True][-len(laws) :]
        assert len(laws) == 1 or chain.grammar.mask_allowed(laws[1].ids).all()
        counts[len(laws)] += 1
        chain.accept(token)
    assert counts[2]


@pytest.mark.parametrize("grammar", [LETTERS, RARE])
def test_sampler_chain_with_mirostat_under_grammar_matches_llama_cpp(grammar: str, demo_vocabulary: Vocabulary) -> None:
    rng = np.random.default_rng(8)
    s = Sampling(1.0, mirostat=2, mirostat_tau=3.0, seed=9, grammar=grammar)
    ours = demo_vocabulary.sampler(s)
    theirs = LlamaChain(s, demo_vocabulary.n_vocab, vocab=demo_vocabulary._vocab)
    for i in range(40):
        logits = random_logits(rng, i, 4096)
        (expected,) = theirs.probabilities(logits)
        if not theirs.allows(expected):
            (expected,) = theirs.probabilities(logits, grammar=True)
        assert ours.draw(logits, i) == expected
        ours.accept(expected)
        theirs.accept(expected)
