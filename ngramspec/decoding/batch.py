"""`Batch`: the sequences that go through a pass together, and how large the batches are that llama.cpp makes of it.

Where each sequence has a cache of its own, a batch takes in sequences only as long as their numbers follow each other.
An idle sequence in a gap then goes along with a token that is taken back, if that is cheaper than another batch.
"""

from __future__ import annotations

from collections.abc import Sequence

from ngramspec.backend import Logits
from ngramspec.cost.curve import CostCurve
from ngramspec.shared_model import Part, SequenceModel, SharedModel


class Batch:
    """Sequences whose texts share a pass.

    Args:
        model: whose sequences they are.
        sequences: of the texts.
        curve: what a batch costs.
        most: tokens of the largest batch that may be used.
    """

    def __init__(self, model: SharedModel, sequences: Sequence[SequenceModel], curve: CostCurve, most: int) -> None:
        self._model = model
        self.sequences = list(sequences)
        self.drafts_alone = model.drafts_alone  # as of `SharedModel`
        self._fillers: list[SequenceModel] = []
        self._plain = self.batches([1] * len(sequences))
        numbers = [sequence.number for sequence in sequences]
        if not model.drafts_alone and len(sequences) < max(numbers) - min(numbers) + 1:
            between = range(min(numbers), max(numbers))
            self._fillers = [
                sequence
                for sequence in model.sequences
                if sequence.number in between and sequence.number not in numbers
            ]
            bare, self._plain = self._plain, self.batches([1] * len(sequences))
            if self.plain_cost(curve) >= sum(map(curve.ratio, bare)) or len(sequences) + len(self._fillers) > most:
                self._fillers, self._plain = [], bare

    def batches(self, shape: Sequence[int]) -> Sequence[int]:
        """The sizes of the batches of a pass in which each text has so many tokens."""
        return self._model.batches([*shape, *[min(shape)] * len(self._fillers)], [*self.sequences, *self._fillers])

    def plain_cost(self, curve: CostCurve) -> float:
        """What a pass without drafts costs, in units of T(1)."""
        return sum(map(curve.ratio, self._plain))

    def evaluate(self, batches: Sequence[Sequence[int]]) -> list[Logits]:
        """Evaluate tokens of each text, and return the logits after each of them.

        Raises:
            TargetError: the pass failed; the sequences are as before.
        """
        filler = [0] * min(map(len, batches))
        parts = [Part(sequence, tokens, len(tokens)) for sequence, tokens in zip(self.sequences, batches, strict=True)]
        before = [len(sequence.tokens) for sequence in self._fillers]
        rows = self._model.evaluate_together([*parts, *(Part(sequence, filler, 0) for sequence in self._fillers)])
        for sequence, length in zip(self._fillers, before, strict=True):
            sequence.rollback(length)
        return rows[: len(parts)]
