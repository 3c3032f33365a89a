"""Token ids as sequences."""

from __future__ import annotations

from array import array

import pytest

from ngramspec.tokens import common_prefix


@pytest.mark.parametrize(
    ("a", "b", "length"),
    [((1, 2, 3), (1, 2, 4), 2), ((1, 2), (1, 2, 4), 2), ((), (1,), 0), ([1, 2], (1, 2), 2), ([5], array("i", [6]), 0)],
)
def test_a_common_prefix(a: list[int], b: list[int], length: int) -> None:
    assert common_prefix(a, b) == common_prefix(b, a) == length
