"""Where a drafted text leaves the plain one, and whether the batch size explains it.

The last bits of logits may depend on the batch size (see `ngramspec.cost.kernels`). A difference counts as explained by
that only if two things are shown. Each of the two tokens is what the sampler takes, with the noise of that place, from
the logits of its own pass. And some logits within the probe's bound of plain decoding's make the sampler take the
drafted token.
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
        needed: how far any of these logits must move at most for the drafted token to be taken; in greedy decoding half
            the gap between the two. None if `bound` is not enough, or if a token is not what the sampler takes.
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

    A row within the distance returned does make the sampler take the drafted token. That no closer row does is certain
    only without filters.

    Args:
        draw: the sampler at that place.
        plain_row, drafted_row: the logits there, of each of the two passes.
        plain, drafted: the tokens taken.
        bound: the largest movement that counts; 0: none counts.
    """
    if bound <= 0 or draw(plain_row) != plain or draw(drafted_row) != drafted:
        return None

    def taken(distance: float) -> bool:
        step = np.float32(distance)
        # Without filters nothing within the distance favours a token more than this; filters look at other tokens too.
        favoured = plain_row - step
        favoured[drafted] = plain_row[drafted] + step
        # These are the drafted pass's logits, moved no further than the distance from the plain ones.
        clipped = np.clip(drafted_row, plain_row - step, plain_row + step)
        return draw(favoured) == drafted or draw(clipped) == drafted

    if not taken(bound):
        return None
    low, high = 0.0, bound
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if taken(middle) else (middle, high)
    return high
