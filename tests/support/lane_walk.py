"""A random walk over the lanes of a shared target; every row of logits is that of the lane's text read on its own."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Callable

import numpy as np
from architectures.reference import Reference, Rows

from ngramspec.backend import Logits, Part
from ngramspec.llama.lane import SequenceLane
from ngramspec.llama.shared import SharedTarget

ROOM = 110
"""Longest text of the walk, in tokens."""

REMEMBERED = 50


class LaneWalk:
    """Texts in the lanes of a shared target, what they must be, and how far logits were off.

    Args:
        shared: with n_ctx above ROOM.
        reference: of the same file, under the same settings.
        seed: another one is another walk.

    Attributes:
        texts: the tokens that each lane must hold.
        worst: largest difference of a logit to the reference.
        seen: how often what was done.
    """

    def __init__(self, shared: SharedTarget, reference: Reference, seed: int) -> None:
        self.shared, self.reference = shared, reference
        self.texts: list[list[int]] = [[] for _ in shared.lanes]
        self.worst = 0.0
        self.seen: Counter[str] = Counter()
        self._rng = random.Random(seed)
        self._saved: list[tuple[list[int], bytes]] = []
        self._rows: OrderedDict[tuple[int, ...], Rows] = OrderedDict()

    def walk(self, steps: int) -> None:
        """Do so many things, and look at all lanes after each."""
        doing: list[tuple[Callable[[SequenceLane], None], int]] = [
            (self._prefill, 12),
            (self._together, 45),
            (self._alone, 12),
            (self._take_back, 6),
            (self._adopt, 10),
            (self._save, 6),
            (self._restore, 6),
            (self._clear, 6),
        ]
        for _ in range(steps):
            lane = self._rng.choice(self.shared.lanes)
            (what,) = self._rng.choices(*zip(*doing, strict=True)) if self.texts[lane.number] else (self._prefill,)
            what(lane)
            self.seen[what.__name__] += 1
            for number, text in enumerate(self.texts):
                assert self.shared.lanes[number].tokens == text, what

    def new(self, count: int) -> list[int]:
        """Tokens that no text has yet."""
        return [self._rng.randrange(10, 4000) for _ in range(count)]

    def check(self, lane: SequenceLane, rows: Logits) -> None:
        """Compare the last rows of a lane's text."""
        text = self.texts[lane.number]
        if len(rows):
            self.worst = max(self.worst, float(np.abs(rows - self._expected(text)[-len(rows) :]).max()))

    def _expected(self, text: list[int]) -> Rows:
        key = tuple(text)
        if key not in self._rows:
            self._rows[key] = self.reference.rows(text)
            if len(self._rows) > REMEMBERED:
                self._rows.popitem(last=False)
        return self._rows[key]

    def _drop(self, lane: SequenceLane, length: int) -> None:
        lane.rollback(length)
        del self.texts[lane.number][length:]

    # ------------------------------------------------------------------ what is done

    def _prefill(self, lane: SequenceLane) -> None:
        other = self._rng.choice(self.texts)
        text = [*other[: self._rng.randrange(len(other) + 1)], *self.new(self._rng.choice((1, 20, 80)))][-ROOM + 20 :]
        row = lane.prefill(text, aligned=self._rng.random() < 0.3)
        self.texts[lane.number] = text
        self.check(lane, row[np.newaxis])

    def _together(self, _lane: SequenceLane) -> None:
        ready = [lane for lane in self.shared.lanes if 0 < len(self.texts[lane.number]) < ROOM]
        parts = []
        for lane in self._rng.sample(ready, self._rng.randint(min(1, len(ready)), len(ready))):
            tokens = self.new(self._rng.choice((1, 1, 1, 2, 4, 7)))
            parts.append(Part(lane, tokens, self._rng.randint(0, len(tokens))))
        found = self.shared.evaluate(parts) if parts else []
        for (_, tokens, count), part, rows in zip(parts, parts, found, strict=True):
            assert isinstance(part.lane, SequenceLane)
            self.texts[part.lane.number] += tokens
            assert rows.shape == (count, self.shared.n_vocab)
            self.check(part.lane, rows)
        for lane, tokens, _ in parts:
            if self._rng.random() < 0.6:
                assert isinstance(lane, SequenceLane)
                self._drop(lane, len(self.texts[lane.number]) - self._rng.randrange(len(tokens)))

    def _alone(self, lane: SequenceLane) -> None:
        tokens = self.new(self._rng.randint(1, 5))
        if self._rng.random() < 0.5:
            lane.checkpoint()
        rows = lane.evaluate(tokens)
        self.texts[lane.number] += tokens
        self.check(lane, rows)
        self._drop(lane, len(self.texts[lane.number]) - self._rng.randrange(len(tokens) + 1))
        if len(lane.tokens) > ROOM:
            self._clear(lane)

    def _take_back(self, lane: SequenceLane) -> None:
        self._drop(lane, self._rng.randrange(len(lane.tokens) + 1))

    def _adopt(self, lane: SequenceLane) -> None:
        other = self._rng.choice([other for other in self.shared.lanes if other is not lane])
        held = len(other.tokens)
        length = self._rng.choice((held, held, max(0, held - 3), self._rng.randint(0, held)))
        lane.adopt(other, length)
        self.texts[lane.number] = other.tokens[: len(lane.tokens)]
        assert len(lane.tokens) <= length
        self.seen["adopted"] += bool(lane.tokens)

    def _save(self, lane: SequenceLane) -> None:
        self._saved = [*self._saved, (list(lane.tokens), lane.saved())][-4:]

    def _restore(self, lane: SequenceLane) -> None:
        if self._saved:
            tokens, state = self._rng.choice(self._saved)
            lane.restore(tokens, state)
            self.texts[lane.number] = list(tokens)

    def _clear(self, lane: SequenceLane) -> None:
        lane.clear()
        self.texts[lane.number] = []
