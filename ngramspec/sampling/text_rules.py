"""`TextRules`: where a text may end, and which words it may not hold; `Forbidding` keeps to them, in vLLM's way.

What a rule forbids depends on the tokens before it, so no logit bias can say it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ngramspec.sampling.distribution import Distribution
from ngramspec.sampling.sampler import Draw, GrammarState, Sampler
from ngramspec.sampling.settings import Sampling


@dataclass(frozen=True, slots=True)
class TextRules:
    """Rules of one text.

    Attributes:
        least: tokens that come before the text may end, by a token or a stop string.
        ends: tokens that end it, beside the vocabulary's own.
        words: token ids that may not follow each other in it, two or more each.
    """

    least: int = 0
    ends: frozenset[int] = frozenset()
    words: tuple[tuple[int, ...], ...] = ()


NO_RULES = TextRules()


class Forbidding:
    """A sampler that does not see the logits of tokens that may not come now.

    Args:
        sampler: draws the tokens.
        rules: of the text.
        ends: all tokens that end it.
    """

    def __init__(self, sampler: Sampler, rules: TextRules, ends: Sequence[int]) -> None:
        self.sampling: Sampling = sampler.sampling
        self._sampler, self._ends, self._words = sampler, list(ends), rules.words
        self._early = rules.least
        self._longest = max(map(len, rules.words), default=1) - 1
        self._last: tuple[int, ...] = ()

    @property
    def grammar(self) -> GrammarState | None:
        return self._sampler.grammar

    def begin(self, prompt: Sequence[int]) -> None:
        self._sampler.begin(prompt)

    def accept(self, token: int) -> None:
        self._early -= 1
        self._last = (*self._last, token)[-self._longest :] if self._longest else ()
        self._sampler.accept(token)

    def draw(self, logits: NDArray[np.float32], pick: Draw) -> int:
        return self._sampler.draw(self._left(logits), pick)

    def distribution(self, logits: NDArray[np.float32]) -> Distribution:
        return self._sampler.distribution(self._left(logits))

    def _left(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """The logits without those of forbidden tokens."""
        forbidden = self._ends[:] if self._early > 0 else []
        forbidden += [last for *before, last in self._words if self._last[-len(before) :] == tuple(before)]
        if not forbidden:
            return logits
        left = logits.copy()
        left[forbidden] = -np.inf
        return left
