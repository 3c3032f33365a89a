"""The law of text that went through the whole loop: drafter, policy, grammar and verifier.

A draft that is cut after a look at its tokens is the classic way to lose the law, so the prompts and costs here tempt
policies to do so. The seeds 0, 1, 2, ... are the sample; see `acceptance/test_laws.py` for the odds of a false alarm.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.decoder_loop import CLOCK, cheap, unmeasured
from support.laws import Legal, Path, check_law, chi_square_excess, law_of_text
from support.mock_target import MockTarget
from support.vocabulary_files import END, FIRST_WORD

from ngramspec.acceptance.verifier import RuleVerifier
from ngramspec.decoding.step import Stats
from ngramspec.drafting import make_drafter
from ngramspec.drafting.draft import Draft
from ngramspec.drafting.grammar import GrammarGuide
from ngramspec.sampling.settings import Sampling

if TYPE_CHECKING:
    from ngramspec.llama.vocabulary import Vocabulary

OPEN: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
RUNS = 1000


class Coin(MockTarget):
    """Tokens 0 and 2 with probability 0.45 each, 1 and 3 with 0.05 each, whatever came before."""

    def row(self, context: Sequence[int]) -> NDArray[np.float32]:
        return np.log([0.45, 0.05, 0.45, 0.05]).astype(np.float32)


def sample_of(
    mock: MockTarget,
    prompt: Sequence[int],
    settings: dict[str, Any],
    verify: str,
    *,
    drafter: str,
    policy: str,
    slope: float = 0.1,
    runs: int = RUNS,
) -> tuple[Counter[Path], Stats]:
    """Texts of three tokens, of which the first comes from the prefill, undrafted.

    Args:
        drafter: a drafter's name; with a comma and a word, it is new every time; with "memory", it has one.
        slope: what a token more costs, in passes over one.
    """
    name, memory, new = drafter.split(maxsplit=1)[0].strip(","), " with memory" in drafter, "," in drafter
    decoder = unmeasured(mock, slope=slope, drafter=make_drafter(name, memory=memory), policy=policy, draft_max=4)
    sample: Counter[Path] = Counter()
    stats = Stats()
    for seed in range(runs):
        tokens: list[int] = []
        sampling = Sampling(**{"temperature": 1.0, "seed": seed, **OPEN, **settings})
        if new:
            decoder.drafter = make_drafter(name)
        for step in decoder.generate(prompt, max_tokens=4, sampling=sampling, verify=verify):
            stats.add(step)
            tokens += step.tokens
        sample[tuple(tokens[:3])] += 1
    return sample, stats


@pytest.mark.parametrize(
    ("drafter", "verify", "policy", "slope", "order"),
    [
        ("mixture", "coupled", "fixed", 0.1, 2),
        ("mixture", "coupled", "cost", 0.1, 0),
        ("mixture", "rejection", "fixed", 0.1, 0),
        ("mixture", "rejection", "heuristic", 0.1, 2),
        ("mixture", "rejection", "cost", 0.1, 2),
        ("mixture", "rejection", "entropy", 0.1, 2),
        ("mixture", "rejection", "threshold", 0.1, 0),
        ("mixture", "rejection", "cost", 0.001, 2),
        ("mixture", "coupled", "cost", 0.001, 2),
        ("mixture, new every time", "rejection", "cost", 0.33, 0),
        ("mixture with memory", "coupled", "cost", 0.1, 2),
        ("mixture with memory", "rejection", "cost", 0.1, 0),
        ("ngram", "coupled", "fixed", 0.1, 2),
        ("ngram", "match", "cost", 0.1, 2),
        ("ngram", "rejection", "fixed", 0.1, 0),
        ("ngram", "rejection", "heuristic", 0.1, 2),
        ("ngram", "rejection", "cost", 0.1, 2),
        ("ngram", "rejection", "cost", 0.4, 0),
        ("suffix", "coupled", "fixed", 0.1, 2),
        ("suffix", "rejection", "cost", 0.1, 2),
        ("recycle", "coupled", "fixed", 0.1, 2),
        ("recycle", "rejection", "cost", 0.1, 2),
        ("nasd", "rejection", "cost", 0.1, 2),
        ("lookahead", "coupled", "fixed", 0.1, 2),
        ("lookahead", "rejection", "cost", 0.1, 2),
    ],
)
def test_sampling_keeps_the_law(drafter: str, verify: str, policy: str, slope: float, order: int) -> None:
    # In the prompt 0 and 1 follow in the proportion 3 : 2, so 0 is a good guess and 1 a bad one: estimates that
    # looked at the drawn token would have the cost policy send the zeros alone, and 0 come out far too often. A
    # drafter that is new every time has not learnt yet what both are worth.
    options: dict[str, Any] = {"seconds": lambda n: 1e-3 * (1 + slope * (n - 1)), "clock": CLOCK, "peak": 1.0}
    mock = MockTarget(4, **options) if order else Coin(4, **options)
    rng = random.Random(36)
    prompt = [int(rng.random() < 0.4) for _ in range(100)]
    settings: dict[str, Any] = {}
    if policy == "heuristic":
        settings = {"repeat_penalty": 1.3, "frequency_penalty": 0.05, "repeat_last_n": 12}
    sample, stats = sample_of(mock, prompt, settings, verify, drafter=drafter, policy=policy, slope=slope)
    assert stats.drafted > RUNS / 20
    # Questions are nearly free there, and what the target says to them is drafted.
    assert slope > 0.01 or mock.questions > RUNS
    assert 0.1 < (stats.acceptance_rate or 0) < 0.95
    check_law(sample, law_of_text(mock, prompt, Sampling(1.0, **OPEN, **settings), 3))


# -------------------------------------------------------------------------------------- grammar

A, B, C = range(FIRST_WORD, FIRST_WORD + 3)
LETTERS = {A: "a", B: "b", C: "c", 3 + ord("a"): "a"}
BYTE_A = 3 + ord("a")

LOOSE = 'root ::= ("a" "b"? | "c")*'
TIGHT = 'root ::= ("a" "c" | "b" "a")+'


def loose(path: Path) -> set[int]:
    after_a = bool(path) and LETTERS[path[-1]] == "a"
    return {A, BYTE_A, C, END} | ({B} if after_a else set())


def tight(path: Path) -> set[int]:
    """Every other letter is forced; an a may be one of two tokens."""
    if len(path) % 2 == 0:
        return {A, BYTE_A, B} | ({END} if path else set())
    return {C} if LETTERS[path[-1]] == "a" else {A, BYTE_A}


GRAMMARS: dict[str, tuple[str, Legal]] = {"loose": (LOOSE, loose), "tight": (TIGHT, tight)}


def tempting(rng: random.Random) -> list[int]:
    """A prompt whose n-grams suggest what the grammars forbid, and what ends the text."""
    return rng.choices([A, B, C, BYTE_A, END], [4, 3, 2, 1, 1], k=100)


@pytest.mark.parametrize(
    ("drafter", "verify", "policy", "grammar"),
    [
        ("ngram", "rejection", "fixed", "loose"),
        ("ngram", "rejection", "cost", "loose"),
        ("ngram", "rejection", "heuristic", "tight"),
        ("ngram", "coupled", "fixed", "loose"),
        ("ngram", "match", "fixed", "tight"),
        ("mixture", "rejection", "cost", "tight"),
        ("mixture", "rejection", "fixed", "loose"),
        ("mixture", "coupled", "cost", "loose"),
        ("suffix", "rejection", "fixed", "loose"),
    ],
)
def test_sampling_under_a_grammar_keeps_the_law(
    drafter: str, verify: str, policy: str, grammar: str, word_vocabulary: Vocabulary
) -> None:
    mock = MockTarget(vocabulary=word_vocabulary, words=(*LETTERS, END), peak=0.7, seconds=cheap, clock=CLOCK)
    text, legal = GRAMMARS[grammar]
    settings = {"grammar": text, "top_k": 4}
    if policy == "heuristic":
        settings |= {"repeat_penalty": 1.3, "repeat_last_n": 12}
    prompt = tempting(random.Random(3))
    sample, stats = sample_of(mock, prompt, settings, verify, drafter=drafter, policy=policy)
    assert stats.drafted > RUNS / 20
    assert 0.02 < (stats.acceptance_rate or 0) < 0.98
    check_law(sample, law_of_text(mock, prompt, Sampling(**{"temperature": 1.0, **OPEN, **settings}), 3, legal))


class Even(MockTarget):
    """a and c, whatever came before, with equal odds."""

    def row(self, context: Sequence[int]) -> NDArray[np.float32]:
        row = np.full(self.n_vocab, -np.inf, np.float32)
        row[[A, C]] = 0.0
        return row


@pytest.mark.parametrize("silently", [False, True])
def test_a_forbidden_draw_is_a_refusal(
    silently: bool, word_vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were it cut off the draft as for the other methods, it would be as if it had never been drawn."""
    plain = GrammarGuide.shape

    def trimming(self: GrammarGuide, draft: Draft, limit: int, *, blind: bool = False) -> Draft:
        return plain(self, draft, limit)

    if silently:
        monkeypatch.setattr(GrammarGuide, "shape", trimming)
        monkeypatch.setattr(RuleVerifier, "blind", False)
    mock = Even(vocabulary=word_vocabulary, seconds=cheap, clock=CLOCK)
    prompt = random.Random(3).choices([A, B], k=100)  # a is drafted half the time, and then accepted
    settings = {"grammar": "root ::= [ac]*"}
    sample, _ = sample_of(mock, prompt, settings, "rejection", drafter="ngram", policy="fixed")
    excess = chi_square_excess(sample, law_of_text(mock, prompt, Sampling(1.0, **OPEN), 3))
    assert (excess > 0) == silently
