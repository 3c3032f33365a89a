"""`SecondOpinion`: how likely a guess is right once a model was asked too, and, before that, what asking would give.

At a position n-grams guess a token for nothing, with a chance p that is right on average; a draft model, asked at its
price, guesses one with a probability m of its own. Each of three cases (the guess that both make; where they differ,
the model's and the n-grams') has a chance that is mixed of p and m in the domain of log-odds, by weights learnt online:
logistic mixing, as in compressors of the PAQ family (Mahoney 2005, section 3).

Before the model is asked only p is known. By classes of p it is counted how often a right guess of the n-grams still
stood once the model was asked, and how often what stood was right.
"""

from __future__ import annotations

import math

from ngramspec.drafting.fading import FadingRate

BOTH, MODEL, NGRAMS = range(3)
"""The cases: the guess that both make; where they differ, the model's guess, and the n-grams'."""

START = ((0.8, 0.3, 0.8), (-0.3, -0.3, 0.7), (-0.7, 0.6, -0.5))
"""For each case the weights to begin with, of 1 and of the log-odds of p and m."""

RATE = 0.02
"""Of learning: how far a weight follows one outcome."""

EDGES = (0.0, 0.1, 0.3, 0.5, 0.7, 0.85, 0.95)
"""Upper ends of the classes of p: the first is for positions where n-grams have no guess."""

KEPT, RIGHT = 0.85, 0.7
"""Before anything was counted: how often a right guess of the n-grams stands, unless they are surer than that, and how
often the model is right where they know nothing."""

STRENGTH, CARRIED, FADE = 4.0, 8.0, 0.98
"""What that counts as, in outcomes, and what earlier texts count as; the weight of the past at each new outcome."""

NONE = 0.02
"""What p counts as where n-grams have no guess."""


class SecondOpinion:
    """Mixes what n-grams and a model say of a position. All takes constant time."""

    def __init__(self) -> None:
        self._weights = [list(weights) for weights in START]
        self._kept = [FadingRate(fade=FADE) for _ in range(len(EDGES) + 1)]
        self._right = [FadingRate(fade=FADE) for _ in range(len(EDGES) + 1)]

    def beside(self) -> SecondOpinion:
        """For another text at the same time: the weights are learnt by both, the counts are its own."""
        other = SecondOpinion()
        other._weights = self._weights
        return other

    def begin(self) -> None:
        """Start a text: what asking gave counts for less, lest a model that failed in one text is never asked again."""
        for rates, least in ((self._kept, KEPT), (self._right, RIGHT)):
            for at, edge in enumerate((0.0, *EDGES)):
                carried = CARRIED * rates[at].towards(max(least, edge), STRENGTH)
                rates[at] = FadingRate(carried, CARRIED, fade=FADE)

    def chance(self, case: int, p: float, m: float) -> float:
        """The probability that a guess is right; see the module docstring."""
        bias, ours, theirs = self._weights[case]
        return _squash(bias + ours * _stretch(p or NONE) + theirs * _stretch(m))

    def expected(self, p: float) -> tuple[float, float]:
        """What asking gives: how likely the n-grams' guess stands and is right, and how likely what stands is right."""
        at = _class(p)
        stands = p * self._kept[at].towards(max(KEPT, p), STRENGTH)
        return stands, max(stands, self._right[at].towards(max(RIGHT, p), STRENGTH))

    def learn(self, p: float, m: float, guess: int, answer: int, better: int, token: int) -> None:
        """Learn what came: `guess` was the n-grams', `answer` the model's, `better` was taken, `token` is the truth."""
        at = _class(p)
        if guess == answer:
            self._mix(BOTH, p, m, guess == token)
        else:
            self._mix(MODEL, p, m, answer == token)
            if guess >= 0:
                self._mix(NGRAMS, p, m, guess == token)
        if guess == token:
            self._kept[at].add(better == token)
        self._right[at].add(better == token)

    def _mix(self, case: int, p: float, m: float, right: bool) -> None:
        error = RATE * (right - self.chance(case, p, m))
        weights = self._weights[case]
        for i, said in enumerate((1.0, _stretch(p or NONE), _stretch(m))):
            weights[i] += error * said


def _class(p: float) -> int:
    return sum(p > edge for edge in EDGES)


def _stretch(p: float) -> float:
    p = min(max(p, 1e-3), 1.0 - 1e-3)
    return math.log(p / (1.0 - p))


def _squash(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))
