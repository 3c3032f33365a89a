"""Tests of the noise, a pure function of its counters, and of its distribution.

The statistical tests use fixed counters, so they always pass or always fail. For true noise, each comparison would fail
with probability below 1e-9. There are fewer than 400 of them, so the file's false-alarm rate is below 1e-6. Whole
distributions are compared by the Dvoretzky-Kiefer-Wolfowitz bound with Massart's constant,
P(sup |F_n - F| > e) <= 2 exp(-2 n e^2), and means of many values by 6.2 standard errors.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from ngramspec.sampling import distribution as noise

ALARM = 1e-9
SIGMAS = 6.2  # two-sided normal tail 6e-10
EULER = 0.5772156649015329
SEEDS = (0, 1, 12345, 2**63, 2**64 - 1)


def distance(values: NDArray[np.float64], cdf: NDArray[np.float64]) -> float:
    """Return the Kolmogorov-Smirnov distance; `cdf` contains the distribution function at the sorted values."""
    steps = np.arange(values.size + 1) / values.size
    return float(max(np.abs(cdf - steps[1:]).max(), np.abs(cdf - steps[:-1]).max()))


def limit(n: int) -> float:
    return math.sqrt(math.log(2 / ALARM) / (2 * n))


def correlation(u: NDArray[np.float64], v: NDArray[np.float64]) -> float:
    """Return the correlation of two samples that are uniform in (0, 1) and so have a variance of 1/12."""
    return float(((u - 0.5) * (v - 0.5)).mean() * 12)


def uniform_from_gumbel(g: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.exp(-np.exp(-g))


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


@pytest.mark.parametrize("seed", SEEDS)
def test_gumbel_noise_over_token_ids_follows_gumbel_distribution(seed: int) -> None:
    n = 200_000
    g = np.sort(noise.gumbel(seed, 17, np.arange(n)))
    assert distance(g, uniform_from_gumbel(g)) < limit(n)
    assert abs(g.mean() - EULER) < SIGMAS * math.pi / math.sqrt(6 * n)
    # variance pi^2 / 6; the kurtosis of a Gumbel variable is 5.4, so the sample variance has
    # variance 4.4 / n times that squared
    assert abs(g.var() / (math.pi**2 / 6) - 1) < SIGMAS * math.sqrt(4.4 / n)


@pytest.mark.parametrize("step", [1, 2, 256])
@pytest.mark.parametrize("counter", [0, 1, 2], ids=["seed", "position", "id"])
def test_gumbel_noise_of_neighbouring_counters_is_independent(counter: int, step: int) -> None:
    """If u and v are independent and uniform, u + v and u - v modulo 1 are uniform too."""
    n = 100_000
    ids = np.arange(n)
    steps = step * np.eye(3, dtype=int)[counter]
    a = noise.gumbel(41, 1000, ids)
    b = noise.gumbel(41 + int(steps[0]), 1000 + int(steps[1]), ids + steps[2])
    u, v = uniform_from_gumbel(a), uniform_from_gumbel(b)
    for mixed in ((u + v) % 1.0, (u - v) % 1.0):
        mixed.sort()
        assert distance(mixed, mixed) < limit(n)
    assert abs(correlation(u, v)) < SIGMAS / math.sqrt(n)


def test_uniform_noise_streams_are_uniform_and_independent() -> None:
    n = 30_000
    u, v = (np.array([noise.uniform(6, p, s) for p in range(n)]) for s in (0, 1))
    assert u.min() > 0
    assert u.max() < 1
    for values in (u, v, (u + v) % 1.0, (u - v) % 1.0):
        ordered = np.sort(values)
        assert distance(ordered, ordered) < limit(n)
    # and is not the number from which some token's noise was made
    g = uniform_from_gumbel(np.array([noise.gumbel_one(6, p, 0) for p in range(n)]))
    ordered = np.sort((u + g) % 1.0)
    assert distance(ordered, ordered) < limit(n)


def test_noise_of_extreme_bits_is_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    for bits in (0, 2**64 - 1):
        monkeypatch.setattr(noise, "_out", lambda state, counter, bits=bits: counter * 0 + bits)
        g = noise.gumbel(0, 0, np.array([1]))[0]
        assert math.isfinite(g)
        assert g == noise.gumbel_one(0, 0, 1)
        assert 0 < noise.uniform(0, 0, 0) < 1
