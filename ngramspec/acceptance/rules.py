"""Acceptance rules: each decides on one draft token, given the logits; `RULES` contains them by name."""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ngramspec.data import GrammarError
from ngramspec.drafting.draft import Chooser
from ngramspec.sampling.distribution import BadLogits, Distribution, gumbel_pick, uniform
from ngramspec.sampling.sampler import Sampler
from ngramspec.sampling.settings import Sampling

Row = NDArray[np.float32]
Rows = Iterable[Row]  # logits: row i follows the first i tokens of a draft


class Verdict(NamedTuple):
    """Result of verifying a draft: its accepted prefix, and one token of the target's."""

    tokens: tuple[int, ...]  # emitted token ids
    accepted: int  # number of draft tokens among them: all but the last, or all if the text ended or an error came next
    error: BadLogits | GrammarError | None = None  # error that prevented the choice of the next token


@dataclass(frozen=True, slots=True)
class TokenDecision:
    """Decision on one draft token, or on a token of the target's own."""

    token: int  # token id
    accepted: bool | None  # whether the draft token was accepted; `None` for a token of the target's own
    p: float  # probability at that position in the distribution sampled from; if greedy, by the softmax of the logits
    why: Mapping[str, float]  # numbers that the decision depends on, by name


Watch = Callable[[TokenDecision], None]
Q = Mapping[int, float]  # distribution that a draft token was drawn from; empty after the draft


class Rule:
    """A rule for one sequence. `lenience` is a factor of q, which some use; `watch` is called with each decision."""

    def __init__(self, sampler: Sampler, lenience: float = 1.0, watch: Watch | None = None) -> None:
        self.sampler, self.lenience, self.watch = sampler, lenience, watch

    def decide(self, row: Row, guess: int | None, position: int, _q: Q) -> tuple[int, bool]:
        """Return the token to emit, and whether it is the draft token, accepted; raise the errors of `Sampler.draw`.

        `guess` is `None` after the draft. `position` is the index of the token in the sequence.
        """
        raise NotImplementedError

    def observe(self, token: int, is_accepted: bool | None, p: float, **why: float) -> None:
        assert self.watch is not None
        self.watch(TokenDecision(token, is_accepted, p, why))


class Greedy(Rule):
    """Accepts the draft while it equals the most likely token; equal logits go to the lowest id.

    Plain decoding emits t_i, drawn from row_i, and only then computes row_{i+1}. As long as draft[i] = t_i, the batch
    computed the very rows that plain decoding would have; at the first difference, t_i is still right (Stern, Shazeer,
    Uszkoreit 2018, "Blockwise parallel decoding", section 3).
    """

    def decide(self, row: Row, guess: int | None, position: int, _q: Q) -> tuple[int, bool]:
        token = self.sampler.draw(row, position)
        if self.watch is not None:
            if guess is not None:
                margin = float(row[token]) - float(row[guess])
                self.observe(guess, token == guess, probability(row, guess), margin=margin)
            if token != guess:
                self.observe(token, None, probability(row, token))
        return token, token == guess


class Coupled(Rule):
    """Accepts the draft while it equals the token that plain sampling with this seed emits.

    With G_x independent standard Gumbel noise, argmax_x(log p(x) + G_x) is a draw from p. Here G is a function of
    (seed, position, x) alone, so the target's token at each position does not depend on the draft. A drafter that
    takes argmax_x(log q(x) + G_x) with the same G (`CoupledChoice`) guesses it with probability

        sum_x 1 / sum_y max(p(y)/p(x), q(y)/q(x))  >=  (1 - d) / (1 + d),  d = total variation(p, q)

    (Daliri, Musco, Suresh 2025, "Coupling without communication and drafter-invariant speculative decoding", arXiv
    2408.07978). Match is the same for a draft of the most likely tokens: the guess x is accepted with probability p(x).
    """

    def decide(self, row: Row, guess: int | None, position: int, _q: Q) -> tuple[int, bool]:
        if self.watch is None:
            token = self.sampler.draw(row, position)
        else:
            distributions: list[Distribution] = []
            token = self.sampler.draw(row, position, distributions)
            if guess is not None:
                self.observe(guess, token == guess, distributions[0].probability(guess))
            if token != guess:
                self.observe(token, None, distributions[-1].probability(token))
        return token, token == guess


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


EPSILON, DELTA = 0.09, 0.3  # parameters of `Typical` in Medusa's code (`posterior_threshold`, `posterior_alpha`)


class Typical(Rule):
    """A rule that accepts draft tokens with p(x) > min(epsilon, delta exp(-H(p))); otherwise the token is drawn from p.

    The threshold depends on the entropy of p: if many tokens are plausible, it is lower (Cai et al. 2024, "Medusa",
    arXiv 2401.10774, section 2.3.1).
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


def probability(row: Row, token: int) -> float:
    """Return the probability of a token by the softmax of a row of logits."""
    return float(np.exp(row[token] - row.max()) / np.exp(row - row.max(), dtype=np.float64).sum())


RULES: dict[str, type[Rule]] = {
    "greedy": Greedy,  # the tokens are those of plain greedy decoding
    "coupled": Coupled,  # the tokens are those of plain sampling with the same seed, whatever the draft
    "match": Coupled,  # the same, for drafts that were made without the noise of the seed
    "rejection": Rejection,  # the tokens are draws from the target's distribution; which ones depends on the drafts too
    "lenient": Lenient,  # greedy decoding that accepts tokens that are nearly as likely; this changes the output
    "typical": Typical,  # accepts plausible tokens; this changes the output
}
