"""`Formation`: the lanes that go through a pass together, and how large the batches are that llama.cpp makes of it.

Where each lane has a cache of its own, a batch takes in lanes only as long as their numbers follow each other. An idle
lane in a gap then goes along with a token that is taken back, if that is cheaper than another batch.
"""

from __future__ import annotations

from collections.abc import Sequence

from ngramspec.backend import Lane, Logits, Part, SharedModel
from ngramspec.cost.curve import CostCurve


class Formation:
    """Lanes whose texts share a pass.

    Args:
        model: whose lanes they are.
        lanes: of the texts.
        curve: what a batch costs.
        most: tokens of the largest batch that may be used.

    Attributes:
        lanes: as above.
    """

    def __init__(self, model: SharedModel, lanes: Sequence[Lane], curve: CostCurve, most: int) -> None:
        self._model = model
        self.lanes = list(lanes)
        self._fillers: list[Lane] = []
        self._plain = self.batches([1] * len(lanes))
        numbers = [lane.number for lane in lanes]
        if not model.drafts_alone and len(lanes) < max(numbers) - min(numbers) + 1:
            between = range(min(numbers), max(numbers))
            self._fillers = [lane for lane in model.lanes if lane.number in between and lane.number not in numbers]
            bare, self._plain = self._plain, self.batches([1] * len(lanes))
            if self.plain_cost(curve) >= sum(map(curve.ratio, bare)) or len(lanes) + len(self._fillers) > most:
                self._fillers, self._plain = [], bare

    def batches(self, shape: Sequence[int]) -> Sequence[int]:
        """The sizes of the batches of a pass in which each text has so many tokens."""
        return self._model.batches([*shape, *[min(shape)] * len(self._fillers)], [*self.lanes, *self._fillers])

    def plain_cost(self, curve: CostCurve) -> float:
        """What a pass without drafts costs, in units of T(1)."""
        return sum(map(curve.ratio, self._plain))

    def evaluate(self, batches: Sequence[Sequence[int]]) -> list[Logits]:
        """Evaluate tokens of each text, and return the logits after each of them.

        Raises:
            TargetError: the pass failed; the lanes are as before.
        """
        filler = [0] * min(map(len, batches))
        parts = [Part(lane, tokens, len(tokens)) for lane, tokens in zip(self.lanes, batches, strict=True)]
        before = [len(lane.tokens) for lane in self._fillers]
        rows = self._model.evaluate([*parts, *(Part(lane, filler, 0) for lane in self._fillers)])
        for lane, length in zip(self._fillers, before, strict=True):
            lane.rollback(length)
        return rows[: len(parts)]
