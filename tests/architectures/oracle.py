"""A drafter that knows the text, and is correct for a random number of tokens and then wrong.

So rollbacks have every length, from nothing to all tokens of a batch except the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ngramspec.drafting.draft import Ask, Draft, Drafter

KNOWN = 10
"""First token id that is not a control token."""


class Oracle(Drafter):
    """Drafter that always proposes the maximum number of tokens, of which a random prefix is correct.

    `text` returns the continuation of a prompt.
    """

    name = "oracle"

    def __init__(self, text: Callable[[Sequence[int]], Sequence[int]], n_vocab: int, seed: int = 0) -> None:
        self._text = text
        self._n_vocab = n_vocab
        self._rng = np.random.default_rng(seed)
        self._left: list[int] = []
        self._drafted: tuple[int, ...] = ()

    def begin(self, prompt: Sequence[int]) -> None:
        """Start a request."""
        self._left, self._drafted = list(self._text(prompt)), ()

    def propose(self, ask: Ask) -> Draft:
        """Propose exactly `ask.limit` tokens."""
        limit = ask.limit
        right = self._left[: int(self._rng.integers(0, limit + 1))]
        known = [*self._left[len(right) : limit], *[KNOWN] * limit][: limit - len(right)]
        wrong = [KNOWN + (token + 1) % (self._n_vocab - KNOWN) for token in known]
        self._drafted = (*right, *wrong)
        return Draft(self._drafted, acceptance_probs=(0.98,) * limit, source=self.name)

    def accept(self, tokens: Sequence[int]) -> int:
        """Continue after these tokens."""
        pairs = zip(self._drafted, tokens, strict=False)
        equal = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(self._drafted), len(tokens)))
        self._left, self._drafted = self._left[len(tokens) :], ()
        return equal
