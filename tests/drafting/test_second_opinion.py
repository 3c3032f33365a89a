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
    assert good.expected(p)[1] > 0.9
    assert bad.expected(p)[1] < 0.1
    for opinion in (good, bad):
        kept, right = opinion.expected(p)
        assert 0 <= kept <= min(p, right) <= 1


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
