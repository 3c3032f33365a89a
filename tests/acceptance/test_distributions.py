"""Tests that the output follows the target's distribution, which `support/distributions.py` computes independently.

Drafts have two tokens, so that accepted tokens, refused tokens and ends of drafts are all frequent. Match is coupled
verification of drafts that do not know the noise; `decoding/test_same_text.py` tests that both emit the same tokens
for a seed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from support.distributions import LegalTokens, Text, follows, make_next_distribution
from support.grid import grid
from support.mock_target import MockTarget
from support.small_loop import make_count_drafter, speculate
from support.vocabulary_files import END, FIRST_WORD

from ngramspec.sampling.settings import Sampling

if TYPE_CHECKING:
    from ngramspec.llama.vocabulary import Vocabulary

ALL: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
PROMPT = [3, 1, 2]
TABLES = [{0: 5, 1: 2, 2: 2, 3: 1}, {0: 1, 2: 3, 3: 2}]

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


def texts_of(
    mock: MockTarget, prompt: list[int], sampling: Sampling, tables: list[dict[int, int]], how: str, length: int = 60
) -> list[Text]:
    """Return forty texts; every number of accepted tokens must be frequent, or the test would be void."""
    texts: list[Text] = []
    counts: Counter[int] = Counter()
    for seed in range(40):
        tokens, accepted = speculate(
            mock, prompt, length, replace(sampling, seed=seed), make_count_drafter(tables), how
        )
        texts.append((prompt, tokens))
        counts.update(accepted)
    assert all(counts[k] > 15 for k in range(3)), counts
    return texts


@grid(name=SETTINGS, method=("coupled", "rejection"))
def test_verifier_with_sampling_settings_follows_target_distribution(name: str, method: str) -> None:
    mock = MockTarget(4, peak=1.0, seed=11)
    sampling = Sampling(**{"temperature": 1.0} | SETTINGS[name])
    assert follows(texts_of(mock, PROMPT, sampling, TABLES, method), make_next_distribution(mock, sampling))
    # At temperature 0, one token has probability 1.
    greedy = replace(sampling, temperature=0.0)
    tokens, _ = speculate(mock, PROMPT, 60, greedy, make_count_drafter(TABLES), "greedy")
    law = make_next_distribution(mock, greedy)
    assert all(law(PROMPT, tokens[:i])[token] == 1 for i, token in enumerate(tokens))


A, B, C, AB = range(FIRST_WORD, FIRST_WORD + 4)
BYTE_A = 3 + ord("a")  # another token of the same letter

GRAMMAR = 'root ::= ("a" "b"? | "c")*'
"""The text may end anywhere, and each b follows an a."""


def legal(path: Sequence[int]) -> set[int]:
    """Return the tokens of the mock that `GRAMMAR` allows."""
    after_a = bool(path) and path[-1] in (A, BYTE_A)
    return {A, BYTE_A, C, AB, END} | ({B} if after_a else set())


NO_END = 'root ::= "a" [bc] [abc]+'


def legal_no_end(path: Sequence[int]) -> set[int]:
    """Return the tokens of the mock that `NO_END` allows."""
    letters = sum(2 if token == AB else 1 for token in path)
    return {0: {A, BYTE_A, AB}, 1: {B, C}}.get(letters, {A, BYTE_A, B, C, AB} | ({END} if letters > 2 else set()))


GRAMMARS: dict[str, tuple[str, LegalTokens]] = {"loose": (GRAMMAR, legal), "strict": (NO_END, legal_no_end)}


@grid(text=GRAMMARS, method=("coupled", "rejection"), name=("cut", "penalties"))
def test_verifier_with_grammar_follows_constrained_distribution(
    text: str, method: str, name: str, word_vocabulary: Vocabulary
) -> None:
    """A forbidden draft token is refused and replaced by a sample from the distribution.

    With filters, this is not the distribution over the legal tokens alone: a filter on these can leave a token that it
    removes from all tokens.
    """
    mock = MockTarget(vocabulary=word_vocabulary, words=(A, B, C, AB, BYTE_A, END), peak=0.7, seed=5)
    grammar, allowed = GRAMMARS[text]
    biases = ((B, 0.7), (AB, -0.5), (END, -3.0)) if name == "penalties" else ((END, -3.0),)
    sampling = Sampling(**{"temperature": 1.0, **SETTINGS[name], "grammar": grammar, "logit_bias": biases})
    tables = [{A: 4, AB: 3, BYTE_A: 2, B: 1}, {A: 1, B: 4, C: 3, AB: 1}]
    texts = texts_of(mock, [C, AB], sampling, tables, method, length=16)
    assert follows(texts, make_next_distribution(mock, sampling, allowed))


@pytest.mark.parametrize(
    ("drawn", "others"),
    [
        ({}, ({"repeat_penalty": 2.0}, {"logit_bias": ((1, 0.5),)}, {"temperature": 1.5}, {"top_k": 3})),
        ({"repeat_penalty": 2.0}, ({"repeat_penalty": 1.0},)),
    ],
    ids=str,
)
def test_distribution_check_rejects_other_sampling_settings(
    drawn: dict[str, Any], others: tuple[dict[str, Any], ...]
) -> None:
    mock = MockTarget(4, peak=1.0, seed=11)
    sampling = Sampling(**{"temperature": 1.0, **ALL, **drawn})
    texts = texts_of(mock, PROMPT, sampling, TABLES, "coupled")
    assert follows(texts, make_next_distribution(mock, sampling))
    for other in others:
        assert not follows(texts, make_next_distribution(mock, replace(sampling, **other)))
