"""How likely the target is to accept each guess of a draft, from what came of earlier guesses.

`HitRates` counts online. A guess falls into a cell by what is known when it is made: the length of the matched
context, how much of that context's history agrees with it, and how well the last guesses did. Each cell counts its
hits and misses, old ones fading. Its rate is shrunk towards that of all guesses with its match length, and the latter
towards a prior.

`ChanceEstimator` estimates the guesses of a chain one by one, says where to end it, and learns from what came instead.
`Record` does so for the drafts of a drafter that makes no estimates of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ngramspec.drafting.draft import Chooser, Draft
from ngramspec.drafting.fading import FadingRate
from ngramspec.drafting.price import TokenPrice

Cell = tuple[int, int, int]
"""A match length, and two more classes of what is known: see `cell` and `Record`."""

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
    return match, agreement, _few(streak)


def _few(number: int) -> int:
    """Numbers in six classes: 0, 1, 2, 3 to 5, 6 to 11, and 12 or more."""
    return number if number < 3 else 3 if number < 6 else 4 if number < 12 else 5


_NOTHING = FadingRate(fade=FADE)


class HitRates:
    """Fading counts of hits per cell; `estimate` and `learn` take constant time."""

    def __init__(self) -> None:
        self._cells: dict[Cell, FadingRate] = {}
        self._groups: dict[int, FadingRate] = {}

    def estimate(self, key: Cell) -> float:
        """Probability in (0, 1) that a guess of this cell is accepted, if all before it are."""
        match = key[0]
        prior = PRIORS[min(match, len(PRIORS) - 1)]
        rate = self._groups.get(match, _NOTHING).towards(prior, STRENGTH)
        return self._cells.get(key, _NOTHING).towards(rate, STRENGTH)

    def learn(self, key: Cell, accepted: bool) -> None:
        """Count an outcome."""
        if key not in self._cells:
            self._cells[key] = FadingRate(fade=FADE)
            self._groups.setdefault(key[0], FadingRate(fade=FADE))
        self._cells[key].add(accepted)
        self._groups[key[0]].add(accepted)


HOPELESS = 0.05
"""A draft ends when the probability that all of it is accepted has fallen below this: no curve pays for more."""


def length_class(match: int) -> int:
    """Match lengths of 8 and more by powers of two, so that each class sees enough outcomes; 11 is 32 and more."""
    return match if match < 8 else min(5 + match.bit_length(), 11)


def pick(choose: Chooser, offset: int, weights: Mapping[int, float]) -> int:
    """What `choose` picks.

    Raises:
        ValueError: a token that it was not offered.
    """
    token = choose(offset, weights)
    if token not in weights:
        raise ValueError(f"choose returned {token}, which is not among the counts")
    return token


class ChanceEstimator:
    """A `HitRates`, and the guesses that wait for their outcome.

    A guess is given as (match, count, support): the length of the context it rests on, how often the guessed token
    followed it, and how often anything did.

    A proposal that the policy cut is compared with what was emitted all the same: that tells as much about the
    guesses as verifying them would have.

    Attributes:
        chances: estimates of the chain's guesses so far.
    """

    def __init__(self) -> None:
        self._model = HitRates()
        self.begin()

    def begin(self) -> None:
        """Start a request: guesses of the last one get no outcome."""
        self._streak = 0
        self.open(None)

    def open(self, price: TokenPrice | None, hopeless: float = HOPELESS) -> None:
        """Start a chain, which ends when the probability that all of it is accepted has fallen below `hopeless`."""
        self.chances: list[float] = []
        self._cells: list[Cell] = []
        self._guesses: Sequence[int] = ()
        self._price = price
        self._hopeless = hopeless
        self._reach = 1.0

    def go_on(self, match: int, count: float, support: int) -> bool:
        """Estimate the next guess of the chain, and tell whether one after it may pay."""
        key = cell(length_class(match), count / support, support, self._streak + len(self._cells))
        p = self._model.estimate(key)
        self._cells.append(key)
        self.chances.append(p)
        self._reach *= p
        reach, price = self._reach, self._price
        return reach >= self._hopeless and (price is None or price.pays(reach, len(self._cells)))

    def blind(self, match: int, q: Mapping[int, float], support: int) -> float:
        """The estimate of a chain's first guess, whichever is drawn from `q`; see `blind` in `Drafter.propose`."""
        return self._model.estimate(cell(length_class(match), max(q.values()), support, self._streak))

    def close(self, guesses: Sequence[int]) -> None:
        """End the chain; these are its tokens."""
        self._guesses = guesses

    def settle(self, tokens: Sequence[int]) -> int:
        """Learn from what followed the chain; how many of its tokens were right."""
        hits = 0
        if not self._guesses:
            return hits
        for guess, key, token in zip(self._guesses, self._cells, tokens, strict=False):
            right = guess == token
            self._model.learn(key, right)
            self._streak = self._streak + 1 if right else 0
            if not right:
                break
            hits += 1
        self._guesses = ()
        return hits


class Record(ChanceEstimator):
    """What came of the drafts of a drafter that makes no estimates, as estimates for its next ones.

    Guesses are told apart by their position in the draft, by how many guesses in a row were right before it, and by the
    length of the match behind them, where the drafter tells it.
    """

    def estimated(self, draft: Draft, limit: int, *, blind: bool = False) -> Draft:
        """The draft with estimates added; unchanged if it has some already, or is empty.

        Args:
            draft: what the drafter proposed.
            limit, blind: as it was asked for; see `Drafter.propose`.
        """
        if draft.chances or not draft.tokens:
            self._guesses = ()
            return draft
        # How long a drawn draft is, and what its guesses rest on, may hang on the tokens drawn.
        unknown = blind or not draft.match
        match = (0,) * (limit if blind else len(draft)) if unknown else draft.match
        run = _few(self._streak)
        self._cells = [(length_class(length), _few(position), run) for position, length in enumerate(match)]
        self.close(draft.tokens)
        return replace(draft, chances=tuple(map(self._model.estimate, self._cells)))
