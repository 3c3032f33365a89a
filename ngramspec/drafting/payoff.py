"""`Payoff`: what a draft model's guesses are expected to gain, beyond the time that they take."""

from __future__ import annotations

from ngramspec.drafting.chances import HOPELESS
from ngramspec.drafting.fading import FadingRate
from ngramspec.drafting.pace import Pace
from ngramspec.drafting.price import TokenPrice

POSITIONS = 8
"""Positions of a draft whose acceptance is counted apart; those behind them are counted with the last."""

PRIOR, PRIOR_WEIGHT, FADE = 0.8, 4.0, 0.98
"""Acceptance of a guess before any was judged, as so many outcomes, and the weight of the past at each new one: a draft
model that was chosen for its target is right at 50 to 90 % of the positions (Leviathan et al. 2023, section 4.2)."""


class Payoff:
    """Weighs guesses by how those at the same place of a draft fared lately.

    Args:
        pace: what the model's passes take, measured as they are made.
    """

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._rates = [FadingRate(PRIOR * PRIOR_WEIGHT, PRIOR_WEIGHT, fade=FADE) for _ in range(POSITIONS)]

    def learn(self, at: int, right: bool) -> None:
        """Learn what came of a guess at a position; the first is 0."""
        self._rates[min(at, POSITIONS - 1)].add(right)

    def rate(self, at: int) -> float:
        """How often guesses at a position lately were right, where all before them were."""
        return self._rates[min(at, POSITIONS - 1)].value

    def gain(self, limit: int, price: TokenPrice) -> float:
        """What a draft is expected to gain, in tokens, where a price in seconds is known.

        With p_j the share of guesses at position j that lately were right, s_j the least that a drafted token costs the
        target, and t the model's time for a token, that is

            max over k <= limit of  sum over j <= k of (p_1 * ... * p_j - worth * (s_j + t))
        """
        gain, reach = 0.0, 1.0
        for at in range(limit):
            reach *= self.rate(at)
            more = reach - price.worth * (price.slopes[at] + self._pace.token / price.seconds)
            if more <= 0:
                break
            gain += more
        return gain

    def goes_on(self, reach: float, length: int, price: TokenPrice | None) -> bool:
        """Whether to make one more guess, after `length` that are all accepted with probability `reach`.

        It must be expected to pay for its time and for its place in the target's pass, and all together may not take
        more than may be lost (`TokenPrice.stake`).
        """
        if reach < HOPELESS or price is None:
            return reach >= HOPELESS
        if not price.seconds:
            return bool(price.pays(reach, length))
        time_of = self._pace.token / price.seconds
        if time_of * (length + 1) > price.stake:
            return False
        cost = price.slopes[length] + time_of
        return reach * self.rate(length) >= price.worth * cost
