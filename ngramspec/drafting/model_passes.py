"""`ModelPasses`: the passes of a draft model, each over one text or over several, and which of those asked for to make.

A drafter asks for a pass with a `Wish`; see `ngramspec.drafting.in_step`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, cast

import numpy as np

from ngramspec.backend import Lane, Logits, Model, Part, SharedModel
from ngramspec.drafting.pace import Pace
from ngramspec.drafting.price import TokenPrice


class Wish(NamedTuple):
    """A pass of the draft model over one text.

    Attributes:
        passes: makes it.
        model: whose cache holds the text: a lane, where several texts share the model.
        keep: so many tokens of the cache stay.
        tokens: are appended to them; none: leave is asked for, to read a longer text by oneself.
        rows: for how many of the last of them logits are wanted.
        gain: what it is expected to bring, in tokens, before its time is counted. A wish of several is declined where
            that is too little: the answer to it is None.
    """

    passes: ModelPasses
    model: Model
    keep: int
    tokens: Sequence[int]
    rows: int
    gain: float = math.inf


LEAVE: Logits = np.empty((0, 0), np.float32)
"""The answer to a wish that has no tokens."""


class ModelPasses:
    """Makes the passes of a draft model, and times them.

    Args:
        clock: tells the seconds that they take; None is `time.perf_counter`.
        shared: the model, where several texts have a lane in it.

    Attributes:
        pace: what passes take.
        joint: whether a pass may be over several texts.
        texts: over how many the last one was.
    """

    def __init__(self, clock: Callable[[], float] | None = None, shared: SharedModel | None = None) -> None:
        self.clock = clock or time.perf_counter
        self.pace = Pace()
        self.texts = 1
        self._shared = shared
        lanes = shared.lanes if shared is not None else ()
        # Where each lane has a cache of its own, texts that append more than others go on in batches of their own.
        self.joint = (
            shared is not None
            and len(lanes) > 1
            and not shared.drafts_alone
            and len(shared.batches([1, 2], lanes[:2])) == 1
        )

    def evaluate(self, wishes: Sequence[Wish]) -> list[Logits]:
        """One pass for the wishes; the rows of each, valid until the next pass."""
        for wish in wishes:
            wish.model.rollback(wish.keep)
        passed = sum(wish.model.owed + len(wish.tokens) for wish in wishes)
        began = self.clock()
        if len(wishes) == 1:
            rows = [wishes[0].model.evaluate(wishes[0].tokens)[-wishes[0].rows :]]
        else:
            assert self._shared is not None
            rows = self._shared.evaluate([Part(cast(Lane, wish.model), wish.tokens, wish.rows) for wish in wishes])
        self.pace.saw(passed, self.clock() - began)
        self.texts = len(wishes)
        return rows

    def worthwhile(self, wishes: Mapping[int, Wish], price: TokenPrice | None) -> list[int]:
        """Whose wishes are worth a pass together: those that bring most beyond its time.

        A pass over n tokens takes about a + b n. So wishes compete by what they bring beyond b for each of their
        tokens, and enough of them have to share a. What a text has to catch up with is read some time in any case.
        """
        if not self.joint or price is None or not price.seconds:
            return list(wishes)
        time_of = price.worth / price.seconds
        each = time_of * (self.pace.reading(2) - self.pace.token)
        order = sorted(wishes, key=lambda text: each * wishes[text].rows - wishes[text].gain)
        count, most, gain, tokens = 0, 0.0, 0.0, 0
        for n, text in enumerate(order, 1):
            gain += wishes[text].gain
            tokens += wishes[text].rows
            value = gain - time_of * self.pace.reading(tokens)
            if value > most or wishes[text].gain == math.inf:
                count, most = n, value
        return order[:count]

    def groups(self, texts: Sequence[int], wishes: Mapping[int, Wish]) -> Iterator[list[int]]:
        """The texts of each pass, as many as it has room for."""
        group: list[int] = []
        tokens = rows = 0
        for text in texts:
            wish = wishes[text]
            tokens, rows = tokens + len(wish.tokens), rows + wish.rows
            if group and not (self.joint and self._fits(tokens, rows)):
                yield group
                group, tokens, rows = [], len(wish.tokens), wish.rows
            group.append(text)
        if group:
            yield group

    def _fits(self, tokens: int, rows: int) -> bool:
        assert self._shared is not None
        return tokens <= self._shared.max_tokens and rows <= self._shared.max_rows
