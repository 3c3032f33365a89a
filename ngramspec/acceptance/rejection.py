"""Rules whose tokens depend on the drafts: `Rejection`, and `Lenient` and `Typical`, which change the output."""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from ngramspec.acceptance.rules import Q, Row, Rule, probability
from ngramspec.drafting.draft import Chooser
from ngramspec.sampling.distribution import Distribution, gumbel_pick, uniform
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
    """Raise a ValueError if a distribution is missing, or lacks the draft token, or does not sum to 1."""
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


class Lenient(Rule):
    """A rule for temperature 0 that accepts draft tokens with p(x) >= L max p; otherwise the most likely token is used.

    At temperature 0 one token has the whole probability, so the rule compares the probabilities before the temperature
    (Leviathan, Kalman, Matias 2023, appendix A.5).
    """

    def decide(self, row: Row, guess: int | None, position: int, _q: Q) -> tuple[int, bool]:
        best = self.sampler.draw(row, position)
        if guess is not None:
            margin, slack = float(row[best]) - float(row[guess]), -math.log(self.lenience)
            if self.watch is not None:
                self.observe(guess, margin <= slack, probability(row, guess), margin=margin, slack=slack)
            if margin <= slack:
                return guess, True
        if self.watch is not None:
            self.observe(best, None, probability(row, best))
        return best, False


EPSILON, DELTA = 0.09, 0.3
"""Parameters of typical acceptance, as in Medusa's code (`posterior_threshold`, `posterior_alpha`)."""


class Typical(Rule):
    """A rule that accepts draft tokens with p(x) > min(epsilon, delta exp(-H(p))); otherwise the token is drawn from p.

    The threshold depends on the entropy of p: if many tokens are plausible, it is lower (Cai et al. 2024,
    "Medusa: simple LLM inference acceleration framework with multiple decoding heads", arXiv 2401.10774, section
    2.3.1).
    """

    def decide(self, row: Row, guess: int | None, position: int, _q: Q) -> tuple[int, bool]:
        p = self.sampler.distribution(row)
        if guess is not None:
            positive = p.probs[p.probs > 0]
            threshold = min(EPSILON, DELTA * math.exp(float((positive * np.log(positive)).sum())))
            is_kept = p.probability(guess) > threshold
            if self.watch is not None:
                self.observe(guess, is_kept, p.probability(guess), threshold=threshold)
            if is_kept:
                return guess, True
        token = gumbel_pick(self.sampler.sampling.seed, position, p)
        if self.watch is not None:
            self.observe(token, None, p.probability(token))
        return token, False
