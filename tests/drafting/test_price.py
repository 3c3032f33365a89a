"""The price of one more token, and rates that fade."""

from __future__ import annotations

from array import array
from types import ModuleType

import pytest
from support.uncompiled import plain_modules

from ngramspec.drafting import price
from ngramspec.drafting.fading import FadingRate

BOTH = pytest.mark.parametrize("module", [price, plain_modules()["price"]], ids=["installed", "plain"])


@BOTH
@pytest.mark.parametrize("slopes", [[0.2, 0.4, 0.1], array("d", [0.2, 0.4, 0.1])], ids=["list", "array"])
def test_a_token_pays_where_what_it_brings_is_worth_its_time(module: ModuleType, slopes: list[float]) -> None:
    made = module.TokenPrice(1.5, slopes)
    assert (made.worth, list(made.slopes)) == (1.5, [0.2, 0.4, 0.1])
    # 1.5 tokens a pass: the next token must bring 0.3, 0.6 and 0.15 of one.
    assert [made.pays(0.35, length) for length in range(3)] == [True, False, True]
    assert [made.pays(0.1, length) for length in range(3)] == [False, False, False]
    assert made.pays(1.5 * 0.4, 1)
    with pytest.raises(IndexError):
        made.pays(0.5, 3)


@BOTH
def test_a_draft_costs_what_its_tokens_do_unless_somebody_knows_better(module: ModuleType) -> None:
    assert list(module.TokenPrice(1.5, [0.5, 0.25, 0.25]).costs) == [0.0, 0.5, 0.75]
    made: list[list[float]] = []

    def better() -> list[float]:
        made.append([0.0, 2.0, 2.0])
        return made[-1]

    price = module.TokenPrice(1.5, [0.5, 0.25, 0.25], costs=better)
    assert not made
    assert [list(price.costs), list(price.costs)] == [[0.0, 2.0, 2.0]] * 2
    assert len(made) == 1


def test_a_rate_counts_imagined_outcomes_and_forgets_old_ones() -> None:
    rate = FadingRate(1.0, 4.0, fade=0.5)
    assert rate.value == 0.25
    rate.add(True)
    assert rate.value == (0.5 + 1) / (2 + 1)
    rate.add(0.25)
    assert rate.value == (0.75 + 0.25) / (1.5 + 1)
    assert rate.towards(0.9, 5.0) == (1.0 + 4.5) / (2.5 + 5.0)
    for _ in range(60):
        rate.add(False)
    assert rate.value < 1e-9


def test_without_fading_a_rate_is_a_mean() -> None:
    rate = FadingRate(fade=1.0)
    assert rate.towards(0.3, 2.0) == 0.3
    for hit in (True, False, True, True):
        rate.add(hit)
    assert rate.value == 0.75
