"""Tests of rows of logits, distributions, log probabilities and noise, against sorts and naive sums.

`acceptance/test_rules.py` tests that draws with the noise follow the distribution.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from ngramspec.data import NGramSpecError
from ngramspec.sampling import distribution as noise
from ngramspec.sampling.distribution import (
    BadLogits,
    Distribution,
    Logprobs,
    largest,
    logprobs,
    point_mass,
    softmax,
    top_token,
)


def test_largest_equals_stable_sort() -> None:
    rng = np.random.default_rng(3)
    for size in (1, 63, 64, 65, 1000, 12_345):
        for values in (rng.standard_normal(size), rng.integers(0, 5, size).astype(float)):
            ordered = np.argsort(-values, kind="stable")
            for count in (1, 2, 40, size // 2, size - 1, size, size + 1):
                if count:
                    assert largest(values, count).tolist() == sorted(ordered[:count].tolist())


def test_largest_includes_infinities_and_returns_nan() -> None:
    for size in (10, 20_000):
        values = np.full(size, -np.inf, np.float32)
        values[[3, 7]] = [0.0, np.inf]
        assert largest(values, 2).tolist() == [3, 7]
        assert largest(values, 3).tolist() == [0, 3, 7]
        values[[5, size - 1]] = np.nan
        for count in (1, 2, 5):
            assert {5, size - 1} <= set(largest(values, count).tolist())


def test_softmax_equals_definition() -> None:
    rng = np.random.default_rng(1)
    for size in (1, 2, 50):
        ids = rng.permutation(1000)[:size].astype(np.int32)
        logits = (5 * rng.standard_normal(size)).astype(np.float32)
        law = softmax(ids, logits)
        assert law.ids.tolist() == sorted(ids.tolist())
        total = math.fsum(math.exp(float(x)) for x in logits)
        for token, logit in zip(ids.tolist(), logits.tolist(), strict=True):
            assert law.probability(token) == pytest.approx(math.exp(logit) / total, rel=1e-12)
        np.testing.assert_allclose(np.exp(law.logp), law.probs, rtol=1e-12)
        assert abs(law.probs.sum() - 1) < 1e-14


def test_softmax_omits_tokens_without_probability() -> None:
    with np.errstate(all="raise", under="ignore"):
        law = softmax(np.array([4, 2, 9], np.int32), np.array([0.0, -np.inf, 0.0], np.float32))
        assert (law.ids.tolist(), law.probs.tolist()) == ([4, 9], [0.5, 0.5])
        law = softmax(np.array([4, 2, 9], np.int32), np.array([3e38, -3e38, 0.0], np.float32))
        assert (law.ids.tolist(), law.probs.tolist(), law.logp.tolist()) == ([4], [1.0], [0.0])


def test_distribution_find_and_probability_return_expected_values() -> None:
    law = Distribution(np.array([1, 3], np.int32), np.array([0.25, 0.75]), np.log([0.25, 0.75]))
    assert [law.find(token) for token in range(-1, 6)] == [None, None, 0, None, 1, None, None]
    assert [law.probability(token) for token in range(5)] == [0.0, 0.25, 0.0, 0.75, 0.0]
    sure = point_mass(7)
    assert (sure.ids.tolist(), sure.probs.tolist(), sure.logp.tolist()) == ([7], [1.0], [0.0])
    assert sure.ids.dtype == np.int32
    assert (sure.probability(7), sure.probability(8)) == (1.0, 0.0)


@pytest.mark.parametrize("size", [1, 10, 20_001])
def test_top_token_returns_argmax_and_rejects_bad_logits(size: int) -> None:
    assert issubclass(BadLogits, ValueError)
    assert issubclass(BadLogits, NGramSpecError)  # a user's error
    for where in {0, size // 2, size - 1}:
        logits = np.zeros(size, np.float32)
        logits[where] = 1.0
        assert top_token(logits) == where
        logits[where] = np.nan
        with pytest.raises(BadLogits, match=rf"token {where} is nan"):
            top_token(logits)
        logits[where] = np.inf
        with pytest.raises(BadLogits, match=rf"token {where} is inf"):
            top_token(logits)
        logits[:] = -np.inf
        logits[where] = -1.0
        assert top_token(logits) == where
    assert top_token(np.zeros(size, np.float32)) == 0  # Of equal logits, the lowest id wins.
    with pytest.raises(BadLogits, match=f"all {size} logits are -inf"):
        top_token(np.full(size, -np.inf, np.float32))


# --------------------------------------------------------------------------- the model's own logprobs


def test_logprobs_equal_definition() -> None:
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


def test_logprobs_with_ties_order_by_lowest_token_id() -> None:
    told = logprobs(np.array([1, 2, 1, 2, 2], np.float32), 0, 4)
    assert [token for token, _ in told.top] == [1, 3, 4, 0]
    row = np.array([0.5, 1.5, -1.0], np.float32)
    assert logprobs(row, 2, 0) == Logprobs(2, logprobs(row, 2, 3).logprob, ())
    everything = logprobs(row, 1, 3).top
    assert [token for token, _ in everything] == [1, 0, 2]
    assert math.fsum(math.exp(p) for _, p in everything) == pytest.approx(1)


def test_logprobs_with_minus_infinity_and_large_logits_are_exact() -> None:
    with np.errstate(all="raise", under="ignore"):
        row = np.array([1e6, -np.inf, 1e6, -1e38], np.float32)
        told = logprobs(row, 0, 4)
        assert told.logprob == pytest.approx(-math.log(2))
        assert [token for token, _ in told.top] == [0, 2, 3, 1]
        assert told.top[3][1] == -math.inf
    sure = logprobs(np.array([-np.inf, 5.0], np.float32), 1, 1)
    assert (sure.logprob, sure.top) == (0.0, ((1, 0.0),))


SEEDS = (0, 1, 12345, 2**63, 2**64 - 1)


def test_noise_generator_equals_published_splitmix64_values() -> None:
    first = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [noise._out(1234567, n) for n in range(4)] == first
    assert noise._out(1234567, np.arange(4, dtype=np.uint64)).tolist() == first


def test_noise_equals_pinned_values() -> None:
    ids = np.array([0, 1, 2, 151935])
    pinned = {
        (0, 0): [-0.6807578025137786, 3.5293597414235305, -0.24743454082693486, -0.1093530442433601],
        (0, 1): [-0.526909935923932, 0.755333867420983, 0.2401111256827167, -0.2906223983524208],
        (1, 0): [0.37409038757079954, 0.6092290949683159, -0.7219435701966209, 2.330061302396756],
        (2**64 - 1, 10**6): [0.6912726084043267, 1.3730719072405249, -0.3437731573092049, -1.5691069478359831],
    }
    for (seed, position), values in pinned.items():
        np.testing.assert_allclose(noise.gumbel(seed, position, ids), values, rtol=1e-13)
    assert noise.uniform(0, 0, 0) == 0.04336036139932087
    assert noise.uniform(2**64 - 1, 7, 3) == 0.09395592684583043


def test_gumbel_noise_of_token_does_not_depend_on_other_tokens() -> None:
    ids = np.arange(0, 150_000, 37, dtype=np.int32)
    for seed in SEEDS:
        vector = noise.gumbel(seed, 4321, ids).tolist()
        assert [noise.gumbel_one(seed, 4321, i) for i in ids.tolist()] == vector
    whole = noise.gumbel(7, 99, np.arange(10_000))
    rng = np.random.default_rng(0)
    for size in (1, 2, 3, 7, 8, 9, 40, 1001):
        some = rng.permutation(10_000)[:size]
        assert (noise.gumbel(7, 99, some) == whole[some]).all()
        assert (noise.gumbel(7, 99, some.astype(np.int32)) == whole[some]).all()


def test_noise_of_extreme_bits_is_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    for bits in (0, 2**64 - 1):
        monkeypatch.setattr(noise, "_out", lambda state, counter, bits=bits: counter * 0 + bits)
        g = noise.gumbel(0, 0, np.array([1]))[0]
        assert math.isfinite(g)
        assert g == noise.gumbel_one(0, 0, 1)
        assert 0 < noise.uniform(0, 0, 0) < 1
