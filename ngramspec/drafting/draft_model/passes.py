"""Passes of a draft model: the drafters that request them (`StepwiseDrafter`), the requests (`PassRequest`), their
execution and times (`ModelPasses`), and the gain of the resulting guesses (`Payoff`).

A stepwise drafter requests a pass by yielding a `PassRequest`, and continues when it gets the logits. Requests of
several sequences go through the model together, if that pays:

    draft = draft_alone(drafter.propose_stepwise(8, price=price))
    drafts = draft_together([draft_stepwise(drafter, 8, price=price) for drafter in drafters], price)

Nothing here is used without a draft model: `Drafter.drafts_stepwise` is then False, and `propose` returns the draft.
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

from ngramspec.backend import Logits, Model
from ngramspec.drafting.chances import HOPELESS, FadingRate
from ngramspec.drafting.draft import NO_DRAFT, Chooser, Draft, Drafter, MarginalCost
from ngramspec.shared_model import Part, SequenceModel, SharedModel

RECENT = 15
"""Passes that the median is of: one that the system interrupted, or the first, which sets things up, is not
seen in it."""

FEW = 8
"""Tokens in the largest pass of those that are timed apart: kernels for a few tokens may take longer for each of them
than those for many do."""

POSITIONS = 8  # positions of a draft whose acceptance is counted apart; those behind them are counted with the last

PRIOR, PRIOR_WEIGHT, FADE = 0.8, 4.0, 0.98
"""Acceptance of a guess before any was judged, as so many outcomes, and the weight of the past at each new one: a draft
model that was chosen for its target is right at 50 to 90 % of the positions (Leviathan et al. 2023, section 4.2)."""


class Payoff:
    """Expected gain of a draft model's guesses beyond their time, by the outcome of earlier ones at the same place."""

    def __init__(self, passes: ModelPasses) -> None:
        self._passes = passes
        self._rates = [FadingRate(PRIOR * PRIOR_WEIGHT, PRIOR_WEIGHT, fade=FADE) for _ in range(POSITIONS)]

    def learn(self, at: int, right: bool) -> None:
        """Learn what came of a guess at a position; the first is 0."""
        self._rates[min(at, POSITIONS - 1)].add(right)

    def rate(self, at: int) -> float:
        """How often guesses at a position recently were right, where all before them were."""
        return self._rates[min(at, POSITIONS - 1)].value

    def gain(self, limit: int, price: MarginalCost) -> float:
        """Return the expected gain of a draft in tokens, with a price in seconds.

        With p_j the share of recent guesses at position j that were right, s_j the lowest cost of a draft token for the
        target, t the time of the draft model for a token and r the tokens per second (`price.rate`), it is

            max over k <= limit of  sum over j <= k of (p_1 * ... * p_j - r * (s_j + t))
        """
        gain, reach = 0.0, 1.0
        for at in range(limit):
            reach *= self.rate(at)
            more = reach - price.rate * (price.slopes[at] + self._passes.token / price.seconds)
            if more <= 0:
                break
            gain += more
        return gain

    def goes_on(self, reach: float, length: int, price: MarginalCost | None) -> bool:
        """Whether to make one more guess, after `length` that are all accepted with probability `reach`.

        It must pay for its time and for its place in the target's pass, and all may not take more than may be lost.
        """
        if reach < HOPELESS or price is None:
            return reach >= HOPELESS
        if not price.seconds:
            return bool(price.worth_extending(reach, length))
        time_of = self._passes.token / price.seconds
        if time_of * (length + 1) > price.loss_budget:
            return False
        cost = price.slopes[length] + time_of
        return reach * self.rate(length) >= price.rate * cost


class PassRequest(NamedTuple):
    """A pass of the draft model that one text asks for."""

    passes: ModelPasses  # makes it
    model: Model  # whose cache holds the text: a sequence, where several texts share the model
    keep: int  # so many tokens of the cache stay
    tokens: Sequence[int]  # are appended to them; none: it asks to read a longer text by itself, answered GRANTED
    rows: int  # for how many of the last of them logits are wanted
    # what it should bring, in tokens, before its time is counted; where too little, one of several is answered None
    gain: float = math.inf


GRANTED: Logits = np.empty((0, 0), np.float32)

Drafting: TypeAlias = Generator[PassRequest, Logits | None, Draft]
"""A draft in the making."""


class StepwiseDrafter(Drafter):
    """A drafter that asks a draft model, so that drafts of several sequences can share its passes."""

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
        """`propose` as a generator, which yields the passes that it needs and is sent their logits."""

    def propose(
        self,
        limit: int,
        choose: Chooser | None = None,
        *,
        fixed_length: bool = False,
        price: MarginalCost | None = None,
    ) -> Draft:
        return draft_alone(self.propose_stepwise(limit, choose, fixed_length=fixed_length, price=price))


def draft_stepwise(
    drafter: Drafter,
    limit: int,
    choose: Chooser | None = None,
    *,
    fixed_length: bool = False,
    price: MarginalCost | None = None,
) -> Drafting:
    """Draft as a generator with any drafter; without a draft model it yields nothing. Arguments as in `propose`."""
    if drafter.drafts_stepwise:
        stepwise = cast(StepwiseDrafter, drafter)
        return (yield from stepwise.propose_stepwise(limit, choose, fixed_length=fixed_length, price=price))
    return drafter.propose(limit, choose, fixed_length=fixed_length, price=price)


class ModelPasses:
    """Makes the passes of a draft model, and times them; `shared`: the model, where several texts share it.

    What a pass takes is told by medians of the latest: of those over one token, and of what each token more took.

    >>> passes = ModelPasses()
    >>> for seconds in (0.9, 0.02, 0.02):
    ...     passes.took(1, seconds)
    >>> passes.took(11, 0.07)
    >>> passes.token, round(passes.reading(101), 3)
    (0.02, 0.52)
    >>> passes.took(4, 0.08)
    >>> round(passes.reading(3), 3)
    0.06
    """

    def __init__(self, clock: Callable[[], float] | None = None, shared: SharedModel | None = None) -> None:
        self.clock = clock or time.perf_counter
        self.texts = 1  # over how many the last one was
        self._ones: deque[float] = deque(maxlen=RECENT)
        self._few: deque[float] = deque(maxlen=RECENT)
        self._more: deque[float] = deque(maxlen=RECENT)
        self._shared = shared
        sequences = shared.sequences if shared is not None else ()
        # Whether a pass may be over several texts: where each has a cache of its own, those that append more than
        # others continue in batches of their own.
        self.joint = (
            shared is not None
            and len(sequences) > 1
            and not shared.drafts_alone
            and len(shared.batches([1, 2], sequences[:2])) == 1
        )

    def took(self, tokens: int, seconds: float) -> None:
        if tokens == 1:
            self._ones.append(seconds)
        elif tokens > 1:
            times = self._few if tokens <= FEW else self._more
            times.append(max(0.0, (seconds - self.token) / (tokens - 1)))

    @property
    def token(self) -> float:
        """Seconds of a pass over one token; 0 while none was timed."""
        return median_low(self._ones) if self._ones else 0.0

    def reading(self, tokens: int) -> float:
        """Seconds to read so many tokens, at least one; no longer than one by one."""
        one = self.token
        times = (self._few if tokens <= FEW else self._more) or self._more or self._few
        each = min(one, median_low(times)) if times else one
        return one + each * (tokens - 1)

    def share(self, tokens: int, texts: int) -> float:
        """Seconds of a pass over so many tokens of each of several texts, divided among these."""
        return self.reading(tokens * texts) / texts

    def evaluate(self, requests: Sequence[PassRequest]) -> list[Logits]:
        """One pass for the requests; the rows of each, valid until the next pass."""
        for request in requests:
            request.model.rollback(request.keep)
        passed = sum(request.model.owed + len(request.tokens) for request in requests)
        began = self.clock()
        if len(requests) == 1:
            rows = [requests[0].model.evaluate(requests[0].tokens)[-requests[0].rows :]]
        else:
            assert self._shared is not None
            parts = [Part(cast(SequenceModel, request.model), request.tokens, request.rows) for request in requests]
            rows = self._shared.evaluate_together(parts)
        self.took(passed, self.clock() - began)
        self.texts = len(requests)
        return rows

    def worthwhile(self, requests: Mapping[int, PassRequest], price: MarginalCost | None) -> list[int]:
        """Whose requests are worth a pass together: those that bring most beyond its time, about a + b n for n tokens.

        They compete by what they bring beyond b for each of their tokens, and enough of them have to share a.
        """
        if not self.joint or price is None or not price.seconds:
            return list(requests)
        time_of = price.rate / price.seconds
        each = time_of * (self.reading(2) - self.token)
        order = sorted(requests, key=lambda text: each * requests[text].rows - requests[text].gain)
        count, most, gain, tokens = 0, 0.0, 0.0, 0
        for n, text in enumerate(order, 1):
            gain += requests[text].gain
            tokens += requests[text].rows
            value = gain - time_of * self.reading(tokens)
            if value > most or requests[text].gain == math.inf:
                count, most = n, value
        return order[:count]

    def groups(self, texts: Sequence[int], requests: Mapping[int, PassRequest]) -> Iterator[list[int]]:
        """The texts of each pass, as many as it has room for."""
        shared = self._shared if self.joint else None
        group: list[int] = []
        tokens = rows = 0
        for text in texts:
            request = requests[text]
            tokens, rows = tokens + len(request.tokens), rows + request.rows
            if group and (shared is None or tokens > shared.max_tokens or rows > shared.max_rows):
                yield group
                group, tokens, rows = [], len(request.tokens), request.rows
            group.append(text)
        if group:
            yield group


def draft_alone(drafting: Drafting) -> Draft:
    """The draft of one text, all of whose requests are granted."""
    rows: Logits | None = None
    while True:
        try:
            request = drafting.send(rows)
        except StopIteration as done:
            return cast(Draft, done.value)
        rows = request.passes.evaluate([request])[0] if request.tokens else GRANTED


def draft_together(draftings: Sequence[Drafting], price: MarginalCost | None) -> list[Draft]:
    """The drafts of several texts, all at the same price, none of them begun."""
    if len(draftings) == 1:
        return [draft_alone(draftings[0])]
    drafts = [NO_DRAFT] * len(draftings)
    waiting: dict[int, PassRequest] = {}

    def go_on(text: int, rows: Logits | None) -> None:
        try:
            waiting[text] = draftings[text].send(rows)
        except StopIteration as done:
            drafts[text] = done.value

    for text in range(len(draftings)):
        go_on(text, None)
    while waiting:
        requests = dict(waiting)
        waiting.clear()
        passes = next(iter(requests.values())).passes
        chosen = passes.worthwhile(requests, price)
        for text in requests.keys() - set(chosen):
            go_on(text, None)
        for text in chosen:
            if not requests[text].tokens:
                go_on(text, GRANTED)
        for group in passes.groups([text for text in chosen if requests[text].tokens], requests):
            for text, rows in zip(group, passes.evaluate([requests[text] for text in group]), strict=True):
                go_on(text, rows)
    return drafts
