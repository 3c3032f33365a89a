"""The copy-oracle: the least that a recorded response could have cost a drafter that copies.

On every pass the oracle may copy one span from any earlier place in prompt and response where the preceding token
agrees. It knows how long each copy stays right, and chooses the lengths with the lowest total cost. No drafter that
copies one span of the context per pass is faster; one that splices spans, or knows other texts, may be.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ngramspec.cost.curve import CostCurve
from ngramspec.cost.given import LARGEST


def copy_lengths(prompt: Sequence[int], response: Sequence[int]) -> NDArray[np.int32]:
    """How many tokens a copy may get right at each position of the response, shape (len(response),).

    Entry i is the longest common extension of response[i:] and any earlier place after the same token, at most
    LARGEST - 1; the copy may run into what it copies. Entry 0 is 0: the prefill gives that token. Takes time
    len(response) x (len(prompt) + len(response)), in numpy.

        copy_lengths([1, 2, 3, 4], [1, 2, 3, 9])  ->  [0, 2, 1, 0]
    """
    text = np.concatenate([np.asarray(prompt, np.int32), np.asarray(response, np.int32)])
    end, start = len(text), len(prompt)
    # same[j], while p goes down: how far text[j:] and text[p:] agree. A copy at p + 1 starts right after an
    # agreement at p, and is one token shorter.
    same = np.zeros(end + 1, np.int32)
    lengths = np.zeros(len(response), np.int32)
    for p in range(end - 1, start - 1, -1):
        earlier = same[:p]
        np.multiply(same[1 : p + 1] + 1, text[:p] == text[p], out=earlier)
        if p > 0 and p + 1 < end:
            lengths[p + 1 - start] = min(LARGEST - 1, max(0, int(earlier.max()) - 1))
    return lengths


def least_cost(lengths: NDArray[np.int32], curves: Sequence[CostCurve]) -> NDArray[np.float64]:
    """The cheapest passes for a response, in units of T(1) of each curve, shape (len(curves),).

    Dynamic programming from the end: a draft of k <= lengths[i] right tokens at position i costs T(1 + k) and
    leads to position i + k + 1.

    Args:
        lengths: as from `copy_lengths`.
        curves: what a pass costs.
    """
    total = len(lengths)
    passes = np.array([[curve.ratio(size) for size in range(1, LARGEST + 1)] for curve in curves])
    cost = np.zeros((len(curves), total + 1))
    for i in range(total - 1, 0, -1):
        most = min(int(lengths[i]), total - 1 - i)
        if most == 0:
            cost[:, i] = passes[:, 0] + cost[:, i + 1]
        else:
            cost[:, i] = (passes[:, : most + 1] + cost[:, i + 1 : i + most + 2]).min(axis=1)
    least: NDArray[np.float64] = cost[:, min(1, total)]
    return least
