"""`LookaheadDrafter`: n-grams of the target's own guesses, which it makes at positions that are not written yet.

Lookahead decoding (Fu et al. 2024, "Break the sequential dependency of LLM inference using lookahead decoding", arXiv
2402.02057): each pass also evaluates a window of guesses at the positions to come, whose logits replace them (Jacobi
iteration). The n-grams that come of it are pooled, and those that begin as the text ends are verified. The rows that
this takes are an investment: it pays where a pass over a dozen tokens costs little more than one over one.

What differs from the paper: its window is a branch of its own, several iterations deep and behind an attention mask,
and up to G pooled n-grams are verified beside it. Here all is one chain, as any other draft is: its beginning is the
n-gram to verify, its end the window. So the rows behind a wrong guess are conditioned on that guess; n-grams are read
along the chain of one pass, not along the diagonal of several; and of those that begin alike only the latest is tried.
The prompt's n-grams are pooled too, an option of the authors' code (POOL_FROM_PROMPT).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ngramspec.drafting.successors import Guess, SuccessorDrafter, Successors, top_two

WINDOW = 15
"""Most tokens in a draft: W, the window's length, in llama.cpp's example of lookahead decoding."""

LONGEST = 3
"""Tokens in the longest context of the pool."""

POOLED = 65_536
"""Most contexts in the pool; the one that was not evaluated for longest goes first."""


class LookaheadDrafter(SuccessorDrafter):
    """Drafts whole windows of guesses, and learns from the logits computed behind each of them.

    A guess is the first that there is of these: what followed the last 3, 2 or 1 tokens in the prompt, or was likeliest
    when the target last evaluated them (the pool); what it held likeliest at this position in the pass before, given
    that pass's draft (the trajectory); the token before once more. Only a price ends a draft before the window does:
    where rows cost nothing, hopeless guesses are worth evaluating too.

    Example: 5 6 is the text, and 7 8 9 was sent, of which nothing is accepted: the rows' best tokens are 1 4 4 2. The
    text is 5 6 1 now. Nothing is known after 1, so the trajectory guesses 4, what the target held likeliest behind 7;
    then comes 4 again, and 2; and 2 once more until the window is full. Had the text gone on with 7 all the same, the
    pool had known that 4 follows 5 6 7.

    It needs a model: without logits it drafts repetitions of the last token. The pool outlasts the request.

    Complexity: O(n_vocab) per position verified, O(1) per token drafted or of the prompt.
    """

    name = "lookahead"
    longest = WINDOW
    # A judge would end a draft without hope: its rows are worth what they cost as long as that is 0.
    hopeless = 0.0

    def begin(self, prompt: Sequence[int]) -> None:
        # Pooled when the first logits are seen, which tell whether the pool is this model's.
        self._unread = list(prompt[-POOLED:])
        self._tail = self._unread[-LONGEST:]
        self._rows: list[Successors | None] = []
        self._trajectory: list[Successors | None] = []
        self._judge.begin()

    def see(self, tokens: Sequence[int], rows: NDArray[np.float32], accepted: int = 0) -> None:
        super().see(tokens, rows)
        prompt, self._unread = self._unread, []
        for end, token in enumerate(prompt):
            self._pool_in(prompt[max(0, end - LONGEST) : end], token, {token: 1.0})
        text = [*self._tail[:-1], *tokens]
        self._rows = []
        for end, row in enumerate(rows, len(text) - len(tokens) + 1):
            best, law = top_two(row)
            if law:
                self._pool_in(text[:end][-LONGEST:], best, law)
            self._rows.append(Successors(best, law, 1) if law else None)

    def _pool_in(self, context: Sequence[int], best: int, law: Mapping[int, float]) -> None:
        """Note what follows a context of at most `LONGEST` tokens, and the shorter ones within it."""
        for start in range(len(context)):
            self._learn(tuple(context[start:]), best, law)
        while len(self._pool) > POOLED:
            self._pool.popitem(last=False)

    def _guess(self, tokens: Sequence[int]) -> Guess | None:
        text = [*self._tail, *tokens]
        for length in range(min(LONGEST, len(text)), 0, -1):
            pooled = self._pool.get(tuple(text[-length:]))
            if pooled is not None:
                return Guess(pooled, length, length)
        if not text:
            return None
        expected = self._trajectory[len(tokens)] if len(tokens) < len(self._trajectory) else None
        return Guess(expected or Successors(text[-1], {text[-1]: 1.0}, 1), 0, 0)

    def accept(self, tokens: Sequence[int]) -> int:
        self._tail = [*self._tail, *tokens][-LONGEST:]
        self._trajectory, self._rows = self._rows[len(tokens) :], []
        return self._judge.settle(tokens)
