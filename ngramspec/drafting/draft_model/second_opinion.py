"""`SecondOpinion`: how likely a guess is right once a model was asked too, and, before that, what asking would give.

At a position n-grams guess a token for nothing, with a chance p that is right on average; a draft model, asked at its
price, guesses one with a probability m of its own. Each of four cases has a chance that is mixed of p and m in the
domain of log-odds, by weights learnt online: logistic mixing, as in compressors of the PAQ family (Mahoney 2005,
section 3).

Before the model is asked only p is known. By classes of p it is counted how often the two agreed, how often they were
right then, and otherwise how likely the guess that stood seemed, and how often it was right. A mean of all this would
not do: where a drafted token costs time, the worth of asking is that bad guesses are not sent.
"""

from __future__ import annotations

import math
from itertools import chain

from ngramspec.drafting.chances import FadingRate

BOTH, MODEL, NGRAMS, ALONE = range(4)
"""The cases: the guess that both make; where they differ, the model's guess, and the n-grams'; where n-grams have none,
the model's."""

START = ((0.8, 0.3, 0.8), (0.0, -0.3, 0.7), (-0.7, 0.6, -0.5), (0.2, 0.0, 0.8))
"""For each case the weights to begin with, of 1 and of the log-odds of p and m."""

RATE = 0.02  # of learning: how far a weight follows one outcome

EDGES = (0.0, 0.1, 0.3, 0.5, 0.7, 0.85, 0.95)
"""Upper ends of the classes of p: the first is for positions where n-grams have no guess."""

LEVELS = (0.45, 0.8)  # between the classes of a guess that stands where the two do not agree: poor, fair, and good

AGREED, SURER = 0.9, 0.85
"""Before anything was counted: how often the two agree, as a part of p, and how often they are right then, unless the
n-grams are more certain than that."""

OTHERS = ((0.3, 0.3), (0.3, 0.6), (0.4, 0.9))
"""Likewise, where they do not agree: how often each class of LEVELS comes, and how often it is right."""

STRENGTH, CARRIED, FADE = 4.0, 8.0, 0.98
"""What that counts as, in outcomes, and what earlier texts count as; the weight of the past at each new outcome."""

NONE = 0.02  # what p counts as where n-grams have no guess


Answered = tuple[float, float, int, int, int]
"""A position about which the model was asked: what n-grams and the model gave their guesses, these guesses, and the one
that was taken; 0 and -1: n-grams had none."""


class Prospects:
    """Expected results of calling the model, by the probability p of the n-grams' guess; 0 if they have none."""

    def __init__(self, p: float) -> None:
        self.agrees = _rate(AGREED * p)  # how often the model makes the same guess
        self.surer = _rate(max(SURER, p))  # how often that is right then
        self._others = [(_rate(share), _rate(right)) for share, right in OTHERS]

    def begin(self) -> None:
        for rate in (self.agrees, self.surer, *chain.from_iterable(self._others)):
            rate.carry(CARRIED)

    def add(self, agrees: bool, chance: float, right: bool) -> None:
        """Count an answer: whether the model agreed, the chance of the guess that stood, and whether it was right."""
        self.agrees.add(agrees)
        if agrees:
            self.surer.add(right)
            return
        level = sum(chance > edge for edge in LEVELS)
        for i, (share, _) in enumerate(self._others):
            share.add(i == level)
        self._others[level][1].add(right)

    @property
    def others(self) -> tuple[tuple[float, float], ...]:
        """Otherwise, how likely the guess that stands is of each class of LEVELS, and its chance then."""
        total = sum(share.value for share, _ in self._others)
        return tuple((share.value / total, right.value) for share, right in self._others)


class SecondOpinion:
    """Mixes what n-grams and a model say of a position. All takes constant time."""

    def __init__(self) -> None:
        self._weights = [list(weights) for weights in START]
        self._records = [Prospects(p) for p in (0.0, *EDGES)]
        self._all = Prospects(0.5)

    def beside(self) -> SecondOpinion:
        """For another text at the same time: the weights are learnt by both, the counts are its own."""
        other = SecondOpinion()
        other._weights = self._weights
        return other

    def begin(self) -> None:
        """Start a text: what asking gave counts for less, lest a model that failed in one text is never asked again."""
        for record in (*self._records, self._all):
            record.begin()

    def chance(self, case: int, p: float, m: float) -> float:
        """The probability that a guess is right; see the module docstring."""
        bias, ours, theirs = self._weights[case]
        return _squash(bias + ours * _stretch(p or NONE) + theirs * _stretch(m))

    def expected(self, p: float | None = None) -> Prospects:
        """What asking may give where n-grams give their guess the chance p; 0: they have none; None: anywhere."""
        return self._all if p is None else self._records[_class(p)]

    def learn(self, answered: Answered, token: int) -> None:
        """Learn what came: `token`."""
        p, m, guess, answer, better = answered
        agrees = guess == answer
        theirs = BOTH if agrees else MODEL if guess >= 0 else ALONE
        chance = self.chance(theirs if better == answer else NGRAMS, p, m)
        for record in (self._records[_class(p)], self._all):
            record.add(agrees, chance, better == token)
        self._mix(theirs, p, m, answer == token)
        if theirs == MODEL:
            self._mix(NGRAMS, p, m, guess == token)

    def _mix(self, case: int, p: float, m: float, right: bool) -> None:
        error = RATE * (right - self.chance(case, p, m))
        weights = self._weights[case]
        for i, said in enumerate((1.0, _stretch(p or NONE), _stretch(m))):
            weights[i] += error * said


def _rate(expected: float) -> FadingRate:
    return FadingRate(fade=FADE, expected=expected, strength=STRENGTH)


def _class(p: float) -> int:
    return sum(p > edge for edge in EDGES)


def _stretch(p: float) -> float:
    p = min(max(p, 1e-3), 1.0 - 1e-3)
    return math.log(p / (1.0 - p))


def _squash(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))
