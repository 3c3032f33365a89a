"""`RecycleDrafter`: what the target itself held likeliest after each token, the last time that it was asked.

Token Recycling (Luo et al. 2024, "Turning trash into treasure", arXiv 2408.08696): every pass computes logits at all
drafted positions, and those behind a refused token are thrown away, though they tell what the target expects after
that token. The paper keeps the 8 best successors and drafts a tree of 80 tokens; here it is a chain.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ngramspec.drafting.chances import ChanceEstimator, pick
from ngramspec.drafting.draft import Chooser, Draft, Drafter
from ngramspec.drafting.price import TokenPrice

STEADY = 7
"""Runs are counted up to this length."""


class Successors(NamedTuple):
    """What the target lately held likeliest after a token.

    Attributes:
        best: the token of the largest logit.
        law: the probabilities of the best two, as if there were no others.
        run: how often in a row `best` was the best.
    """

    best: int
    law: Mapping[int, float]
    run: int


class RecycleDrafter(Drafter):
    """Drafts the chain of best successors, and learns from every proposal, sent or not.

    For each token it knows the two best successors by the last logits computed after it, in whatever context, and
    drafts from the last token on: the best, the best after that, and so on. It needs a model: without logits it
    drafts nothing. What the model holds likely after a token is no part of a request, so it outlasts the request.

    Complexity: O(n_vocab) per position verified, O(1) per token drafted. Memory: one entry per token of the vocabulary
    that was ever evaluated in a draft or before one.
    """

    name = "recycle"
    wants_logits = True

    def __init__(self) -> None:
        self._successors: dict[int, Successors] = {}
        self._n_vocab = 0
        self._last: int | None = None
        self._judge = ChanceEstimator()

    def begin(self, prompt: Sequence[int]) -> None:
        self._last = prompt[-1] if prompt else None
        self._judge.begin()

    def see(self, tokens: Sequence[int], rows: NDArray[np.float32], accepted: int = 0) -> None:
        if rows.shape[1] != self._n_vocab:
            # Another model: its tokens have other meanings, and some of these may not be among them.
            self._successors.clear()
            self._n_vocab = rows.shape[1]
        for token, row in zip(tokens, rows, strict=True):
            best, law = top_two(row)
            if not law:
                continue
            before = self._successors.get(token)
            run = min(STEADY, before.run + 1) if before is not None and before.best == best else 1
            self._successors[token] = Successors(best, law, run)

    def propose(
        self, limit: int, choose: Chooser | None = None, *, blind: bool = False, price: TokenPrice | None = None
    ) -> Draft:
        judge = self._judge
        judge.open(price)
        tokens: list[int] = []
        q: list[Mapping[int, float]] = []
        chances: Sequence[float] = judge.chances
        last = self._last
        while last is not None and len(tokens) < limit:
            known = self._successors.get(last)
            if known is None:
                break
            last = known.best
            if choose is not None:
                last = pick(choose, len(tokens), known.law)
                q.append(known.law)
                if blind and not tokens:
                    chances = [judge.blind(known.run, known.law, known.run)] * limit
            tokens.append(last)
            # To the judge a run is what a match is elsewhere: the longer, the surer.
            if not judge.go_on(known.run, known.law[last] * known.run, known.run):
                break
        judge.close(tokens)
        return Draft(tuple(tokens), tuple(q), (1,) * len(tokens), (), tuple(chances), self.name)

    def accept(self, tokens: Sequence[int]) -> int:
        if tokens:
            self._last = tokens[-1]
        return self._judge.settle(tokens)


def top_two(row: NDArray[np.float32]) -> tuple[int, dict[int, float]]:
    """The token of the largest logit, and the softmax over the largest two; empty if the largest is no number.

    Two passes of argmax: for two tokens, much faster than a partition, which moves what it looks at.
    """
    best = int(row.argmax())
    largest = float(row[best])
    if not math.isfinite(largest):
        return best, {}
    sides = ((0, row[:best]), (best + 1, row[best + 1 :]))
    others = [start + int(side.argmax()) for start, side in sides if side.size]
    second = max(others, key=lambda token: float(row[token]), default=best)
    weight = math.exp(float(row[second]) - largest) if second != best else 0.0
    # A logit of -inf is an impossible token, and q must hold none.
    return best, {best: 1 / (1 + weight), second: weight / (1 + weight)} if weight > 0 else {best: 1.0}
