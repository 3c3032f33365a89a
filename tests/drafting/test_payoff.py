"""What a draft model's guesses are expected to gain, and where a draft of them ends."""

from __future__ import annotations

import math

import pytest

from ngramspec.drafting.pace import Pace
from ngramspec.drafting.payoff import POSITIONS, PRIOR, Payoff
from ngramspec.drafting.price import TokenPrice


def payoff(token: float = 0.1) -> Payoff:
    """Of a model that takes so many seconds for a token."""
    pace = Pace()
    pace.saw(1, token)
    return Payoff(pace)


def test_rates_are_those_of_a_position_and_the_last_one_counts_for_all_behind_it() -> None:
    made = payoff()
    for _ in range(100):
        made.learn(1, False)
        made.learn(POSITIONS + 3, True)
    assert made.rate(0) == pytest.approx(PRIOR)
    assert made.rate(1) < 0.1
    assert made.rate(POSITIONS - 1) == made.rate(99) > 0.95


@pytest.mark.parametrize("seconds", [1.0, 2.0])
def test_a_gain_is_that_of_the_best_length(seconds: float) -> None:
    each = 0.3 + 0.1 / seconds
    by_length = [sum(PRIOR**j - 1.2 * each for j in range(1, k + 1)) for k in range(10)]
    price = TokenPrice(1.2, [0.3] * 10, seconds)
    assert payoff().gain(9, price) == pytest.approx(max(by_length))
    assert payoff().gain(1, price) == pytest.approx(by_length[1])
    assert payoff().gain(9, TokenPrice(1.2, [0.8] * 10, seconds)) == 0.0


def test_a_draft_goes_on_while_a_guess_pays_for_its_place_and_its_time() -> None:
    price = TokenPrice(1.0, [0.3] * 10, 1.0)  # a guess more must be right in 0.4 of all cases; it is in 0.8
    assert payoff().goes_on(0.51, 3, price)
    assert not payoff().goes_on(0.49, 3, price)


def test_a_draft_ends_where_its_guesses_take_what_may_be_lost() -> None:
    price = TokenPrice(1.0, [0.0] * 10, 1.0, stake=0.35)
    assert [payoff().goes_on(1.0, length, price) for length in range(1, 5)] == [True, True, False, False]


def test_where_nobody_knows_seconds_the_target_s_price_alone_counts() -> None:
    price = TokenPrice(1.0, [0.5] * 10)
    assert payoff(math.inf).goes_on(0.5, 1, price)
    assert not payoff(math.inf).goes_on(0.4, 1, price)


def test_hopeless_guesses_end_a_draft_at_any_price() -> None:
    for price in (None, TokenPrice(0.0, [0.0] * 10), TokenPrice(0.0, [0.0] * 10, 1.0)):
        assert not payoff().goes_on(0.04, 1, price)
        assert payoff().goes_on(0.06, 1, price)
