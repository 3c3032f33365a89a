"""Drafters that learn from the target's own logits: `RecycleDrafter`, `LookaheadDrafter`, `NasdDrafter`.

The likely successors of a context are kept between requests, until the model changes.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ngramspec.drafting.acceptance_estimator import MIN_CHAIN_PROB, AcceptanceEstimator, pick
from ngramspec.drafting.draft import Ask, Draft, Drafter
from ngramspec.drafting.predictor import NGramDrafter
from ngramspec.sampling.distribution import largest

STEADY = 7  # maximum length of a run that is counted
# Recent predictions of the target after a context: the probabilities of the best two tokens, normalised to a sum of 1,
# the best first; and how often in a row that token was the best.
Successors = tuple[Mapping[int, float], int]


class SuccessorDrafter(Drafter):
    """Drafts a chain of most likely successors, and learns from every proposal, whether it was verified or not."""

    wants_logits = True
    longest: float = math.inf  # maximum draft length, even if `propose` allows more
    min_chain_prob = MIN_CHAIN_PROB  # probability that all of a draft is accepted, below which the draft ends

    def __init__(self) -> None:
        self._pool: OrderedDict[tuple[int, ...], Successors] = OrderedDict()
        self._n_vocab = 0
        self._estimator = AcceptanceEstimator()
        self.begin(())

    def observe_logits(self, tokens: Sequence[int], rows: NDArray[np.float32], n_accepted: int = 0) -> None:
        if rows.shape[1] != self._n_vocab:
            # The model changed: its tokens have other meanings, and some of the pooled ids may not exist in it.
            self._pool.clear()
            self._n_vocab = rows.shape[1]

    def _learn(self, context: tuple[int, ...], likely: Mapping[int, float]) -> None:
        """Store the most likely tokens after a context."""
        before, run = self._pool.pop(context, ({}, 0))
        same = next(iter(before), None) == next(iter(likely))
        self._pool[context] = likely, min(STEADY, run + 1) if same else 1

    @abstractmethod
    def _guess(self, tokens: Sequence[int]) -> tuple[Successors, int, int] | None:
        """Return the successors of the draft `tokens`, if any, the length of their context, and the match length."""

    def propose(self, ask: Ask) -> Draft:
        estimator, choose = self._estimator, ask.choose
        estimator.open(ask.price, self.min_chain_prob)
        tokens: list[int] = []
        q: list[Mapping[int, float]] = []
        match: list[int] = []
        probs: Sequence[float] = estimator.acceptance_probs
        while len(tokens) < min(ask.limit, self.longest) and (guess := self._guess(tokens)) is not None:
            (likely, run), length, sureness = guess
            token = next(iter(likely))
            if choose is not None:
                token = pick(choose, len(tokens), likely)
                q.append(likely)
                if ask.fixed_length and not tokens:
                    probs = [estimator.estimate_undrawn(sureness, likely, run)] * ask.limit
            tokens.append(token)
            match.append(length)
            if not estimator.add_guess(sureness, likely[token] * run, run):
                break
        estimator.close(tokens)
        return Draft(tuple(tokens), tuple(q), tuple(match), (), tuple(probs), self.name)


def top_two(row: NDArray[np.float32]) -> dict[int, float]:
    """Return the softmax over the largest two logits, the largest first; empty if the largest is not finite.

    For two tokens, argmax over the row and over its rest is much faster than a partition.
    """
    best = int(row.argmax())
    largest = float(row[best])
    if not math.isfinite(largest):
        return {}
    sides = ((0, row[:best]), (best + 1, row[best + 1 :]))
    candidates = [start + int(side.argmax()) for start, side in sides if side.size]
    second = max(candidates, key=lambda token: float(row[token]), default=best)
    weight = math.exp(float(row[second]) - largest) if second != best else 0.0
    # A logit of -inf means an impossible token, which q must not contain.
    return {best: 1 / (1 + weight), second: weight / (1 + weight)} if weight > 0 else {best: 1.0}


class RecycleDrafter(SuccessorDrafter):
    """Drafts a chain of best successors of single tokens, by the logits last computed after each token.

    Token Recycling (Luo et al. 2024, "Turning trash into treasure", arXiv 2408.08696). The paper keeps the 8 best
    successors and drafts a tree of 80 tokens; this drafter makes a chain. O(n_vocab) per verified position.
    """

    name = "recycle"

    def begin(self, prompt: Sequence[int]) -> None:
        self._last = prompt[-1:]
        self._estimator.begin()

    def observe_logits(self, tokens: Sequence[int], rows: NDArray[np.float32], n_accepted: int = 0) -> None:
        super().observe_logits(tokens, rows)
        for token, row in zip(tokens, rows, strict=True):
            likely = top_two(row)
            if likely:
                self._learn((token,), likely)

    def _guess(self, tokens: Sequence[int]) -> tuple[Successors, int, int] | None:
        successors = self._pool.get(tuple(tokens[-1:] or self._last))
        return None if successors is None else (successors, 1, successors[1])

    def accept(self, tokens: Sequence[int]) -> int:
        self._last = tokens[-1:] or self._last
        return self._estimator.record_outcome(tokens)


FILLER = 3  # number of most likely tokens that `NasdDrafter` counts at each position
WINDOW = 15  # maximum draft length: W, the length of the window, in llama.cpp's example of lookahead decoding
LONGEST = 3  # number of tokens in the longest context of the pool
MAX_POOL = 65_536  # maximum number of contexts in the pool; the least recently evaluated one is removed first


class LookaheadDrafter(SuccessorDrafter):
    """Drafts whole windows of guesses, and learns from the logits computed after each of them.

    Lookahead decoding (Fu et al. 2024, "Break the sequential dependency of LLM inference using lookahead decoding",
    arXiv 2402.02057): each decode call also evaluates a window of guesses at the next positions. The resulting logits
    replace the guesses (Jacobi iteration). The resulting n-grams are pooled, and those that begin with the last tokens
    of the text are verified. In the paper the window is a separate branch with an attention mask, and up to G pooled
    n-grams are verified in addition to it. Here everything is one chain: its beginning is the n-gram to verify, its end
    the window. The n-grams of the prompt are pooled too, an option of the authors' code (POOL_FROM_PROMPT).

    A guess is the first of these that exists:

    - from the pool: the token that followed the last 3, 2 or 1 tokens in the prompt, or the most likely one when the
      target last evaluated them;
    - from the trajectory: the token that was most likely at this position in the previous decode call, given its draft;
    - a repetition of the previous token.

    Only the price ends a draft before the window ends. O(n_vocab) per verified position.
    """

    name = "lookahead"
    longest = WINDOW
    min_chain_prob = 0.0  # if rows cost nothing, those of unlikely guesses are worth evaluating too

    def begin(self, prompt: Sequence[int]) -> None:
        # The prompt is pooled with the first logits: they show whether the pool belongs to this model.
        self._unread = list(prompt[-MAX_POOL:])
        self._tail = self._unread[-LONGEST:]
        self._rows: list[Successors | None] = []
        self._trajectory: list[Successors | None] = []
        self._estimator.begin()

    def observe_logits(self, tokens: Sequence[int], rows: NDArray[np.float32], n_accepted: int = 0) -> None:
        super().observe_logits(tokens, rows)
        prompt, self._unread = self._unread, []
        for end, token in enumerate(prompt):
            self._pool_in(prompt[max(0, end - LONGEST) : end], {token: 1.0})
        text = [*self._tail[:-1], *tokens]
        self._rows = []
        for end, row in enumerate(rows, len(text) - len(tokens) + 1):
            likely = top_two(row)
            if likely:
                self._pool_in(text[:end][-LONGEST:], likely)
            self._rows.append((likely, 1) if likely else None)

    def _pool_in(self, context: Sequence[int], likely: Mapping[int, float]) -> None:
        """Store the likely tokens after a context of at most `LONGEST` tokens, and after each of its suffixes."""
        for start in range(len(context)):
            self._learn(tuple(context[start:]), likely)
        while len(self._pool) > MAX_POOL:
            self._pool.popitem(last=False)

    def _guess(self, tokens: Sequence[int]) -> tuple[Successors, int, int] | None:
        text = [*self._tail, *tokens]
        for length in range(min(LONGEST, len(text)), 0, -1):
            successors = self._pool.get(tuple(text[-length:]))
            if successors is not None:
                return successors, length, length
        if not text:
            return None
        previous = self._trajectory[len(tokens)] if len(tokens) < len(self._trajectory) else None
        return previous or ({text[-1]: 1.0}, 1), 0, 0

    def accept(self, tokens: Sequence[int]) -> int:
        self._tail = [*self._tail, *tokens][-LONGEST:]
        self._trajectory, self._rows = self._rows[len(tokens) :], []
        return self._estimator.record_outcome(tokens)


class NasdDrafter(NGramDrafter):
    """An `NGramDrafter` that also counts the most likely alternatives of the target.

    NASD, "n-gram assisted speculative decoding" (romsto/Speculative-Decoding on GitHub): after a context, the tokens
    that followed are counted. As filler, the three most likely tokens of the target at each position are counted too.
    Acceptance is done by this package, so sampling stays exact; NASD's code samples a rejected position twice. Without
    logits this drafter equals `NGramDrafter`. Complexity: O(n_vocab) per emitted position.
    """

    name = "nasd"
    wants_logits = True

    def begin(self, prompt: Sequence[int]) -> None:
        super().begin(prompt)
        self._rows: list[list[int]] = []

    def observe_logits(self, tokens: Sequence[int], rows: NDArray[np.float32], n_accepted: int = 0) -> None:
        self._rows = [largest(row, FILLER)[:FILLER].tolist() for row in rows]

    def accept(self, tokens: Sequence[int]) -> int:
        for at, token in enumerate(tokens):
            for alternative in self._rows[at] if at < len(self._rows) else ():
                self.predictor.count_candidate(alternative)
            self.predictor.update(token)
        self._rows = []
        return self._estimator.record_outcome(tokens)
