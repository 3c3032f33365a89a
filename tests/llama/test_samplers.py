"""Tests that `SamplerChain` has the distribution, state and random numbers of llama.cpp's chain on all candidates.

`SamplerChain` reduces the candidates first, so the tests compare it with a chain that gets all of them. They cover each
sampler, combinations and orders, small and large vocabularies, ties, edge cases and bad input.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.llama_chain import (
    INFILL,
    OPEN,
    SETTINGS,
    LlamaChain,
    check_distribution,
    compare,
    make_chain,
    make_chains,
    random_logits,
    random_text,
)
from support.model_files import WORDS, write_words

from ngramspec.data import GrammarError
from ngramspec.llama import samplers
from ngramspec.llama.samplers import SamplerChain
from ngramspec.llama.vocabulary import Vocabulary
from ngramspec.sampling.distribution import BadLogits, NoTokenLeft
from ngramspec.sampling.settings import SAMPLERS, Sampling


@pytest.mark.parametrize("name", SETTINGS)
def test_sampler_chain_with_each_setting_matches_llama_cpp(name: str, word_vocabulary: Vocabulary) -> None:
    """Compare several positions of a text, so that the state counts too."""
    rng = np.random.default_rng(1)
    s = Sampling(**{"temperature": 0.8, "seed": 5} | SETTINGS[name])
    for n_vocab in (7, 300, 5003):
        ours, theirs = make_chains(word_vocabulary, s, n_vocab)
        prompt = random_text(rng, 30, n_vocab)
        ours.begin(prompt)
        theirs.begin(prompt)
        for i in range(16):
            logits = random_logits(rng, i, n_vocab)
            if s.logit_bias and i == 7:
                logits[3] = -np.inf
            kept, expected = logits.copy(), theirs.probabilities(logits)
            if s.greedy:
                assert ours.draw(logits, i) == max(expected, key=expected.__getitem__)
            compare(ours.distribution(logits), expected)
            assert (logits == kept).all()
            token = prompt[i] if i % 2 else int(rng.integers(n_vocab))
            ours.accept(token)
            theirs.accept(token)


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


LETTERS = "root ::= [a-z]+"


def test_sampler_chain_greedy_with_equal_logits_selects_lowest_token_id() -> None:
    chain = make_chain(Sampling(seed=3), 4)
    logits = np.array([1, 5, 5, 2], np.float32)
    p = chain.distribution(logits)
    assert (p.ids.tolist(), p.probs.tolist(), p.logp.tolist()) == ([1], [1.0], [0.0])
    assert chain.draw(logits, 0) == 1


def test_sampler_chain_with_ties_keeps_lowest_token_ids() -> None:
    """llama.cpp would keep any of the equal tokens, as its sort leaves them."""
    logits = np.zeros(20_000, np.float32)
    logits[[7, 19_999]] = 1.0
    assert make_chain(Sampling(1.0, top_k=5, top_p=1.0, min_p=0.0), 20_000).distribution(logits).ids.tolist() == [
        *(0, 1, 2, 7),
        19_999,
    ]
    # min_p = 1 keeps all tokens that equal the best
    only_min_p = make_chain(Sampling(1.0, top_k=0, top_p=1.0, min_p=1.0), 20_000)
    assert only_min_p.distribution(logits).ids.tolist() == [7, 19_999]
    for biases in ((), ((3, 0.0),), ((7, 0.0), (19_999, 0.0))):
        assert make_chain(Sampling(logit_bias=biases), 20_000).distribution(logits).ids.tolist() == [7]


@pytest.mark.parametrize("name", ["defaults", "penalties", "top-p", "typical", "all of it", "backwards"])
def test_sampler_chain_with_ties_returns_probabilities_of_llama_cpp(name: str, word_vocabulary: Vocabulary) -> None:
    """The choice among equal tokens may differ, but not its probability."""
    rng = np.random.default_rng(10)
    s = Sampling(**{"temperature": 0.8, "seed": 5} | SETTINGS[name])
    ours, theirs = make_chains(word_vocabulary, s, 400)
    for _ in range(20):
        logits = rng.integers(0, 12, 400).astype(np.float32)
        mine = np.sort(ours.distribution(logits).probs)
        other = np.sort([p for p in theirs.probabilities(logits).values() if p > 0])
        np.testing.assert_allclose(mine, other, atol=1e-6)


def test_sampler_chain_with_one_token_vocabulary_returns_that_token(word_vocabulary: Vocabulary) -> None:
    for settings in SETTINGS.values():
        s = Sampling(**{"temperature": 0.8} | settings | {"logit_bias": ()})
        chain = SamplerChain(s, 1, vocab=word_vocabulary._vocab, n_ctx=64)
        for _ in range(3):
            assert chain.distribution(np.zeros(1, np.float32)).ids.tolist() == [0]
            chain.accept(0)


def test_sampler_chain_with_tiny_temperature_is_greedy_without_warnings() -> None:
    logits = np.array([1, 5, -40, 2], np.float32)
    orders: list[dict[str, Any]] = [{}, {"mirostat": 1}, {"mirostat": 2}, {"samplers": ("temperature", "typ_p")}]
    with np.errstate(all="raise", under="ignore"):
        for temperature, settings in product((1e-3, 1e-30, 5e-324), orders):
            p = make_chain(Sampling(temperature, **settings), 4).distribution(logits)
            check_distribution(p)
            assert p.ids.tolist()[0] == 1
            assert p.probs.max() > 0.999


def test_sampler_chain_gives_no_probability_to_minus_infinity() -> None:
    logits = np.full(1000, -np.inf, np.float32)
    logits[[3, 500, 998]] = [1.0, 2.0, 3.0]
    for top_k in (0, 2, 40):
        p = make_chain(Sampling(0.8, top_k=top_k, top_p=1.0, min_p=0.0), 1000).distribution(logits)
        check_distribution(p)
        assert p.ids.tolist() == ([500, 998] if top_k == 2 else [3, 500, 998])


def test_sampler_chain_with_several_biases_of_a_token_adds_them() -> None:
    logits = np.zeros(1000, np.float32)
    for top_k in (0, 10):
        both = make_chain(Sampling(1.0, top_k=top_k, logit_bias=((700, 2.0), (700, 3.0))), 1000)
        sum_of = make_chain(Sampling(1.0, top_k=top_k, logit_bias=((700, 5.0),)), 1000)
        assert both.distribution(logits).probability(700) == sum_of.distribution(logits).probability(700) > 0.1
        none = make_chain(Sampling(1.0, top_k=top_k, logit_bias=((700, 5.0), (700, -math.inf))), 1000)
        assert none.distribution(logits).probability(700) == 0


def test_sampler_chain_never_draws_suppressed_tokens() -> None:
    logits = np.zeros(1000, np.float32)
    logits[[4, 5]] = 9.0
    for s in (Sampling(), Sampling(1.0), Sampling(1.0, logit_bias=((4, 6.0),)), Sampling(1.0, mirostat=2)):
        chain = SamplerChain(s, 1000, vocab=None, suppressed_tokens=[4])
        for position in range(20):
            assert chain.draw(logits, position) != 4


def test_sampler_chain_penalties_apply_to_last_n_tokens() -> None:
    """It sees the given number of tokens, including the prompt, up to the context; -1 means the whole context."""
    logits = np.zeros(20, np.float32)

    def penalised(last_n: int, prompt: Sequence[int], emitted: Sequence[int]) -> list[int]:
        s = Sampling(1.0, presence_penalty=1.0, repeat_last_n=last_n, **OPEN)
        chain = SamplerChain(s, 20, vocab=None, n_ctx=6)
        chain.begin(prompt)
        for token in emitted:
            chain.accept(token)
        law = chain.distribution(logits)
        return law.ids[law.probs < law.probs.max()].tolist()

    assert penalised(2, [1, 2, 3], []) == [2, 3]
    assert penalised(2, [1, 2, 3], [4]) == [3, 4]
    assert penalised(3, [1, 1], [2, 2, 2]) == [2]
    assert penalised(0, [1, 2], [3]) == []
    assert penalised(-1, [1, 2, 3], [4, 5, 6, 7]) == [2, 3, 4, 5, 6, 7]
    assert penalised(2**31 - 1, [1, 2], [3]) == [1, 2, 3]  # llama.cpp would reserve 8 GB


def test_sampler_chain_with_unusual_dry_settings_matches_llama_cpp(word_vocabulary: Vocabulary) -> None:
    # DRY looks back no further than the context.
    far = Sampling(1.0, dry_multiplier=1.0, dry_penalty_last_n=2**31 - 1)
    SamplerChain(far, 20, vocab=word_vocabulary._vocab, n_ctx=64).begin([1, 2, 3])
    for breakers in (("x" * 40,), ("a", "a"), ("\u00e9",), ("\n" * 40,)):
        s = Sampling(1.0, dry_multiplier=1.0, dry_allowed_length=1, dry_sequence_breakers=breakers, **OPEN)
        ours, theirs = make_chains(word_vocabulary, s, word_vocabulary.n_vocab)
        prompt = word_vocabulary.tokenize("abcabcabca\u00e9bc\u00e9b", add_bos=False)
        ours.begin(prompt)
        theirs.begin(prompt)
        logits = np.zeros(word_vocabulary.n_vocab, np.float32)
        compare(ours.distribution(logits), theirs.probabilities(logits))


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("greedy", 10),
        ("defaults", 20_001),
        ("open", 1000),
        ("penalties", 10),
        ("greedy, biases", 1000),
        ("xtc always", 1000),
    ],
)
def test_sampler_chain_with_nan_or_infinite_logits_raises(name: str, size: int) -> None:
    chain = make_chain(Sampling(**{"temperature": 1.0} | SETTINGS[name]), size)
    chain.begin([1, 2])
    for where in {0, 1, 5, size // 2, size - 1}:
        for bad, said in ((np.nan, "nan"), (np.inf, "inf")):
            logits = np.zeros(size, np.float32)
            logits[where] = bad
            with pytest.raises(BadLogits, match=rf"token {where} is {said}"):
                chain.distribution(logits)
            with pytest.raises(BadLogits, match=rf"token {where} is {said}"):
                chain.draw(logits, 0)
    with pytest.raises(BadLogits, match=f"all {size} logits are -inf"):
        chain.distribution(np.full(size, -np.inf, np.float32))
    for broken in (min(5, size), max(1, size // 2), size):  # also more than top_k keeps
        logits = np.zeros(size, np.float32)
        logits[-broken:] = np.nan
        with pytest.raises(BadLogits, match=r"the logit of token \d+ is nan"):
            chain.distribution(logits)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_sampler_chain_with_nan_of_forbidden_token_raises(temperature: float, demo_vocabulary: Vocabulary) -> None:
    chain = demo_vocabulary.sampler(Sampling(temperature, grammar=LETTERS))
    logits = np.zeros(4096, np.float32)
    logits[8] = np.nan  # forbidden, but still an error
    with pytest.raises(BadLogits, match="token 8 is nan"):
        chain.distribution(logits)
    with pytest.raises(BadLogits, match="token 8 is nan"):
        chain.draw(logits, 0)


def test_sampler_chain_without_remaining_tokens_raises(demo_vocabulary: Vocabulary) -> None:
    """Biases, biases with a grammar, and penalties that overflow can remove all tokens."""
    none = tuple((t, -math.inf) for t in range(50))
    cases: list[dict[str, Any]] = [{}, {"top_k": 0}, {"temperature": 0.0}, {"mirostat": 1}, {"mirostat": 2}]
    chains = [make_chain(Sampling(**{"temperature": 1.0, "logit_bias": none, **case}), 50) for case in cases]
    ends = tuple((t, -math.inf) for t in range(4096) if demo_vocabulary.is_eog(t) or demo_vocabulary.piece(t) == b"a")
    chains += [
        demo_vocabulary.sampler(Sampling(1.0, grammar='root ::= "a"', logit_bias=ends)),
        make_chain(Sampling(1.0, frequency_penalty=-3e38), 20),
    ]
    chains[-1].begin([5, 5, 5])
    for chain, size in zip(chains, [50] * 5 + [4096, 20], strict=True):
        with pytest.raises(NoTokenLeft, match="no token is left to sample"):
            chain.draw(np.zeros(size, np.float32), 0)


def test_sampler_chain_rejects_bias_of_unknown_token() -> None:
    for token in (-1, 50, 2**40):
        with pytest.raises(ValueError, match=f"^the token of a logit bias must be 0 to 49, got {token}"):
            make_chain(Sampling(1.0, logit_bias=((3, 1.0), (token, 1.0))), 50)


def test_sampler_with_infill_rejects_unsupported_vocabulary(tmp_path: Path, word_vocabulary: Vocabulary) -> None:
    """In llama.cpp, each of these would end the process."""

    class Endless(Vocabulary):
        end_of_turn = None

    s = Sampling(1.0, samplers=("top_k", "infill"))
    word_vocabulary.sampler(s)
    with Vocabulary(write_words(tmp_path / "long.gguf", [*WORDS, "a" * 513])) as long:
        long.sampler(Sampling(1.0))
        with pytest.raises(
            ValueError, match=r"does not support the sampler infill: its vocabulary has a token of more than 512"
        ):
            long.sampler(s)
    with Endless(tmp_path / "long.gguf") as endless:
        endless.sampler(Sampling(1.0))
        with pytest.raises(
            ValueError, match=r"does not support the sampler infill: its vocabulary has no token that ends a text"
        ):
            endless.sampler(s)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_sampler_chain_at_dead_end_of_grammar_raises(temperature: float, demo_vocabulary: Vocabulary) -> None:
    chain = demo_vocabulary.sampler(Sampling(temperature, grammar='root ::= "a" "b" "c"', repeat_penalty=1.2))
    logits = np.zeros(4096, np.float32)
    chain.begin([5, 6, 7])
    for piece in (b"a", b"b"):
        chain.accept(next(t for t in range(4096) if demo_vocabulary.piece(t) == piece))
    logits[[t for t in range(4096) if demo_vocabulary.piece(t) == b"c"]] = -np.inf
    with pytest.raises(GrammarError, match=r"^dead end in the grammar"):
        chain.draw(logits, 0)
    with pytest.raises(GrammarError, match=r"^dead end in the grammar"):
        chain.distribution(logits)


def test_sampler_chain_with_penalties_after_top_k_restores_no_tokens() -> None:
    """As in llama.cpp, no penalty restores a token that top-k or temperature 0 has dropped."""
    logits = np.array([0.0, 3.0, 2.9, 1.0], np.float32)
    for order, token in (
        (SAMPLERS, 2),
        (("top_k", "penalties", "temperature"), 1),
        (("temperature", "penalties", "top_k"), 1),
        (("penalties", "temperature", "top_k"), 2),
    ):
        chain = make_chain(Sampling(top_k=1, repeat_penalty=2.0, samplers=order), 4)
        chain.begin([1])
        assert chain.distribution(logits).ids.tolist() == [token], order


def test_sampler_chain_with_many_biases_returns_same_distribution(
    word_vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    biases = ((3, 5.0), (5, -math.inf), (7, -2.0), (7, -1.0))
    logits = np.random.default_rng(0).normal(size=20).astype(np.float32)

    def distribution() -> Any:
        s = Sampling(1.0, top_k=4, logit_bias=biases)
        chain = SamplerChain(s, 20, vocab=word_vocabulary._vocab, n_ctx=64)
        return chain.distribution(logits).probs.tolist(), chain.distribution(logits).ids.tolist()

    few = distribution()
    monkeypatch.setattr(samplers, "_MANY_BIASES", 1)
    assert distribution() == few
