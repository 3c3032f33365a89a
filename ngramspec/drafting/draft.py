# cython: language_level=3, wraparound=False, initializedcheck=False
"""The interface of drafters: `Drafter`, its result `Draft`, and `MarginalCost`, the cost of one more draft token."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Self

import cython

from ngramspec.sampling.settings import Sampling

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ngramspec.tokens import Tokenizer


Chooser = Callable[[int, Mapping[int, float]], int]
"""Pick among the continuations of a context: (offset in the draft, weights) -> token id.

The weights are counts or probabilities, all positive. In greedy decoding there is no chooser, and a drafter takes the
most likely token. In sampled decoding, the chooser adds the target's own noise (coupled) or draws from the weights
(rejection); see `ngramspec.acceptance`.
"""


# The class is hashable because a draft is a default value in `Step`. It is not frozen, because a frozen instance takes
# four times as long to create.
@dataclass(slots=True, unsafe_hash=True)
class Draft:
    """A guess at the next tokens, which must not be changed. Every tuple has one entry per draft token, or is empty.

    An exception is `acceptance_probs`, which may be longer with `fixed_length`; see `Ask`.
    """

    tokens: tuple[int, ...] = ()  # token ids, in order
    # The distribution that each token was picked from (sums to 1); empty without a `Chooser`. A drafter with one
    # candidate per position passes {token: 1.0} to the chooser, and stores the same here.
    q: tuple[Mapping[int, float], ...] = ()
    match_lengths: tuple[int, ...] = ()  # length in tokens of the context that each guess rests on
    context_counts: tuple[int, ...] = ()  # number of occurrences of that context; empty if they are not counted
    # Estimated probability that the target accepts the token, if it accepts all before it. `mixture` and the drafters
    # with a draft model make separate estimates; the others use an `AcceptanceEstimator`. If a user's drafter
    # leaves them empty, the loop estimates them with one.
    acceptance_probs: tuple[float, ...] = ()
    source: str = ""  # name of the drafter
    repeats: bool = False  # True if the draft begins with the continuation of an earlier answer to the same request
    # Function that computes `entropy_ratio` of a draft model's logits for the first token; `None` if it has none.
    entropy: Callable[[], float] | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def head(self, length: int) -> Draft:
        """Return the first `length` positions; the draft itself if it is not longer."""
        if length >= len(self.tokens):
            return self
        return Draft(
            self.tokens[:length],
            self.q[:length],
            self.match_lengths[:length],
            self.context_counts[:length],
            self.acceptance_probs[:length],
            self.source,
            self.repeats,
        )


NO_DRAFT = Draft()


class MarginalCost:
    """The cost of one more draft token. A drafter that receives it ends a draft when a longer one cannot pay.

    Args:
        rate: Recent throughput, in tokens per unit of time, which is by convention a decode call of one token.
        slopes: Entry k is the minimum time that one more token costs a draft of k tokens: the lowest slope of the cost
            curve from there on. At least one entry more than a draft can have tokens.
        seconds: Length of the unit of time, for drafters that take time themselves; 0 means unknown.
        loss_budget: Maximum time that may be lost if the draft is rejected. The policy `cost` passes half of the budget
            of its `LossBudget`, which all sequences of a decode call share.
        costs: Function that computes the attribute `costs` when it is first read, which only drafters with a draft
            model do. By default it sums the slopes.
    """

    def __init__(
        self,
        rate: float,
        slopes: Sequence[float],
        seconds: float = 0.0,
        loss_budget: float = math.inf,
        costs: Callable[[], Sequence[float]] | None = None,
    ) -> None:
        self.rate = rate
        self.seconds = seconds
        self.loss_budget = loss_budget
        self._make_costs = costs
        self._costs: Sequence[float] | None = None
        self.slopes = self._slopes = slopes if isinstance(slopes, array) else array("d", slopes)

    @property
    def costs(self) -> Sequence[float]:
        """Additional time of a draft of k tokens, by k."""
        if self._costs is None:
            make = self._make_costs
            self._costs = list(accumulate(self.slopes[:-1], initial=0.0)) if make is None else make()
        return self._costs

    def worth_extending(self, reach: cython.double, length: cython.Py_ssize_t) -> cython.bint:
        """Return True if a draft of `length` tokens, all accepted with probability `reach`, can gain by one more."""
        return reach >= self.rate * self._slopes[length]


class Ask:
    """A request for a draft.

    Args:
        limit: Maximum number of tokens, at least 1.
        choose: Picks each token; see `Chooser`. If it is not `None`, it must be called for every draft token, also if
            there is only one candidate.
        fixed_length: If True and something is drafted, return `limit` entries in `acceptance_probs`, estimated before
            the first token is drawn. Rejection sampling requires it: q is the distribution of a draft token only if
            neither that token nor a later one decides whether it stays in the draft.
        price: Cost of one more token; `None` means to propose every token that may be accepted. A drafter with an
            `AcceptanceEstimator` passes it to `open`; others call `worth_extending`.
    """

    def __init__(
        self,
        limit: int,
        choose: Chooser | None = None,
        *,
        fixed_length: bool = False,
        price: MarginalCost | None = None,
    ) -> None:
        self.limit, self.choose, self.fixed_length, self.price = limit, choose, fixed_length, price


class Drafter(ABC):
    """Proposes tokens and learns from the emitted tokens. One instance serves many requests, one after the other.

    `begin`, `propose` and `accept` are required. The attributes and the other methods have defaults.
    """

    name: str = ""  # name on the command line
    wants_logits: bool = False  # True to receive logits in `observe_logits`
    is_slow: bool = False  # True if it drafts with a model, whose passes take time
    # Seconds of the last `propose` that a draft model took to read the prompt, which count as prefill.
    prefill_seconds: float = 0.0
    # Text that the next answer is likely to copy, set before `begin`; `None` means that the drafter supports none.
    prediction: Sequence[int] | None = None
    # Text of the tokens (`vocabulary.piece(token)`), for drafters that need it. `make_drafter` sets it after the
    # constructor; `None` means unknown, as in `replay`, and such a drafter then drafts nothing.
    vocabulary: Tokenizer | None = None

    @abstractmethod
    def begin(self, prompt: Sequence[int]) -> None:
        """Start a request with the context `prompt`; drop the context of the previous request."""

    @abstractmethod
    def propose(self, ask: Ask) -> Draft:
        """Return tokens that may follow the context and the accepted tokens; an empty draft is allowed."""

    @abstractmethod
    def accept(self, tokens: Sequence[int]) -> int:
        """Learn from the tokens that the target emitted since the last call, in order, drafted or not.

        Returns:
            Number of tokens of the last proposal that were right, verified or not.
        """

    def observe_logits(self, tokens: Sequence[int], rows: NDArray[np.float32], n_accepted: int = 0) -> None:
        """Learn from the logits that the target computed, including rejected positions; called before `accept`.

        Args:
            tokens: The evaluated tokens: the token before the draft, then the draft.
            rows: Logits of shape (len(tokens), n_vocab); row i was computed after tokens[i]. Valid only during the
                call, read-only, and unchecked: nan and inf may occur.
            n_accepted: Number of accepted draft tokens; row `n_accepted` decided the last emitted token.
        """
        return

    def set_sampling(self, sampling: Sampling) -> None:
        """Set the sampling of the next request; called before `begin`."""
        return

    def clone_for_sequence(self) -> Self:
        """Return a drafter for another sequence at the same time; by default a new instance with this vocabulary.

        Override it if the constructor has arguments.
        """
        clone = type(self)()
        clone.vocabulary = self.vocabulary
        return clone

    def save_state(self) -> None:
        """Save statistics for later processes; called after a request."""
        return
