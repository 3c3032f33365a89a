"""Sampling: the law of the next token, held against llama.cpp's own samplers and a naive model."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import llama_cpp.llama_cpp as llama
import numpy as np
import pytest
from numpy.typing import NDArray

from ngramspec.errors import NGramSpecError
from ngramspec.sampling import BadLogits, Distribution, Sampling, _largest, top_token

EDGE = 2e-5  # closer than this to a cut, float32 and float64 may fall on different sides

SETTINGS = [
    {},
    {"temperature": 0.3},
    {"temperature": 2.5, "min_p": 0.0},
    {"top_k": 1},
    {"top_k": 5, "top_p": 0.7, "min_p": 0.0},
    {"top_k": 0},
    {"top_k": 0, "top_p": 0.6, "min_p": 0.0},
    {"top_k": 0, "top_p": 1.0, "min_p": 0.2},
    {"top_k": 0, "top_p": 1.0, "min_p": 0.0},
    {"top_k": 200, "top_p": 0.99, "min_p": 0.001},
    {"top_k": 10**6, "top_p": 0.3, "min_p": 0.0},
    {"top_k": 40, "top_p": 1.0, "min_p": 1.0},
]


def sampling(**settings: Any) -> Sampling:
    return Sampling(**({"temperature": 0.8} | settings))


@contextmanager
def llama_chain(s: Sampling) -> Iterator[Any]:
    """The samplers llama.cpp's `common` puts in a row, and the one that turns logits into a law."""
    chain = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
    for one in (
        llama.llama_sampler_init_top_k(s.top_k),
        llama.llama_sampler_init_top_p(s.top_p, 0),
        llama.llama_sampler_init_min_p(s.min_p, 0),
        llama.llama_sampler_init_temp(s.temperature),
        llama.llama_sampler_init_dist(1),
    ):
        llama.llama_sampler_chain_add(chain, one)
    try:
        yield chain
    finally:
        llama.llama_sampler_free(chain)


def llama_law(chain: Any, logits: NDArray[np.float32]) -> dict[int, float]:
    data = np.zeros(logits.size, [("id", np.int32), ("logit", np.float32), ("p", np.float32)])
    data["id"], data["logit"] = np.arange(logits.size), logits
    pointer = data.ctypes.data_as(ctypes.POINTER(llama.llama_token_data))
    array = llama.llama_token_data_array(pointer, logits.size, -1, False)
    llama.llama_sampler_apply(chain, ctypes.byref(array))
    left = data[: array.size]
    return dict(zip(left["id"].tolist(), left["p"].tolist(), strict=True))


def on_an_edge(s: Sampling, logits: NDArray[np.float32]) -> bool:
    """Whether a cut of the chain passes within EDGE of a token, by brute force."""
    ordered = np.sort(logits.astype(np.float64))[::-1]
    if 0 < s.top_k < ordered.size:
        if ordered[s.top_k - 1] == ordered[s.top_k]:
            return True
        ordered = ordered[: s.top_k]
    weights = np.exp(ordered - ordered[0])
    covered = np.cumsum(weights) / weights.sum()
    if s.top_p < 1 and np.abs(covered - s.top_p).min() < EDGE:
        return True
    cut = math.log(s.min_p) if s.min_p > 0 else -math.inf
    return bool(0 < s.min_p < 1 and np.abs(ordered - ordered[0] - cut).min() < EDGE)


def check_law(p: Distribution) -> None:
    assert p.ids.dtype == np.int32
    assert (np.diff(p.ids) > 0).all()
    assert (p.probs > 0).all()
    assert abs(p.probs.sum() - 1) < 1e-12
    np.testing.assert_allclose(np.exp(p.logp), p.probs, rtol=1e-10)


def compare_with_llama(s: Sampling, chain: Any, logits: NDArray[np.float32]) -> bool:
    """Whether the vector could be compared, that is, whether no token lies on an edge."""
    p = s.distribution(logits)
    check_law(p)
    if on_an_edge(s, logits):
        return False
    # Below 1e-30 a float32 probability loses its digits, then vanishes.
    theirs = {token: prob for token, prob in llama_law(chain, logits).items() if prob > 1e-30}
    ours = dict(zip(p.ids.tolist(), p.probs.tolist(), strict=True))
    assert sorted(theirs) == [token for token, prob in ours.items() if prob > 1e-30]
    assert max(abs(ours[token] - prob) for token, prob in theirs.items()) < 1e-5
    return True


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_equals_llama_cpp(settings: dict[str, Any]) -> None:
    rng = np.random.default_rng(1)
    s = sampling(**settings)
    compared = 0
    with llama_chain(s) as chain:
        for i in range(60):
            n_vocab = (7, 300, 1000, 5003)[i % 4]
            scale = (0.1, 1.0, 3.0, 8.0)[i // 4 % 4]
            logits = (scale * rng.standard_normal(n_vocab)).astype(np.float32)
            if i % 3 == 0:
                logits[rng.integers(n_vocab)] += 6  # a peak
            compared += compare_with_llama(s, chain, logits)
    # Thousands of near-equal tokens put one within EDGE of any cut; the rest must compare.
    assert compared >= 50


@pytest.mark.parametrize("settings", [{}, {"top_k": 0}, {"top_k": 0, "top_p": 1.0, "min_p": 0.0}])
def test_equals_llama_cpp_on_a_large_vocabulary(settings: dict[str, Any]) -> None:
    rng = np.random.default_rng(2)
    logits = (2.5 * rng.standard_normal(151_936)).astype(np.float32)
    logits[rng.choice(logits.size, 50, replace=False)] = np.linspace(14, 22, 50)
    s = sampling(**settings)
    with llama_chain(s) as chain:
        assert compare_with_llama(s, chain, logits)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ties_keep_the_lowest_ids(temperature: float) -> None:
    logits = np.zeros(20_000, np.float32)
    logits[[7, 19_999]] = 1.0
    s = Sampling(temperature, top_k=5, top_p=1.0, min_p=0.0)
    assert s.distribution(logits).ids.tolist() == ([0, 1, 2, 7, 19_999] if temperature else [7])
    assert top_token(logits) == 7
    # top_p = 0.5 of four equal tokens is exactly two of them
    s = Sampling(1.0, top_k=0, top_p=0.5, min_p=0.0)
    assert s.distribution(np.zeros(4, np.float32)).ids.tolist() == [0, 1]
    # min_p = 1 keeps all that equal the best
    s = Sampling(1.0, top_k=0, top_p=1.0, min_p=1.0)
    assert s.distribution(logits).ids.tolist() == [7, 19_999]


def test_largest_equals_a_stable_sort() -> None:
    rng = np.random.default_rng(3)
    for size in (1, 63, 64, 65, 1000, 12_345):
        for values in (rng.standard_normal(size), rng.integers(0, 5, size).astype(float)):
            ordered = np.argsort(-values, kind="stable")
            for count in (1, 2, 40, size // 2, size - 1, size, size + 1):
                if count:
                    assert _largest(values, count).tolist() == sorted(ordered[:count].tolist())


def test_top_p_cut_against_brute_force() -> None:
    """The pre-filter by mass and the early min_p change nothing: all tokens sorted, cut by cut."""
    rng = np.random.default_rng(4)
    for i in range(200):
        logits = (rng.uniform(0.05, 6) * rng.standard_normal(500)).astype(np.float32)
        s = sampling(top_k=(0, 3, 100)[i % 3], top_p=rng.uniform(0.01, 1), min_p=(0, 0.02, 0.5)[i // 3 % 3])
        order = np.argsort(-logits, kind="stable")[: s.top_k or None]
        p = np.exp(logits[order].astype(float) - float(logits[order[0]]))
        count = int(np.argmax(np.cumsum(p) >= s.top_p * p.sum())) + 1
        kept = [int(x) for x, w in zip(order[:count], p, strict=False) if w >= s.min_p]
        assert s.distribution(logits).ids.tolist() == sorted(kept)


def test_greedy_is_a_point_mass() -> None:
    p = Sampling(seed=3).distribution(np.array([1, 5, 5, 2], np.float32))
    assert (p.ids.tolist(), p.probs.tolist(), p.logp.tolist()) == ([1], [1.0], [0.0])
    assert Sampling().greedy
    assert not Sampling(0.1).greedy


def test_tiny_temperature_is_greedy_without_warnings() -> None:
    logits = np.array([1, 5, -40, 2], np.float32)
    with np.errstate(all="raise", under="ignore"):
        for temperature in (1e-3, 1e-30, 5e-324):
            p = Sampling(temperature, min_p=0.0, top_p=1.0).distribution(logits)
            check_law(p)
            assert p.ids.tolist()[0] == 1
            assert p.probs.max() > 0.999


def test_minus_infinity_has_no_probability() -> None:
    logits = np.full(1000, -np.inf, np.float32)
    logits[[3, 500, 998]] = [1.0, 2.0, 3.0]
    for top_k in (0, 2, 40):
        p = sampling(top_k=top_k, top_p=1.0, min_p=0.0).distribution(logits)
        check_law(p)
        assert p.ids.tolist() == ([500, 998] if top_k == 2 else [3, 500, 998])


def test_find() -> None:
    p = sampling(top_k=2, top_p=1.0, min_p=0.0).distribution(np.array([0, 3, 1, 2], np.float32))
    assert [p.find(token) for token in range(5)] == [None, 0, None, 1, None]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("size", [1, 10, 1000, 20_001])
def test_bad_logits(size: int, temperature: float) -> None:
    s = Sampling(temperature)
    for where in {0, size // 2, size - 1}:
        logits = np.zeros(size, np.float32)
        logits[where] = np.nan
        with pytest.raises(BadLogits, match=rf"token {where} is nan"):
            s.distribution(logits)
        logits[where] = np.inf
        with pytest.raises(BadLogits, match=rf"token {where} is inf"):
            s.distribution(logits)
    with pytest.raises(BadLogits, match=f"all {size} logits are -inf"):
        s.distribution(np.full(size, -np.inf, np.float32))
    for broken in (min(5, size), max(1, size // 2), size):  # more of them than top_k keeps, too
        logits = np.zeros(size, np.float32)
        logits[-broken:] = np.nan
        with pytest.raises(BadLogits, match=r"the logit of token \d+ is nan"):
            s.distribution(logits)
    assert issubclass(BadLogits, ValueError)
    assert issubclass(BadLogits, NGramSpecError)


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("temperature", (-0.1, math.nan, math.inf)),
        ("top_k", (-1, 1.5)),
        ("top_p", (0.0, -0.1, 1.0001, math.nan)),
        ("min_p", (-0.01, 1.01, math.nan)),
        ("seed", (-1, 2**64, 0.5)),
    ],
)
def test_values_outside_their_range(name: str, bad: tuple[Any, ...]) -> None:
    for value in bad:
        with pytest.raises(ValueError, match=f"^{name} is .* but must be") as error:
            Sampling(**{name: value})
        assert "\n" not in str(error.value)


def test_limits_of_the_ranges_are_allowed() -> None:
    Sampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)
    Sampling(temperature=100.0, top_k=10**9, top_p=1e-9, min_p=1.0, seed=2**64 - 1)
