"""`AcceptanceModel`: the probability that the target accepts a guess, from counts kept online.

A guess falls into a cell by what is known when it is made: the length of the matched context, how much of that
context's history agrees with it, and how well the last guesses did. Each cell counts its hits and misses, old
ones fading, and is shrunk towards all guesses with its match length, which are shrunk towards a prior.
"""

from __future__ import annotations

Cell = tuple[int, int, int]

FADE = 0.995
"""Weight of the past at each new outcome of a cell: about the last 200 count."""

STRENGTH = 6.0
"""How many outcomes the wider group's rate is worth in a cell."""

PRIORS = (0.05, 0.15, 0.35, 0.5)
"""Acceptance by match length before anything was seen (the last for all longer): on the careful side, since a
draft that fails costs time and a draft not sent costs nothing."""


def cell(match: int, share: float, support: int, streak: int) -> Cell:
    """The cell of a guess.

    Args:
        match: length of the matched context in tokens.
        share: part of that context's continuations that agree with the guess, 0 to 1.
        support: how often the context was seen.
        streak: guesses that were right in a row up to this one.
    """
    if share >= 1.0:
        agreement = 0 if support > 1 else 1
    else:
        agreement = 2 if share >= 0.6 else 3 if share >= 0.3 else 4
    run = streak if streak < 3 else 3 if streak < 6 else 4 if streak < 12 else 5
    return match, agreement, run


class AcceptanceModel:
    """Fading counts of hits per cell; `estimate` and `learn` take constant time."""

    def __init__(self) -> None:
        self._cells: dict[Cell, list[float]] = {}
        self._groups: dict[int, list[float]] = {}

    def estimate(self, key: Cell) -> float:
        """Probability in (0, 1) that a guess of this cell is accepted, if all before it are."""
        match = key[0]
        prior = PRIORS[min(match, len(PRIORS) - 1)]
        hits, seen = self._groups.get(match, (0.0, 0.0))
        rate = (hits + STRENGTH * prior) / (seen + STRENGTH)
        hits, seen = self._cells.get(key, (0.0, 0.0))
        return (hits + STRENGTH * rate) / (seen + STRENGTH)

    def learn(self, key: Cell, accepted: bool) -> None:
        """Count an outcome."""
        for counts in (
            self._cells.setdefault(key, [0.0, 0.0]),
            self._groups.setdefault(key[0], [0.0, 0.0]),
        ):
            counts[0] = counts[0] * FADE + accepted
            counts[1] = counts[1] * FADE + 1.0
