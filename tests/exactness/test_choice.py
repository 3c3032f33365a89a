"""Tests of the choice of `exact="auto"` from measurements, without a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ngramspec.exactness.decision import (
    ANSWER,
    DECODING_MODES,
    MAX_DRAFT_SIZE,
    NEW,
    SIZES,
    TOLERANCE,
    DecodingMode,
    Identity,
    Measurements,
    Times,
)
from ngramspec.json_data import decode, encode

ALL = Identity(SIZES, SIZES[1:])
SPLIT = Identity((1,), SIZES[1:])
LARGE_DIFFER = Identity(
    tuple(n for n in SIZES if n <= MAX_DRAFT_SIZE), tuple(n for n in SIZES if 1 < n <= MAX_DRAFT_SIZE)
)
NONE = Identity((1,), (8, 16))

TIMES = Times((0.020, 0.040, 0.080), 0.002)


def scaled(at: Times, factor: float) -> Times:
    return Times(tuple(seconds * factor for seconds in at.passes), at.reading * factor)


def known(fast: Identity = SPLIT, exact: Identity | None = ALL, **prices: float) -> Measurements:
    """Return measurements in which each way takes a given multiple of the time of the fastest settings."""
    found = {"fast": fast} if exact is None else {"fast": fast, "exact": exact}
    factors = {"fast": 1.0, **prices}
    times = {way: scaled(TIMES, f) for way, f in factors.items()}
    return Measurements({setting: (one, one) for setting, one in found.items()}, times)


def test_measured_seconds_equal_prefill_and_decode_time() -> None:
    assert known().seconds("fast") == pytest.approx(NEW * 0.002 + ANSWER * TIMES.per_token)
    assert known().seconds("exact") is None
    assert Measurements().seconds("fast") is None


def test_times_per_token_includes_only_drafts_that_pay() -> None:
    dear = Times((1.0, 4.0, 8.0), 0.0)
    assert dear.per_token == pytest.approx(1.0), "no draft pays"
    free = Times((1.0, 1.0, 1.0), 0.0)
    expected = 0.5 + 0.3 / sum(0.7**i for i in range(8)) + 0.2 / sum(0.95**i for i in range(8))
    assert free.per_token == pytest.approx(expected)


def test_choose_prefers_faster_verification_over_single_token_speed() -> None:
    measured = known()
    fast = Times((1.0, 3.0, 6.0), 0.01)
    measured.times = {"fast": fast, "exact": Times((1.06, 2.0, 3.5), 0.01)}
    assert measured.choose(DECODING_MODES) == "exact"


@pytest.mark.parametrize(("price", "way"), [(1.04, "exact"), (0.7, "exact"), (1.06, "fast")])
def test_choose_selects_exact_within_tolerance(price: float, way: str) -> None:
    assert known().choose(DECODING_MODES) == "fast", "nothing is known of their speed"
    assert known(exact=ALL, padded=1.5).relative_time("padded") == pytest.approx(1.5)
    measured = known()
    measured.times = {**measured.times, "exact": scaled(TIMES, price)}
    assert measured.choose(DECODING_MODES) == way


def test_choose_with_agreeing_sizes_keeps_fast() -> None:
    for fast in (ALL, LARGE_DIFFER):
        measured = Measurements({"fast": (fast, fast)})
        assert measured.missing(DECODING_MODES) is None
        assert measured.choose(DECODING_MODES) == "fast"


@pytest.mark.parametrize("ways", [DECODING_MODES, ("fast", "padded"), ("fast",)])
@pytest.mark.parametrize("exact", [NONE, SPLIT, ALL, None])
def test_choose_never_selects_differing_or_unavailable_way(
    exact: Identity | None, ways: Sequence[DecodingMode]
) -> None:
    measured = known(NONE, exact, padded=1.0)
    measured.times = {**measured.times, "exact": TIMES}
    assert measured.choose(ways) == ("exact" if exact is ALL and "exact" in ways else "fast")
    assert (measured.missing(ways) is None) == (exact is not None or "exact" not in ways)


@given(st.floats(0.5, 2), st.floats(0.5, 2), st.sampled_from([ALL, SPLIT]))
def test_choose_never_exceeds_cost_tolerance(exact: float, padded: float, fast: Identity) -> None:
    measured = known(fast, padded=padded)
    measured.times = {**measured.times, "exact": scaled(TIMES, exact)}
    way = measured.choose(DECODING_MODES)
    if way != "fast":
        price = measured.relative_time(way)
        assert price is not None
        assert price <= TOLERANCE


def test_identity_merge_keeps_sizes_that_agree_in_both() -> None:
    assert ALL.merge(SPLIT) == SPLIT
    assert LARGE_DIFFER.merge(ALL) == LARGE_DIFFER
    assert Measurements({"fast": (ALL,)}).identity("fast") is None


def test_measured_join_prefers_values_of_other() -> None:
    mine, other = (
        Measurements({"fast": (ALL, SPLIT)}),
        Measurements({"fast": (NONE,), "exact": (ALL,)}, {"fast": TIMES}),
    )
    mine.rounding = 0.5
    mine.join(other)
    assert mine == Measurements({"fast": (NONE, SPLIT), "exact": (ALL,)}, {"fast": TIMES}, 0.5)
    assert decode(Measurements, encode(mine)) == mine


@pytest.mark.parametrize(
    "change",
    [
        {"identities": {"fast": [{"agreeing": ["nine"], "padded": []}]}},
        {"identities": {"fast": [{"agreeing": [1], "padded": []}] * 3}},
        {"identities": []},
        {"times": {"fast": [[1], "much"]}},
        {"rounding": "much"},
    ],
)
def test_measured_decode_rejects_damaged_data(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"Input should be|required|more sizes than"):
        decode(Measurements, {**encode(known()), **change})
