"""How undecided a model is: the entropy of the law that its logits stand for."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray


def normalised_entropy(row: NDArray[np.float32]) -> float:
    """Entropy of the softmax of logits of shape (n_vocab,), n_vocab at least 2, over ln(n_vocab): 0 to 1.

    A logit of -inf is a token of probability 0. nan if a logit is nan or inf, or all are -inf. O(n_vocab), in
    float32: some 0.15 ms for 150,000 tokens.
    """
    largest = row.max()  # nan if there is one
    if not math.isfinite(largest):
        return math.nan
    gap = row - largest
    # No more than 1e-35 each, and no -inf * 0 below.
    np.maximum(gap, np.float32(-80.0), out=gap)
    weights = np.exp(gap)
    total = float(weights.sum())
    # H = ln(sum of e^g) - sum of g e^g / sum of e^g, for g = z - max(z).
    entropy = math.log(total) - float(weights.dot(gap)) / total
    return min(1.0, max(0.0, entropy / math.log(row.size)))
