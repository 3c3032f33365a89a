"""What the tests of drafters that read logits share: rows of logits, and a check of drafts that are drawn blindly."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from ngramspec.drafting.draft import Drafter


def rows_to(best: Sequence[int], n_vocab: int = 12) -> NDArray[np.float32]:
    """Rows in which these tokens are the best, in turn."""
    rows = np.zeros((len(best), n_vocab), np.float32)
    rows[np.arange(len(best)), best] = 4.0
    return rows


def check_blind_drafts(drafter: Drafter, limit: int, rng: random.Random) -> None:
    """Each q is the law that the token was drawn from, and whatever is drawn, the estimates are the same."""
    asked: list[dict[int, float]] = []

    def choose(offset: int, weights: Mapping[int, float]) -> int:
        asked.append(dict(weights))
        return rng.choice(list(weights))

    seen = set()
    for _ in range(12):
        asked.clear()
        draft = drafter.propose(limit, choose, blind=True)
        assert [dict(q) for q in draft.q] == asked
        assert all(sum(q.values()) == pytest.approx(1) for q in draft.q)
        assert all(token in q for token, q in zip(draft.tokens, draft.q, strict=True))
        assert len(draft.chances) == limit >= len(draft)
        seen.add(draft.chances)
    assert len(seen) == 1
