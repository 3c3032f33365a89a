"""`Sampler`: a `Sampling` at work on one text, and what it needs of a grammar. `ngramspec.llama` has the real ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

        As llama.cpp does it: a token is drawn without the grammar; if the grammar forbids it, another is drawn
        from that of the tokens that the grammar allows.

        Raises:
            BadLogits: a nan or +inf among the logits that matter, or no finite one.
            GrammarError: the grammar allows no token.
        """

    def distribution(self, logits: NDArray[np.float32]) -> Distribution:
        """What `draw` draws from. Of the two, one is called, once for each token emitted: samplers may be random."""

    def accept(self, token: int) -> None:
        """A token was emitted."""
