"""Acceptance: how much of a draft the target keeps, as pure functions on arrays.

Every function takes the target's logits `rows`, an iterable of at least len(draft) + 1 rows of
shape (n_vocab,) where row i holds the logits after draft[:i]; it returns the accepted prefix of the
draft plus one token of the target's own, and touches no row past the first refusal. A draft whose
last token ends the text comes with len(draft) rows: nothing is to follow it. `position` is
the absolute index in the sequence of the token that row 0 decides. `sampler` turns a row into a law
or a token, and is told of every emitted token. They raise BadLogits and GrammarError (see
`sampling.Sampler`), with the position, and ValueError when the rows run out or a draft contradicts
its q.

    greedy     the emitted tokens are those of plain greedy decoding
    coupled    the emitted tokens are those of plain sampling with the same seed, whatever the
               draft; their law is the target's
    match      the same, for drafts that were made without the seed's noise
    rejection  their law is the target's; which tokens come out depends on the drafts too

`ngramspec.acceptance.verifier` picks one of them, or one of the lossy rules in `ngramspec.acceptance.lossy`.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ngramspec.drafting.draft import Chooser
from ngramspec.errors import GrammarError
from ngramspec.sampling import noise
from ngramspec.sampling.distribution import BadLogits, Distribution
from ngramspec.sampling.sampler import Draw, Sampler
from ngramspec.sampling.settings import Sampling

Row = NDArray[np.float32]
Rows = Iterable[Row]

# Streams of `noise.uniform`. The first two are keyed by the position decided, which happens once.
# The draws of a draft are keyed by the position where the draft starts and by the offset in it: a
# position that is drafted again after a refusal gets a fresh number, since the old one shaped the
# draft that was just judged.
_ACCEPT, _SAMPLE, _DRAW = 0, 1, 2

# Added to token ids, which are all smaller: a draw that follows a token the grammar forbids has noise of its own.
_SECOND_DRAW = 1 << 32


class Verdict(NamedTuple):
    """What one pass emits: the accepted prefix of the draft, then one token of the target's.

    Attributes:
        tokens: ids.
        accepted: how many of them are the draft's: all but the last, or all where the draft was accepted whole and
            ends the text, or an error came next.
        error: what kept the next token from being chosen.
    """

    tokens: tuple[int, ...]
    accepted: int
    error: BadLogits | GrammarError | None = None


@dataclass(frozen=True, slots=True)
class TokenDecision:
    """What came of one drafted token, or a token of the target's own.

    Attributes:
        token: its id.
        accepted: whether a drafted token was kept; None for one of the target's own.
        p: its probability at that position: by the law that is sampled; in greedy decoding by the
            softmax of the logits.
        why: the numbers that decided, by name.
    """

    token: int
    accepted: bool | None
    p: float
    why: Mapping[str, float]


Watch = Callable[[TokenDecision], None]
"""Called for every token that is judged or emitted, in order, by those who want to see."""


# Greedy. Plain decoding emits t_i = argmax(row_i) and only then computes row_{i+1}. As long as
# draft[i] = t_i, the batch computed the very rows that plain decoding would have; at the first
# difference, t_i is still right.
# (Stern, Shazeer, Uszkoreit 2018, "Blockwise parallel decoding", section 3.)
def verify_greedy(
    rows: Rows, draft: Sequence[int], sampler: Sampler, position: int, watch: Watch | None = None
) -> Verdict:
    """Keep the draft while it equals the likeliest token; equal logits go to the lowest id."""

    def decide(offset: int, row: Row, guess: int | None) -> int:
        token = draw(sampler, row, lambda law, _attempt: int(law.ids[0]), position + offset)
        if watch is not None:
            if guess is not None:
                why = {"margin": float(row[token]) - float(row[guess])}
                watch(TokenDecision(guess, token == guess, probability(row, guess), why))
            if token != guess:
                watch(TokenDecision(token, None, probability(row, token), {}))
        return token

    return keep_while_equal(rows, draft, sampler, decide)


# Coupled. With G_x independent standard Gumbel noise, argmax_x(log p(x) + G_x) has law p. Here G is
# a function of (seed, position, x) alone, so the target's token at each position is fixed before
# anybody drafts, and the draft is kept while it guessed that token. A drafter that takes
# argmax_x(log q(x) + G_x) with the same G guesses it with probability
#     sum_x 1 / sum_y max(p(y)/p(x), q(y)/q(x))  >=  (1 - d) / (1 + d),  d = total variation(p, q).
# (Daliri, Musco, Suresh 2025, "Coupling without communication and drafter-invariant speculative
# decoding", arXiv 2408.07978.)
# Match is the same test of a draft that took the likeliest tokens: the target's token is a draw from
# p, and the guess x is kept with probability p(x).
def verify_coupled(
    rows: Rows, draft: Sequence[int], sampler: Sampler, position: int, watch: Watch | None = None
) -> Verdict:
    """Keep the draft while it equals the token that plain sampling with this seed would emit."""

    def decide(offset: int, row: Row, guess: int | None) -> int:
        seen: list[Distribution] = []

        def pick(law: Distribution, attempt: int) -> int:
            seen.append(law)
            return gumbel_pick(sampler.sampling.seed, position + offset, law, attempt)

        token = draw(sampler, row, pick, position + offset)
        if watch is not None:
            if guess is not None:
                watch(TokenDecision(guess, token == guess, seen[0].probability(guess), {}))
            if token != guess:
                watch(TokenDecision(token, None, seen[-1].probability(token), {}))
        return token

    return keep_while_equal(rows, draft, sampler, decide)


def gumbel_pick(seed: int, position: int, law: Distribution, attempt: int = 0) -> int:
    """The token that a seed draws from a law at a position."""
    if law.ids.size == 1:
        return int(law.ids[0])
    g = noise.gumbel(seed, position, law.ids if attempt == 0 else law.ids.astype(np.int64) + attempt * _SECOND_DRAW)
    return int(law.ids[np.argmax(law.logp + g)])


def coupled_choice(sampling: Sampling, position: int) -> Chooser:
    """The drafter's side of `verify_coupled` for a draft that starts at `position`.

    It takes argmax(log weight + G), with the G of `verify_coupled`.
    """

    def choose(offset: int, weights: Mapping[int, float]) -> int:
        if len(weights) == 1:
            return next(iter(weights))
        at, seed = position + offset, sampling.seed
        return max(weights, key=lambda x: math.log(weights[x]) + noise.gumbel_one(seed, at, x))

    return choose


# Rejection. A token x drawn from q is kept with probability min(1, p(x)/q(x)); after a refusal the
# token comes from norm(max(0, p - q)). x is then emitted with probability
#     q(x) min(1, p(x)/q(x)) + (1 - sum_y min(p(y), q(y))) * norm(max(0, p - q))(x)
#   = min(p(x), q(x))        + max(0, p(x) - q(x))  =  p(x),
# and kept with probability alpha = sum_y min(p(y), q(y)).
# (Leviathan, Kalman, Matias 2023, "Fast inference from transformers via speculative decoding",
# Algorithm 1, corollary 3.6 and appendix A.1.)
# Lenience L < 1 compares with L q instead of q, so that no token's probability exceeds p(x)/L.
# (Appendix A.5.)
def verify_rejection(
    rows: Rows,
    draft: Sequence[int],
    q: Sequence[Mapping[int, float]],
    sampler: Sampler,
    position: int,
    watch: Watch | None = None,
    *,
    lenience: float = 1.0,
) -> Verdict:
    """Keep each drafted token with probability min(1, p/q), else sample norm(max(0, p - q)).

    The law is p only if draft[i] was drawn from q[i] by a number used for nothing else, as
    `rejection_choice` does, and if whether position i is in the draft was settled without looking
    at draft[i] or what follows it. A draft that was picked by a rule, or cut after a look at its
    tokens, stays exact with q[i] = {draft[i]: 1}.

    Args:
        rows, sampler, position: as in the module docstring; the rows may end where the draft has a
            token that the sampler cannot emit.
        draft: token ids.
        q: for each of them, token id -> probability, summing to 1.
        watch: see `Watch`.
        lenience: what q is multiplied by, above 0; below 1 the law is no longer p.
    """
    if len(q) != len(draft):
        raise ValueError(f"a draft of {len(draft)} tokens came with {len(q)} distributions q")
    for token, law in zip(draft, q, strict=True):
        if not (law.get(token, 0) > 0 and math.isclose(sum(law.values()), 1, rel_tol=1e-6)):
            raise ValueError(f"drafted token {token} was not drawn from its q, {dict(law)}")
    seed = sampler.sampling.seed
    guesses = zip(draft, q, strict=True)
    count = 0
    for offset, row in enumerate(rows):
        at, count = position + offset, offset + 1
        p = law_of(sampler, row, at)
        guess, law = next(guesses, (None, {}))  # past the draft: q = 0 everywhere, refuse
        if guess is not None:
            odds = p.probability(guess) / (lenience * law[guess])
            u = noise.uniform(seed, at, _ACCEPT)
            if watch is not None:
                why = {"q": law[guess], "u": u, "overlap": _overlap(p, law)}
                watch(TokenDecision(guess, u < odds, p.probability(guess), why))
            if u < odds:
                sampler.accept(guess)
                continue
        token = _draw(p.ids, _residual(p, law, lenience), noise.uniform(seed, at, _SAMPLE))
        sampler.accept(token)
        if watch is not None:
            watch(TokenDecision(token, None, p.probability(token), {}))
        return Verdict((*draft[:offset], token), offset)
    return whole(draft, count)


def rejection_choice(sampling: Sampling, position: int) -> Chooser:
    """The drafter's side of `verify_rejection` for a draft that starts at `position`.

    It draws from the weights, so q of the drafted token must be the weights, normalised.
    """

    def choose(offset: int, weights: Mapping[int, float]) -> int:
        edges = list(accumulate(weights.values()))
        u = noise.uniform(sampling.seed, position, _DRAW + offset)
        return list(weights)[bisect(edges, u * edges[-1])]

    return choose


def draw(sampler: Sampler, row: Row, pick: Draw, position: int) -> int:
    """`Sampler.draw`, with the position in its errors."""
    try:
        return sampler.draw(row, pick)
    except (BadLogits, GrammarError) as error:
        raise _placed(error, position) from error


def law_of(sampler: Sampler, row: Row, position: int) -> Distribution:
    """`Sampler.distribution`, with the position in its errors."""
    try:
        return sampler.distribution(row)
    except (BadLogits, GrammarError) as error:
        raise _placed(error, position) from error


def _placed(error: BadLogits | GrammarError, position: int) -> BadLogits | GrammarError:
    return type(error)(f"at position {position} of the text: {error}")


def probability(row: Row, token: int) -> float:
    """The probability of a token, by the softmax of the row's logits."""
    return float(np.exp(row[token] - row.max()) / np.exp(row - row.max(), dtype=np.float64).sum())


def keep_while_equal(
    rows: Rows, draft: Sequence[int], sampler: Sampler, decide: Callable[[int, Row, int | None], int]
) -> Verdict:
    """The target's own tokens up to and with the first that the draft did not guess.

    Args:
        rows, draft, sampler: as in the module docstring.
        decide: (offset, row, drafted token or None past the draft) -> the target's token.
    """
    tokens: list[int] = []
    for offset, row in enumerate(rows):
        guess = draft[offset] if offset < len(draft) else None
        token = decide(offset, row, guess)
        sampler.accept(token)
        tokens.append(token)
        if token != guess:
            return Verdict(tuple(tokens), offset)
    return whole(draft, len(tokens))


def _overlap(p: Distribution, q: Mapping[int, float]) -> float:
    """sum_x min(p(x), q(x)): the probability that a draw from q is kept."""
    return sum(min(p.probability(token), probability) for token, probability in q.items())


def _residual(p: Distribution, law: Mapping[int, float], lenience: float) -> NDArray[np.float64]:
    """max(0, p - L q) over p's tokens, not normalised; p itself when rounding leaves nothing."""
    rest = p.probs.copy()
    for token, probability in law.items():
        index = p.find(token)
        if index is not None:
            rest[index] = max(0.0, rest[index] - lenience * probability)
    return rest if rest.any() else p.probs


def _draw(ids: NDArray[np.int32], weights: NDArray[np.float64], u: float) -> int:
    """The id at height u of the cumulated weights: a draw from them, never one of weight 0."""
    edges = np.cumsum(weights)  # u <= 1 - 2^-53, so u * edges[-1] rounds to less than edges[-1]
    return int(ids[np.searchsorted(edges, u * edges[-1], side="right")])


def whole(draft: Sequence[int], rows: int) -> Verdict:
    """The verdict on a draft that was accepted whole, with the last of its `rows` rows of logits."""
    if not draft or rows != len(draft):
        raise ValueError(f"a draft of {len(draft)} tokens came with {rows} rows of logits")
    return Verdict(tuple(draft), len(draft))
