"""What comes out follows the target's law: chi-square tests at one, two and three positions.

Drafts have two tokens, so that the three positions meet a token accepted, one refused, and the end of the draft;
each case is really met. The law is worked out apart from the code under test (see `laws`). The seeds 0, 1, 2, ...
are the sample, so that the tests pass or fail for ever. Under exact sampling each comparison would fail with
probability below `laws.ALARM` = 5e-9; with those of the other files there are fewer than 200, so that the whole
suite's false-alarm rate is below 1e-6.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
from support.laws import Legal, Path, check_law, chi_square_excess, head, law_of_text
from support.mock_target import MockTarget
from support.small_loop import Propose, certain, from_counts, speculate
from support.vocabulary_files import END, FIRST_WORD

from ngramspec.acceptance.verifier import Acceptance
from ngramspec.drafting.draft import Chooser, Draft
from ngramspec.sampling.settings import Sampling

if TYPE_CHECKING:
    from ngramspec.llama.vocabulary import Vocabulary

ALL: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
PROMPT = [3, 1, 2]
TABLES = [{0: 5, 1: 2, 2: 2, 3: 1}, {0: 1, 2: 3, 3: 2}]
SAMPLES = 2000

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


def sample_of(
    mock: MockTarget, prompt: list[int], sampling: Sampling, propose: Propose, how: Acceptance | str, runs: int
) -> Counter[Path]:
    """Texts of three tokens. Every number of accepted tokens must come often, or nothing was tested."""
    sample: Counter[Path] = Counter()
    first: Counter[int] = Counter()
    for seed in range(runs):
        tokens, accepted = speculate(mock, prompt, 3, replace(sampling, seed=seed), propose, how)
        sample[tuple(tokens)] += 1
        first[accepted[0]] += 1
    assert all(first[k] > runs / 30 for k in range(3)), first
    return sample


def guessing(drafts: Sequence[Path]) -> Propose:
    """A drafter that asks nobody: any of these drafts, at random."""
    rng = random.Random(0)

    def propose(_tokens: list[int], _choose: Chooser | None) -> Draft:
        return certain(rng.choice(drafts))

    return propose


ANY = list(product(range(4), repeat=2))


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("method", ["coupled", "rejection", "match"])
def test_law_of_three_tokens(method: str, name: str) -> None:
    mock = MockTarget(4, peak=1.0, seed=11)
    sampling = Sampling(**{"temperature": 1.0} | SETTINGS[name])
    propose = guessing(ANY) if method == "match" else from_counts(TABLES)
    sample = sample_of(mock, PROMPT, sampling, propose, method, SAMPLES)
    check_law(sample, law_of_text(mock, PROMPT, sampling, 3), positions=True)


@pytest.mark.parametrize("name", ["all", "penalties"])
def test_law_of_greedy_is_one_text(name: str) -> None:
    mock = MockTarget(4, peak=1.0, seed=11)
    sampling = Sampling(**SETTINGS[name])
    (text,) = law_of_text(mock, PROMPT, sampling, 3)
    sample = sample_of(mock, PROMPT, sampling, guessing(ANY), "greedy", 300)
    assert sample.keys() == {text}


# -------------------------------------------------------------------------------------- grammar

A, B, C, AB = range(FIRST_WORD, FIRST_WORD + 4)
BYTE_A = 3 + ord("a")  # another token for the same letter

GRAMMAR = 'root ::= ("a" "b"? | "c")*'
"""The text may end anywhere, and no b comes without an a before."""


def legal(path: Path) -> set[int]:
    """What `GRAMMAR` allows of the words of the mock."""
    after_a = bool(path) and path[-1] in (A, BYTE_A)
    return {A, BYTE_A, C, AB, END} | ({B} if after_a else set())


NO_END = 'root ::= "a" [bc] [abc]+'


def legal_no_end(path: Path) -> set[int]:
    """The same for `NO_END`, while there are fewer than three letters."""
    letters = sum(2 if token == AB else 1 for token in path)
    return {0: {A, BYTE_A, AB}, 1: {B, C}}.get(letters, {A, BYTE_A, B, C, AB} | ({END} if letters > 2 else set()))


GRAMMARS: dict[str, tuple[str, Legal]] = {"loose": (GRAMMAR, legal), "strict": (NO_END, legal_no_end)}


@pytest.mark.parametrize("name", ["cut", "penalties"])
@pytest.mark.parametrize("text", GRAMMARS)
@pytest.mark.parametrize("method", ["coupled", "rejection", "match"])
def test_law_under_a_grammar(method: str, text: str, name: str, word_vocabulary: Vocabulary) -> None:
    """A forbidden token in the draft is refused, and gives way to one of the law.

    With filters, the law is not that of the legal tokens alone: a filter can leave a token that is only legal.
    """
    words = (A, B, C, AB, BYTE_A, END)
    mock = MockTarget(vocabulary=word_vocabulary, words=words, peak=0.7, seed=5)
    grammar, allowed = GRAMMARS[text]
    settings = SETTINGS[name] | ({"logit_bias": ((B, 0.7), (AB, -0.5))} if name == "penalties" else {})
    sampling = Sampling(**{"temperature": 1.0, **settings, "grammar": grammar})
    tables = [{A: 4, AB: 3, BYTE_A: 2, B: 1}, {A: 1, B: 4, C: 3, AB: 1}]
    law = law_of_text(mock, [C, AB], sampling, 3, allowed)
    twos = head(law, 2)
    likely = [path for path in sorted(twos, key=twos.__getitem__) if len(path) == 2][-5:]
    propose = guessing([*likely, (B, A), (A, AB)]) if method == "match" else from_counts(tables)
    sample = sample_of(mock, [C, AB], sampling, propose, method, 1000)
    check_law(sample, law, positions=True)


# ------------------------------------------------------------------------------- the tests' own power


@pytest.mark.parametrize(
    ("drawn", "said"),
    [
        ({"repeat_penalty": 2.0}, {}),
        ({}, {"repeat_penalty": 2.0}),
        ({"logit_bias": ((1, 0.5),)}, {}),
        ({"temperature": 1.5}, {}),
        ({"top_k": 3}, {}),
    ],
    ids=str,
)
def test_another_law_is_told_apart(drawn: dict[str, Any], said: dict[str, Any]) -> None:
    mock = MockTarget(4, peak=1.0, seed=11)
    settings: dict[str, Any] = {"temperature": 1.0, **ALL}
    sampling = Sampling(**settings | drawn)
    sample: Counter[Path] = Counter()
    for seed in range(SAMPLES):
        sample[tuple(speculate(mock, PROMPT, 3, replace(sampling, seed=seed), from_counts(TABLES), "coupled")[0])] += 1
    assert chi_square_excess(sample, law_of_text(mock, PROMPT, sampling, 3)) < 0
    assert chi_square_excess(sample, law_of_text(mock, PROMPT, Sampling(**settings | said), 3)) > 0
