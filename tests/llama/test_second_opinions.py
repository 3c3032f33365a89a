"""Laws computed without llama.cpp are its laws: that of `ngramspec verify`, and that of the tests' own sampler."""

from __future__ import annotations

import numpy as np
import pytest
from support.llama_chain import SETTINGS, chains, compare, make_chain, some_logits, some_text
from support.numpy_sampler import NumpySampler

from ngramspec.llama.vocabulary import Vocabulary
from ngramspec.sampling.settings import Sampling
from ngramspec.selfcheck import law

NOT_ALIKE = {name for name, s in SETTINGS.items() if "dry_multiplier" in s or 0 < s.get("xtc_probability", 0) < 1}
"""What the numpy sampler does not know, and what tosses a coin of its own."""


@pytest.mark.parametrize("sampling", [*law.SETTINGS, Sampling(temperature=0.5, top_k=5, top_p=0.6, min_p=0.2)])
def test_the_reference_law_is_llama_cpp_s(sampling: Sampling) -> None:
    rng = np.random.default_rng(1)
    compared = 0
    for scale in (0.5, 2.0, 6.0) * 20:
        row = (scale * rng.standard_normal(300)).astype(np.float32)
        ours = law.reference_law(row, sampling)
        if ours is None:
            continue
        compared += 1
        theirs = make_chain(sampling, row.size).distribution(row)
        assert sorted(ours) == theirs.ids.tolist()
        assert [ours[t] for t in theirs.ids.tolist()] == pytest.approx(theirs.probs.tolist(), rel=1e-5)
    assert compared > 50


@pytest.mark.parametrize("name", sorted(SETTINGS.keys() - NOT_ALIKE))
def test_the_numpy_sampler_s_law_is_llama_cpp_s(name: str, word_vocabulary: Vocabulary) -> None:
    rng = np.random.default_rng(1)
    for n_vocab in (7, 300):
        s = Sampling(**{"temperature": 0.8, "seed": 5} | SETTINGS[name])
        _, theirs = chains(word_vocabulary, s, n_vocab)
        ours = NumpySampler(s, n_vocab, n_ctx=4096)
        prompt = some_text(rng, 30, n_vocab)
        ours.begin(prompt)
        theirs.begin(prompt)
        for i in range(16):
            logits = some_logits(rng, i, n_vocab)
            compare(ours.distribution(logits), theirs.law(logits))
            token = prompt[i] if i % 2 else int(rng.integers(n_vocab))
            ours.accept(token)
            theirs.accept(token)


@pytest.mark.parametrize("version", [1, 2])
def test_the_numpy_sampler_s_mirostat_steers_as_llama_cpp_s_does(version: int) -> None:
    """Other coins, and for version 1 another estimate: the mean surprise is what both are told to come to."""
    rng = np.random.default_rng(2)
    s = Sampling(1.0, mirostat=version, mirostat_tau=3.0)
    means = []
    for sampler in (make_chain(s, 300), NumpySampler(s, 300)):
        surprises = []
        for _ in range(400):
            logits = (2.0 * rng.standard_normal(300)).astype(np.float32)
            token = sampler.draw(logits, lambda law, _attempt: int(law.ids[0]))
            p = np.exp(logits - logits.max())
            surprises.append(-np.log2(p[token] / p.sum()))
            sampler.accept(token)
        means.append(np.mean(surprises[100:]))
    assert means[1] == pytest.approx(means[0], abs=0.6)
