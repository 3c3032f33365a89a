"""Tests that drafts with rejection change no distribution, for all drafters and under grammars.

`support/distributions.py` has the probability of a false alarm. `acceptance/test_rules.py` tests the distribution of
plain decoding.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from support.all_drafters import ALL_DRAFTERS, make_any
from support.decoder_loop import CLOCK, Coin, make_decoder, pass_seconds
from support.distributions import LegalTokens, Text, follows, make_next_distribution
from support.grid import grid
from support.llama_chain import OPEN
from support.mock_target import MockTarget
from support.model_files import END, FIRST_WORD

from ngramspec.drafting import make_drafter
from ngramspec.drafting.draft import Drafter
from ngramspec.llama.vocabulary import Vocabulary
from ngramspec.sampling.settings import Sampling
from ngramspec.steps import Stats


class OtherCoin(Coin):
    """Draft model with another distribution."""

    probabilities = (0.2, 0.4, 0.35, 0.05)


def texts_of(
    mock: MockTarget,  # target model
    prompt: Sequence[int],  # prompt of all texts
    sampling: Sampling,  # settings except for the seed, which is the number of the text
    drafter: Drafter | None,  # drafter of all texts; `None` means a new one for each text, without experience
    policy: str,  # name of the policy
    *,
    slope: float = 0.1,  # cost of each further token in a pass, in units of a pass over one token
    count: int = 40,  # number of texts
    length: int = 60,  # maximum number of tokens in a text
) -> tuple[list[Text], Stats]:
    """Generate texts by rejection.

    Returns:
        The texts and the statistics of their drafts.
    """
    decoder = make_decoder(mock, slope=slope, drafter=drafter, policy=policy, draft_max=4)
    texts: list[Text] = []
    stats = Stats()
    for seed in range(count):
        decoder.set_drafter(drafter or make_drafter("mixture"), decoder.policy)
        tokens: list[int] = []
        for step in decoder.generate(
            prompt, max_tokens=length, sampling=replace(sampling, seed=seed), acceptance="rejection"
        ):
            stats.add(step)
            tokens += step.tokens
        texts.append((prompt, tokens))
    return texts, stats


def zeros_and_ones() -> list[int]:
    """Return a prompt of 0 and 1 in the proportion 3 : 2, so that `Coin` often accepts 0 and rarely accepts 1.

    If estimates depended on the drawn token, a policy would only send the zeros, and 0 would be emitted too often.
    """
    rng = random.Random(36)
    return [int(rng.random() < 0.4) for _ in range(40)]


@grid(
    drafter=(*ALL_DRAFTERS, "new for each text"),
    passes=[
        ("fixed", 0.1, MockTarget),
        ("cost", 0.1, MockTarget),
        ("heuristic", 0.1, MockTarget),
        ("cost", 0.001, Coin),  # Questions are nearly free here, and their answers become drafts.
        ("entropy", 0.1, MockTarget),
        ("fixed", 0.1, Coin),
        ("cost", 0.33, Coin),
        ("threshold", 0.1, Coin),
    ],
)
def test_rejection_with_any_drafter_keeps_target_distribution(
    drafter: str, passes: tuple[str, float, type[MockTarget]]
) -> None:
    policy, slope, kind = passes
    mock = kind(4, seconds=lambda n: 1e-3 * (1 + slope * (n - 1)), clock=CLOCK, peak=1.0)
    sampling = Sampling(1.0, **OPEN)
    if policy == "heuristic":
        sampling = replace(sampling, repeat_penalty=1.3, frequency_penalty=0.05, repeat_last_n=12)
    prompt = zeros_and_ones()
    one = make_any(drafter, lambda: OtherCoin(4), prompt) if drafter in ALL_DRAFTERS else None
    texts, stats = texts_of(mock, prompt, sampling, one, policy, slope=slope)
    # In this case the draft model costs more time than it saves.
    assert stats.drafted > 100 or (drafter, slope) == ("model", 0.33), "too few draft tokens to test the distribution"
    assert 0.1 < (stats.acceptance_rate or 0) < 0.95
    assert follows(texts, make_next_distribution(mock, sampling))


A, B, C = range(FIRST_WORD, FIRST_WORD + 3)
BYTE_A = 3 + ord("a")
LETTERS = {A: "a", B: "b", C: "c", BYTE_A: "a"}


def loose(path: Sequence[int]) -> set[int]:
    after_a = bool(path) and LETTERS[path[-1]] == "a"
    return {A, BYTE_A, C, END} | ({B} if after_a else set())


def tight(path: Sequence[int]) -> set[int]:
    """Return the tokens that "tight" allows: it forces every other letter, and an a may be one of two tokens."""
    if len(path) % 2 == 0:
        return {A, BYTE_A, B} | ({END} if path else set())
    return {C} if LETTERS[path[-1]] == "a" else {A, BYTE_A}


CONSTRAINED: dict[str, tuple[str, LegalTokens]] = {
    "loose": ('root ::= ("a" "b"? | "c")*', loose),
    "tight": ('root ::= ("a" "c" | "b" "a")+', tight),
}


@grid(drafter=("ngram", "mixture", "suffix"), policy=("fixed", "cost", "heuristic"), grammar=CONSTRAINED)
def test_rejection_with_grammar_keeps_constrained_distribution(
    drafter: str, policy: str, grammar: str, word_vocabulary: Vocabulary
) -> None:
    mock = MockTarget(vocabulary=word_vocabulary, words=(*LETTERS, END), peak=0.7, seconds=pass_seconds, clock=CLOCK)
    text, legal = CONSTRAINED[grammar]
    # The bias makes ends rare.
    sampling = Sampling(**{"temperature": 1.0, **OPEN, "grammar": text, "top_k": 4, "logit_bias": ((END, -3.0),)})
    if policy == "heuristic":
        sampling = replace(sampling, repeat_penalty=1.3, repeat_last_n=12)
    # Its n-grams predict tokens that the grammars forbid, and the end of the text.
    prompt = random.Random(3).choices([A, B, C, BYTE_A, END], [4, 3, 2, 1, 1], k=40)
    texts, stats = texts_of(mock, prompt, sampling, make_drafter(drafter), policy, count=60, length=12)
    assert stats.drafted > 100
    assert 0.02 < (stats.acceptance_rate or 0) < 0.98
    assert follows(texts, make_next_distribution(mock, sampling, legal))
