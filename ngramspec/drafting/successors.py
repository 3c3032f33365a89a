"""`SuccessorDrafter`: drafts of what the target itself held likeliest after some context, by logits that it computed.

Which contexts those are, and what is guessed where none is known, is a subclass's matter: see `recycle`, `lookahead`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ngramspec.drafting.chances import HOPELESS, ChanceEstimator, pick
from ngramspec.drafting.draft import Chooser, Draft, Drafter
from ngramspec.drafting.price import TokenPrice

STEADY = 7
"""Runs are counted up to this length."""


class Successors(NamedTuple):
    """What the target lately held likeliest after a context.

    Attributes:
        best: the token of the largest logit.
        law: the probabilities of the best two, as if there were no others.
        run: how often in a row `best` was the best.
    """

    best: int
    law: Mapping[int, float]
    run: int


class Guess(NamedTuple):
    """A guess of a chain.

    Attributes:
        known: the token, and what else was likely.
        match: tokens of context that it rests on.
        sureness: to the judge, what the length of a match is elsewhere: the larger, the surer.
    """

    known: Successors
    match: int
    sureness: int


class SuccessorDrafter(Drafter):
    """Drafts a chain of likeliest successors, and learns from every proposal, sent or not.

    It needs a model: it learns from the logits that `see` gets. What a model holds likely after a context is no part of
    a request, so it outlasts the request, but not the model.

    Attributes:
        longest: most tokens in a draft, whatever is asked for.
        hopeless: a draft ends when the probability that all of it is accepted has fallen below this.
    """

    wants_logits = True
    longest: float = math.inf
    hopeless = HOPELESS

    def __init__(self) -> None:
        self._pool: OrderedDict[tuple[int, ...], Successors] = OrderedDict()
        self._n_vocab = 0
        self._judge = ChanceEstimator()
        self.begin(())

    def see(self, tokens: Sequence[int], rows: NDArray[np.float32], accepted: int = 0) -> None:
        if rows.shape[1] != self._n_vocab:
            # Another model: its tokens have other meanings, and some of these may not be among them.
            self._pool.clear()
            self._n_vocab = rows.shape[1]

    def _learn(self, context: tuple[int, ...], best: int, law: Mapping[int, float]) -> None:
        """Note what is likeliest after a context now."""
        before = self._pool.pop(context, None)
        run = min(STEADY, before.run + 1) if before is not None and before.best == best else 1
        self._pool[context] = Successors(best, law, run)

    @abstractmethod
    def _guess(self, tokens: Sequence[int]) -> Guess | None:
        """What comes after these tokens, which follow the text; None: nobody knows."""

    def propose(
        self, limit: int, choose: Chooser | None = None, *, blind: bool = False, price: TokenPrice | None = None
    ) -> Draft:
        judge = self._judge
        judge.open(price, self.hopeless)
        tokens: list[int] = []
        q: list[Mapping[int, float]] = []
        match: list[int] = []
        chances: Sequence[float] = judge.chances
        while len(tokens) < min(limit, self.longest) and (guess := self._guess(tokens)) is not None:
            known = guess.known
            token = known.best
            if choose is not None:
                token = pick(choose, len(tokens), known.law)
                q.append(known.law)
                if blind and not tokens:
                    chances = [judge.blind(guess.sureness, known.law, known.run)] * limit
            tokens.append(token)
            match.append(guess.match)
            if not judge.go_on(guess.sureness, known.law[token] * known.run, known.run):
                break
        judge.close(tokens)
        return Draft(tuple(tokens), tuple(q), tuple(match), (), tuple(chances), self.name)


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
