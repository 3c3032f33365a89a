"""The copy-oracle against one that tries everything."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
from support.recordings import recordings

from ngramspec.cost.given import CURVES, LARGEST, GivenCurve
from ngramspec.drafting.draft import Chooser, Draft, Drafter
from ngramspec.drafting.price import TokenPrice
from ngramspec.replay.oracle import copy_lengths, least_cost
from ngramspec.replay.recording import Recording
from ngramspec.replay.replay import Replay


def naive_lengths(prompt: list[int], response: list[int]) -> list[int]:
    text, start = [*prompt, *response], len(prompt)
    lengths = [0] * len(response)
    for i in range(start + 1, len(text)):
        for j in range(1, i):
            k = 0
            while text[j - 1] == text[i - 1] and i + k < len(text) and text[j + k] == text[i + k]:
                k += 1
            lengths[i - start] = max(lengths[i - start], min(k, LARGEST - 1))
    return lengths


def naive_cost(lengths: list[int], curve: GivenCurve) -> float:
    end = len(lengths)

    @cache
    def cost(i: int) -> float:
        if i >= end:
            return 0.0
        return min(curve.ratio(1 + k) + cost(i + k + 1) for k in range(min(lengths[i], end - 1 - i) + 1))

    return cost(1)


def test_the_example() -> None:
    assert copy_lengths([1, 2, 3, 4], [1, 2, 3, 9]).tolist() == [0, 2, 1, 0]


def test_a_copy_may_run_into_itself_and_is_capped() -> None:
    assert copy_lengths([5, 5], [5] * 100)[1:].tolist() == [min(63, 99 - i) for i in range(99)]


@pytest.mark.parametrize("vocabulary", [2, 5, 60])
def test_lengths_equal_the_naive_search(vocabulary: int) -> None:
    rng = np.random.default_rng(vocabulary)
    for _ in range(60):
        prompt, response = (rng.integers(0, vocabulary, rng.integers(0, n)).tolist() for n in (20, 40))
        assert copy_lengths(prompt, response).tolist() == naive_lengths(prompt, response)


def test_cost_equals_the_naive_search() -> None:
    curves = {name: GivenCurve(points) for name, (points, _) in CURVES.items()}
    for recording in recordings(12):
        lengths = copy_lengths(recording.prompt, recording.response)
        costs = least_cost(lengths, list(curves.values()))
        assert costs.tolist() == pytest.approx([naive_cost(lengths.tolist(), c) for c in curves.values()])


@pytest.mark.parametrize("length", [0, 1])
def test_what_the_prefill_gives_costs_nothing(length: int) -> None:
    lengths = copy_lengths([1, 2], [3][:length])
    assert least_cost(lengths, [GivenCurve({1: 1.0})]).tolist() == [0.0]


class Copier(Drafter):
    """Copies as far as any copy is right; it has seen the recording."""

    name = "copier"

    def __init__(self, recording: Recording) -> None:
        self._response = recording.response
        self._lengths = copy_lengths(recording.prompt, recording.response)
        self._at = 0

    def begin(self, prompt: Sequence[int]) -> None:
        self._at = 0

    def propose(
        self, limit: int, choose: Chooser | None = None, *, blind: bool = False, price: TokenPrice | None = None
    ) -> Draft:
        end = self._at + min(limit, int(self._lengths[self._at])) if self._at < len(self._lengths) else 0
        tokens = tuple(self._response[self._at : end])
        return Draft(tokens, chances=(1.0,) * len(tokens))

    def accept(self, tokens: Sequence[int]) -> int:
        self._at += len(tokens)
        return len(tokens) - 1


def test_a_drafter_that_copies_as_far_as_it_can_reaches_it_where_batches_cost_nothing() -> None:
    # There the longest copy is the best one: from a place further on, a copy reaches at least as far.
    curve = GivenCurve(CURVES["flat"][0])
    for recording in recordings(20, seed=1):
        replay = Replay(Copier(recording), "fixed", LARGEST - 1, curve=curve)
        least = least_cost(copy_lengths(recording.prompt, recording.response), [curve])[0]
        assert replay.run(recording).stats.passes == least
