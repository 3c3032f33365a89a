"""Tests that the compiled loops give exactly the tokens of the numpy functions in `distribution`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from ngramspec.sampling.distribution import (
    BadLogits,
    NoTokenLeft,
    gumbel,
    gumbel_one,
    gumbel_pick,
    largest,
    softmax,
    top_token,
)
from ngramspec.sampling.rows import Candidates, CoupledChoice, append_most_likely

SIZE = 1000


@st.composite
def rows(draw: Any) -> NDArray[np.float32]:
    """Draw rows of many lengths: with and without ties, in order, and with some or all logits at -inf, +inf or nan."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    n = draw(st.sampled_from([1, 2, 40, 41, 63, 64, 65, 66, 129, SIZE]))
    row: NDArray[np.float32] = (rng.standard_normal(n) * draw(st.sampled_from([0.01, 3, 100]))).astype(np.float32)
    row = draw(st.sampled_from([row, np.sort(row), np.round(row), np.zeros_like(row)])).copy()
    row[rng.random(n) < draw(st.sampled_from([0.0, 0.5, 1.0]))] = -np.inf
    if draw(st.booleans()):
        row[rng.integers(n)] = draw(st.sampled_from([np.nan, np.inf, 1.0, -np.inf]))
    return row


def outcome(function: Callable[..., Any], *args: Any) -> Any:
    """Return the result, or the message of the error."""
    try:
        return function(*args)
    except BadLogits as error:
        return str(error)


@given(row=rows(), count=st.sampled_from([1, 2, 40, SIZE + 1]))
def test_candidates_take_keeps_largest_logits_or_all(row: NDArray[np.float32], count: int) -> None:
    candidates, best = Candidates(SIZE), outcome(top_token, row)
    for take, ids in ((candidates.take_all, np.arange(row.size)), (candidates.take_largest, largest(row, count))):
        n = outcome(take, row) if take == candidates.take_all else outcome(take, row, count)
        if isinstance(best, str):
            assert n == best
            continue
        data = candidates.data[:n]
        assert (data["id"].tolist(), data["logit"].tolist()) == (ids.tolist(), row[ids].tolist())
        assert not data["p"].any()
        assert json.dumps([candidates.best(0, n)]) == f"[{best}]"


@given(ids=st.sets(st.integers(0, 19)), moved=st.sets(st.integers(0, 19)))
def test_candidates_move_to_end_moves_or_appends_tokens(ids: set[int], moved: set[int]) -> None:
    row = np.arange(20, dtype=np.float32)
    candidates, data = Candidates(20), sorted(ids)
    candidates.data[: len(ids)] = [(token, token, 0) for token in data]
    n = candidates.move_to_end(len(ids), np.array(sorted(moved), np.int32), row)
    assert candidates.data[:n].tolist() == [(t, t, 0) for t in [*sorted(ids - moved), *sorted(moved)]]


@given(row=rows(), seed=st.integers(0, 2**64 - 1), position=st.integers(0, 2**31), attempt=st.integers(0, 1))
def test_candidates_draw_equals_gumbel_pick_of_softmax(
    row: NDArray[np.float32], seed: int, position: int, attempt: int
) -> None:
    """The result does not depend on the order of the candidates, or on the presence of the first ones."""
    candidates = Candidates(SIZE)
    if isinstance(outcome(top_token, row), str):
        return
    for count in (1, 40, SIZE):
        n = candidates.take_largest(row, count)
        candidates.data[:n] = np.random.default_rng(seed).permutation(candidates.data[:n])
        for first in {0, n // 2}:
            kept = candidates.data[first:n].copy()
            if kept["logit"].max() > -np.inf:
                expected = gumbel_pick(seed, position, softmax(kept["id"], kept["logit"]), attempt)
                assert candidates.draw(first, n - first, seed, position, attempt) == expected
            else:
                with pytest.raises(NoTokenLeft):
                    candidates.draw(first, n - first, seed, position, attempt)


def test_candidates_draw_with_nearly_equal_scores_matches_numpy() -> None:
    """The second token's logit compensates its noise up to the last bits of float32, which are far below 1e-9 here."""
    noise = gumbel(5, 9, np.arange(100_000))
    order = np.argsort(noise)
    candidates, winners = Candidates(2), set[bool]()
    for first, second in zip(order[50_000:50_400].tolist(), order[50_001:50_401].tolist(), strict=True):
        gap = np.float32(noise[second] - noise[first])
        assert gap < 1e-3
        for logits in ((gap, 0.0), (np.nextafter(gap, np.float32(1)), 0.0), (np.nextafter(gap, np.float32(0)), 0.0)):
            candidates.data["id"], candidates.data["logit"] = (first, second), logits
            token = candidates.draw(0, 2, 5, 9, 0)
            assert token == gumbel_pick(5, 9, softmax(candidates.data["id"], candidates.data["logit"]))
            winners.add(token == first)
    assert winners == {True, False}


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_candidates_with_invalid_logits_raise_no_token_left(bad: float) -> None:
    candidates = Candidates(3)
    for logits in ((1.0, bad, 2.0), (bad, 1.0, 2.0), (-np.inf,) * 3):
        candidates.take_all(np.zeros(3, np.float32))
        candidates.data["logit"] = logits
        for call in (lambda: candidates.best(0, 3), lambda: candidates.draw(0, 3, 1, 2, 0)):
            with pytest.raises(NoTokenLeft, match="no token is left to sample"):
                call()


def test_candidates_take_rejects_row_longer_than_vocabulary() -> None:
    candidates = Candidates(3)
    for take in (candidates.take_all, lambda row: candidates.take_largest(row, 2)):
        with pytest.raises(ValueError, match="the row has 4 logits for a vocabulary of 3 tokens"):
            take(np.zeros(4, np.float32))


@given(row=rows())
def test_append_most_likely_without_draft_appends_argmax(row: NDArray[np.float32]) -> None:
    tokens: list[int] = []
    error = outcome(append_most_likely, row[np.newaxis], (), tokens)
    best = outcome(top_token, row)
    assert (error, tokens) == ((best, []) if isinstance(best, str) else (False, [best]))


def test_append_most_likely_stops_at_first_mismatch_or_bad_row() -> None:
    rows = np.eye(5, dtype=np.float32)
    rows.flags.writeable = False

    def appended(rows: NDArray[np.float32], draft: tuple[int, ...]) -> tuple[list[int], Any]:
        tokens = [7]
        result = outcome(append_most_likely, rows, draft, tokens)
        return tokens, result

    assert appended(rows, ()) == ([7, 0], False)
    assert appended(rows, (0, 1, 9, 3)) == ([7, 0, 1, 2], False)
    assert appended(rows, (0, 1)) == ([7, 0, 1, 2], False)
    assert appended(rows[:2], (0, 1, 2)) == ([7, 0, 1], True)
    for bad in (np.nan, np.inf):
        broken = rows.copy()
        broken[2, 4] = bad
        assert appended(broken, (0, 1, 2, 3)) == (
            [7, 0, 1],
            f"the logit of token 4 is {bad}: the model's output is broken",
        )
        assert appended(broken, (0, 9)) == ([7, 0, 1], False)


def test_coupled_choice_adds_noise_of_its_position() -> None:
    rng = np.random.default_rng(2)
    for seed in (0, 3, 2**64 - 1):
        choose = CoupledChoice(seed, 70)
        for offset in range(40):
            weights = dict(zip(rng.permutation(1000)[:12].tolist(), rng.uniform(0.01, 9, 12).tolist(), strict=True))
            scores = {x: math.log(w) + gumbel_one(seed, 70 + offset, x) for x, w in weights.items()}
            assert choose(offset, weights) == max(scores, key=scores.__getitem__)
        assert choose(0, {7: 3}) == 7
