"""Counts of what the text said, and of what the target would have said."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ngramspec.drafting.nasd import NasdDrafter
from ngramspec.drafting.ngram import NGramDrafter
from ngramspec.drafting.predictor import NGramPredictor


def rows(*likely: Sequence[int]) -> NDArray[np.float32]:
    """Logits by which these tokens are the likeliest, best first."""
    found = np.full((len(likely), 30), -9.0, np.float32)
    for row, tokens in zip(found, likely, strict=True):
        row[list(tokens)] = np.arange(len(tokens), 0, -1)
    return found


def after(*tokens: int) -> list[int]:
    """The keys of the contexts that end with these tokens."""
    predictor = NGramPredictor()
    predictor.update_batch(tokens)
    return predictor.keys


def test_what_was_likely_is_counted_beside_what_came() -> None:
    drafter = NasdDrafter()
    drafter.begin([1])
    drafter.see([1], rows([2, 3, 4]))
    drafter.accept([2])
    length, found = drafter.predictor.lookup(after(1)) or (0, None)
    assert length == 1
    assert found is not None
    assert found.counts == {2: 2, 3: 1, 4: 1}
    assert len(drafter.predictor) == 2  # the text itself is the text alone


def test_a_refused_guess_leaves_nothing() -> None:
    """Of a pass over a draft, only the rows up to the first refusal are about this text."""
    drafter = NasdDrafter()
    drafter.begin([1])
    drafter.see([1, 8, 9], rows([2, 3, 4], [20, 21, 22], [23, 24, 25]))
    drafter.accept([2])
    for last in (8, 9):
        assert drafter.predictor.lookup(after(last)) is None


def test_without_logits_it_is_an_n_gram_drafter() -> None:
    ours, plain = NasdDrafter(), NGramDrafter()
    for drafter in (ours, plain):
        drafter.begin([1, 2, 3, 1, 2])
        assert drafter.accept([3, 1]) == 0
    assert ours.propose(4).tokens == plain.propose(4).tokens == (2, 3, 1, 2)
