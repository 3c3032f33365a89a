"""When another quantisation is advised."""

from __future__ import annotations

import pytest

from ngramspec.tuning.quantisation import AMX, NAMES, REPACKED, advice

MIXED = {0: 10, 12: 500, 14: 490}  # F32, Q4_K, Q6_K


def test_types_that_are_not_repacked_are_named_with_their_share() -> None:
    line = advice(MIXED, "x86_64", 2.43)
    assert line is not None
    assert "A batch of 4 costs 2.4 passes here: 49% of its weights are Q6_K" in line
    assert "Q4_0, Q4_K, IQ4_NL, MXFP4" in line


@pytest.mark.parametrize(
    ("types", "processor", "steepness"),
    [
        (MIXED, "x86_64", 1.9),
        (MIXED, "aarch64", 2.5),
        (MIXED, "riscv64", 2.5),
        ({12: 900, 14: 100}, "AMD64", 2.5),
        ({1: 100}, "x86_64", 3.9),
        ({}, "x86_64", 3.9),
    ],
)
def test_where_there_is_nothing_to_say_nothing_is_said(types: dict[int, int], processor: str, steepness: float) -> None:
    assert advice(types, processor, steepness) is None


def test_amx_takes_several_rows_of_more_types() -> None:
    assert advice(MIXED, "x86_64", 2.43, amx=True) is None
    line = advice({11: 500, 14: 500}, "x86_64", 2.43, amx=True)
    assert line is not None
    assert "50% of its weights are Q3_K, which" in line
    assert "MXFP4, Q4_1, Q8_0, Q5_K, Q6_K, IQ4_XS" in line


def test_every_repacked_type_has_a_name() -> None:
    assert {name for names in (*REPACKED.values(), AMX) for name in names} <= set(NAMES.values())
