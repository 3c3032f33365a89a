"""Answers behind refused tokens: where they are found again, and what they change."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from support.mock_target import MockTarget, plain_generate
from support.uncompiled import plain_modules

from ngramspec.cost.given import GivenCurve
from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.drafting.asked_model import AskedModel
from ngramspec.drafting.hybrid import HybridDrafter
from ngramspec.drafting.mixture.answers import Answers
from ngramspec.drafting.mixture.drafter import MemoryDrafter, MixtureDrafter
from ngramspec.drafting.mixture.guesser import Guesser
from ngramspec.drafting.mixture.history import History
from ngramspec.drafting.price import TokenPrice
from ngramspec.drafting.refused_rows import CHEAP, MOST, RefusedRows
from ngramspec.sampling.settings import Sampling

FREE = TokenPrice(1.0, [0.0] * 65)
DEAR = TokenPrice(1.0, [2 * CHEAP] * 65)


def text(*tokens: int) -> History:
    history = History()
    for token in tokens:
        history.add(token)
    return history


def rows_to(*tokens: int) -> NDArray[np.float32]:
    rows = np.zeros((len(tokens), 100), np.float32)
    rows[np.arange(len(tokens)), tokens] = 4.0
    return rows


def found(answers: Answers, history: History) -> tuple[int, int]:
    answers.look(history, history.size)
    return answers.aligned, answers.pooled


def test_answers_are_found_in_their_place_and_behind_the_same_tokens() -> None:
    answers, history = Answers(640), text(1, 2, 3, 40, 50)
    history.size = 3  # 40 and 50 were refused
    answers.hear(history, 3, [60, 70])
    assert found(answers, history) == (-1, -1)  # nobody was asked what follows 3
    history.add(9)
    assert found(answers, history) == (60, -1)  # 9 stands where 40 was
    history.add(50)
    assert found(answers, history) == (70, 70)
    for token in (8, 40):
        history.add(token)
    assert found(answers, history) == (-1, 60)
    history.add(50)
    assert found(answers, history) == (-1, 70)
    answers.begin()
    assert found(answers, history) == (-1, -1)


def test_the_longest_context_and_the_latest_answer_count() -> None:
    answers, history = Answers(640), text(1, 2)
    for first, answer in ((5, 60), (6, 61), (6, 62)):
        history.size = 1
        history.add(first)
        history.tokens[2] = 40
        answers.hear(history, 2, [answer])
    history.size = 1
    for token in (5, 40):
        history.add(token)
    assert found(answers, history)[1] == 60
    history.size = 1
    for token in (7, 40):
        history.add(token)
    assert found(answers, history)[1] == 62


def ready(guesser: Guesser) -> Guesser:
    """One that has drafted 2 3 after 1, of which 3 was refused; 9 came instead."""
    guesser.begin([1, 2, 3, 4, 5, 1])
    assert guesser.guess(2, 0.0, FREE) == 2
    assert guesser.chain()[0] == (2, 3)
    guesser.hear([2, 3], 1, [77])
    assert guesser.accept([2, 9]) == 1
    return guesser


def test_answers_that_come_true_count_for_more() -> None:
    guesser = ready(Guesser())
    chances = []
    for _ in range(12):
        guesser.guess(1, 0.0, FREE)
        chances.append(guesser.law(0)[77])
        guesser.accept([77])
        guesser.hear([50], 0, [77])  # what was said behind 50 stands where 77 will, whatever came before
        guesser.accept([len(chances) + 100])
    assert chances[-1] > max(0.5, 1.5 * chances[0])


def test_without_answers_nothing_changes() -> None:
    text = [1, 2, 3, 4, 1, 2, 5, 4, 1, 2, 3, 6] * 4
    one, other = MixtureDrafter(), MixtureDrafter()
    one.begin(text[:6])
    other.begin(text[:6])
    for token in text[6:]:
        a, b = one.propose(8, price=FREE), other.propose(8, price=DEAR)
        n = min(len(a), len(b))
        assert a.tokens[:n] == b.tokens[:n]
        assert a.chances[:n] == b.chances[:n]
        one.see([0, *a.tokens], np.empty((1 + len(a), 0), np.float32), 0)  # a record has no logits
        assert one.accept([token]) == other.accept([token])


def test_rows_are_wanted_of_cheap_drafts_alone_and_read_behind_the_fault() -> None:
    drafter = MixtureDrafter()
    drafter.begin([1, 2, 3, 4, 5, 1])
    assert not drafter.wants_logits
    drafter.propose(2, price=DEAR)
    assert not drafter.wants_logits
    draft = drafter.propose(2, price=FREE)
    assert drafter.wants_logits
    assert draft.tokens == (2, 3)
    drafter.see([1, 2, 3], rows_to(2, 9, 77), 1)
    drafter.accept([2, 9])
    assert not drafter.wants_logits
    drafter.propose(1, price=FREE)
    assert 77 in drafter._guesser.law(0)


def test_beside_a_model_rows_are_read_too() -> None:
    """Whoever guessed what was refused."""
    drafter = HybridDrafter(AskedModel(MockTarget(100, words=[50])))
    drafter.begin([1, 2, 3, 4, 5, 1])
    drafter.propose(2, price=DEAR)
    assert not drafter.wants_logits
    drafter.propose(2, price=FREE)
    assert drafter.wants_logits
    drafter.see([1, 50, 3], rows_to(2, 77, 9), 0)
    drafter.accept([2])
    assert not drafter.wants_logits
    drafter.propose(1, price=FREE)
    assert 77 in drafter._guesser.law(0)


def test_a_memory_alone_reads_no_rows() -> None:
    drafter = MemoryDrafter(True)
    drafter.begin([1, 2, 3])
    drafter.propose(2, price=FREE)
    assert not drafter.wants_logits


def test_compiled_and_plain_answers_agree() -> None:
    plain = plain_modules()["guesser"].Guesser
    for guesser in (one := ready(Guesser()), other := ready(plain())):
        guesser.guess(1, 0.0, FREE)
    assert one.law(0) == pytest.approx(other.law(0), rel=1e-12)


class Chain(MockTarget):
    """The next token follows from the last, but for every 40th: so a row behind a wrong token is right about it."""

    def row(self, context: Sequence[int]) -> NDArray[np.float32]:
        row = np.zeros(self.n_vocab, np.float32)
        row[(7 * context[-1] + 31 * (context[-1] % 5 == 0) * context[-2] + 1) % self.n_vocab] = 5.0
        if len(context) % 40 == 0:
            row[(context[-1] + 11) % self.n_vocab] = 9.0
        return row


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.9, seed=3)], ids=["greedy", "sampled"])
def test_reading_saves_passes_and_the_text_is_the_targets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sampling: Sampling
) -> None:
    mock, passes = Chain(211), []
    plain = plain_generate(mock, [3, 4], 400, sampling)
    for reads in (True, False):
        if not reads:
            monkeypatch.setattr(RefusedRows, "worth_reading", lambda self, price: 0)
        decoder = SpeculativeDecoder(mock, curve=GivenCurve({1: 1.0, 64: 1.0}), calibration_folder=tmp_path)
        steps = list(decoder.generate([3, 4], max_tokens=400, sampling=sampling))
        assert [token for step in steps for token in step.tokens] == plain
        passes.append(len(steps))
    assert passes[0] < passes[1]


def test_reading_takes_a_small_part_of_a_pass() -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 1e-4
        return now[0]

    rows = RefusedRows(clock)
    assert rows.worth_reading(TokenPrice(1.0, [0.0] * 9, 0.02)) == MOST  # never timed
    assert rows.read(rows_to(5, 7)) == [5, 7]  # 50 us a row
    assert rows.worth_reading(TokenPrice(1.0, [0.0] * 9, 0.02)) == 2
    assert rows.worth_reading(TokenPrice(1.0, [0.0] * 9, 0.001)) == 0
    assert rows.worth_reading(TokenPrice(1.0, [0.0] * 9)) == MOST
    assert rows.worth_reading(DEAR) == 0
