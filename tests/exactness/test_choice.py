"""The choice of `exact="auto"` from measurements: pure arithmetic, no model."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ngramspec.exactness.choice import MOST, SIZES, TOLERANCE, TYPICAL, UNMEASURED, Identity, Measured, Speed

ALL = Identity(SIZES, SIZES[1:])
SPLIT = Identity((1,), SIZES[1:])
LARGE_DIFFER = Identity(tuple(n for n in SIZES if n <= MOST), tuple(n for n in SIZES if 1 < n <= MOST))
NONE = Identity((1,), (8, 16))

FAST = Speed(1000, 0.010, 0.020, 0.001, 0.002)


def scaled(speed: Speed, decoding: float, prefill: float = 1.0) -> Speed:
    return Speed(
        speed.depth,
        speed.shallow * decoding,
        speed.deep * decoding,
        speed.prefill_shallow * prefill,
        speed.prefill_deep * prefill,
    )


def known(fast: Identity | None = SPLIT, exact: Identity | None = ALL, **speed: Speed) -> Measured:
    identity = {name: found for name, found in (("fast", fast), ("exact", exact)) if found is not None}
    return Measured(identity, {"fast": FAST, **speed})


def test_seconds_are_the_area_under_both_lines() -> None:
    # Prefill: 100 tokens at 1.05 ms on the way to 0.1 of the depth. Decoding: 10 tokens around context 105.
    assert FAST.seconds(100, 10) == pytest.approx(100 * 0.00105 + 10 * (0.010 + 0.01 * 0.105))


def test_a_line_that_falls_below_nothing_is_nothing() -> None:
    assert Speed(10, 1.0, 0.5, 1.0, 0.5).seconds(1000, 10) == 0


@pytest.mark.parametrize(("decoding", "way"), [(1.04, "exact"), (0.7, "exact"), (1.06, "fast")])
def test_exact_settings_are_taken_up_to_the_tolerance(decoding: float, way: str) -> None:
    measured = known()
    assert measured.choose(1, 100) == "fast", "nothing is known of their speed"
    measured.speed["exact"] = scaled(FAST, decoding)
    assert measured.choose(1, 100) == way


def test_the_prompt_decides_where_prefill_is_dear() -> None:
    measured = known()
    measured.speed["exact"] = scaled(FAST, 1.0, prefill=1.5)
    assert measured.choose(20, 200) == "exact"
    assert measured.choose(2000, 200) == "fast"


def test_where_sizes_agree_anyway_nothing_is_given_up() -> None:
    measured = known(fast=ALL)
    measured.speed["exact"] = scaled(FAST, 0.5)
    assert measured.choose(100, 100) == "fast"
    assert measured.sizes("fast") == SIZES
    assert known(fast=LARGE_DIFFER).sizes("fast") == LARGE_DIFFER.agreeing


def test_padding_comes_before_other_settings_where_it_costs_nothing() -> None:
    measured = known(padded=scaled(FAST, 1.02))
    measured.speed["exact"] = FAST
    assert measured.choose(100, 100) == "padded"
    assert measured.sizes("padded") == SIZES[1:]
    measured.speed["padded"] = scaled(FAST, 1.3)
    assert measured.choose(100, 100) == "exact"


def test_what_does_not_agree_is_never_taken() -> None:
    for exact in (NONE, SPLIT, None):
        measured = known(fast=NONE, exact=exact, padded=FAST)
        measured.speed["exact"] = FAST
        assert measured.choose(100, 100) == "fast"
        assert measured.sizes("fast") is None
        assert measured.sizes("exact") is None
    measured = known(exact=ALL)
    measured.speed["exact"] = FAST
    assert measured.choose(100, 100, ("fast", "padded")) == "fast", "the target cannot do the other"


def test_the_fastest_is_whatever_is_fastest() -> None:
    measured = known()
    measured.speed["exact"] = scaled(FAST, 0.8)
    assert measured.price("fast", 1, 100) == pytest.approx(1.25, rel=0.01)
    assert measured.price("exact", 1, 100) == 1
    assert measured.price("padded", 1, 100) is None


def test_more_than_a_typical_text_makes_no_difference() -> None:
    measured = known()
    measured.speed["exact"] = scaled(FAST, 0.5, prefill=2)
    assert measured.price("exact", 500, TYPICAL) == measured.price("exact", 500, 2**31)


@given(st.floats(0.5, 2), st.floats(0.5, 2), st.integers(1, 8000), st.integers(1, 1000), st.sampled_from([ALL, SPLIT]))
def test_the_choice_never_costs_more_than_the_tolerance(
    decoding: float, prefill: float, prompt: int, tokens: int, fast: Identity
) -> None:
    measured = known(fast=fast)
    measured.speed["exact"] = scaled(FAST, decoding, prefill)
    way = measured.choose(prompt, tokens)
    if way != "fast":
        price = measured.price(way, prompt, tokens)
        assert price is not None
        assert price <= TOLERANCE
        assert measured.sizes(way) is not None


def test_two_depths_agree_where_both_do() -> None:
    assert ALL.merge(SPLIT) == SPLIT
    assert LARGE_DIFFER.merge(ALL) == LARGE_DIFFER


def test_rounding_is_taken_to_be_large_until_it_is_measured() -> None:
    measured = known(padded=scaled(FAST, 1.5))
    assert measured.bound == UNMEASURED
    measured.rounding, measured.wanted = 0.5, 3.0
    assert measured.bound == 0.5
    assert Measured.from_json(measured.to_json()) == measured


@pytest.mark.parametrize(
    "change",
    [
        {"identity": {"fast": {"agreeing": [9], "padded": []}}},
        {"speed": {"fast": [0, 1, 1, 1, 1]}},
        {"speed": {"fast": [10, 1]}},
        {"identity": []},
        {"rounding": "much"},
    ],
)
def test_what_is_damaged_is_refused(change: dict[str, Any]) -> None:
    data = {**known().to_json(), **change}
    with pytest.raises((KeyError, TypeError, ValueError, AttributeError)):
        Measured.from_json(data)
