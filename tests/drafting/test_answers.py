"""Tests of predictions after rejected tokens: the positions at which they are found again."""

from __future__ import annotations

from itertools import count

import pytest
from support.mock_target import MockTarget, rows_to

from ngramspec.drafting.draft import Ask, MarginalCost
from ngramspec.drafting.draft_model.hybrid import HybridDrafter
from ngramspec.drafting.draft_model.model import ModelDrafter
from ngramspec.drafting.mixture.answers import RejectedRowPredictions
from ngramspec.drafting.mixture.drafter import CHEAP, ROWS, MixtureDrafter
from ngramspec.drafting.mixture.guesser import Guesser
from ngramspec.drafting.mixture.history import History

FREE = MarginalCost(1.0, [0.0] * 65)
DEAR = MarginalCost(1.0, [2 * CHEAP] * 65)


def text(*tokens: int) -> History:
    history = History()
    for token in tokens:
        history.add(token)
    return history


def found(answers: RejectedRowPredictions, history: History) -> tuple[int, int]:
    answers.find_predictions(history, history.size)
    return answers.place_token, answers.pool_token


def test_answers_look_finds_them_by_position_and_context() -> None:
    answers, history = RejectedRowPredictions(640), text(1, 2, 3, 40, 50)
    history.size = 3  # 40 and 50 were refused.
    answers.record(history, 3, [60, 70])
    assert found(answers, history) == (-1, -1)  # There is no answer on what follows 3.
    history.add(9)
    assert found(answers, history) == (60, -1)  # 9 is at the position of 40.
    history.add(50)
    assert found(answers, history) == (70, 70)
    for token in (8, 40):
        history.add(token)
    assert found(answers, history) == (-1, 60)
    history.add(50)
    assert found(answers, history) == (-1, 70)
    answers.begin()
    assert found(answers, history) == (-1, -1)
    answers.record(text(200, 201), 1, [99])
    assert found(answers, history) == (-1, -1)
    history.size = 1
    for token in range(3000):  # so many that they reuse slots
        history.tokens[0] = token
        answers.record(history, 0, [99])
    for token in range(5000, 5100):
        history.tokens[0] = token
        assert found(answers, history)[1] == -1


def test_answers_look_prefers_longest_context_and_latest_answer() -> None:
    answers, history = RejectedRowPredictions(640), text(1, 2)
    for first, answer in ((5, 60), (6, 61), (6, 62)):
        history.size = 1
        history.add(first)
        history.tokens[2] = 40
        answers.record(history, 2, [answer])
    for first, answer in ((5, 60), (7, 62)):
        history.size = 1
        history.add(first)
        history.add(40)
        assert found(answers, history)[1] == answer


def test_answers_that_prove_correct_increase_probability() -> None:
    """After 1 the drafter proposed 2 3; the target refused 3 and emitted 9."""
    guesser = Guesser()
    guesser.begin([1, 2, 3, 4, 5, 1])
    assert guesser.guess(2, 0.0, FREE) == 2
    assert guesser.chain()[0] == (2, 3)
    guesser.record_target_guesses([2, 3], 1, [77])
    assert guesser.accept([2, 9]) == 1
    chances = []
    for _ in range(12):
        guesser.guess(1, 0.0, FREE)
        chances.append(guesser.distribution(0)[77])
        guesser.accept([77])
        guesser.record_target_guesses([50], 0, [77])  # The answer after 50 is at the position of 77.
        guesser.accept([len(chances) + 100])
    assert chances[-1] > max(0.5, 1.5 * chances[0])


@pytest.mark.parametrize("beside_a_model", [False, True])
def test_drafter_wants_logits_only_of_cheap_drafts(beside_a_model: bool) -> None:
    """The source of a rejected guess has no influence."""
    drafter = HybridDrafter(ModelDrafter(MockTarget(100, words=[50]))) if beside_a_model else MixtureDrafter()
    drafter.begin([1, 2, 3, 4, 5, 1])
    assert not drafter.wants_logits
    drafter.propose(Ask(2, price=DEAR))
    assert not drafter.wants_logits
    draft = drafter.propose(Ask(2, price=FREE))
    assert drafter.wants_logits
    assert beside_a_model or draft.tokens == (2, 3)
    drafter.observe_logits([1, 2, 3], rows_to([2, 9, 77], 100), 1)
    drafter.accept([2, 9])
    assert not drafter.wants_logits
    drafter.propose(Ask(1, price=FREE))
    assert 77 in drafter.guesser.distribution(0)


def test_mixture_limits_logits_it_reads_by_their_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.perf_counter", map((1e-4).__mul__, count()).__next__)
    drafter = MixtureDrafter()
    drafter.begin([1, 2])

    def worth_reading(price: MarginalCost) -> int:
        drafter.propose(Ask(2, price=price))
        assert drafter.wants_logits == (drafter._max_rows > 0)
        return drafter._max_rows

    assert worth_reading(MarginalCost(1.0, [0.0] * 9, 0.02)) == ROWS  # not measured yet
    drafter.observe_logits([2, 3, 4], rows_to([9, 5, 7], 100))  # 50 us per row
    assert worth_reading(MarginalCost(1.0, [0.0] * 9, 0.02)) == 2
    assert worth_reading(MarginalCost(1.0, [0.0] * 9, 0.001)) == 0
    assert worth_reading(MarginalCost(1.0, [0.0] * 9)) == ROWS
    assert worth_reading(DEAR) == 0
