"""Tests of earlier contexts and answers: `History`, `TokenIndex`, `AnswerStore`, and predictions of rejected rows."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.mock_target import MockTarget, rows_to

from ngramspec.drafting.draft import Ask, MarginalCost
from ngramspec.drafting.draft_model.hybrid import HybridDrafter
from ngramspec.drafting.draft_model.model import ModelDrafter
from ngramspec.drafting.mixture import history
from ngramspec.drafting.mixture.answers import RejectedRowPredictions
from ngramspec.drafting.mixture.drafter import CHEAP, ROWS, MixtureDrafter, TextIndexSet
from ngramspec.drafting.mixture.guesser import Guesser
from ngramspec.drafting.mixture.history import CERTAIN, AnswerStore, History, mix
from ngramspec.drafting.token_index import NOWHERE, SEAM, TokenIndex, slot
from ngramspec.sampling.settings import Sampling

ORDERS, SMALLEST, GUESSES = 4, 4096, 64
REACH, STEPS, STEP = 25, 32, 8
ODD = (-1, 0, 1, 2**31 - 2, 2**31 - 1)
"""Token ids at the limits of the type."""
SEEDS = st.integers(0, 10**6)
"""Seeds of random texts; a few examples cover more cases than lists drawn token by token."""


def after(tokens: Sequence[int], context: Sequence[int]) -> list[int]:
    """Return the positions that follow `context`, latest first."""
    order = len(context)
    return [i for i in range(len(tokens) - 1, order - 1, -1) if list(tokens[i - order : i]) == list(context)]


# --------------------------------------------------------------------------- History


def filled(tokens: Sequence[int], guesses: Sequence[int] = ()) -> Any:
    """Return a history of `tokens`, with `guesses` after its end."""
    h = History()
    for token in tokens:
        h.add(token)
    for i, token in enumerate(guesses):
        h.tokens[h.size + i] = token
    return h


def on_chain(h: Any, context: Sequence[int]) -> list[int]:
    """Return the positions that follow `context`, in the order of its chain."""
    state, order = 0, len(context)
    for token in reversed(context):
        state = mix(state, (token + 1) % 2**64)
    at, found = h.heads[h.chain(state, order)], []
    while at != -1:
        if list(h.tokens[at - order : at]) == list(context):
            found.append(at)
        at = h.links[at * ORDERS + order - 1]
    return found


@given(seed=SEEDS, size=st.integers(0, 60))
def test_history_chain_visits_all_occurrences_latest_first(seed: int, size: int) -> None:
    tokens = random.Random(seed).choices(ODD, k=size)
    h = filled(tokens)
    assert h.size == len(tokens)
    for order in range(1, ORDERS + 1):
        contexts = {tuple(tokens[i - order : i]) for i in range(order, len(tokens) + 1)} | {(7,) * order}
        for context in contexts:
            assert on_chain(h, context) == after(tokens, context)


def test_history_grows_with_guesses_and_clear_empties_it() -> None:
    for size in (SMALLEST - 1, SMALLEST, 2 * SMALLEST + 1):
        rng = random.Random(size)
        tokens = [rng.randrange(20) for _ in range(size)]
        h = filled(tokens, guesses=[5] * GUESSES)
        for token in (6, 7, 8):  # The guesses were wrong.
            h.add(token)
            tokens.append(token)
        assert list(h.tokens[: h.size]) == tokens
        assert len(h.tokens) >= h.size + GUESSES
        for order in range(1, ORDERS + 1):
            for end in (order, size // 2, size, h.size):
                context = tokens[end - order : end]
                assert on_chain(h, context) == after(tokens, context)
        # All heads and links point inside.
        assert max(h.heads) < h.size
        assert all(link < i // ORDERS for i, link in enumerate(h.links[: h.size * ORDERS]))
    h.clear()
    assert h.size == 0
    assert set(h.heads) == {-1}
    tokens = [rng.randrange(3) for _ in range(500)]
    for token in tokens:
        h.add(token)
    for context in ([0], [1, 2], [2, 2, 1], [0, 1, 0, 2]):
        assert on_chain(h, context) == after(tokens, context)


def test_history_add_rejects_token_outside_32_bits() -> None:
    h = filled([1, 2])
    for bad in (2**31, -(2**31) - 1):
        with pytest.raises(OverflowError):
            h.add(bad)
    h.add(3)
    assert list(h.tokens[: h.size]) == [1, 2, 3]


def nearest(tokens: Sequence[int], size: int, end: int, place: int) -> tuple[int, int]:
    """Return (position, how) as documented for `History.near`; of two equally near positions, the later one."""
    if not 1 <= place < size:
        return -1, 4
    if tokens[place - 1] == tokens[end - 1]:
        return place, 0
    if end >= 2:
        latest = after(tokens[:size], tokens[end - 2 : end])[:STEPS]
        around = [e for e in latest if abs(e - place) < REACH]
        if around:
            return min(around, key=lambda e: (abs(e - place), -e)), 1
    same = [e for e in range(1, size) if tokens[e - 1] == tokens[end - 1] and abs(e - place) <= STEP]
    if same:
        best = min(same, key=lambda e: (abs(e - place), -e))
        return best, 2 if best > place else 3
    return place, 4


@given(seed=SEEDS, n_vocab=st.integers(2, 12), size=st.integers(1, 90))
def test_history_near_returns_nearest_occurrence(seed: int, n_vocab: int, size: int) -> None:
    rng = random.Random(seed)
    tokens = [rng.randrange(n_vocab) for _ in range(size)]
    guesses = [rng.randrange(n_vocab) for _ in range(GUESSES)]
    h = filled(tokens, guesses)
    for end in (size, size + 1, size + rng.randrange(GUESSES), size + GUESSES):
        for place in range(-1, size + 2):
            assert (h.near(end, place), h.match_kind) == nearest([*tokens, *guesses], size, end, place)


def test_history_near_searches_only_latest_occurrences() -> None:
    # 40 later occurrences of the pair hide the one next to the position; 20 do not.
    text = [*range(1, 14), *[0] * 30]
    for times, found in ((40, (13, 4)), (20, (4, 1))):
        h = filled([*text, *[3, 4, 0] * times, 3, 4])
        assert (h.near(h.size, 13), h.match_kind) == found


# --------------------------------------------------------------------------- TokenIndex


def made(tokens: list[int]) -> Iterator[Any]:
    """Yield indexes of a text: built token by token, at once with few or many chains, or over arrays that then grow."""
    grown = TokenIndex()
    grown.extend(tokens)
    yield grown
    for chains in (1, 64, 8192):
        yield TokenIndex.build(array("i", tokens), chains)
    for length in (0, 2, 1000):
        # A mapped file gives numpy arrays like these; the length is not a power of two.
        built = TokenIndex.build(array("i", tokens[:length]), 16)
        arrays = [np.array(list(a), np.int32).data for a in (built.tokens, built.links, built.heads)]
        index = TokenIndex.from_arrays(*arrays, length)
        index.extend(tokens[length:])
        yield index


def occurrences(index: Any, context: list[int]) -> list[int]:
    """Return the positions after `context` on its chain, in the drafter's order."""
    at, found = index.heads[slot(*context, len(index.heads) - 1)], []
    while at != NOWHERE:
        if list(index.tokens[at - 3 : at]) == context:
            found.append(at)
        at = index.links[at]
    return found


def test_token_index_chains_visit_all_occurrences_except_seams() -> None:
    rng = random.Random(0)
    tokens = [rng.randrange(-1, 7) for _ in range(3000)]
    contexts = [tokens[i - 3 : i] for i in range(3, len(tokens), 97) if min(tokens[i - 3 : i]) >= 0]
    expected = [[i for i in after(tokens, context) if tokens[i] != SEAM] for context in contexts]
    assert max(map(len, expected)) > 5
    for index in made(tokens):
        assert list(index.tokens[: index.size]) == tokens
        assert [occurrences(index, context) for context in contexts] == expected
        entered = {at for at in (*index.heads, *index.links[: index.size]) if at != NOWHERE}
        assert entered
        assert all(min(index.tokens[i - 3 : i + 1]) >= 0 for i in entered)


def test_token_index_over_rejects_inconsistent_arrays() -> None:
    ints = array("i", [0] * 8)
    with pytest.raises(ValueError, match="9 of 8 tokens"):
        TokenIndex.from_arrays(ints, ints, ints, 9)
    with pytest.raises(ValueError, match="power of two"):
        TokenIndex.from_arrays(ints, ints, ints[:6], 8)


# --------------------------------------------------------------------------- AnswerStore

PROMPT = [1, 2, 3]
ANSWER = list(range(100, 140))
GREEDY = Sampling()


def answered(store: AnswerStore, tokens: Sequence[int], prompt: Sequence[int] = PROMPT) -> None:
    """Answer a request token by token."""
    answer = store.begin(prompt, GREEDY)
    for token in tokens:
        answer.accept([token])


def expected(store: AnswerStore, start: Sequence[int], sampling: Sampling = GREEDY) -> list[int]:
    """Return the expected continuation of an answer that began with the given tokens."""
    answer = store.begin(PROMPT, sampling)
    answer.accept(start)
    return answer.continuation(63)[0]


def test_continuation_of_repeated_request_returns_earlier_answer() -> None:
    store = AnswerStore()
    answered(store, ANSWER)
    answer = store.begin(PROMPT, Sampling(seed=7))  # Greedy decoding uses no seed.
    tokens, chances = answer.continuation(10)
    assert tokens == ANSWER[:10]
    assert min(chances) > 0.99
    answer.accept(ANSWER[:30])
    assert answer.continuation(63)[0] == ANSWER[30:]
    answer.accept([*ANSWER[30:35], 5])
    assert answer.continuation(63) == ([], ())


def test_continuation_requires_same_prompt_and_sampling() -> None:
    store = AnswerStore()
    answered(store, ANSWER)
    assert store.begin([*PROMPT, 4], GREEDY).continuation(5)[0] == []
    assert expected(store, ANSWER[:1], Sampling(top_k=0)) == []
    answer = store.begin(PROMPT, Sampling(0.5, seed=1))
    answer.accept(ANSWER)
    assert expected(store, ANSWER[:1], Sampling(0.5, seed=2)) == []
    assert expected(store, ANSWER[:1], Sampling(0.5, seed=1)) == ANSWER[1:]


def test_continuation_returns_answer_that_matches_start() -> None:
    store = AnswerStore()
    answered(store, [1, 2, 3, 4, 5])
    answered(store, [1, 2, 6, 4, 5])
    assert expected(store, [1, 2, 3, 4]) == [5]
    assert expected(store, [1, 2, 7, 4]) == []


def test_continuation_after_wrong_answers_returns_only_repeated_ones() -> None:
    store = AnswerStore()
    for last in range(3):
        answered(store, [1, last])
    assert expected(store, [1]) == []
    for _ in range(30):
        answered(store, [1, 2, 3])
    answer = store.begin(PROMPT, GREEDY)
    answer.accept([1])
    assert answer.continuation(9)[0] == [2, 3]
    assert min(answer.continuation(9)[1]) >= CERTAIN


def test_answer_store_limits_requests_and_answer_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "REQUESTS", 2)
    monkeypatch.setattr(history, "LONGEST", 30)
    store = AnswerStore()
    for first in (1, 5, 6):
        answered(store, ANSWER, [first, 2, 3])
    assert expected(store, ANSWER[:1]) == []
    answered(store, ANSWER)
    assert expected(store, ANSWER[:1]) == ANSWER[1:30]
    assert expected(store, ANSWER) == []


def test_drafter_without_memory_or_sampling_stores_no_answers() -> None:
    memory = TextIndexSet()
    for drafter in (MixtureDrafter(), MixtureDrafter(memory)):
        for _ in range(2):
            if not drafter.guesser.memory:
                drafter.set_sampling(GREEDY)
            drafter.begin(PROMPT)
            drafter.accept(ANSWER[:1])
            assert not drafter.propose(Ask(8)).repeats
            drafter.accept(ANSWER[1:])


# --------------------------------------------------------------------------- RejectedRowPredictions

FREE = MarginalCost(1.0, [0.0] * 65)
DEAR = MarginalCost(1.0, [2 * CHEAP] * 65)


def predicted(answers: RejectedRowPredictions, history: History) -> tuple[int, int]:
    answers.find_predictions(history, history.size)
    return answers.place_token, answers.pool_token


def test_answers_look_finds_them_by_position_and_context() -> None:
    answers, history = RejectedRowPredictions(640), filled([1, 2, 3, 40, 50])
    history.size = 3  # 40 and 50 were refused.
    answers.record(history, 3, [60, 70])
    assert predicted(answers, history) == (-1, -1)  # There is no answer on what follows 3.
    history.add(9)
    assert predicted(answers, history) == (60, -1)  # 9 is at the position of 40.
    history.add(50)
    assert predicted(answers, history) == (70, 70)
    for token in (8, 40):
        history.add(token)
    assert predicted(answers, history) == (-1, 60)
    history.add(50)
    assert predicted(answers, history) == (-1, 70)
    answers.begin()
    assert predicted(answers, history) == (-1, -1)
    answers.record(filled([200, 201]), 1, [99])
    assert predicted(answers, history) == (-1, -1)
    history.size = 1
    for token in range(3000):  # so many that they reuse slots
        history.tokens[0] = token
        answers.record(history, 0, [99])
    for token in range(5000, 5100):
        history.tokens[0] = token
        assert predicted(answers, history)[1] == -1


def test_answers_look_prefers_longest_context_and_latest_answer() -> None:
    answers, history = RejectedRowPredictions(640), filled([1, 2])
    for first, answer in ((5, 60), (6, 61), (6, 62)):
        history.size = 1
        history.add(first)
        history.tokens[2] = 40
        answers.record(history, 2, [answer])
    for first, answer in ((5, 60), (7, 62)):
        history.size = 1
        history.add(first)
        history.add(40)
        assert predicted(answers, history)[1] == answer


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
