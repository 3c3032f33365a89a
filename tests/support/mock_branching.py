"""A mock target whose cache contains several continuations of its text, as beam search needs them."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from support.mock_target import MockTarget

WINDOW = 4  # tokens in the sliding window of a windowed target, which is shorter than drafts


class MockBranchingTarget(MockTarget):
    """`MockTarget` with the attributes of `ngramspec.llama.target.Target` that beam search needs."""

    def __init__(
        self,
        n_vocab: int = 16,
        *,
        n_seq: int = 64,  # number of sequences in the context
        suppressed: Sequence[int] = (),  # tokens that the model's file forbids
        windowed: bool = False,  # the cache frees each cell that has left the window of its only sequence
        decimals: int | None = None,  # number of decimals to which logits are rounded, so that some scores are equal
        **options: Any,  # arguments of `MockTarget`
    ) -> None:
        super().__init__(n_vocab, **options)
        self.n_seq = n_seq
        self.suppress_tokens = tuple(suppressed)
        self.weights = SimpleNamespace(window=WINDOW if windowed else 0)
        self.decimals = decimals
        self.max_rows = self.max_batch
        self.cells: list[tuple[int, int, set[int]]] = []  # token, position and sequences

    @property
    def passes(self) -> Any:
        """The `Passes` of the target."""
        return self

    @property
    def can_branch(self) -> bool:
        return self.can_rollback

    @property
    def is_clean(self) -> bool:
        """True if the cache contains only the prompt, as far as its window shows it."""
        prompt = [(token, at, {0}) for at, token in enumerate(self.tokens)]
        return not self.cells or prompt[-len(self.cells) :] == self.cells

    def row(self, context: Sequence[int]) -> NDArray[np.float32]:
        row = super().row(context)
        return row if self.decimals is None else np.round(row, self.decimals)

    # ------------------------------------------------------------------ `ngramspec.llama.passes.Passes`

    def length(self, sequence: int) -> int:
        return max((at + 1 for _, at, sequences in self.cells if sequence in sequences), default=0)

    def share(self, source: int, sequence: int, end: int) -> None:
        start = self.length(sequence)
        for _, at, sequences in self.cells:
            if source in sequences and start <= at < end:
                sequences.add(sequence)

    def cut(self, sequence: int, length: int) -> None:
        if not self.cells:
            self.cells = [(token, at, {0}) for at, token in enumerate(self.tokens)]
        self._remove(sequence, length, self.n_ctx + self.max_batch)

    def _remove(self, sequence: int, start: int, end: int) -> None:
        for _, at, sequences in self.cells:
            if start <= at < end:
                sequences.difference_update(set(sequences) if sequence < 0 else {sequence})
        self.cells = [cell for cell in self.cells if cell[2]]

    def branch(self, rows: Sequence[tuple[int, int, Sequence[int]]]) -> NDArray[np.float32]:
        assert 0 < len(rows) <= self.max_batch
        assert all(sequence < self.n_seq for *_, sequences in rows for sequence in sequences)
        held: dict[int, list[int]] = {}
        for _, at, sequences in self.cells:
            for sequence in sequences:
                held.setdefault(sequence, []).append(at)
        for *_, sequences in rows:  # llama-batch.cpp rejects tokens of sequences that differ
            assert len({(min(held.get(each, [-1])), max(held.get(each, [-1]))) for each in sequences}) == 1
        window = self.weights.window or self.n_ctx + self.max_batch
        for _, at, sequences in list(self.cells):
            if len(sequences) == 1 and at <= max(held[only := min(sequences)]) + 1 - window:
                self._remove(only, 0, at + 1)
        self.cells += [(token, at, set(sequences)) for token, at, sequences in rows]
        assert len(self.cells) <= self.n_ctx + self.max_batch
        self.batches.append(len(rows))
        if self._seconds is not None and self._clock is not None:
            self._clock.now += self._seconds(len(rows))
        return self._return_rows([self.row(self._visible(at, sequences[0], window)) for _, at, sequences in rows])

    def _visible(self, last: int, sequence: int, window: int) -> list[int]:
        """Return the tokens up to a position that a row of a sequence attends to."""
        path = sorted((at, token) for token, at, sequences in self.cells if sequence in sequences and at <= last)
        inside = range(max(0, last + 1 - window), last + 1)
        assert [at for at, _ in path if at in inside] == list(inside)
        return [token for at, token in path if at in inside]
