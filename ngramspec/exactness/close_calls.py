"""`CloseCalls`: counts the tokens that rounding could have decided, where drafts are allowed to change last bits.

A pass over several tokens may give logits that differ in their last bits from single tokens', by no more than a
measured bound. A token that stays the sampler's choice when its own logit falls by that much and all others rise by
as much is the one that undrafted decoding would have taken after the same tokens; any other is a close call. Without
filters of the distribution that is a proof; with filters it is the test that moves the token's own chances most.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ngramspec.acceptance.rules import gumbel_pick
from ngramspec.errors import GrammarError
from ngramspec.sampling.distribution import BadLogits, Distribution
from ngramspec.sampling.sampler import Draw, GrammarState, Sampler
from ngramspec.sampling.settings import Sampling


class CloseCalls:
    """A sampler that counts, and draws as the one inside it does. `sampler`: draws the tokens."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampling: Sampling = sampler.sampling
        self._bound = 0.0
        self._count = 0
        self._sampler = sampler
        self._position = 0
        # These draw random numbers of their own, and a second draw would change the text.
        self._unrepeatable = self.sampling.selects or self.sampling.xtc_probability > 0

    def arm(self, bound: float) -> None:
        """A pass was made whose logits may differ by so much, and what it left in the cache may move all later ones."""
        self._bound = bound

    def take(self) -> int:
        """Close calls since the last call."""
        count, self._count = self._count, 0
        return count

    @property
    def grammar(self) -> GrammarState | None:
        return self._sampler.grammar

    def begin(self, prompt: Sequence[int]) -> None:
        self._position = len(prompt)
        self._sampler.begin(prompt)

    def accept(self, token: int) -> None:
        self._position += 1
        self._sampler.accept(token)

    def distribution(self, logits: NDArray[np.float32]) -> Distribution:
        return self._sampler.distribution(logits)

    def draw(self, logits: NDArray[np.float32], pick: Draw) -> int:
        token = self._sampler.draw(logits, pick)
        if self._bound > 0 and self._close(logits, token):
            self._count += 1
        return token

    def _close(self, logits: NDArray[np.float32], token: int) -> bool:
        """Whether the draw changes if the token's logit falls by the bound and all others rise by it."""
        if self._unrepeatable:
            return True
        # Only differences between logits count, so the token's own logit can take the whole movement: 2 x the bound.
        # In its place, where that may be written to: a copy of the row takes longer than the draw.
        if not logits.flags.writeable:
            logits = logits.copy()
        logit = logits[token]
        logits[token] = logit - np.float32(2 * self._bound)
        try:
            return self._sampler.draw(logits, self._pick) != token
        except (BadLogits, GrammarError):
            return True
        finally:
            logits[token] = logit

    def _pick(self, p: Distribution, attempt: int) -> int:
        if self.sampling.greedy:
            return int(p.ids[0])
        return gumbel_pick(self.sampling.seed, self._position, p, attempt)
