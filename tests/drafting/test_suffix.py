"""Tests of the longest suffix: `SuffixAutomaton` and its drafter, against naive search."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ngramspec.drafting.acceptance_estimator import MIN_CHAIN_PROB
from ngramspec.drafting.baselines.suffix import CLEARLY, MAX_COUNTED, SuffixAutomaton, SuffixDrafter
from ngramspec.drafting.draft import Ask

LETTERS = st.sampled_from([range(2), range(4), range(9), (0, 7, 150_000, 2**31 - 2)])
SIZES = st.integers(0, 60)
TEXTS = st.one_of(
    st.builds(lambda seed, some, k: random.Random(seed).choices(some, k=k), st.integers(0, 10**6), LETTERS, SIZES),
    st.lists(st.integers(0, 2), min_size=1, max_size=5).map(lambda loop: loop * 12),
)


def built(tokens: Sequence[int]) -> SuffixAutomaton:
    automaton = SuffixAutomaton()
    automaton.extend(tokens)
    return automaton


# --------------------------------------------------------------------------- the automaton


def hard_texts(n: int) -> dict[str, list[int]]:
    fibonacci, before = [0, 1], [0]
    while len(fibonacci) < n:
        fibonacci, before = fibonacci + before, fibonacci
    rng = random.Random(0)
    return {
        "one token": [3] * n,
        "all different": list(range(n)),
        "fibonacci": fibonacci[:n],
        "random bits": [rng.randrange(2) for _ in range(n)],
        "random, large": [rng.randrange(n) for _ in range(n)],
        "loop": list(range(17)) * (n // 17 + 1),
        "a, then b after each": [1] * (n // 2) + [1, 2] * (n // 4),
        "most states": [0] + [1] * (n - 1),
        "copies": [t for _ in range(4) for t in range(n // 4)],
    }


@pytest.mark.parametrize("name", hard_texts(8))
@pytest.mark.parametrize("n", [500, 2000, pytest.param(8000, marks=pytest.mark.exhaustive)])
def test_suffix_automaton_keeps_time_and_size_linear(n: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, count = 0, SuffixAutomaton._count

    def counted(self: SuffixAutomaton, state: int, token: int) -> None:
        nonlocal steps
        steps += 1
        count(self, state, token)

    monkeypatch.setattr(SuffixAutomaton, "_count", counted)
    automaton = built(hard_texts(n)[name][:n])
    assert steps < (MAX_COUNTED + 4) * n
    assert len(automaton.length) <= 2 * n
    assert sum(map(len, automaton.goals)) <= 3 * n


# --------------------------------------------------------------------------- the drafter


def expected_draft(text: Sequence[int], limit: int) -> tuple[list[int], list[int]]:
    """Return tokens and match lengths by a naive search; a guess is context for the next, but adds no count."""
    draft: list[int] = []
    matches: list[int] = []
    for _ in range(limit):
        context = [*text, *draft]
        for length in range(min([*matches[-1:], len(text)]) + 1, 0, -1):
            suffix = context[len(context) - length :] if length <= len(context) else None
            followed = [text[i] for i in range(length, len(text)) if list(text[i - length : i]) == suffix]
            if followed:
                break
        else:
            break
        best = max(map(followed.count, followed))
        clear = best >= CLEARLY * followed.count(followed[-1])
        # The most recent of equally frequent tokens wins.
        draft.append(next(t for t in reversed(followed) if followed.count(t) == best) if clear else followed[-1])
        matches.append(length)
    return draft, matches


@given(text=TEXTS, more=st.lists(st.lists(st.integers(0, 3), max_size=5), max_size=5))
def test_suffix_drafter_equals_naive_search(text: list[int], more: list[list[int]]) -> None:
    drafter = SuffixDrafter()
    drafter.begin(text)
    for emitted in ([], *more):
        drafter.accept(emitted)
        text = [*text, *emitted]
        draft = drafter.propose(Ask(8))
        tokens, matches = expected_draft(text, 8)
        assert list(draft.tokens) == tokens[: len(draft)]
        assert list(draft.match_lengths) == matches[: len(draft)]
        assert len(draft) == len(tokens) or (draft and np.prod(draft.acceptance_probs) < MIN_CHAIN_PROB)


def test_suffix_drafter_uses_context_of_any_length() -> None:
    # The text has 40 passages that share 400 tokens and differ in the token before and after them.
    same = list(range(100, 500))
    text = [token for i in range(40) for token in (i, *same, 1000 + i)]
    drafter = SuffixDrafter()
    for before, draft in ((0, (1000, 401, 1)), (17, (1017, 401, 1)), (39, (1039, 401, 1)), (77, (1039, 400, 40))):
        drafter.begin([*text, before, *same])
        found = drafter.propose(Ask(1))
        assert (*found.tokens, *found.match_lengths, *found.context_counts) == draft
