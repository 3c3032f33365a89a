"""Tests of `AnswerStore`: answers to repeated requests, and their chances."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from ngramspec.drafting.draft import Ask
from ngramspec.drafting.mixture import history
from ngramspec.drafting.mixture.drafter import MixtureDrafter, TextIndexSet
from ngramspec.drafting.mixture.history import CERTAIN, AnswerStore
from ngramspec.sampling.settings import Sampling

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
