"""A shared model with a mock target for each sequence: a joint pass gives the logits that each target gives alone."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from support.mock_target import Clock, MockTarget

from ngramspec.backend import Part, SequenceModel
from ngramspec.data import TargetError

Rows = NDArray[np.float32]


class MockSequence(MockTarget):
    """Mock target whose cache can be filled in steps, copied and saved."""

    def __init__(self, number: int, **settings: Any) -> None:
        super().__init__(**settings)
        self.number = number
        self.n_restored = self.n_adopted = 0
        self.owner: MockShared | None = None

    def submit(self, tokens: Sequence[int]) -> None:
        assert self.owner is not None
        (self._fetched,) = self.owner.evaluate_together([Part(self, tokens, len(tokens))])

    def reading(
        self, tokens: Sequence[int], *, aligned: bool = False, max_chunk: Callable[[], int] | None = None
    ) -> Generator[int, None, Rows]:
        n_done = self._reuse(tokens, aligned)
        while True:
            yield n_done
            chunk = self.n_batch if aligned or max_chunk is None else min(self.n_batch, max_chunk())
            self._append(tokens[n_done : n_done + chunk], self.n_ctx, 0)
            self._spend(self._seconds, len(self.tokens) - n_done)
            n_done = len(self.tokens)
            if n_done == len(tokens):
                rows: Rows = self._return_rows([self._inexact(n_done)])
                return rows[0]

    def adopt(self, source: SequenceModel, length: int) -> None:
        assert isinstance(source, MockSequence)
        self.n_adopted += 1
        self.tokens[:] = source.tokens[:length]
        self._marks[:] = source._marks[:length]

    def save_state(self) -> bytes:
        return pickle.dumps((self.tokens, self._marks))

    def restore(self, tokens: Sequence[int], state: bytes) -> None:
        self.n_restored += 1
        self.tokens[:], self._marks[:] = pickle.loads(state)
        assert self.tokens == list(tokens)


class MockShared:
    """Shared model of several mock sequences."""

    def __init__(
        self,
        sequences: int = 4,  # number of sequences
        *,
        split: bool = False,  # separate caches: a batch has as many tokens of each of its sequences
        drafts_alone: bool = False,  # see `SharedModel`
        early: bool = False,  # passes return before their logits are there
        fails: Callable[[Sequence[Part]], bool] | None = None,  # called before a pass, which fails if True
        seconds: Callable[[int], float] = lambda n: 1e-3 + 1e-5 * n,  # duration of a batch of n tokens on `clock`
        clock: Clock | None = None,  # clock of all sequences; `None` means a new one
        **settings: Any,  # further arguments of `MockTarget`
    ) -> None:
        self.clock = clock = clock or Clock()
        self.sequences = [MockSequence(number, seconds=seconds, clock=clock, **settings) for number in range(sequences)]
        for sequence in self.sequences:
            sequence.owner, sequence.returns_early = self, early
        first = self.sequences[0]
        self.n_ctx, self.max_tokens, self.max_rows = first.n_ctx, first.n_batch, first.max_batch
        self.drafts_alone, self.returns_early = drafts_alone, early
        self.passes: list[list[tuple[int, int]]] = []
        """For each pass, (number of the sequence, number of its tokens) of each of its sequences."""
        self._split, self._fails = split, fails
        self._seconds = seconds

    feeds_head = False

    def submit_together(self, parts: Sequence[Part]) -> None:
        self._fetched = self.evaluate_together(parts)

    def fetch_together(self) -> list[Rows]:
        return self._fetched

    def evaluate_together(self, parts: Sequence[Part]) -> list[Rows]:
        assert parts
        assert len({part.sequence.number for part in parts}) == len(parts)
        assert sum(part.rows for part in parts) <= self.max_rows
        assert not self.drafts_alone or len(parts) == 1 or all(len(part.tokens) == 1 for part in parts)
        if self._fails is not None and self._fails(parts):
            raise TargetError("the pass failed because of `fails`")
        self.passes.append([(part.sequence.number, len(part.tokens)) for part in parts])
        now = self.clock.now
        rows = [part.sequence.evaluate(part.tokens)[len(part.tokens) - part.rows :] for part in parts]
        batches = self.batches([len(part.tokens) for part in parts], [part.sequence for part in parts])
        self.clock.now = now + sum(map(self._seconds, batches))
        return rows

    def batches(self, lengths: Sequence[int], sequences: Sequence[SequenceModel]) -> Sequence[int]:
        if not self._split:
            return [sum(lengths)]
        numbers = [sequence.number for sequence in sequences]
        remaining = dict(sorted(zip(numbers, lengths, strict=True)))
        sizes = []
        while remaining:
            block = [min(remaining)]
            while block[-1] + 1 in remaining:
                block.append(block[-1] + 1)
            n_tokens = min(remaining[number] for number in block)
            sizes.append(n_tokens * len(block))
            remaining = {number: n - n_tokens * (number in block) for number, n in remaining.items()}
            remaining = {number: n for number, n in remaining.items() if n}
        return sizes
