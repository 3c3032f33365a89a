"""`Judge`: estimates the guesses of a chain one by one, says where to end it, and learns from what came instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ngramspec.drafting.draft import Choose, Outlook
from ngramspec.drafting.hit_rates import AcceptanceModel, Cell, cell

HOPELESS = 0.05
"""A draft ends when the probability that all of it is accepted has fallen below this: no curve pays for more."""


def length_class(match: int) -> int:
    """Match lengths of 8 and more by powers of two, so that each class sees enough outcomes; 11 is 32 and more."""
    return match if match < 8 else min(5 + match.bit_length(), 11)


def pick(choose: Choose, offset: int, weights: Mapping[int, float]) -> int:
    """What `choose` picks.

    Raises:
        ValueError: a token that it was not offered.
    """
    token = choose(offset, weights)
    if token not in weights:
        raise ValueError(f"choose returned {token}, which is not among the counts")
    return token


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
        self._model = AcceptanceModel()
        self.begin()

    def begin(self) -> None:
        """Start a request: guesses of the last one get no outcome."""
        self._streak = 0
        self.open(None)

    def open(self, outlook: Outlook | None) -> None:
        """Start a chain."""
        self.acceptance: list[float] = []
        self._cells: list[Cell] = []
        self._guesses: Sequence[int] = ()
        self._outlook = outlook
        self._reach = 1.0

    def go_on(self, match: int, count: float, support: int) -> bool:
        """Estimate the next guess of the chain, and tell whether one after it may pay."""
        key = cell(length_class(match), count / support, support, self._streak + len(self._cells))
        p = self._model.estimate(key)
        self._cells.append(key)
        self.acceptance.append(p)
        self._reach *= p
        reach, outlook = self._reach, self._outlook
        return reach >= HOPELESS and (outlook is None or reach >= outlook.worth * outlook.slopes[len(self._cells)])

    def blind(self, match: int, q: Mapping[int, float], support: int) -> float:
        """The estimate of a chain's first guess, whichever is drawn from `q`; see `blind` in `Drafter.propose`."""
        return self._model.estimate(cell(length_class(match), max(q.values()), support, self._streak))

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
