"""`Sampler`: a `Sampling` at work on one text, and what it needs of a grammar; `ngramspec.llama` has the real ones.

`Forbidding` is one that also keeps to `TextRules`, in vLLM's way: where a text may end, and which words it may not
hold. What such a rule forbids depends on the tokens before it, so no logit bias can say it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from ngramspec.sampling.distribution import Distribution
from ngramspec.sampling.settings import Sampling
from ngramspec.tokens import Tokenizer


class GrammarState(Protocol):
    """A grammar at one place of its text. Tokens it does not allow must not be accepted."""

    @property
    def vocabulary(self) -> Tokenizer: ...

    def copy(self) -> Self:
        """An independent grammar at the same place."""

    def allowed(self, ids: NDArray[np.integer]) -> NDArray[np.bool_]:
        """Which of these tokens, shape (n,), may come next."""

    def allows(self, token: int) -> bool:
        """Whether this token may come next."""

    def accept(self, token: int) -> None:
        """Move on by a token that is allowed."""


Draw = Callable[[Distribution, int], int]
"""Draws a token: (distribution, attempt) -> token id. Attempts of one position need independent draws."""


class Sampler(Protocol):
    """A `Sampling` at work on one text: with the state that plain decoding would have at this position."""

    sampling: Sampling  # the settings

    @property
    def grammar(self) -> GrammarState | None:
        """What the text must be a sentence of, at the place that the text has reached; None: any text will do."""

    def begin(self, prompt: Sequence[int]) -> None:
        """Start a text: what the penalties look back on is `prompt`, the grammar is at its start."""

    def draw(self, logits: NDArray[np.float32], pick: Draw) -> int:
        """The next token, given its logits of shape (n_vocab,); `pick` draws from the distribution they come to.

        If the grammar forbids the token drawn, another is drawn from those that it allows, as llama.cpp does it.

        Raises:
            BadLogits: a nan or +inf among the logits that matter, or no finite one.
            GrammarError: the grammar allows no token.
        """

    def distribution(self, logits: NDArray[np.float32]) -> Distribution:
        """What `draw` draws from. Of the two, one is called, once for each token emitted: samplers may be random."""

    def accept(self, token: int) -> None:
        """A token was emitted."""


@dataclass(frozen=True, slots=True)
class TextRules:
    """Rules of one text."""

    least: int = 0  # tokens that come before the text may end, by a token or a stop string
    ends: frozenset[int] = frozenset()  # tokens that end it, in addition to the vocabulary's own
    words: tuple[tuple[int, ...], ...] = ()  # token ids that may not follow each other in it, two or more each


NO_RULES = TextRules()


class Forbidding:
    """A sampler that does not see the logits of tokens that may not come now; `ends`: all tokens that end the text."""

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
