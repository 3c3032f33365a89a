"""Where a drafted text leaves the plain one, and whether the batch size explains it.

Logits may depend in their last bits on the batch size (see `ngramspec.cost.kernels`). That explains a difference only
if it can be shown to: each token is what the sampler takes, with the noise of that place, from the logits of its own
pass; and there are logits within the probe's bound of those that plain decoding had from which it takes the drafted
token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ngramspec.backend import Logits

Draw = Callable[[Logits], int]
"""The token that is taken from logits of shape (n_vocab,), at one place of a text."""

_BISECTIONS = 12


@dataclass(frozen=True, slots=True)
class TextDifference:
    """The first difference of two texts.

    Attributes:
        position: how many tokens were equal before.
        plain, drafted: the token ids there; None where that text had ended.
        plain_text, drafted_text: what they stand for.
        plain_logit, drafted_logit: their logits in plain decoding.
        bound: how far batch sizes move a logit here, by the probe; 0 in exact mode.
        needed: how far these logits must move, none by more than this, for the drafted token to be taken: in greedy
            decoding half of what the two are apart. None if `bound` is not enough, or a token is not the sampler's.
    """

    position: int
    plain: int | None
    drafted: int | None
    plain_text: str
    drafted_text: str
    plain_logit: float | None
    drafted_logit: float | None
    bound: float
    needed: float | None

    @property
    def explained(self) -> bool:
        """Whether the batch size alone can make the difference."""
        return self.needed is not None


def movement(
    draw: Draw, plain_row: Logits, drafted_row: Logits, plain: int, drafted: int, bound: float
) -> float | None:
    """How far logits must move for the drafted token to be taken: `TextDifference.needed`.

    What is found is shown by a row within that distance; that there is no closer one is certain only without filters.

    Args:
        draw: the sampler at that place.
        plain_row, drafted_row: the logits there, of each of the two passes.
        plain, drafted: the tokens taken.
        bound: the farthest that counts; 0: nothing does.
    """
    if bound <= 0 or draw(plain_row) != plain or draw(drafted_row) != drafted:
        return None

    def taken(distance: float) -> bool:
        step = np.float32(distance)
        # Nothing within the distance does more for a token than this, but for filters, which look at others too.
        favoured = plain_row - step
        favoured[drafted] = plain_row[drafted] + step
        # And this is what the drafted pass had, as far as the distance allows.
        clipped = np.clip(drafted_row, plain_row - step, plain_row + step)
        return draw(favoured) == drafted or draw(clipped) == drafted

    if not taken(bound):
        return None
    low, high = 0.0, bound
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if taken(middle) else (middle, high)
    return high
