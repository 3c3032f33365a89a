# cython: language_level=3
"""How likely the target is to accept each guess of a draft, from what came of earlier guesses.

`ChanceEstimator` estimates a chain as it grows, or a whole draft of a drafter that makes no estimates of its own.
`OutcomeMap` learns what somebody's probabilities turned out to mean; `Reliability` tells how right estimates were.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ngramspec.drafting.draft import Chooser, Draft, MarginalCost


class FadingRate:
    """Hits over tries, where each new outcome makes all before it count a little less.

    Args:
        hits, tries: imagined outcomes to begin with.
        fade: weight of what was counted before, at each new outcome; 1: nothing fades.
        expected, strength: the `value` is shrunk by these, see `towards`.
    """

    __slots__ = ("_expected", "_fade", "_hits", "_strength", "_tries")

    def __init__(
        self, hits: float = 0.0, tries: float = 0.0, *, fade: float, expected: float = 0.0, strength: float = 0.0
    ) -> None:
        self._hits = hits
        self._tries = tries
        self._fade = fade
        self._expected, self._strength = expected, strength

    def add(self, hit: float) -> None:
        """Count an outcome: a bool, or a share of a hit."""
        self._hits = self._hits * self._fade + hit
        self._tries = self._tries * self._fade + 1.0

    @property
    def value(self) -> float:
        """The rate. Raises ZeroDivisionError where nothing was counted, imagined or expected."""
        return self.towards(self._expected, self._strength)

    def towards(self, rate: float, strength: float) -> float:
        """The rate, shrunk: as if `strength` more outcomes had been counted, of which `rate` were hits."""
        return (self._hits + strength * rate) / (self._tries + strength)

    def carry(self, tries: float) -> None:
        """Make the outcomes so far count as `tries` outcomes, with the same rate."""
        self._hits, self._tries = tries * self.value, tries


Cell = tuple[int, int, int]  # a match length, and two more classes of what is known: see `cell` and `estimated`
FADE = 0.995  # weight of the past at each new outcome of a cell: about the last 200 count
STRENGTH = 6.0  # how many outcomes the wider group's rate is worth in a cell

PRIORS = (0.05, 0.15, 0.35, 0.5)
"""Acceptance by match length before anything was seen (the last for all longer): on the careful side, since a
draft that fails costs time and a draft not sent costs nothing."""


def cell(match: int, share: float, support: int, streak: int) -> Cell:
    """The cell of a guess on a context of `match` tokens, seen `support` times, whose continuations agree with it to a
    `share` of 0 to 1, after `streak` right guesses in a row."""
    if share >= 1.0:
        agreement = 0 if support > 1 else 1
    else:
        agreement = 2 if share >= 0.6 else 3 if share >= 0.3 else 4
    return match, agreement, _few(streak)


def _few(number: int) -> int:
    """Numbers in six classes: 0, 1, 2, 3 to 5, 6 to 11, and 12 or more."""
    return number if number < 3 else 3 if number < 6 else 4 if number < 12 else 5


_NOTHING = FadingRate(fade=FADE)

HOPELESS = 0.05
"""A draft ends when the probability that all of it is accepted has fallen below this: no curve pays for more."""


def length_class(match: int) -> int:
    """Match lengths of 8 and more by powers of two, so that each class sees enough outcomes; 11 is 32 and more."""
    return match if match < 8 else min(5 + match.bit_length(), 11)


def pick(choose: Chooser, offset: int, weights: Mapping[int, float]) -> int:
    """Return the choice of `choose`; ValueError for a token that was not offered."""
    token = choose(offset, weights)
    if token not in weights:
        raise ValueError(f"choose returned {token}, which is not among the counts")
    return token


class ChanceEstimator:
    """Fading hit rates by what is known when a guess is made, and the guesses that wait for their outcome.

    A guess is given as (match, count, support): the length of the context it rests on, how often the guessed token
    followed it, and how often anything did. That, and how well the last guesses did, is its cell. A cell's rate is
    shrunk towards that of all guesses with its match length, that towards a prior. Constant time per guess.

    Attributes:
        chances: estimates of the chain's guesses so far.
    """

    def __init__(self) -> None:
        self._rates: dict[Cell, FadingRate] = {}
        self._groups: dict[int, FadingRate] = {}
        self.begin()

    def estimate(self, key: Cell) -> float:
        """Probability in (0, 1) that a guess of this cell is accepted, if all before it are."""
        match = key[0]
        prior = PRIORS[min(match, len(PRIORS) - 1)]
        rate = self._groups.get(match, _NOTHING).towards(prior, STRENGTH)
        return self._rates.get(key, _NOTHING).towards(rate, STRENGTH)

    def learn(self, key: Cell, accepted: bool) -> None:
        """Count an outcome."""
        if key not in self._rates:
            self._rates[key] = FadingRate(fade=FADE)
            self._groups.setdefault(key[0], FadingRate(fade=FADE))
        self._rates[key].add(accepted)
        self._groups[key[0]].add(accepted)

    def begin(self) -> None:
        """Start a request: guesses of the last one get no outcome."""
        self._streak = 0
        self.open(None)

    def open(self, price: MarginalCost | None, hopeless: float = HOPELESS) -> None:
        """Start a chain, which ends when the probability that all of it is accepted has fallen below `hopeless`."""
        self.acceptance_probs: list[float] = []
        self._cells: list[Cell] = []
        self._guesses: Sequence[int] = ()
        self._price = price
        self._hopeless = hopeless
        self._reach = 1.0

    def go_on(self, match: int, count: float, support: int) -> bool:
        """Estimate the next guess of the chain, and tell whether one after it may pay."""
        key = cell(length_class(match), count / support, support, self._streak + len(self._cells))
        p = self.estimate(key)
        self._cells.append(key)
        self.acceptance_probs.append(p)
        self._reach *= p
        reach, price = self._reach, self._price
        return reach >= self._hopeless and (price is None or price.worth_extending(reach, len(self._cells)))

    def blind(self, match: int, q: Mapping[int, float], support: int) -> float:
        """Return the estimate for the first guess before it is sampled from `q`; see `Drafter.propose`."""
        return self.estimate(cell(length_class(match), max(q.values()), support, self._streak))

    def estimated(self, draft: Draft, limit: int, *, fixed_length: bool = False) -> Draft:
        """A whole draft with estimates added; unchanged if it has some already, or is empty.

        Guesses are then told apart by their position in the draft, by how many in a row were right before it, and by
        the length of their match, where the drafter tells it.

        Args:
            draft: what the drafter proposed.
            limit, fixed_length: as it was asked for; see `Drafter.propose`.
        """
        if draft.acceptance_probs or not draft.tokens:
            self._guesses = ()
            return draft
        # How long a drawn draft is, and what its guesses rest on, may hang on the tokens drawn.
        unknown = fixed_length or not draft.match_lengths
        match = (0,) * (limit if fixed_length else len(draft)) if unknown else draft.match_lengths
        run = _few(self._streak)
        self._cells = [(length_class(length), _few(position), run) for position, length in enumerate(match)]
        self.close(draft.tokens)
        return replace(draft, acceptance_probs=tuple(map(self.estimate, self._cells)))

    def close(self, guesses: Sequence[int]) -> None:
        """End the chain; these are its tokens."""
        self._guesses = guesses

    def settle(self, tokens: Sequence[int]) -> int:
        """Learn from what followed the chain, sent or not; how many of its tokens were right."""
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


REACH = 6  # log-odds covered, to both sides of 0; a point at every half

RATE = 0.02


class OutcomeMap:
    """A map from probability to what it turned out to mean, the identity at first, learnt online in constant time.

    A table over log-odds, linear between its points, each moved towards the outcomes near it: secondary estimation, as
    compressors of the PAQ family do it (Mahoney 2005, section 4, "APM").
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


BINS = 10  # number of bins in the reliability table


@dataclass(slots=True)
class Reliability:
    """Predicted against observed acceptance of every position of drafts, up to and with the first that was wrong."""

    # by bin:
    seen: list[int] = field(default_factory=lambda: [0] * BINS)  # how many
    predicted: list[float] = field(default_factory=lambda: [0.0] * BINS)  # the sum of their predictions
    right: list[int] = field(default_factory=lambda: [0] * BINS)

    def add(self, proposal: Draft, truth: Sequence[int]) -> None:
        """Count a proposal; `truth` is what really followed."""
        for guess, p, token in zip(proposal.tokens, proposal.acceptance_probs, truth, strict=False):
            number = min(BINS - 1, int(p * BINS))
            self.seen[number] += 1
            self.predicted[number] += p
            if guess != token:
                return
            self.right[number] += 1

    def merge(self, other: Reliability) -> None:
        """Add another's counts to these."""
        for i in range(BINS):
            self.seen[i] += other.seen[i]
            self.predicted[i] += other.predicted[i]
            self.right[i] += other.right[i]

    @property
    def calibration_error(self) -> float | None:
        """Expected calibration error: the mean of |predicted - observed| over bins, weighted by their counts.

        (Naeini, Cooper, Hauskrecht 2015, "Obtaining well calibrated probabilities using Bayesian binning".)
        None if nothing was proposed.
        """
        wrong = sum(abs(p - r) for p, r in zip(self.predicted, self.right, strict=True))
        return wrong / sum(self.seen) if any(self.seen) else None

    def to_json(self) -> list[dict[str, float | None]]:
        """Each bin: its bounds, how many predictions, their mean, and the share that was right."""
        return [
            {
                "from": i / BINS,
                "to": (i + 1) / BINS,
                "count": seen,
                "predicted": self.predicted[i] / seen if seen else None,
                "observed": self.right[i] / seen if seen else None,
            }
            for i, seen in enumerate(self.seen)
        ]
