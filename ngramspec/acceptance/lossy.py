"""The rules that change the output: `Lenient` greedy decoding, and `Typical` acceptance."""

from __future__ import annotations

import math

import numpy as np

from ngramspec.acceptance.rules import Q, Row, Rule, probability
from ngramspec.sampling.distribution import gumbel_pick


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
