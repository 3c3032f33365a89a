"""Counter-based randomness: every value is a pure function of its counters, with no state to carry.

Plain and drafted decoding must read the same noise, whichever positions a pass covers and whichever token ids survive
top-k there: a hash of the counters gives that (Salmon, Moraes, Dror, Shaw 2011, "Parallel random numbers: as easy as 1,
2, 3"). It is a chain of SplitMix64 outputs (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators",
OOPSLA), with the finaliser that David Stafford tuned for counters ("Mix13"):

    h0 = 0,  h1 = out(h0, seed),  h2 = out(h1, position),  bits = out(h2, id)
    out(s, n) = mix(s + (n + 1) * 0x9E3779B97F4A7C15)     the n-th output of SplitMix64 started at s

Along each counter the values are consecutive outputs of a generator that passes TestU01's BigCrush; every step is a
bijection of 64 bits, so two rows (same seed, other position) overlap only by chance, about once in 2^45 pairs of rows
of 2^18 ids. It is not for cryptography.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from ngramspec.sampling.distribution import Distribution

_MASK = 0xFFFFFFFFFFFFFFFF
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, made odd: SplitMix64's increment
_FIRST_STREAM = 1 << 63  # no token id reaches it, so `uniform` and `gumbel` never share a value

# Added to token ids, which are all smaller: a draw that follows a token the grammar forbids has noise of its own.
_SECOND_DRAW = 1 << 32


@overload
def _out(state: int, counter: int) -> int: ...
@overload
def _out(state: int, counter: NDArray[np.uint64]) -> NDArray[np.uint64]: ...
def _out(state: int, counter: Any) -> Any:
    """Output number `counter` (from 0) of SplitMix64 started at `state`: the same of ints and of uint64 arrays."""
    z = ((counter + 1) * _GOLDEN + state) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


# Cached because a position is asked about once for each continuation, then again by the verifier.
@lru_cache(maxsize=64)
def _row(seed: int, position: int) -> int:
    return _out(_out(0, seed & _MASK), position & _MASK)


def gumbel(seed: int, position: int, ids: NDArray[np.integer]) -> NDArray[np.float64]:
    """Standard Gumbel noise of each token id at one position: -log(-log u), u uniform in (0, 1).

    argmax(log p + gumbel) is a draw from p (the Gumbel-max trick: Yellott 1977; Maddison, Tarlow,
    Minka 2014, "A* sampling"). u has 52 random bits, centred: it is never 0 or 1, and the noise
    lies between -3.61 and 36.74. Shape as that of `ids`, (n,), which are not negative.
    """
    bits = _out(_row(seed, position), ids.astype(np.uint64))
    u = ((bits >> 12).astype(np.float64) + 0.5) * 2.0**-52
    noise: NDArray[np.float64] = -np.log(-np.log(u))
    return noise


def gumbel_pick(seed: int, position: int, p: Distribution, attempt: int = 0) -> int:
    """The token that a seed draws from p at a position."""
    if p.ids.size == 1:
        return int(p.ids[0])
    g = gumbel(seed, position, p.ids if attempt == 0 else p.ids.astype(np.int64) + attempt * _SECOND_DRAW)
    return int(p.ids[np.argmax(p.logp + g)])


def gumbel_one(seed: int, position: int, token: int) -> float:
    """`gumbel` of one token id, equal to the last bit: the logarithm is numpy's, the C library's may differ."""
    u = ((_out(_row(seed, position), token) >> 12) + 0.5) * 2.0**-52
    return float(-np.log(-np.log(u)))


def uniform(seed: int, position: int, stream: int) -> float:
    """A uniform number in (0, 1), at least 2^-53 away from both ends; `stream`: which of the position's, from 0."""
    return ((_out(_row(seed, position), _FIRST_STREAM + stream) >> 12) + 0.5) * 2.0**-52
