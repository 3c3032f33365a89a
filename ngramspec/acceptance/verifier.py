"""How drafts are to be accepted: `Acceptance`, and the `RuleVerifier` that applies the rule it comes to.

Beside the rules of `ngramspec.acceptance.rules` there are some that are asked for by name, with the same arguments:

    rejection  the emitted tokens are draws from the target's distribution; which ones depends on the drafts too
    lenience   changes the output: good tokens will do, not the target's choice alone
    typical    changes the output: plausible tokens will do
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ngramspec.acceptance.rules import (
    Row,
    Rows,
    TokenDecision,
    Verdict,
    Watch,
    coupled_choice,
    likeliest,
    probability,
    verify_coupled,
    verify_each,
    verify_greedy,
)
from ngramspec.drafting.draft import Chooser, Draft
from ngramspec.errors import GrammarError
from ngramspec.sampling.distribution import BadLogits, Distribution, gumbel_pick, uniform
from ngramspec.sampling.sampler import Sampler
from ngramspec.sampling.settings import Sampling

METHODS = ("greedy", "coupled", "match", "rejection")


@dataclass(frozen=True, slots=True)
class Acceptance:
    """How drafts are accepted. Raises ValueError for a value out of range, or options that contradict each other."""

    method: str | None = None  # one of `METHODS`; None: greedy at temperature 0, rejection with lenience, else coupled
    lenience: float = 1.0  # above 0; below 1 drafted tokens are accepted more often than their probabilities allow
    typical: bool = False  # typical acceptance, as Medusa does it

    def __post_init__(self) -> None:
        if self.method is not None and self.method not in METHODS:
            raise ValueError(f"acceptance must be one of {', '.join(METHODS)}, got {self.method!r}")
        if not 0 < self.lenience <= 1:
            raise ValueError(f"lenience must be above 0 and at most 1 (1: off), got {self.lenience}")
        if self.lenience < 1 and self.method in ("coupled", "match"):
            raise ValueError(
                f"lenience has no effect with acceptance {self.method!r}; use 'rejection', or temperature 0"
            )
        if self.typical and (self.lenience < 1 or self.method is not None):
            raise ValueError("typical acceptance cannot be combined with lenience or another acceptance rule")

    @property
    def lossy(self) -> str | None:
        """Description of the setting that changes the output, if any."""
        if self.typical:
            return "typical acceptance"
        return f"lenience {self.lenience:g}" if self.lenience < 1 else None

    def rule(self, sampling: Sampling, *, ruled: bool = False) -> str:
        """Return the rule to apply: one of `METHODS`, or "typical".

        Args:
            sampling: Settings that choose the tokens.
            ruled: True if the text keeps to `TextRules`.

        Raises:
            ValueError: the acceptance contradicts the sampling or the rules.
        """
        if self.method == "greedy" and not sampling.greedy:
            raise ValueError(f"acceptance 'greedy' requires temperature 0, got {sampling.temperature}")
        if sampling.selects and (self.method == "rejection" or self.lossy):
            raise ValueError(
                f"mirostat cannot be combined with {self.lossy or 'rejection sampling'}: it samples by itself"
            )
        if sampling.greedy and self.typical:
            raise ValueError("typical acceptance requires a temperature above 0")
        if sampling.greedy and self.lossy and (sampling.moves_logits or ruled):
            others = "a reasoning budget or other rules" if ruled else "penalties, logit biases or a grammar"
            raise ValueError(f"lenience at temperature 0 cannot be combined with {others}")
        if sampling.greedy:
            # With all mass on one token all methods emit the same tokens, and greedy does it without noise.
            return "greedy"
        if self.typical:
            return "typical"
        if sampling.selects or self.method == "match":
            return "match"
        return "rejection" if self.method == "rejection" or self.lossy else "coupled"


class Verifier(Protocol):
    """Interface that decides on the tokens of a sequence; `RuleVerifier` uses a model's logits."""

    fixed_length: bool  # whether a draft's length must be settled before its tokens are drawn; see `Drafter.propose`

    def choose(self, position: int) -> Chooser | None: ...

    def verify(self, rows: Rows, draft: Draft, position: int) -> Verdict: ...


class RuleVerifier:
    """Verifies the drafts of one text. Raises ValueError for an acceptance that contradicts the sampling.

    Args:
        sampler: chooses the tokens; it has begun the text.
        acceptance: how drafts are accepted, or the method's name.
        watch: is told of every judgement.
    """

    def __init__(
        self, sampler: Sampler, acceptance: Acceptance | str | None = None, watch: Watch | None = None
    ) -> None:
        how = acceptance if isinstance(acceptance, Acceptance) else Acceptance(acceptance)
        self.rule, self._lenience = how.rule(sampler.sampling), how.lenience
        self.fixed_length = self.rule == "rejection"
        self.sampler = sampler
        self._watch = watch

    def choose(self, position: int) -> Chooser | None:
        """Return the chooser for a draft whose first token has index `position`."""
        if self.rule == "coupled":
            return coupled_choice(self.sampler.sampling, position)
        return rejection_choice(self.sampler.sampling, position) if self.rule == "rejection" else None

    def verify(self, rows: Rows, draft: Draft, position: int) -> Verdict:
        """Verify a draft; an empty one: just choose a token.

        Raises BadLogits and GrammarError, with the position, at the first row only. At a later one the verdict holds
        the error and what was accepted before, which plain decoding would have emitted.
        """
        read = 0

        def counted() -> Iterator[Row]:
            nonlocal read
            for row in rows:
                read += 1
                yield row

        try:
            return self._verify(counted(), draft, position)
        except (BadLogits, GrammarError) as error:
            # A row is read only after every row before it has accepted its drafted token.
            accepted = read - 1
            placed = type(error)(f"at position {position + accepted} of the text: {error}")
            if not accepted:
                raise placed from error
            return Verdict(draft.tokens[:accepted], accepted, placed)

    def _verify(self, rows: Rows, draft: Draft, position: int) -> Verdict:
        """Apply the rule."""
        tokens, sampler, watch, lenience = draft.tokens, self.sampler, self._watch, self._lenience
        if self.rule == "rejection":
            return verify_rejection(rows, tokens, draft.q, sampler, position, watch, lenience=lenience)
        if self.rule == "typical":
            return verify_typical(rows, tokens, sampler, position, watch)
        if self.rule != "greedy":
            return verify_coupled(rows, tokens, sampler, position, watch)
        if lenience < 1:
            return verify_lenient_greedy(rows, tokens, sampler, position, watch, lenience=lenience)
        return verify_greedy(rows, tokens, sampler, position, watch)


# --------------------------------------------------------------------------- rules that are asked for by name


# Streams of `uniform`. The first two are keyed by the position decided, which happens once. The draws of a draft
# are keyed by the position where it starts and the offset in it: a position that is drafted again after a refusal gets
# a fresh number, since the old one shaped the draft that was just judged.
_ACCEPT, _SAMPLE, _DRAW = 0, 1, 2

EPSILON, DELTA = 0.09, 0.3  # of typical acceptance, as in Medusa's code (`posterior_threshold`, `posterior_alpha`)


# Rejection. A token x drawn from q is kept with probability min(1, p(x)/q(x)); after a refusal the
# token comes from norm(max(0, p - q)). x is then emitted with probability
#     q(x) min(1, p(x)/q(x)) + (1 - sum_y min(p(y), q(y))) * norm(max(0, p - q))(x)
#   = min(p(x), q(x))        + max(0, p(x) - q(x))  =  p(x),
# and kept with probability alpha = sum_y min(p(y), q(y)).
# (Leviathan, Kalman, Matias 2023, "Fast inference from transformers via speculative decoding",
# Algorithm 1, corollary 3.6 and appendix A.1.)
# Lenience L < 1 compares with L q instead of q, so that no token's probability exceeds p(x)/L.
# (Appendix A.5.)
def verify_rejection(
    rows: Rows,
    draft: Sequence[int],
    q: Sequence[Mapping[int, float]],
    sampler: Sampler,
    position: int,
    watch: Watch | None = None,
    *,
    lenience: float = 1.0,
) -> Verdict:
    """Keep each drafted token with probability min(1, p/q), else sample norm(max(0, p - q)).

    The tokens are draws from p only if draft[i] was drawn from q[i] by a number used for nothing else, as
    `rejection_choice` does, and if whether position i is in the draft was settled without looking at draft[i] or what
    follows it. A draft that was picked by a rule, or cut after a look at its tokens, stays exact with q[i] =
    {draft[i]: 1}.

    Args:
        q: for each drafted token the distribution it was drawn from: token id -> probability, summing to 1.
        lenience: what q is multiplied by, above 0; below 1 the tokens are no longer draws from p.
    """
    if len(q) != len(draft):
        raise ValueError(f"a draft of {len(draft)} tokens came with {len(q)} distributions q")
    for token, drawn_from in zip(draft, q, strict=True):
        if not (drawn_from.get(token, 0) > 0 and math.isclose(sum(drawn_from.values()), 1, rel_tol=1e-6)):
            raise ValueError(f"drafted token {token} was not drawn from its q, {dict(drawn_from)}")
    seed = sampler.sampling.seed

    def decide(offset: int, row: Row, guess: int | None) -> tuple[int, bool]:
        p, at = sampler.distribution(row), position + offset
        q_here: Mapping[int, float] = {}  # past the draft: q = 0 everywhere
        if guess is not None:
            q_here = q[offset]
            ratio = p.probability(guess) / (lenience * q_here[guess])
            u = uniform(seed, at, _ACCEPT)
            if watch is not None:
                overlap = sum(min(p.probability(token), chance) for token, chance in q_here.items())
                why = {"q": q_here[guess], "u": u, "overlap": overlap}
                watch(TokenDecision(guess, u < ratio, p.probability(guess), why))
            if u < ratio:
                return guess, True
        token = _draw(p.ids, _residual(p, q_here, lenience), uniform(seed, at, _SAMPLE))
        if watch is not None:
            watch(TokenDecision(token, None, p.probability(token), {}))
        return token, False

    return verify_each(rows, draft, sampler, decide)


def rejection_choice(sampling: Sampling, position: int) -> Chooser:
    """The drafter's side, for a draft that starts at `position`: a draw from the weights, which normalised are q."""

    def choose(offset: int, weights: Mapping[int, float]) -> int:
        edges = list(accumulate(weights.values()))
        u = uniform(sampling.seed, position, _DRAW + offset)
        return list(weights)[bisect(edges, u * edges[-1])]

    return choose


def _residual(p: Distribution, q: Mapping[int, float], lenience: float) -> NDArray[np.float64]:
    """max(0, p - L q) over p's tokens, not normalised; p itself when rounding leaves nothing."""
    rest = p.probs.copy()
    for token, chance in q.items():
        index = p.find(token)
        if index is not None:
            rest[index] = max(0.0, rest[index] - lenience * chance)
    return rest if rest.any() else p.probs


def _draw(ids: NDArray[np.int32], weights: NDArray[np.float64], u: float) -> int:
    """The id at height u of the cumulated weights: a draw from them, never one of weight 0."""
    edges = np.cumsum(weights)  # u <= 1 - 2^-53, so u * edges[-1] rounds to less than edges[-1]
    return int(ids[np.searchsorted(edges, u * edges[-1], side="right")])


# Lenience at temperature 0: p is then a point mass, which leaves nothing to be lenient about. The probabilities
# before that are compared instead: a token at least L times as likely as the best one is good enough.
# (Leviathan, Kalman, Matias 2023, appendix A.5.)
def verify_lenient_greedy(
    rows: Rows, draft: Sequence[int], sampler: Sampler, position: int, watch: Watch | None = None, *, lenience: float
) -> Verdict:
    """Keep each drafted token with p(x) >= L max p; the target's own token is the most likely."""
    slack = -math.log(lenience)

    def decide(_offset: int, row: Row, guess: int | None) -> tuple[int, bool]:
        best = sampler.draw(row, likeliest)
        if guess is not None:
            margin = float(row[best]) - float(row[guess])
            kept = margin <= slack
            if watch is not None:
                watch(TokenDecision(guess, kept, probability(row, guess), {"margin": margin, "slack": slack}))
            if kept:
                return guess, True
        if watch is not None:
            watch(TokenDecision(best, None, probability(row, best), {}))
        return best, False

    return verify_each(rows, draft, sampler, decide)


# The entropy of p sets the bar: where many tokens are plausible, a plausible one will do. (Cai et al. 2024, "Medusa:
# simple LLM inference acceleration framework with multiple decoding heads", arXiv 2401.10774, section 2.3.1.)
def verify_typical(
    rows: Rows, draft: Sequence[int], sampler: Sampler, position: int, watch: Watch | None = None
) -> Verdict:
    """Keep each drafted token with p(x) > min(epsilon, delta exp(-H(p))); else the token is a draw from p."""

    def decide(offset: int, row: Row, guess: int | None) -> tuple[int, bool]:
        p = sampler.distribution(row)
        if guess is not None:
            some = p.probs[p.probs > 0]
            bar = min(EPSILON, DELTA * math.exp(float((some * np.log(some)).sum())))
            kept = p.probability(guess) > bar
            if watch is not None:
                watch(TokenDecision(guess, kept, p.probability(guess), {"threshold": bar}))
            if kept:
                return guess, True
        token = gumbel_pick(sampler.sampling.seed, position + offset, p)
        if watch is not None:
            watch(TokenDecision(token, None, p.probability(token), {}))
        return token, False

    return verify_each(rows, draft, sampler, decide)
