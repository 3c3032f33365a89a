"""Acceptance rules that emit the tokens of plain decoding. Each decides on one draft token, given the logits.

`ngramspec.acceptance.verifier` has all rules by name, and applies one to the draft, row by row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ngramspec.data import GrammarError
from ngramspec.sampling.distribution import BadLogits, Distribution
from ngramspec.sampling.sampler import Sampler

Row = NDArray[np.float32]
Rows = Iterable[Row]
"""Logits, shape (n, n_vocab): row i follows the first i tokens of a draft."""


class Verdict(NamedTuple):
    """Result of verifying a draft: its accepted prefix, and one token of the target's."""

    tokens: tuple[int, ...]  # emitted token ids
    # Number of draft tokens among them: all but the last, or all if the whole draft was accepted and ends the text, or
    # an error came next.
    accepted: int
    error: BadLogits | GrammarError | None = None  # error that prevented the choice of the next token


@dataclass(frozen=True, slots=True)
class TokenDecision:
    """Decision on one draft token, or on a token of the target's own."""

    token: int  # token id
    accepted: bool | None  # whether the draft token was accepted; `None` for a token of the target's own
    # Probability at that position: in the distribution sampled from; in greedy decoding by the softmax of the logits.
    p: float
    why: Mapping[str, float]  # numbers that the decision depends on, by name


Watch = Callable[[TokenDecision], None]  # called with each decision, in order
Q = Mapping[int, float]  # distribution that a draft token was drawn from; empty after the draft


class Rule:
    """A rule for one sequence. This one accepts a draft while it equals the tokens of plain decoding.

    Plain decoding emits t_i, drawn from row_i, and only then computes row_{i+1}. As long as draft[i] = t_i, the batch
    computed the very rows that plain decoding would have; at the first difference, t_i is still right (Stern, Shazeer,
    Uszkoreit 2018, "Blockwise parallel decoding", section 3).

    `lenience` is a factor of q, above 0 and at most 1, which only some rules use. `watch` is called with each decision.
    """

    def __init__(self, sampler: Sampler, lenience: float = 1.0, watch: Watch | None = None) -> None:
        self.sampler, self.lenience, self.watch = sampler, lenience, watch

    def decide(self, row: Row, guess: int | None, position: int, _q: Q) -> tuple[int, bool]:
        """Return the token to emit, and whether it is the draft token, accepted; raise the errors of `Sampler.draw`.

        `guess` is `None` after the draft. `position` is the index of the token in the sequence.
        """
        token = self.sampler.draw(row, position)
        return token, token == guess

    def observe(self, token: int, is_accepted: bool | None, p: float, **why: float) -> None:
        """Report a decision to `watch`, which must be set."""
        assert self.watch is not None
        self.watch(TokenDecision(token, is_accepted, p, why))


class Greedy(Rule):
    """Accepts the draft while it equals the most likely token; equal logits go to the lowest id."""

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


def probability(row: Row, token: int) -> float:
    """Return the probability of a token by the softmax of a row of logits."""
    return float(np.exp(row[token] - row.max()) / np.exp(row - row.max(), dtype=np.float64).sum())
