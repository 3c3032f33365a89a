"""How right estimates were: what counts, and up to where."""

from __future__ import annotations

import pytest

from ngramspec.drafting.draft import Draft
from ngramspec.drafting.reliability import BINS, Reliability


def test_reliability_counts_up_to_the_first_wrong_one() -> None:
    counts = Reliability()
    counts.add(Draft((1, 2, 3, 4), chances=(0.95, 0.55, 0.51, 1.0)), [1, 2, 9, 4])
    counts.add(Draft((1, 2), chances=(0.0, 1.0)), [1])
    assert counts.seen == [1, 0, 0, 0, 0, 2, 0, 0, 0, 1]
    assert counts.right == [1, 0, 0, 0, 0, 1, 0, 0, 0, 1]
    assert counts.predicted[5] == pytest.approx(1.06)
    assert counts.calibration_error == pytest.approx((1.0 + 0.06 + 0.05) / 4)
    counts.add(Draft((7,), chances=(1.0,)), [7])
    assert counts.seen[BINS - 1] == 2
    assert Reliability().calibration_error is None


def test_the_bins_as_data() -> None:
    counts = Reliability()
    counts.add(Draft((1, 2), chances=(0.95, 0.55)), [1, 3])
    cells = counts.to_json()
    assert [cell["count"] for cell in cells] == counts.seen
    assert cells[5] == {"from": 0.5, "to": 0.6, "count": 1, "predicted": pytest.approx(0.55), "observed": 0.0}
    assert cells[0] == {"from": 0.0, "to": 0.1, "count": 0, "predicted": None, "observed": None}
