"""`Judge`: estimates the guesses of a chain one by one, says where to end it, and learns from what came instead."""

from __future__ import annotations

from collections.abc import Sequence

from ngramspec.draft import Outlook
from ngramspec.drafting.acceptance import AcceptanceModel, Cell, cell

HOPELESS = 0.05
"""A draft ends when the probability that all of it is accepted has fallen below this: no curve pays for more."""


class Judge:
    """An `AcceptanceModel`, and the guesses that wait for their outcome.

    A guess is given as (match, count, support): the length of the context it rests on, how often the guessed token
    followed it, and how often anything did.

    A proposal that the policy cut is compared with what was emitted all the same: that tells as much about the
    guesses as verifying them would have.

    Attributes:
        acceptance: estimates of the chain's guesses so far.
    """

    def __init__(self) -> None:
        self.acceptance: list[float] = []
        self._model = AcceptanceModel()
        self._streak = 0
        self._outlook: Outlook | None = None
        self.begin()

    def begin(self) -> None:
        """Start a request: guesses of the last one get no outcome."""
        self._cells: list[Cell] = []
        self._guesses: Sequence[int] = ()
        self._streak = 0

    def open(self, outlook: Outlook | None) -> None:
        """Start a chain."""
        self._outlook = outlook
        self._cells = []
        self._guesses = ()
        self.acceptance = []
        self._reach = 1.0

    def go_on(self, match: int, count: int, support: int) -> bool:
        """Estimate the next guess of the chain; whether one after it may pay."""
        key = cell(match, count / support, support, self._streak + len(self._cells))
        p = self._model.estimate(key)
        self._cells.append(key)
        self.acceptance.append(p)
        self._reach *= p
        worth, outlook = self._reach, self._outlook
        return worth >= HOPELESS and (outlook is None or worth >= outlook.worth * outlook.slopes[len(self._cells)])

    def blind(self, match: int, count: int, support: int) -> float:
        """The estimate of a first guess, for `blind` in `Drafter.propose`: that of the likeliest one."""
        return self._model.estimate(cell(match, count / support, support, self._streak))

    def close(self, guesses: Sequence[int]) -> None:
        """End the chain; these are its tokens."""
        self._guesses = guesses

    def settle(self, tokens: Sequence[int]) -> int:
        """Learn from what followed the chain; how many of its tokens were right."""
        hits = 0
        for guess, key, token in zip(self._guesses, self._cells, tokens, strict=False):
            right = guess == token
            self._model.learn(key, right)
            self._streak = self._streak + 1 if right else 0
            if not right:
                break
            hits += 1
        self._guesses = ()
        return hits
