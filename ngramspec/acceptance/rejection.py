"""`Rejection`: speculative sampling, whose tokens are draws from the target's distribution."""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from ngramspec.acceptance.rules import Q, Row, Rule
from ngramspec.drafting.draft import Chooser
from ngramspec.sampling.distribution import Distribution, uniform
from ngramspec.sampling.settings import Sampling

# Streams of `uniform`. The first two are keyed by the position decided, which happens once. The draws of a draft
# are keyed by the position where it starts and the offset in it: a position that is drafted again after a rejection
# gets a fresh number, since the old one shaped the draft that was just rejected.
_ACCEPT, _SAMPLE, _DRAW = 0, 1, 2


class Rejection(Rule):
    """Speculative sampling: accept a draft token x, drawn from q, with min(1, p(x)/q(x)), else use norm(max(0, p - q)).

    x is then emitted with probability

        q(x) min(1, p(x)/q(x)) + (1 - sum_y min(p(y), q(y))) * norm(max(0, p - q))(x)
      = min(p(x), q(x))        + max(0, p(x) - q(x))  =  p(x),

    and accepted with probability alpha = sum_y min(p(y), q(y)) (Leviathan, Kalman, Matias 2023, "Fast inference from
    transformers via speculative decoding", Algorithm 1, corollary 3.6 and appendix A.1). Lenience L < 1 compares with
    L q instead of q, so that no token's probability exceeds p(x)/L (appendix A.5).

    The tokens are draws from p only under two conditions. First, draft[i] was drawn from q[i] with a number that is not
    used for anything else, as in `rejection_choice`. Second, the decision to draft position i did not depend on
    draft[i] or later tokens. A draft that was chosen by a rule, or cut depending on its tokens, is exact with q[i] =
    {draft[i]: 1}.
    """

    def decide(self, row: Row, guess: int | None, position: int, q: Q) -> tuple[int, bool]:
        p, seed = self.sampler.distribution(row), self.sampler.sampling.seed
        if guess is not None:
            ratio = p.probability(guess) / (self.lenience * q[guess])
            u = uniform(seed, position, _ACCEPT)
            if self.watch is not None:
                overlap = sum(min(p.probability(token), chance) for token, chance in q.items())
                self.observe(guess, u < ratio, p.probability(guess), q=q[guess], u=u, overlap=overlap)
            if u < ratio:
                return guess, True
        token = _draw(p.ids, _residual(p, q, self.lenience), uniform(seed, position, _SAMPLE))
        if self.watch is not None:
            self.observe(token, None, p.probability(token))
        return token, False


def rejection_choice(sampling: Sampling, position: int) -> Chooser:
    """Return the drafter's side of `Rejection`: a draw from the weights, which are q if they are normalised."""

    def choose(offset: int, weights: Mapping[int, float]) -> int:
        edges = list(accumulate(weights.values()))
        u = uniform(sampling.seed, position, _DRAW + offset)
        return list(weights)[bisect(edges, u * edges[-1])]

    return choose


def check_q(draft: Sequence[int], q: Sequence[Q]) -> None:
    """Check the distributions that a draft was drawn from, for `Rejection`.

    Raises:
        ValueError: The number of distributions is wrong, or one lacks the token or does not sum to 1.
    """
    if len(q) != len(draft):
        raise ValueError(f"a draft of {len(draft)} tokens came with {len(q)} distributions q")
    for token, drawn_from in zip(draft, q, strict=True):
        if not (drawn_from.get(token, 0) > 0 and math.isclose(sum(drawn_from.values()), 1, rel_tol=1e-6)):
            raise ValueError(f"drafted token {token} was not drawn from its q, {dict(drawn_from)}")


def _residual(p: Distribution, q: Q, lenience: float) -> NDArray[np.float64]:
    """Return max(0, p - L q) over p's tokens, not normalised; p itself if rounding leaves nothing."""
    rest = p.probs.copy()
    for token, chance in q.items():
        index = p.find(token)
        if index is not None:
            rest[index] = max(0.0, rest[index] - lenience * chance)
    return rest if rest.any() else p.probs


def _draw(ids: NDArray[np.int32], weights: NDArray[np.float64], u: float) -> int:
    """Return the id at height u of the cumulated weights: a draw from them, never an id of weight 0."""
    edges = np.cumsum(weights)  # u <= 1 - 2^-53, so u * edges[-1] rounds to less than edges[-1]
    return int(ids[np.searchsorted(edges, u * edges[-1], side="right")])
