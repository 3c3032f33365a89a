# cython: language_level=3, wraparound=False, initializedcheck=False
"""`Draft`: a chain of token ids that may follow the text, with what is known of each; `Drafter`: what makes one.

`MarginalCost` tells it whether one more token is worth its time.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol

import cython

from ngramspec.sampling.settings import Sampling

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


Chooser = Callable[[int, Mapping[int, float]], int]
"""How a drafter picks among the continuations of a context: (offset in the draft, weights) -> token id.

The weights are counts or probabilities, all positive. Greedy decoding passes none and gets the most likely one;
sampled decoding adds the target's own noise (coupled) or draws from the weights (rejection): `ngramspec.acceptance`.
"""


@dataclass(frozen=True, slots=True)
class Draft:
    """A guess at the next tokens; every tuple has one entry per drafted position, or is empty."""

    tokens: tuple[int, ...] = ()  # token ids, in order
    # The distribution each token was picked from (sums to 1); may be empty when the drafter was given no `Chooser`.
    q: tuple[Mapping[int, float], ...] = ()
    match_lengths: tuple[int, ...] = ()  # length in tokens of the context that each guess rests on
    context_counts: tuple[int, ...] = ()  # how often that context was seen in all; empty when nobody counts
    # Estimated probability that the target accepts the token, given that it accepted all before it; empty when the
    # drafter makes no estimate: the loop then makes one of how earlier drafts fared.
    acceptance_probs: tuple[float, ...] = ()
    source: str = ""  # which drafter made it
    # Computes `normalised_entropy` of a draft model's logits for the first token; None: no model made them.
    entropy: Callable[[], float] | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def head(self, length: int) -> Draft:
        """The first `length` positions; the draft itself when it is no longer than that."""
        if length >= len(self.tokens):
            return self
        return Draft(
            self.tokens[:length],
            self.q[:length],
            self.match_lengths[:length],
            self.context_counts[:length],
            self.acceptance_probs[:length],
            self.source,
            self.entropy,
        )


NO_DRAFT = Draft()


class MarginalCost:
    """The price of one more drafted token. A drafter that knows it ends a draft where no longer one can pay.

    Args:
        rate: recent throughput, in tokens per unit of time.
        slopes: entry k is the least time that one more token costs a draft of k tokens: the lowest slope of the cost
            curve from there on. At least as many entries as a draft can have tokens, and one more.
        seconds: of a unit of time, for drafters that take time themselves; 0: nobody knows.
        loss_budget: units of time that may be lost if the draft is refused.
        costs: makes the attribute `costs` when it is first read: drafters without a draft model never do. By default it
            is what the slopes add up to.
        texts: how many are drafted for at this price at a time.

    The unit of time is the caller's, by custom a one-token pass.
    """

    def __init__(
        self,
        rate: float,
        slopes: Sequence[float],
        seconds: float = 0.0,
        loss_budget: float = math.inf,
        costs: Callable[[], Sequence[float]] | None = None,
        texts: int = 1,
    ) -> None:
        self.rate = rate
        self.seconds = seconds
        self.loss_budget = loss_budget
        self.texts = texts
        self._make_costs = costs
        self._costs: Sequence[float] | None = None
        self.slopes = self._slopes = slopes if isinstance(slopes, array) else array("d", slopes)

    @property
    def costs(self) -> Sequence[float]:
        """Entry k is what a draft of k tokens takes longer than none."""
        if self._costs is None:
            make = self._make_costs
            self._costs = list(accumulate(self.slopes[:-1], initial=0.0)) if make is None else make()
        return self._costs

    def worth_extending(self, reach: cython.double, length: cython.Py_ssize_t) -> cython.bint:
        """Whether a draft of `length` tokens, all accepted with probability `reach`, can gain by one token more."""
        return reach >= self.rate * self._slopes[length]


class Drafter(Protocol):
    """Proposes tokens and learns from what was emitted. One instance serves many requests, in order."""

    name: str  # on the command line
    wants_logits: bool = False  # whether `observe_logits` is to be called
    drafts_stepwise: bool = False  # True for a `StepwiseDrafter`, which asks a draft model
    # How much of the last `propose` went into reading the text so far, which counts as prefill.
    prefill_seconds: float = 0.0
    # A text that the next answer is likely to copy, set before `begin`; None: it cannot draft from one.
    prediction: Sequence[int] | None = None

    def set_sampling(self, sampling: Sampling) -> None:
        """How the target chooses the tokens of the next request; called before `begin`, where that is known."""
        return

    def begin(self, prompt: Sequence[int]) -> None:
        """Start a request whose whole context so far is `prompt`; state of the request before is dropped."""

    def propose(
        self,
        limit: int,
        choose: Chooser | None = None,
        *,
        fixed_length: bool = False,
        price: MarginalCost | None = None,
    ) -> Draft:
        """At most `limit` tokens that may follow everything seen so far; an empty draft is fine.

        Args:
            limit: most tokens to propose, at least 1.
            choose: see `Chooser`.
            fixed_length: estimate acceptance for `limit` positions from what is known before the first token is
                drawn. Rejection sampling needs it: q is the distribution of a drafted token only if no look at that
                token, or at one after it, decided whether the token stays in the draft.
            price: what one more token costs; None is to propose whatever has a chance.
        """

    def accept(self, tokens: Sequence[int]) -> int:
        """Learn from the tokens that the target has emitted since, in order, drafted or not.

        Returns:
            how many tokens of the last proposal were right, whether they were sent to the target or not.
        """

    def observe_logits(self, tokens: Sequence[int], rows: NDArray[np.float32], accepted: int = 0) -> None:
        """Learn from the logits that the target computed, those of refused positions too; called before `accept`.

        Args:
            tokens: what was evaluated: the token before the draft, then the draft.
            rows: of shape (len(tokens), n_vocab): row i was computed after tokens[i]. Valid during the call alone,
                not to be written to, and unchecked: nan and inf may be among them.
            accepted: how many tokens of the draft were accepted; row `accepted` decided the last token emitted.
        """
        return

    def save_state(self) -> None:
        """A request has ended: what is to outlive the process can be written down now."""
        return
