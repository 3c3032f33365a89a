"""Logits to probabilities: top-k, top-p, min-p, temperature, exactly as llama.cpp chains them.

llama.cpp's default chain (`common/sampling.cpp`, min_keep 0; each sampler in
`src/llama-sampler.cpp`):

    top_k        keep the k largest logits (0: all)
    top_p        keep the shortest prefix, by falling logit, that holds at least top_p of the
                 probability of what top_k left
    min_p        keep logits >= largest + log(min_p): tokens at least min_p times as likely as the
                 best one
    temperature  divide by it, then softmax

Temperature comes last, so which tokens survive does not depend on it. Differences, all at the edges
of a cut: equal logits keep the lowest ids (llama.cpp: whichever its partial sort left first), and
sums and thresholds are float64 (llama.cpp: float32, where a running sum over many thousand tokens
is off by some 1e-5).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ngramspec.errors import NGramSpecError

_LARGEST_SEED = 2**64 - 1
_ROWS = 32  # tokens per column in the pre-filter of _largest


class BadLogits(NGramSpecError, ValueError):  # noqa: N818 - reads better where it is raised
    """A row of logits from which no token can be chosen."""


@dataclass(frozen=True, slots=True, eq=False)
class Distribution:
    """Probabilities of the tokens that can be sampled; every array has shape (n,).

    Attributes:
        ids: token ids, ascending.
        probs: their probabilities, all > 0, summing to 1.
        logp: natural logarithms of the probabilities.
    """

    ids: NDArray[np.int32]
    probs: NDArray[np.float64]
    logp: NDArray[np.float64]

    def find(self, token: int) -> int | None:
        """Index of a token in the arrays, or None where its probability is 0. O(log n)."""
        index = int(np.searchsorted(self.ids, token))
        return index if index < self.ids.size and self.ids[index] == token else None


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is chosen from logits. Raises ValueError for a value outside its range.

    Attributes:
        temperature: 0 is greedy decoding, 1 the model's own distribution; finite, >= 0.
        top_k: how many of the largest logits are kept; 0 keeps all.
        top_p: probability mass kept; in (0, 1], 1 keeps all.
        min_p: least probability relative to the best token's; in [0, 1], 0 keeps all.
        seed: the same seed gives the same text; 0 .. 2^64 - 1.
    """

    temperature: float = 0.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        # Written so that a nan, for which every comparison is false, fails them all.
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature is {self.temperature}, but must be finite and at least 0")
        if not (isinstance(self.top_k, int) and self.top_k >= 0):
            raise ValueError(f"top_k is {self.top_k}, but must be a whole number, at least 0 (0: off)")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}, but must be above 0 and at most 1 (1: off)")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p is {self.min_p}, but must be between 0 (off) and 1")
        if not (isinstance(self.seed, int) and 0 <= self.seed <= _LARGEST_SEED):
            raise ValueError(f"seed is {self.seed}, but must be a whole number from 0 to 2^64 - 1")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0

    def distribution(self, logits: NDArray[np.float32]) -> Distribution:
        """The law of the next token, given its logits of shape (n_vocab,).

        Greedy sampling gives all probability to the largest logit. Raises BadLogits as
        `top_token` does. O(n_vocab), plus a sort of the tokens that may be in the top_p.
        """
        if self.greedy:
            return Distribution(np.array([top_token(logits)], np.int32), np.ones(1), np.zeros(1))
        ids = _largest(logits, self.top_k or logits.size)
        values = logits[ids].astype(np.float64)
        largest = float(values.max())
        if not math.isfinite(largest):
            top_token(logits)  # tells what is wrong
        gap = values - largest  # <= 0, exactly 0 at the best
        # top_p and min_p both keep a prefix of the order by logit, so min_p may go first and leave
        # few tokens to sort, once the mass that top_p is a share of is known. The tokens below
        # (1 - top_p) * mass / n hold less than 1 - top_p together: they need no sorting either.
        target, floor = 0.0, self.min_p
        if self.top_p < 1:
            mass = float(np.exp(gap).sum())
            target, floor = self.top_p * mass, max(floor, (1 - self.top_p) * mass / gap.size)
        if floor > 0:
            likely = np.flatnonzero(gap >= math.log(floor))
            ids, gap = ids[likely], gap[likely]
        if self.top_p < 1:
            covered = np.cumsum(np.exp(np.sort(gap)[::-1]))
            prefix = _largest(gap, int(np.searchsorted(covered, target)) + 1)
            ids, gap = ids[prefix], gap[prefix]
        with np.errstate(over="ignore"):  # a tiny temperature: -inf, and so probability 0, is right
            gap = gap / self.temperature
        weights = np.exp(gap)
        total = float(weights.sum())
        probs, logp = weights / total, gap - math.log(total)
        if not probs.all():  # a logit of -inf, or one that underflows
            some = np.flatnonzero(probs)
            ids, probs, logp = ids[some], probs[some], logp[some]
        return Distribution(ids.astype(np.int32), probs, logp)


def top_token(logits: NDArray[np.float32]) -> int:
    """Id of the largest logit of a row of shape (n_vocab,), the lowest id among equals.

    Raises:
        BadLogits: a logit is nan or +inf, or all are -inf.
    """
    best = int(np.argmax(logits))  # a nan wins, so a look at the winner is the whole check
    if math.isfinite(logits[best]):
        return best
    if logits[best] == -math.inf:
        raise BadLogits(f"all {logits.size} logits are -inf: there is no token to choose")
    raise BadLogits(f"the logit of token {best} is {logits[best]}: the model's output is broken")


def _largest(values: NDArray[np.floating], count: int) -> NDArray[np.intp]:
    """Ascending indices of the `count` largest values, the lowest indices among equals. O(n).

    A nan counts as larger than anything else; where nan fills the `count`, all indices come back.
    """
    if count >= values.size:
        return np.arange(values.size)
    some: NDArray[np.intp] | None = None
    columns = values.size // _ROWS
    if columns > 4 * count:
        # The `count` largest column maxima of a table of the values are `count` of the values, so none of the
        # `count` largest is below the last of those: one pass over the values, and little left to partition.
        filled = columns * _ROWS
        table = values[:filled].reshape(_ROWS, columns)
        maxima = table.max(axis=0)
        floor = np.partition(maxima, columns - count)[columns - count]
        high = np.flatnonzero(~(maxima < floor))
        row, column = np.divmod(np.flatnonzero(~(table.take(high, axis=1) < floor)), high.size)
        some = row * columns + high[column]
        if filled < values.size:
            some = np.concatenate((some, np.arange(filled, values.size)))
        values = values[some]
    edge = np.partition(values, values.size - count)[values.size - count]
    above = np.flatnonzero(~(values <= edge))
    ties = np.flatnonzero(values == edge)
    kept = np.sort(np.concatenate((above, ties[: count - above.size])))
    return kept if some is None else some[kept]
