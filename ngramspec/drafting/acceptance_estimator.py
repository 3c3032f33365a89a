# cython: language_level=3
"""Estimates of the probability that the target accepts each guess of a draft, from the outcomes of earlier guesses.

`AcceptanceEstimator` estimates a chain while it grows, or a whole draft of a drafter that makes no estimates.
`ProbabilityCalibrator` calibrates the probabilities of a source.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ngramspec.drafting.draft import Chooser, Draft, MarginalCost


class DecayingRate:
    """A rate of hits over tries, in which each new outcome reduces the weight of all earlier ones by the factor `fade`.

    `value` is shrunk towards `prior` as if `strength` outcomes of that rate had been counted.
    """

    __slots__ = ("_fade", "_hits", "_prior", "_strength", "_tries")

    def __init__(
        self, hits: float = 0.0, tries: float = 0.0, *, fade: float, prior: float = 0.0, strength: float = 0.0
    ) -> None:
        self._hits, self._tries, self._fade = hits, tries, fade
        self._prior, self._strength = prior, strength

    def add(self, hit: float) -> None:
        """Count an outcome: True or False, or a share of a hit."""
        self._hits = self._hits * self._fade + hit
        self._tries = self._tries * self._fade + 1.0

    @property
    def value(self) -> float:
        """The rate, shrunk towards `prior`; without outcomes and `strength`, that is a ZeroDivisionError."""
        return self.shrunk_to(self._prior, self._strength)

    def shrunk_to(self, rate: float, strength: float) -> float:
        """Return the rate as if `strength` more outcomes had been counted, a share `rate` of which were hits."""
        return (self._hits + strength * rate) / (self._tries + strength)

    def carry(self, tries: float) -> None:
        """Set the weight of the outcomes so far to `tries` outcomes with the same rate."""
        self._hits, self._tries = tries * self.value, tries


Cell = tuple[int, int, int]  # match length and two more classes; see `cell` and `AcceptanceEstimator.add_estimates`
FADE = 0.995  # factor for the earlier outcomes of a cell at each new one, so that about the last 200 count
STRENGTH = 6.0  # weight of the rate of a cell's group in the rate of the cell, in outcomes

PRIORS = (0.05, 0.15, 0.35, 0.5)
"""Initial acceptance rate by match length; the last one is for all longer matches. The rates are low, because a
rejected draft costs time and a missing draft costs nothing."""


def cell(match: int, share: float, support: int, streak: int) -> Cell:
    """Return the cell of a guess that is a `share` of the continuations of a context with `support` occurrences.

    `streak` is the number of right guesses in a row before this one.
    """
    if share >= 1.0:
        agreement = 0 if support > 1 else 1
    else:
        agreement = 2 if share >= 0.6 else 3 if share >= 0.3 else 4
    return match, agreement, _few(streak)


def _few(number: int) -> int:
    """Return the class of a number, one of six: 0, 1, 2, 3 to 5, 6 to 11, and 12 or more."""
    return number if number < 3 else 3 if number < 6 else 4 if number < 12 else 5


_NOTHING = DecayingRate(fade=FADE)

MIN_CHAIN_PROB = 0.05
"""Default of the minimum probability that all of a draft is accepted, at which the draft ends.

A less likely token pays only if it costs less than this part of a decode call, as on large GPUs. The default drafter
continues there to 0.004 (`HOPELESS` in `ngramspec.drafting.mixture.drafter`).
"""


def length_class(match: int) -> int:
    """Return the class of a match length.

    Lengths from 8 on are grouped by powers of two, so that each class gets enough outcomes. Class 11 is 32 and more.
    """
    return match if match < 8 else min(5 + match.bit_length(), 11)


def pick(choose: Chooser, offset: int, weights: Mapping[int, float]) -> int:
    """Return the token that a `Chooser` picks; another one than those of `weights` is a ValueError."""
    token = choose(offset, weights)
    if token not in weights:
        raise ValueError(f"choose returned {token}, which is not among the weights")
    return token


class AcceptanceEstimator:
    """Acceptance rates for classes of guesses (cells), and the guesses that wait for their outcome.

    A guess is described by (match, count, support): the length of its context, how often the guessed token followed it,
    and how often any token did. Its cell depends on these numbers and on the number of right guesses before it. The
    rate of a cell is shrunk towards the rate of all guesses with its match length, and this rate towards a prior.
    """

    def __init__(self) -> None:
        self._rates: dict[Cell, DecayingRate] = {}
        self._groups: dict[int, DecayingRate] = {}
        self.begin()

    def estimate(self, key: Cell) -> float:
        """Return the probability in (0, 1) that a guess of this cell is accepted, if all before it are."""
        match = key[0]
        prior = PRIORS[min(match, len(PRIORS) - 1)]
        rate = self._groups.get(match, _NOTHING).shrunk_to(prior, STRENGTH)
        return self._rates.get(key, _NOTHING).shrunk_to(rate, STRENGTH)

    def learn(self, key: Cell, is_accepted: bool) -> None:
        """Count the outcome of a guess."""
        if key not in self._rates:
            self._rates[key] = DecayingRate(fade=FADE)
            self._groups.setdefault(key[0], DecayingRate(fade=FADE))
        self._rates[key].add(is_accepted)
        self._groups[key[0]].add(is_accepted)

    def begin(self) -> None:
        """Start a request; guesses of the last request get no outcome."""
        self._streak = 0
        self.open(None)

    def open(self, price: MarginalCost | None, min_chain_prob: float = MIN_CHAIN_PROB) -> None:
        """Start a chain, which ends when a longer one cannot pay, or is accepted with less than `min_chain_prob`."""
        self.acceptance_probs: list[float] = []  # estimates for the guesses of the chain so far
        self._cells: list[Cell] = []
        self._guesses: Sequence[int] = ()
        self._price, self._min_chain_prob, self._reach = price, min_chain_prob, 1.0

    def add_guess(self, match: int, count: float, support: int) -> bool:
        """Estimate the next guess of the chain; return True if one more guess may pay."""
        key = cell(length_class(match), count / support, support, self._streak + len(self._cells))
        p = self.estimate(key)
        self._cells.append(key)
        self.acceptance_probs.append(p)
        self._reach *= p
        reach, price = self._reach, self._price
        return reach >= self._min_chain_prob and (price is None or price.worth_extending(reach, len(self._cells)))

    def estimate_undrawn(self, match: int, q: Mapping[int, float], support: int) -> float:
        """Return the estimate for the first guess before it is sampled from `q`; see `Ask`, `fixed_length`.

        Only the largest value of `q` matters, as the share of the guess.
        """
        return self.estimate(cell(length_class(match), max(q.values()), support, self._streak))

    def add_estimates(self, draft: Draft, limit: int, *, fixed_length: bool = False) -> Draft:
        """Return a draft with added estimates; unchanged if it has estimates or is empty.

        The cell of a guess then depends on its position in the draft, on the number of right guesses before the draft,
        and on the match length, if the drafter provides it. `limit` and `fixed_length` are those of `Ask`.
        """
        if draft.acceptance_probs or not draft.tokens:
            self._guesses = ()
            return draft
        # The length of a drawn draft and its match lengths may depend on the drawn tokens, so they are not used.
        unknown = fixed_length or not draft.match_lengths
        match = (0,) * (limit if fixed_length else len(draft)) if unknown else draft.match_lengths
        run = _few(self._streak)
        self._cells = [(length_class(length), _few(position), run) for position, length in enumerate(match)]
        self.close(draft.tokens)
        return replace(draft, acceptance_probs=tuple(map(self.estimate, self._cells)))

    def close(self, guesses: Sequence[int]) -> None:
        """End the chain, whose tokens are `guesses`."""
        self._guesses = guesses

    def record_outcome(self, tokens: Sequence[int]) -> int:
        """Learn from the emitted tokens, whether the chain was verified or not; return its number of right guesses."""
        hits = 0
        for guess, key, token in zip(self._guesses, self._cells, tokens, strict=False):
            right = guess == token
            self.learn(key, right)
            self._streak = self._streak + 1 if right else 0
            if not right:
                break
            hits += 1
        self._guesses = ()
        return hits


REACH = 6  # range of the map in log-odds, on both sides of 0; one point per 0.5
RATE = 0.02  # learning rate of its points


class ProbabilityCalibrator:
    """A calibration map for probabilities, initially the identity, learnt online in constant time.

    It is a table over log-odds, linear between its points. Each outcome moves the points next to it (secondary
    estimation, as in compressors of the PAQ family: Mahoney 2005, section 4, "APM").
    """

    def __init__(self) -> None:
        self._points = [1.0 / (1.0 + math.exp(-i / 2)) for i in range(-2 * REACH, 2 * REACH + 1)]

    def estimate(self, p: float) -> float:
        """Return the calibrated value of `p`, between 0 and 1 exclusive."""
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
