"""Rows of logits, distributions over tokens, and draws from them, which depend only on seed, position and token."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ngramspec.data import NGramSpecError

_ROWS = 32  # tokens per column in the pre-filter of `largest`


class BadLogits(NGramSpecError, ValueError):  # noqa: N818 - reads better in a raise statement
    """A row of logits from which no token can be chosen."""


class NoTokenLeft(BadLogits):
    """The sampling settings exclude all tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class Distribution:
    """Probabilities of the tokens that can be sampled; every array has shape (n,)."""

    ids: NDArray[np.int32]  # token ids, ascending
    probs: NDArray[np.float64]  # their probabilities, all > 0, summing to 1
    logp: NDArray[np.float64]  # natural logarithms of the probabilities

    def find(self, token: int) -> int | None:
        """Return the index of a token in the arrays; `None` if its probability is 0. O(log n)."""
        index = int(np.searchsorted(self.ids, token))
        return index if index < self.ids.size and self.ids[index] == token else None

    def probability(self, token: int) -> float:
        index = self.find(token)
        return 0.0 if index is None else float(self.probs[index])


def point_mass(token: int) -> Distribution:
    """Return the distribution in which one token has the probability 1."""
    return Distribution(np.array([token], np.int32), np.ones(1), np.zeros(1))


def softmax(ids: NDArray[np.int32], logits: NDArray[np.float32]) -> Distribution:
    """Return the distribution of logits of shape (n,), one of them finite, in float64, without impossible tokens."""
    order = np.argsort(ids)
    ids, gap = ids[order], logits[order].astype(np.float64)
    gap -= gap.max()
    weights = np.exp(gap)
    total = float(weights.sum())
    probs, logp = weights / total, gap - math.log(total)
    if not probs.all():
        positive = np.flatnonzero(probs)
        ids, probs, logp = ids[positive], probs[positive], logp[positive]
    return Distribution(ids, probs, logp)


def top_token(logits: NDArray[np.float32]) -> int:
    """Return the id of the largest logit of a row, the lowest among equals; a BadLogits means a broken row."""
    best = int(logits.argmax())  # argmax returns a nan if there is one, so only this logit is checked
    if math.isfinite(logits[best]):
        return best
    if logits[best] == -math.inf:
        raise BadLogits(f"all {logits.size} logits are -inf: there is no token to choose")
    raise BadLogits(f"the logit of token {best} is {logits[best]}: the model's output is broken")


def largest(values: NDArray[np.floating], count: int) -> NDArray[np.intp]:
    """Return the ascending indices of the `count` largest values, the lowest indices among equals. O(n).

    A nan counts as larger than other values. If there are at least `count` nan, all indices are returned.
    """
    if count >= values.size:
        return np.arange(values.size)
    candidates: NDArray[np.intp] | None = None
    columns = values.size // _ROWS
    if columns > 4 * count:
        # The `count` largest column maxima of a table of the values are `count` of the values. So none of the `count`
        # largest values is below the smallest of these maxima. This needs one pass over the values, and few remain for
        # the partition.
        n_full = columns * _ROWS
        table = values[:n_full].reshape(_ROWS, columns)
        maxima = table.max(axis=0)
        floor = np.partition(maxima, columns - count)[columns - count]
        high = np.flatnonzero(~(maxima < floor))
        row, column = np.divmod(np.flatnonzero(~(table.take(high, axis=1) < floor)), high.size)
        candidates = row * columns + high[column]
        if n_full < values.size:
            candidates = np.concatenate((candidates, np.arange(n_full, values.size)))
        values = values[candidates]
    edge = np.partition(values, values.size - count)[values.size - count]
    above = np.flatnonzero(~(values <= edge))
    ties = np.flatnonzero(values == edge)
    result = np.sort(np.concatenate((above, ties[: count - above.size])))
    return result if candidates is None else candidates[result]


def entropy_ratio(row: NDArray[np.float32]) -> float:
    """Return the entropy of the softmax of logits, shape (n_vocab,), over ln(n_vocab); nan if a logit is broken."""
    largest = row.max()  # nan if the row contains one
    if not math.isfinite(largest):
        return math.nan
    gap = row - largest
    # The clipped terms are at most 1e-35 each, and the clipping avoids -inf * 0 below.
    np.maximum(gap, np.float32(-80.0), out=gap)
    weights = np.exp(gap)
    total = float(weights.sum())
    # H = ln(sum of e^g) - sum of g e^g / sum of e^g, for g = z - max(z).
    entropy = math.log(total) - float(weights.dot(gap)) / total
    return min(1.0, max(0.0, entropy / math.log(row.size)))


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Natural logarithms of probabilities at one position, by the softmax of the target's logits."""

    token: int  # id of the emitted token
    logprob: float
    # (token id, logprob) of the most likely tokens, best first, the lowest id among equals.
    top: tuple[tuple[int, float], ...]


def logprobs(row: NDArray[np.float32], token: int, count: int) -> Logprobs:
    """Return logprobs of an emitted token and of the `count` most likely ones, from logits of shape (n_vocab,)."""
    best = float(row.max())
    total = best + float(np.log(np.exp(row - np.float32(best)).sum(dtype=np.float64)))
    ids = largest(row, count) if count else np.empty(0, np.intp)
    ids = ids[np.argsort(-row[ids], kind="stable")]
    return Logprobs(token, float(row[token]) - total, tuple((int(i), float(row[i]) - total) for i in ids))


def distribution_logprobs(distribution: Distribution, token: int, count: int) -> Logprobs:
    """Return logprobs of an emitted token and of up to `count` most likely ones, from a sampled distribution."""
    order = np.argsort(-distribution.logp, kind="stable")[:count]
    index = distribution.find(token)
    logprob = -math.inf if index is None else float(distribution.logp[index])
    return Logprobs(token, logprob, tuple((int(distribution.ids[i]), float(distribution.logp[i])) for i in order))


# --------------------------------------------------------------------------- draws with a seed
# Plain and drafted decoding must read the same noise, whichever positions a pass covers and whichever token ids remain
# after top-k. So the noise is a hash of the counters (Salmon, Moraes, Dror, Shaw 2011, "Parallel random numbers: as
# easy as 1, 2, 3"). The hash is a chain of SplitMix64 outputs (Steele, Lea, Flood 2014, "Fast splittable pseudorandom
# number generators", OOPSLA), with the finaliser that David Stafford tuned for counters ("Mix13"):
#
#     h0 = 0,  h1 = out(h0, seed),  h2 = out(h1, position),  bits = out(h2, id)
#     out(s, n) = mix(s + (n + 1) * 0x9E3779B97F4A7C15)     the n-th output of SplitMix64 started at s
#
# Along each counter the values are consecutive outputs of a generator that passes TestU01's BigCrush. Every step is a
# bijection of 64 bits. So two rows (same seed, other position) overlap only by chance, about once in 2^45 pairs of rows
# of 2^18 ids. The hash is not suitable for cryptography.


_MASK = 0xFFFFFFFFFFFFFFFF
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, made odd: SplitMix64's increment
_FIRST_STREAM = 1 << 63  # no token id reaches it, so `uniform` and `gumbel` never share a value

# Added to token ids, which are all smaller. So the second draw, after a token that the grammar forbids, has new noise.
_SECOND_DRAW = 1 << 32


def _out(state: int, counter: Any) -> Any:
    """Return output number `counter` (from 0) of SplitMix64 started at `state`, for ints or for uint64 arrays."""
    z = ((counter + 1) * _GOLDEN + state) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def _row(seed: int, position: int) -> int:
    state: int = _out(_out(0, seed & _MASK), position & _MASK)
    return state


def gumbel(seed: int, position: int, ids: NDArray[np.integer]) -> NDArray[np.float64]:
    """Return standard Gumbel noise of each token id at one position: -log(-log u), u uniform in (0, 1).

    argmax(log p + gumbel) is a draw from p (the Gumbel-max trick: Yellott 1977; Maddison, Tarlow, Minka 2014, "A*
    sampling"). u has 52 random bits, centred, so it is never 0 or 1, and the noise is between -3.61 and 36.74.
    """
    bits = _out(_row(seed, position), ids.astype(np.uint64))
    u = ((bits >> 12).astype(np.float64) + 0.5) * 2.0**-52
    noise: NDArray[np.float64] = -np.log(-np.log(u))
    return noise


def gumbel_pick(seed: int, position: int, p: Distribution, attempt: int = 0) -> int:
    """Return the token that a seed draws from p at a position."""
    if p.ids.size == 1:
        return int(p.ids[0])
    g = gumbel(seed, position, p.ids if attempt == 0 else p.ids.astype(np.int64) + attempt * _SECOND_DRAW)
    return int(p.ids[np.argmax(p.logp + g)])


def gumbel_one(seed: int, position: int, token: int) -> float:
    """Return `gumbel` of one token id, bit for bit; the logarithm is numpy's, because the C library's may differ."""
    u = ((_out(_row(seed, position), token) >> 12) + 0.5) * 2.0**-52
    return float(-np.log(-np.log(u)))


def uniform(seed: int, position: int, stream: int) -> float:
    """Return number `stream` (from 0) of a position: uniform in (0, 1), at least 2^-53 away from both ends."""
    bits: int = _out(_row(seed, position), _FIRST_STREAM + stream)
    return ((bits >> 12) + 0.5) * 2.0**-52
