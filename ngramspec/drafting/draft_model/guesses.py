"""What a draft model guesses by its logits (`DraftSampler`), and what such guesses gain (`Payoff`).

>>> sampler = DraftSampler(3, Sampling(temperature=0.5))
>>> row = np.log(np.array([0.25, 0.5, 0.25, 9.0]))  # the last one means nothing to the target
>>> sampler.guess(row, 0, None)  # greedy
(1, 0.5, {})
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from ngramspec.backend import Logits
from ngramspec.drafting.chances import HOPELESS, FadingRate, pick
from ngramspec.drafting.draft import Chooser
from ngramspec.drafting.draft_model.passes import Pace
from ngramspec.drafting.price import TokenPrice
from ngramspec.sampling.distribution import largest
from ngramspec.sampling.settings import Sampling

RARE = 0.01  # tokens less likely than this part of the likeliest are not drafted when a draft is drawn
WIDEST = 32  # most tokens that one is drawn from
POSITIONS = 8  # positions of a draft whose acceptance is counted apart; those behind them are counted with the last

PRIOR, PRIOR_WEIGHT, FADE = 0.8, 4.0, 0.98
"""Acceptance of a guess before any was judged, as so many outcomes, and the weight of the past at each new one: a draft
model that was chosen for its target is right at 50 to 90 % of the positions (Leviathan et al. 2023, section 4.2)."""


ModelGuess = tuple[int, float, Mapping[int, float]]
"""What the model would put at a position: its guess, its probability of that, and the distribution that it was drawn
from, empty in greedy decoding."""


class DraftSampler:
    """Guesses the tokens below `n_vocab` by rows of logits, drawn at the temperature of the target's `sampling`."""

    def __init__(self, n_vocab: int, sampling: Sampling) -> None:
        self._n_vocab = n_vocab
        self._temperature = sampling.temperature or 1.0
        rare = self._temperature * math.log(RARE)
        self._deepest = max(rare, math.log(sampling.min_p)) if sampling.min_p > 0 else rare

    def guess(self, row: Logits, offset: int, choose: Chooser | None) -> ModelGuess | None:
        """The guess by a row of logits, `offset` tokens into the draft; None where the row holds none. O(n_vocab)."""
        row = row[: self._n_vocab]
        best = int(row.argmax())
        if not math.isfinite(row[best]):
            return None
        if choose is None:
            return best, 1.0 / float(np.exp(row - row[best]).sum()), {}
        q = self._likeliest(row - row[best])
        token = pick(choose, offset, q)
        return token, q[token], q

    def _likeliest(self, gaps: Logits) -> dict[int, float]:
        """The likeliest tokens with their probabilities, by logits less the largest one."""
        ids = np.flatnonzero(gaps >= self._deepest)
        if ids.size > WIDEST:
            ids = ids[largest(gaps[ids], WIDEST)]
        weights = np.exp(gaps[ids].astype(np.float64) / self._temperature)
        return dict(zip(ids.tolist(), (weights / weights.sum()).tolist(), strict=True))


class Payoff:
    """What a draft model's guesses are expected to gain beyond their time, by how those at the same place fared."""

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
            more = reach - price.rate * (price.slopes[at] + self._pace.token / price.seconds)
            if more <= 0:
                break
            gain += more
        return gain

    def goes_on(self, reach: float, length: int, price: TokenPrice | None) -> bool:
        """Whether to make one more guess, after `length` that are all accepted with probability `reach`.

        It must pay for its time and for its place in the target's pass, and all may not take more than may be lost.
        """
        if reach < HOPELESS or price is None:
            return reach >= HOPELESS
        if not price.seconds:
            return bool(price.pays(reach, length))
        time_of = self._pace.token / price.seconds
        if time_of * (length + 1) > price.loss_budget:
            return False
        cost = price.slopes[length] + time_of
        return reach * self.rate(length) >= price.rate * cost
