"""Acceptance: how much of a draft the target keeps, as pure functions on arrays.

Every function takes the target's logits `rows`, an iterable of at least len(draft) + 1 rows of shape (n_vocab,) where
row i holds the logits after draft[:i]; it returns the accepted prefix of the draft plus one token of the target's own,
and reads no row past the first refusal. A draft whose last token ends the text comes with len(draft) rows. `position`
is the index in the sequence of the token that row 0 decides. `sampler` turns a row into a distribution or a token, and
is told every emitted token. They raise BadLogits and GrammarError (see `sampling.Sampler`), and ValueError when the
rows run out.

    greedy     the emitted tokens are those of plain greedy decoding
    coupled    the emitted tokens are those of plain sampling with the same seed, whatever the draft
    match      the same, for drafts that were made without the seed's noise

`ngramspec.acceptance.verifier` picks one of them, or one of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ngramspec.drafting.draft import Chooser
from ngramspec.errors import GrammarError
from ngramspec.sampling.distribution import BadLogits, Distribution, gumbel_one, gumbel_pick
from ngramspec.sampling.sampler import Sampler
from ngramspec.sampling.settings import Sampling

Row = NDArray[np.float32]
Rows = Iterable[Row]
Decide = Callable[[int, Row, int | None], tuple[int, bool]]
"""(offset, row, drafted token or None past the draft) -> the token to emit, and whether it is the drafted one, kept."""


class Verdict(NamedTuple):
    """Result of one pass: the accepted prefix of the draft and one token of the target's."""

    tokens: tuple[int, ...]  # ids
    # How many of them are the draft's: all but the last, or all where the draft was accepted whole and ends the text,
    # or an error came next.
    accepted: int
    error: BadLogits | GrammarError | None = None  # what kept the next token from being chosen


@dataclass(frozen=True, slots=True)
class TokenDecision:
    """Decision on one draft token, or on a token of the target's own."""

    token: int  # its id
    accepted: bool | None  # whether a drafted token was kept; None for one of the target's own
    # Its probability at that position: in the distribution sampled from; in greedy decoding by the softmax of the
    # logits.
    p: float
    why: Mapping[str, float]  # the numbers that decided, by name


Watch = Callable[[TokenDecision], None]
"""Called for every token that is judged or emitted, in order, by those who want to see."""


# Greedy. Plain decoding emits t_i = argmax(row_i) and only then computes row_{i+1}. As long as
# draft[i] = t_i, the batch computed the very rows that plain decoding would have; at the first
# difference, t_i is still right.
# (Stern, Shazeer, Uszkoreit 2018, "Blockwise parallel decoding", section 3.)
def verify_greedy(
    rows: Rows, draft: Sequence[int], sampler: Sampler, position: int, watch: Watch | None = None
) -> Verdict:
    """Keep the draft while it equals the most likely token; equal logits go to the lowest id."""

    def decide(_offset: int, row: Row, guess: int | None) -> tuple[int, bool]:
        token = sampler.draw(row, likeliest)
        if watch is not None:
            if guess is not None:
                why = {"margin": float(row[token]) - float(row[guess])}
                watch(TokenDecision(guess, token == guess, probability(row, guess), why))
            if token != guess:
                watch(TokenDecision(token, None, probability(row, token), {}))
        return token, token == guess

    return verify_each(rows, draft, sampler, decide)


def likeliest(p: Distribution, _attempt: int) -> int:
    """The draw of greedy decoding: what is left has all mass on one token."""
    return int(p.ids[0])


# Coupled. With G_x independent standard Gumbel noise, argmax_x(log p(x) + G_x) is a draw from p. Here G is
# a function of (seed, position, x) alone, so the target's token at each position is fixed before
# anybody drafts, and the draft is kept while it guessed that token. A drafter that takes
# argmax_x(log q(x) + G_x) with the same G guesses it with probability
#     sum_x 1 / sum_y max(p(y)/p(x), q(y)/q(x))  >=  (1 - d) / (1 + d),  d = total variation(p, q).
# (Daliri, Musco, Suresh 2025, "Coupling without communication and drafter-invariant speculative
# decoding", arXiv 2408.07978.)
# Match is the same test of a draft that took the most likely tokens: the target's token is a draw from
# p, and the guess x is kept with probability p(x).
def verify_coupled(
    rows: Rows, draft: Sequence[int], sampler: Sampler, position: int, watch: Watch | None = None
) -> Verdict:
    """Keep the draft while it equals the token that plain sampling with this seed would emit."""

    def decide(offset: int, row: Row, guess: int | None) -> tuple[int, bool]:
        seen: list[Distribution] = []

        def pick(p: Distribution, attempt: int) -> int:
            seen.append(p)
            return gumbel_pick(sampler.sampling.seed, position + offset, p, attempt)

        token = sampler.draw(row, pick)
        if watch is not None:
            if guess is not None:
                watch(TokenDecision(guess, token == guess, seen[0].probability(guess), {}))
            if token != guess:
                watch(TokenDecision(token, None, seen[-1].probability(token), {}))
        return token, token == guess

    return verify_each(rows, draft, sampler, decide)


def coupled_choice(sampling: Sampling, position: int) -> Chooser:
    """The drafter's side, for a draft that starts at `position`: argmax(log weight + G), with the verifier's G."""

    def choose(offset: int, weights: Mapping[int, float]) -> int:
        if len(weights) == 1:
            return next(iter(weights))
        at, seed = position + offset, sampling.seed
        return max(weights, key=lambda x: math.log(weights[x]) + gumbel_one(seed, at, x))

    return choose


def probability(row: Row, token: int) -> float:
    """The probability of a token, by the softmax of the row's logits."""
    return float(np.exp(row[token] - row.max()) / np.exp(row - row.max(), dtype=np.float64).sum())


def verify_each(rows: Rows, draft: Sequence[int], sampler: Sampler, decide: Decide) -> Verdict:
    """Decide row by row, up to the first drafted token that is not kept."""
    tokens: list[int] = []
    for offset, row in enumerate(rows):
        guess = draft[offset] if offset < len(draft) else None
        token, kept = decide(offset, row, guess)
        sampler.accept(token)
        tokens.append(token)
        if not kept:
            return Verdict(tuple(tokens), offset)
    if not draft or len(tokens) != len(draft):
        raise ValueError(f"a draft of {len(draft)} tokens came with {len(tokens)} rows of logits")
    return Verdict(tuple(tokens), len(tokens))
