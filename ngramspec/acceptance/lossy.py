"""Acceptance that changes the output: opt-in, and labelled so wherever it is used.

Rows, draft, sampler and position are as in `ngramspec.acceptance.rules`. Lenience at a temperature above 0 is
`verify_rejection(lenience=)`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ngramspec.acceptance.rules import (
    Row,
    Rows,
    TokenDecision,
    Verdict,
    Watch,
    draw,
    gumbel_pick,
    keep_while_equal,
    law_of,
    probability,
    whole,
)
from ngramspec.sampling.sampler import Sampler

EPSILON, DELTA = 0.09, 0.3
"""Of typical acceptance, as in Medusa's code (`posterior_threshold`, `posterior_alpha`)."""


# At temperature 0 the law is a point mass, which leaves nothing to be lenient about. The probabilities
# before that are compared instead: a token at least L times as likely as the best one is good enough.
# (Leviathan, Kalman, Matias 2023, appendix A.5.)
def verify_lenient_greedy(
    rows: Rows, draft: Sequence[int], lenience: float, sampler: Sampler, position: int, watch: Watch | None = None
) -> Verdict:
    """Keep each drafted token with p(x) >= L max p; the target's own token is the likeliest."""
    slack = -math.log(lenience)

    def decide(offset: int, row: Row, guess: int | None) -> int:
        best = draw(sampler, row, lambda law, _attempt: int(law.ids[0]), position + offset)
        if guess is not None:
            margin = float(row[best]) - float(row[guess])
            kept = margin <= slack
            if watch is not None:
                watch(TokenDecision(guess, kept, probability(row, guess), {"margin": margin, "slack": slack}))
            if kept:
                return guess
        if watch is not None:
            watch(TokenDecision(best, None, probability(row, best), {}))
        return best

    return keep_while_equal(rows, draft, sampler, decide)


# The entropy of p sets the bar: where many tokens are plausible, a plausible one will do.
# (Cai et al. 2024, "Medusa: simple LLM inference acceleration framework with multiple decoding
# heads", arXiv 2401.10774, section 2.3.1.)
def verify_typical(
    rows: Rows, draft: Sequence[int], sampler: Sampler, position: int, watch: Watch | None = None
) -> Verdict:
    """Keep each drafted token with p(x) > min(epsilon, delta exp(-H(p))); else the token is a draw from p."""
    count = 0
    for offset, row in enumerate(rows):
        at, count = position + offset, offset + 1
        p = law_of(sampler, row, at)
        if offset < len(draft):
            some = p.probs[p.probs > 0]
            guess, bar = draft[offset], min(EPSILON, DELTA * math.exp(float((some * np.log(some)).sum())))
            kept = p.probability(guess) > bar
            if watch is not None:
                watch(TokenDecision(guess, kept, p.probability(guess), {"threshold": bar}))
            if kept:
                sampler.accept(guess)
                continue
        token = gumbel_pick(sampler.sampling.seed, at, p)
        sampler.accept(token)
        if watch is not None:
            watch(TokenDecision(token, None, p.probability(token), {}))
        return Verdict((*draft[:offset], token), offset)
    return whole(draft, count)
