"""What a guess is worth once a model was asked too, and what asking is expected to give."""

from __future__ import annotations

import random

import pytest

from ngramspec.drafting.second_opinion import BOTH, MODEL, NGRAMS, SecondOpinion


def test_agreement_makes_sure_and_disagreement_does_not() -> None:
    opinion = SecondOpinion()
    assert opinion.chance(BOTH, 0.6, 0.6) > 0.6 > opinion.chance(MODEL, 0.6, 0.6)
    assert opinion.chance(NGRAMS, 0.6, 0.6) < 0.6
    assert opinion.chance(MODEL, 0.1, 0.9) > opinion.chance(NGRAMS, 0.1, 0.9)
    assert opinion.chance(NGRAMS, 0.97, 0.3) > opinion.chance(MODEL, 0.97, 0.3)
    assert all(0 < opinion.chance(case, p, m) < 1 for case in range(3) for p in (0, 1) for m in (0, 1))


@pytest.mark.parametrize("p", [0.0, 0.2, 0.6, 0.99])
def test_what_asking_gives_is_learnt(p: float) -> None:
    guess = 5 if p else -1
    good, bad = SecondOpinion(), SecondOpinion()
    for _ in range(300):
        good.learn(p, 0.9, guess, 7, 7, 7)
        bad.learn(p, 0.9, guess, 7, 7, 5)
    for opinion, sign in ((good, 1), (bad, -1)):
        for prospects in (opinion.expected(p), opinion.expected()):
            assert prospects.agrees < 0.1
            share, right = max(prospects.others)
            assert share > 0.8
            assert sign * (right - 0.5) > 0.3
            assert sum(share for share, _ in prospects.others) == pytest.approx(1)


def test_who_agrees_is_surer() -> None:
    opinion = SecondOpinion()
    before = opinion.expected(0.6)
    for i in range(300):
        opinion.learn(0.6, 0.9, 5, 5 if i % 2 else 7, 5, 5 if i % 2 else 6)
    after = opinion.expected(0.6)
    assert after.agrees == pytest.approx(0.5, abs=0.05)
    assert after.surer > max(before.surer, 0.95)
    assert opinion.expected(0.2) == SecondOpinion().expected(0.2), "another class of p learnt nothing"


def test_a_new_text_remembers_a_little() -> None:
    """A model that failed is expected to fail, but asked again."""
    opinion = SecondOpinion()
    for _ in range(300):
        opinion.learn(0.0, 0.9, -1, 7, 7, 5)
    failed = max(opinion.expected(0.0).others)[1]
    opinion.begin()
    again = max(opinion.expected(0.0).others)[1]
    assert failed < again < max(SecondOpinion().expected(0.0).others)[1]


def test_chances_become_what_came_true() -> None:
    """A model that boasts, and n-grams that are too careful."""
    opinion = SecondOpinion()
    rng = random.Random(1)
    for _ in range(4000):
        same = rng.random() < 0.5
        token = 1 if rng.random() < (0.9 if same else 0.2) else 2 if rng.random() < 0.75 else 3
        opinion.learn(0.5, 0.9, 1 if same else 2, 1, 1, token)
    assert opinion.chance(BOTH, 0.5, 0.9) == pytest.approx(0.9, abs=0.08)
    assert opinion.chance(MODEL, 0.5, 0.9) == pytest.approx(0.2, abs=0.08)
    assert opinion.chance(NGRAMS, 0.5, 0.9) == pytest.approx(0.6, abs=0.08)
