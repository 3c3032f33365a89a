"""Logprobs: the model's own, before any sampling setting. In the loop they are in `test_decoder_sampling`."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ngramspec.sampling.logprobs import Logprobs, logprobs


def test_logprobs_against_the_definition() -> None:
    rng = np.random.default_rng(1)
    for size, scale in ((1, 1.0), (2, 5.0), (300, 3.0), (5003, 0.01), (151_936, 4.0)):
        row = (scale * rng.standard_normal(size)).astype(np.float32)
        total = math.log(math.fsum(np.exp(row.astype(np.float64))))
        for token in {0, size - 1, int(row.argmax()), int(row.argmin())}:
            told = logprobs(row, token, min(size, 7))
            assert told.token == token
            assert told.logprob == pytest.approx(float(row[token]) - total, abs=2e-5)
            best = np.argsort(-row, kind="stable")[:7].tolist()
            assert [one for one, _ in told.top] == best
            assert [p for _, p in told.top] == pytest.approx([float(row[one]) - total for one in best], abs=2e-5)
            assert [p for _, p in told.top] == sorted((p for _, p in told.top), reverse=True)


def test_ties_go_to_the_lowest_id() -> None:
    row = np.array([1, 2, 1, 2, 2], np.float32)
    told = logprobs(row, 0, 4)
    assert [token for token, _ in told.top] == [1, 3, 4, 0]


def test_none_and_all_of_the_likeliest() -> None:
    row = np.array([0.5, 1.5, -1.0], np.float32)
    assert logprobs(row, 2, 0) == Logprobs(2, logprobs(row, 2, 3).logprob, ())
    everything = logprobs(row, 1, 3).top
    assert [token for token, _ in everything] == [1, 0, 2]
    assert math.fsum(math.exp(p) for _, p in everything) == pytest.approx(1)


def test_minus_infinity_and_large_logits() -> None:
    with np.errstate(all="raise", under="ignore"):
        row = np.array([1e6, -np.inf, 1e6, -1e38], np.float32)
        told = logprobs(row, 0, 4)
        assert told.logprob == pytest.approx(-math.log(2))
        assert [token for token, _ in told.top] == [0, 2, 3, 1]
        assert told.top[3][1] == -math.inf
    sure = logprobs(np.array([-np.inf, 5.0], np.float32), 1, 1)
    assert (sure.logprob, sure.top) == (0.0, ((1, 0.0),))
