"""Acceptance: how much of a draft the target keeps, as pure functions on arrays.

Every function takes the target's logits `rows`, an iterable of at least len(draft) + 1 rows of
shape (n_vocab,) where row i holds the logits after draft[:i]; it returns the accepted prefix of the
draft plus one token of the target's own, and touches no row past the first refusal. `position` is
the absolute index in the sequence of the token that row 0 decides. All three raise BadLogits (see
`sampling.top_token`), and ValueError when the rows run out or a draft contradicts its q.

    greedy     the emitted tokens are those of plain greedy decoding
    coupled    the emitted tokens are those of plain sampling with the same seed, whatever the
               draft; their law is the target's
    rejection  their law is the target's; which tokens come out depends on the drafts too
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ngramspec import noise
from ngramspec.draft import Choose, Draft
from ngramspec.sampling import Distribution, Sampling, top_token

Rows = Iterable[NDArray[np.float32]]

METHODS = ("greedy", "coupled", "rejection")

# Streams of `noise.uniform`. The first two are keyed by the position decided, which happens once.
# The draws of a draft are keyed by the position where the draft starts and by the offset in it: a
# position that is drafted again after a refusal gets a fresh number, since the old one shaped the
# draft that was just judged.
_ACCEPT, _SAMPLE, _DRAW = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one pass emits: the accepted prefix of the draft, then one token of the target's."""

    tokens: tuple[int, ...]

    @property
    def accepted(self) -> int:
        """How many drafted tokens were kept."""
        return len(self.tokens) - 1


# Greedy. Plain decoding emits t_i = argmax(row_i) and only then computes row_{i+1}. As long as
# draft[i] = t_i, the batch computed the very rows that plain decoding would have; at the first
# difference, t_i is still right.
# (Stern, Shazeer, Uszkoreit 2018, "Blockwise parallel decoding", section 3.)
def verify_greedy(rows: Rows, draft: Sequence[int]) -> Verdict:
    """Keep the draft while it equals the largest logit; equal logits go to the lowest id."""
    return _keep_while_equal(rows, draft, lambda _offset, row: top_token(row))


# Coupled. With G_x independent standard Gumbel noise, argmax_x(log p(x) + G_x) has law p. Here G is
# a function of (seed, position, x) alone, so the target's token at each position is fixed before
# anybody drafts, and the draft is kept while it guessed that token. A drafter that takes
# argmax_x(log q(x) + G_x) with the same G guesses it with probability
#     sum_x 1 / sum_y max(p(y)/p(x), q(y)/q(x))  >=  (1 - d) / (1 + d),  d = total variation(p, q).
# (Daliri, Musco, Suresh 2025, "Coupling without communication and drafter-invariant speculative
# decoding", arXiv 2408.07978.)
def verify_coupled(rows: Rows, draft: Sequence[int], sampling: Sampling, position: int) -> Verdict:
    """Keep the draft while it equals the token that plain sampling with this seed would emit."""

    def pick(offset: int, row: NDArray[np.float32]) -> int:
        p = sampling.distribution(row)
        g = noise.gumbel(sampling.seed, position + offset, p.ids)
        return int(p.ids[np.argmax(p.logp + g)])

    return _keep_while_equal(rows, draft, pick)


def coupled_choice(sampling: Sampling, position: int) -> Choose:
    """The drafter's side of `verify_coupled` for a draft that starts at `position`.

    It takes argmax(log weight + G), with the G of `verify_coupled`.
    """

    def choose(offset: int, weights: Mapping[int, float]) -> int:
        if len(weights) == 1:
            return next(iter(weights))
        at, seed = position + offset, sampling.seed
        return max(weights, key=lambda x: math.log(weights[x]) + noise.gumbel_one(seed, at, x))

    return choose


# Rejection. A token x drawn from q is kept with probability min(1, p(x)/q(x)); after a refusal the
# token comes from norm(max(0, p - q)). x is then emitted with probability
#     q(x) min(1, p(x)/q(x)) + (1 - sum_y min(p(y), q(y))) * norm(max(0, p - q))(x)
#   = min(p(x), q(x))        + max(0, p(x) - q(x))  =  p(x),
# and kept with probability alpha = sum_y min(p(y), q(y)).
# (Leviathan, Kalman, Matias 2023, "Fast inference from transformers via speculative decoding",
# Algorithm 1, corollary 3.6 and appendix A.1.)
def verify_rejection(
    rows: Rows,
    draft: Sequence[int],
    q: Sequence[Mapping[int, float]],
    sampling: Sampling,
    position: int,
) -> Verdict:
    """Keep each drafted token with probability min(1, p/q), else sample norm(max(0, p - q)).

    The law is p only if draft[i] was drawn from q[i] by a number used for nothing else, as
    `rejection_choice` does, and if whether position i is in the draft was settled without looking
    at draft[i] or what follows it. A draft that was picked by a rule, or cut after a look at its
    tokens, stays exact with q[i] = {draft[i]: 1}.

    Args:
        rows: as in the module docstring.
        draft: token ids.
        q: for each of them, token id -> probability, summing to 1.
        sampling: turns logits into p, and holds the seed.
        position: as in the module docstring.
    """
    if len(q) != len(draft):
        raise ValueError(f"a draft of {len(draft)} tokens came with {len(q)} distributions q")
    for token, law in zip(draft, q, strict=True):
        if not (law.get(token, 0) > 0 and math.isclose(sum(law.values()), 1, rel_tol=1e-6)):
            raise ValueError(f"drafted token {token} was not drawn from its q, {dict(law)}")
    guesses = zip(draft, q, strict=True)
    for offset, row in enumerate(rows):
        p, at = sampling.distribution(row), position + offset
        guess, law = next(guesses, (None, {}))  # past the draft: q = 0 everywhere, refuse
        index = None if guess is None else p.find(guess)
        if guess is not None and index is not None:
            odds = p.probs[index] / law[guess]
            if noise.uniform(sampling.seed, at, _ACCEPT) < odds:
                continue
        token = _draw(p.ids, _residual(p, law), noise.uniform(sampling.seed, at, _SAMPLE))
        return Verdict((*draft[:offset], token))
    raise _rows_ran_out(draft)


def rejection_choice(sampling: Sampling, position: int) -> Choose:
    """The drafter's side of `verify_rejection` for a draft that starts at `position`.

    It draws from the weights, so q of the drafted token must be the weights, normalised.
    """

    def choose(offset: int, weights: Mapping[int, float]) -> int:
        edges = list(accumulate(weights.values()))
        u = noise.uniform(sampling.seed, position, _DRAW + offset)
        return list(weights)[bisect(edges, u * edges[-1])]

    return choose


class Verification(Protocol):
    """What the decoding loop needs of whatever decides on the tokens; see `Verifier`."""

    name: str

    def choose(self, position: int) -> Choose | None: ...

    def verify(self, rows: Rows, draft: Draft, position: int) -> Verdict: ...


class Verifier:
    """One way of verifying logits, with its settings.

    Attributes:
        name: "greedy", "coupled" or "rejection".
        sampling: the sampling it verifies.
    """

    def __init__(self, sampling: Sampling, method: str | None = None) -> None:
        """Choose a method by name; at temperature 0 any is "greedy", above 0 None is "coupled".

        Raises:
            ValueError: an unknown method, or "greedy" at a temperature above 0.
        """
        if method is not None and method not in METHODS:
            raise ValueError(f"verify is {method!r}, but must be one of: {', '.join(METHODS)}")
        if method == "greedy" and not sampling.greedy:
            raise ValueError(f"verify is 'greedy', but temperature is {sampling.temperature}, not 0")
        # With all mass on one token the three emit the same tokens, and greedy does it without
        # noise.
        self.name = "greedy" if sampling.greedy else method or "coupled"
        self.sampling = sampling

    def choose(self, position: int) -> Choose | None:
        """What the drafter is to pick with, for a draft whose first token has index `position`."""
        if self.name == "greedy":
            return None
        make = coupled_choice if self.name == "coupled" else rejection_choice
        return make(self.sampling, position)

    def verify(self, rows: Rows, draft: Draft, position: int) -> Verdict:
        """Verify a draft (an empty one: just choose a token); see the module docstring."""
        if self.name == "greedy":
            return verify_greedy(rows, draft.tokens)
        if self.name == "coupled":
            return verify_coupled(rows, draft.tokens, self.sampling, position)
        return verify_rejection(rows, draft.tokens, draft.q, self.sampling, position)


def _keep_while_equal(rows: Rows, draft: Sequence[int], pick: Callable[[int, NDArray[np.float32]], int]) -> Verdict:
    """The target's own tokens up to and with the first that the draft did not guess."""
    tokens: list[int] = []
    for offset, row in enumerate(rows):
        tokens.append(pick(offset, row))
        if offset == len(draft) or tokens[-1] != draft[offset]:
            return Verdict(tuple(tokens))
    raise _rows_ran_out(draft)


def _residual(p: Distribution, law: Mapping[int, float]) -> NDArray[np.float64]:
    """max(0, p - q) over p's tokens, not normalised; p itself when rounding leaves nothing."""
    rest = p.probs.copy()
    for token, probability in law.items():
        index = p.find(token)
        if index is not None:
            rest[index] = max(0.0, rest[index] - probability)
    return rest if rest.any() else p.probs


def _draw(ids: NDArray[np.int32], weights: NDArray[np.float64], u: float) -> int:
    """The id at height u of the cumulated weights: a draw from them, never one of weight 0."""
    edges = np.cumsum(weights)  # u <= 1 - 2^-53, so u * edges[-1] rounds to less than edges[-1]
    return int(ids[np.searchsorted(edges, u * edges[-1], side="right")])


def _rows_ran_out(draft: Sequence[int]) -> ValueError:
    return ValueError(f"a draft of {len(draft)} tokens needs {len(draft) + 1} rows of logits")
