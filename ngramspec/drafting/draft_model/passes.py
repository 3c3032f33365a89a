"""Decode calls of a draft model, called passes.

`StepwiseDrafter` is a drafter that requests them, `PassRequest` a request, `ModelPasses` executes and times them, and
`DraftModelGain` estimates the gain of the resulting guesses.

A stepwise drafter requests a pass by yielding a `PassRequest`, and continues when it gets the logits. Requests of
several sequences are evaluated together if that pays:

    draft = draft_single(drafter.propose_stepwise(8, price=price))
    drafts = draft_batch([drafter.propose_stepwise(8, price=price) for drafter in drafters], price)

This module is used only with a draft model. For other drafters `Drafter.drafts_stepwise` is False, and `propose`
returns the draft.
"""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from statistics import median_low
from typing import NamedTuple, TypeAlias, cast

import numpy as np

from ngramspec.backend import Logits, Model, Part, SequenceModel, SharedModel
from ngramspec.drafting.acceptance_estimator import MIN_CHAIN_PROB, DecayingRate
from ngramspec.drafting.draft import NO_DRAFT, Chooser, Draft, Drafter, MarginalCost

RECENT = 15
"""Number of latest passes whose median is used. A median ignores a pass that the system interrupted, and the first one,
which includes the setup."""

FEW = 8
"""Maximum tokens of a small pass. Small passes are timed separately, because kernels for a few tokens may take longer
per token than kernels for many."""

POSITIONS = 8  # draft positions with a separate acceptance rate; the last one includes all later positions

PRIOR, PRIOR_WEIGHT, FADE = 0.8, 4.0, 0.98
"""Assumed acceptance rate before the first outcome, its weight in outcomes, and the factor for older outcomes at each
new one. A draft model that was chosen for its target is right at 50 to 90 % of the positions (Leviathan et al. 2023,
section 4.2)."""


class DraftModelGain:
    """Expected gain of a draft model's guesses minus their time, by earlier outcomes at the same draft position."""

    def __init__(self, passes: ModelPasses) -> None:
        self._passes = passes
        self._rates = [DecayingRate(PRIOR * PRIOR_WEIGHT, PRIOR_WEIGHT, fade=FADE) for _ in range(POSITIONS)]

    def learn(self, at: int, right: bool) -> None:
        """Count the outcome of a guess at a draft position; the first position is 0."""
        self._rates[min(at, POSITIONS - 1)].add(right)

    def rate(self, at: int) -> float:
        """Return the share of recent guesses at a position that were right, given that all before them were."""
        return self._rates[min(at, POSITIONS - 1)].value

    def gain(self, limit: int, price: MarginalCost) -> float:
        """Return the expected gain of a draft in tokens; requires a `price` whose unit of time is known in seconds.

        It is

            max over k <= limit of  sum over j <= k of (p_1 * ... * p_j - r * (s_j + t))

        Here p_j is the share of recent guesses at position j that were right, and s_j the lowest cost of a draft token
        for the target. The draft model takes the time t for a token, and r is the throughput (`price.rate`).
        """
        gain, reach = 0.0, 1.0
        for at in range(limit):
            reach *= self.rate(at)
            more = reach - price.rate * (price.slopes[at] + self._passes.token_seconds / price.seconds)
            if more <= 0:
                break
            gain += more
        return gain

    def should_continue(self, reach: float, length: int, price: MarginalCost | None) -> bool:
        """Return True if one more guess pays after `length` guesses that are all accepted with probability `reach`.

        The guess must pay for its own time and for its token in the target's decode call. The draft model's time for
        all guesses must not exceed the loss budget.
        """
        if reach < MIN_CHAIN_PROB or price is None:
            return reach >= MIN_CHAIN_PROB
        if not price.seconds:
            return bool(price.worth_extending(reach, length))
        time_of = self._passes.token_seconds / price.seconds
        if time_of * (length + 1) > price.loss_budget:
            return False
        cost = price.slopes[length] + time_of
        return reach * self.rate(length) >= price.rate * cost


class PassRequest(NamedTuple):
    """A pass of the draft model, requested for one sequence."""

    passes: ModelPasses  # instance that executes the pass
    model: Model  # model whose cache contains the sequence; a `SequenceModel` if several sequences share the model
    keep: int  # number of cached tokens to keep
    # Tokens to append to the cache. Empty means that the drafter wants to prefill a longer text itself; the answer is
    # then `GRANT`.
    tokens: Sequence[int]
    rows: int  # number of last tokens whose logits are requested
    # Expected gain in tokens, before the time of the pass is subtracted. If it is too small, a request that competes
    # with others is answered with `None`.
    gain: float = math.inf


GRANT: Logits = np.empty((0, 0), np.float32)

Drafting: TypeAlias = Generator[PassRequest, Logits | None, Draft]
"""A generator that makes a draft: it yields requests, receives logits and returns the draft."""


class StepwiseDrafter(Drafter):
    """A drafter with a draft model, written so that drafts of several sequences can share the model's passes."""

    drafts_stepwise = True

    @abstractmethod
    def propose_stepwise(
        self,
        limit: int,
        choose: Chooser | None = None,
        *,
        fixed_length: bool = False,
        price: MarginalCost | None = None,
    ) -> Drafting:
        """Make a draft as `propose` does, but yield a request for each pass and receive its logits."""

    def propose(
        self,
        limit: int,
        choose: Chooser | None = None,
        *,
        fixed_length: bool = False,
        price: MarginalCost | None = None,
    ) -> Draft:
        return draft_single(self.propose_stepwise(limit, choose, fixed_length=fixed_length, price=price))


class ModelPasses:
    """Executes and times the passes of a draft model.

    The time of a pass is estimated from medians of the latest ones: of passes over one token, and of the additional
    time per further token.

    Args:
        clock: Function that returns the time in seconds; `None` means `time.perf_counter`.
        shared_model: The model, if several sequences share it.

    >>> passes = ModelPasses()
    >>> for seconds in (0.9, 0.02, 0.02):
    ...     passes.record_time(1, seconds)
    >>> passes.record_time(11, 0.07)
    >>> passes.token_seconds, round(passes.read_seconds(101), 3)
    (0.02, 0.52)
    >>> passes.record_time(4, 0.08)
    >>> round(passes.read_seconds(3), 3)
    0.06
    """

    def __init__(self, clock: Callable[[], float] | None = None, shared_model: SharedModel | None = None) -> None:
        self.clock = clock or time.perf_counter
        self.texts = 1  # number of sequences in the last pass
        self._ones: deque[float] = deque(maxlen=RECENT)
        self._few: deque[float] = deque(maxlen=RECENT)
        self._more: deque[float] = deque(maxlen=RECENT)
        self._shared = shared_model
        sequences = shared_model.sequences if shared_model is not None else ()
        # True if one pass may evaluate several sequences. If each has a separate cache, sequences that append more
        # tokens than others continue in separate batches.
        self.joint = (
            shared_model is not None
            and len(sequences) > 1
            and not shared_model.drafts_alone
            and len(shared_model.batches([1, 2], sequences[:2])) == 1
        )

    def record_time(self, tokens: int, seconds: float) -> None:
        if tokens == 1:
            self._ones.append(seconds)
        elif tokens > 1:
            times = self._few if tokens <= FEW else self._more
            times.append(max(0.0, (seconds - self.token_seconds) / (tokens - 1)))

    @property
    def token_seconds(self) -> float:
        """Median seconds of a pass over one token; 0 before the first one was timed."""
        return median_low(self._ones) if self._ones else 0.0

    def read_seconds(self, tokens: int) -> float:
        """Return the expected seconds of a pass over `tokens` tokens, at least 1; at most their time one by one."""
        single = self.token_seconds
        times = (self._few if tokens <= FEW else self._more) or self._more or self._few
        each = min(single, median_low(times)) if times else single
        return single + each * (tokens - 1)

    def seconds_per_sequence(self, tokens: int, texts: int) -> float:
        """Return the seconds per sequence of a joint pass over `tokens` tokens of each of `texts` sequences."""
        return self.read_seconds(tokens * texts) / texts

    def evaluate(self, requests: Sequence[PassRequest]) -> list[Logits]:
        """Execute one pass for the requests; return the logits of each, which are valid until the next pass."""
        for request in requests:
            request.model.rollback(request.keep)
        n_tokens = sum(request.model.owed + len(request.tokens) for request in requests)
        start_time = self.clock()
        if len(requests) == 1:
            rows = [requests[0].model.evaluate(requests[0].tokens)[-requests[0].rows :]]
        else:
            assert self._shared is not None
            parts = [Part(cast(SequenceModel, request.model), request.tokens, request.rows) for request in requests]
            rows = self._shared.evaluate_together(parts)
        self.record_time(n_tokens, self.clock() - start_time)
        self.texts = len(requests)
        return rows

    def select_requests(self, requests: Mapping[int, PassRequest], price: MarginalCost | None) -> list[int]:
        """Return the sequences whose requests are worth a joint pass.

        A pass over n tokens takes about a + b n. The requests are sorted by their gain minus b for each of their
        tokens. The best k of them are chosen. k maximises the gain minus the time of the pass, and is 0 if that is
        never positive. Requests with infinite gain are always chosen.
        """
        if not self.joint or price is None or not price.seconds:
            return list(requests)
        time_of = price.rate / price.seconds
        each = time_of * (self.read_seconds(2) - self.token_seconds)
        order = sorted(requests, key=lambda sequence: each * requests[sequence].rows - requests[sequence].gain)
        count, best_value, gain, tokens = 0, 0.0, 0.0, 0
        for n, sequence in enumerate(order, 1):
            gain += requests[sequence].gain
            tokens += requests[sequence].rows
            value = gain - time_of * self.read_seconds(tokens)
            if value > best_value or requests[sequence].gain == math.inf:
                count, best_value = n, value
        return order[:count]

    def group_requests(self, sequences: Sequence[int], requests: Mapping[int, PassRequest]) -> Iterator[list[int]]:
        """Yield the sequences of each pass, as many as fit into it."""
        shared_model = self._shared if self.joint else None
        group: list[int] = []
        tokens = rows = 0
        for sequence in sequences:
            request = requests[sequence]
            tokens, rows = tokens + len(request.tokens), rows + request.rows
            if group and (shared_model is None or tokens > shared_model.max_tokens or rows > shared_model.max_rows):
                yield group
                group, tokens, rows = [], len(request.tokens), request.rows
            group.append(sequence)
        if group:
            yield group


def draft_single(drafting: Drafting) -> Draft:
    """Make the draft of one sequence; all its requests are granted."""
    rows: Logits | None = None
    while True:
        try:
            request = drafting.send(rows)
        except StopIteration as done:
            return cast(Draft, done.value)
        rows = request.passes.evaluate([request])[0] if request.tokens else GRANT


def draft_batch(draftings: Sequence[Drafting], price: MarginalCost | None) -> list[Draft]:
    """Make the drafts of several sequences together; no generator was started yet."""
    if len(draftings) == 1:
        return [draft_single(draftings[0])]
    drafts = [NO_DRAFT] * len(draftings)
    waiting: dict[int, PassRequest] = {}

    def advance(sequence: int, rows: Logits | None) -> None:
        try:
            waiting[sequence] = draftings[sequence].send(rows)
        except StopIteration as done:
            drafts[sequence] = done.value

    for sequence in range(len(draftings)):
        advance(sequence, None)
    while waiting:
        requests = dict(waiting)
        waiting.clear()
        passes = next(iter(requests.values())).passes
        running = passes.select_requests(requests, price)
        for sequence in requests.keys() - set(running):
            advance(sequence, None)
        for sequence in running:
            if not requests[sequence].tokens:
                advance(sequence, GRANT)
        for group in passes.group_requests([sequence for sequence in running if requests[sequence].tokens], requests):
            for sequence, rows in zip(group, passes.evaluate([requests[sequence] for sequence in group]), strict=True):
                advance(sequence, rows)
    return drafts
