"""Whether a rollback leaves nothing behind: evaluate, roll back, evaluate again, and the logits are the same bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ngramspec.backend import Logits, Model

SIZES = (5, 2, 1, 16)
"""Batch sizes. That of a full draft comes first, as time may run out before the end of the list."""

DEPTHS = (24, 300)
"""Tokens of context before the batch."""

ROOM = max(DEPTHS) + 2 * max(SIZES)
"""Tokens of text that all tests take."""


@dataclass(frozen=True, slots=True)
class RollbackTest:
    """A batch evaluated, rolled back, and evaluated again."""

    depth: int  # tokens in the cache before the batch
    size: int  # tokens in the batch
    # 0 if the whole batch was taken back and evaluated again. Otherwise this many of its tokens were kept, and what
    # followed was evaluated twice: after two batches of this size that differ in the tokens taken back.
    kept: int
    left_over: int  # tokens that the cache reports beyond those that it was rolled back to
    difference: float  # largest difference of a logit between the two evaluations; inf where one is nan
    identical: bool  # whether they are the same bits

    @property
    def held(self) -> bool:
        return self.identical and self.left_over == 0


def rollback_tests(target: Model, text: Sequence[int]) -> Iterator[RollbackTest]:
    """Test every size at every depth that the text and the context have room for.

    Like is compared with like: whatever is evaluated twice stands in the same place of a batch of the same size.
    """
    other = [(token + 1) % target.n_vocab for token in text]
    room = min(len(text), target.n_ctx)
    for depth in sorted({max(1, min(depth, room - 2 * max(SIZES))) for depth in DEPTHS}):
        target.clear()
        target.prefill(text[:depth])
        target.checkpoint()
        for size in SIZES:
            end = depth + size
            if end + size > room or size > target.max_batch:
                continue
            batch, refused, after = text[depth:end], other[depth:end], text[end : end + size]
            once = _evaluate(target, batch, depth)
            _evaluate(target, refused, depth)
            yield _test(target, depth, size, 0, once, _evaluate(target, batch, depth))
            kept = size // 2
            if not kept:
                continue
            rows = []
            for taken_back in (batch[kept:], refused[kept:]):
                _evaluate(target, [*batch[:kept], *taken_back], depth + kept)
                rows.append(_evaluate(target, after, depth))
            yield _test(target, depth, size, kept, *rows)


def _evaluate(target: Model, batch: Sequence[int], length: int) -> Logits:
    """The logits of a batch, after which the cache is rolled back to `length` tokens."""
    rows = target.evaluate(batch).copy()
    target.rollback(length)
    return rows


def _test(target: Model, depth: int, size: int, kept: int, once: Logits, again: Logits) -> RollbackTest:
    left_over = len(target.tokens) - depth
    if once.tobytes() == again.tobytes():
        return RollbackTest(depth, size, kept, left_over, 0.0, True)
    changed = once != again
    gaps = np.abs(once[changed] - again[changed])
    return RollbackTest(depth, size, kept, left_over, float(np.nan_to_num(gaps, nan=np.inf).max(initial=0.0)), False)
