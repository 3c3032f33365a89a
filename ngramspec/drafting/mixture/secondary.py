"""`OutcomeMap`: what a probability turned out to mean, learnt online.

A judge may be right about one question and be asked another: the mixture says how likely a token comes next, and
a draft needs to know how likely a token that was *drawn* is accepted. The map between the two is a table over log-odds,
linear between its points, each point moved towards the outcomes near it: secondary estimation, as compressors of the
PAQ family do it (Mahoney 2005, section 4, "APM").
"""

from __future__ import annotations

import math

REACH = 6
"""Log-odds covered, to both sides of 0; a point at every half."""

RATE = 0.02


class OutcomeMap:
    """A map from probability to probability, the identity at first. `estimate` and `learn` take constant time."""

    def __init__(self) -> None:
        self._points = [1.0 / (1.0 + math.exp(-i / 2)) for i in range(-2 * REACH, 2 * REACH + 1)]

    def estimate(self, p: float) -> float:
        """What `p`, between 0 and 1 exclusive, turned out to mean."""
        i, share = self._place(p)
        return self._points[i] * (1.0 - share) + self._points[i + 1] * share

    def learn(self, p: float, right: bool) -> None:
        """Learn the outcome of a guess that was given the probability `p`."""
        i, share = self._place(p)
        for point, weight in ((i, 1.0 - share), (i + 1, share)):
            self._points[point] += RATE * weight * (right - self._points[point])

    @staticmethod
    def _place(p: float) -> tuple[int, float]:
        odds = math.log(p / (1.0 - p))
        at = 2 * (min(max(odds, -REACH), REACH - 1e-9) + REACH)
        return int(at), at - int(at)
