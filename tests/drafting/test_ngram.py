"""Tests of counted n-grams: tables, predictor and drafters, against searches in plain lists without hashes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ngramspec.drafting import predictor
from ngramspec.drafting.acceptance_estimator import MIN_CHAIN_PROB
from ngramspec.drafting.baselines.target_logits import FILLER, NasdDrafter
from ngramspec.drafting.draft import Ask, Draft
from ngramspec.drafting.predictor import Continuations, CountTable, NGramDrafter, NGramPredictor, roll

SEEDS = st.integers(0, 10**6)
# With three letters, every context soon has several continuations, some of them equally frequent.
STREAMS = st.builds(lambda seed, k: random.Random(seed).choices(range(3), k=k), SEEDS, st.integers(0, 60))

# --------------------------------------------------------------------------- tables


def test_count_table_when_full_evicts_stalest_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predictor, "MAX_PAIRS", 4)
    table = CountTable()
    for key, token in [(1, 5), (2, 5), (3, 5), (1, 5), (1, 6)]:
        table.add(key, token)
    assert list(table) == [2, 3, 1]
    assert table.pairs == 4  # The table is full: contexts 2 and 3 have one, context 1 has two.
    table.add(4, 5)
    assert list(table) == [3, 1, 4]
    table.add(4, 6)
    table.add(4, 7)  # One pair too many removes context 1 with both of its tokens.
    assert list(table) == [4]
    assert table.pairs == 3


def test_count_table_full_context_drops_stalest_token_except_best(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predictor, "MAX_CONTINUATIONS", 3)
    for tokens, left in [
        ((4, 7, 7, 5, 6), {7: 2, 5: 1, 6: 1}),
        ((7, 7, 4, 5, 6), {7: 2, 5: 1, 6: 1}),  # 7 is the oldest, but the most frequent.
        ((4, 5, 6, 7), {5: 1, 6: 1, 7: 1}),
        ((4, 4, 5, 5, 6, 7), {5: 2, 6: 1, 7: 1}),  # The later of two equally frequent ones is the best.
    ]:
        table = CountTable()
        for token in tokens:
            table.add(1, token)
        (entry,) = entries(table)
        assert entry.counts == left
        assert entry.best == max(reversed(left), key=left.__getitem__)
        assert (entry.total, table.pairs) == (sum(left.values()), 3)


# --------------------------------------------------------------------------- the predictor


def counted(events: Sequence[tuple[Sequence[int], int]], text: Sequence[int], max_order: int, limit: int) -> Draft:
    """Return the draft that the counts of (context, next token) give after a text, by the rule."""
    text = list(text)
    tokens, q, match, support = [], [], [], []
    for _ in range(limit):
        for length in range(min(max_order - 1, len(text)), 0, -1):
            found = [token for before, token in events if list(before[-length:]) == text[-length:]]
            if found:
                break
        else:
            break
        counts = Counter(found)
        top = max(counts.values())
        token = next(t for t in reversed(found) if counts[t] == top)
        tokens.append(token)
        q.append({t: count / len(found) for t, count in counts.items()})
        match.append(length)
        support.append(len(found))
        text.append(token)
    return Draft(tuple(tokens), tuple(q), tuple(match), tuple(support), source="ngram")


def reference(seen: Sequence[int], max_order: int, limit: int) -> Draft:
    """Return the expected draft of a predictor whose tables cover exactly `seen`."""
    return counted([(seen[:i], token) for i, token in enumerate(seen)], seen, max_order, limit)


def entries(table: CountTable) -> list[Continuations]:
    return [e if isinstance(e, Continuations) else Continuations(e) for e in table.values()]


def contents(p: NGramPredictor) -> list[dict[int, tuple[list[tuple[int, int]], int, int]]]:
    """Return for each table: key -> (continuations from the least to the most recent, best, total)."""
    return [
        {
            key: (list(entry.counts.items()), entry.best, entry.total)
            for key, entry in zip(table, entries(table), strict=True)
        }
        for table in p._tables
    ]


def state(p: NGramPredictor) -> tuple[Any, ...]:
    """Return the complete state of a predictor."""
    return list(p._history), p._keys, contents(p), [list(table) for table in p._tables]


def fed(tokens: list[int], **options: Any) -> NGramPredictor:
    p = NGramPredictor(**options)
    for token in tokens:
        p.update(token)
    return p


def fnv1a(tokens: Iterable[int]) -> int:
    key = 14695981039346656037
    for token in tokens:
        key = ((key ^ token) * 1099511628211) % 2**64
    return key


@given(st.lists(st.integers(0, 200_000), min_size=1, max_size=12), st.integers(1, 7))
def test_roll_returns_hashes_of_last_tokens(tokens: list[int], orders: int) -> None:
    assert fnv1a(b"foobar") == 0x85944171F73967E8  # a test vector of the FNV authors
    keys: list[int] = []
    for token in tokens:
        keys = roll(keys, token, orders)
    assert keys == [fnv1a(tokens[-n:]) for n in range(1, min(orders, len(tokens)) + 1)]


@given(STREAMS, st.integers(2, 8), st.integers(0, 7))
def test_predictor_with_short_window_drafts_from_whole_stream(stream: list[int], max_order: int, limit: int) -> None:
    p = fed(stream, max_order=max_order, window=max_order)
    assert p.predict(limit) == reference(stream, max_order, limit)


@given(st.lists(st.lists(st.integers(0, 2), max_size=14), max_size=5))
def test_predictor_update_batch_equals_updates_and_reset_clears(batches: list[list[int]]) -> None:
    options: dict[str, Any] = {"max_order": 4, "window": 9}
    p = NGramPredictor(**options)
    for batch in batches:
        p.update_batch(batch)
    stream = [token for batch in batches for token in batch]
    assert state(p) == state(fed(stream, **options))
    assert len(p) == min(9, len(stream))
    p.reset()
    assert len(p) == 0
    assert state(p) == state(NGramPredictor(**options))


def test_predictor_predict_limits_draft_length() -> None:
    p = fed([1, 2, 3] * 5, draft_count=6)
    assert [len(p.predict(limit)) for limit in (0, 1, 2, 9)] == [0, 1, 2, 9]
    assert p.predict().tokens == (1, 2, 3, 1, 2, 3)
    assert fed([1, 2, 3] * 5).predict().tokens == (1, 2, 3, 1)
    with pytest.raises(ValueError, match="limit must be 0 or more"):
        p.predict(-1)


def test_predictor_update_keeps_q_of_earlier_draft() -> None:
    p = fed([1, 2, 1, 3, 1])
    q = p.predict(1).q[0]
    p.update(2)
    assert dict(q) == {2: 0.5, 3: 0.5}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_order": 1}, "max_order must be 2 to 8, not 1"),
        ({"max_order": 9}, "max_order must be 2 to 8, not 9"),
        ({"draft_count": 0}, "draft_count must be 1 or more, not 0"),
        ({"max_order": 5, "window": 4}, r"window must be max_order \(5\) or more, not 4"),
    ],
)
def test_predictor_rejects_invalid_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NGramPredictor(**options)


# --------------------------------------------------------------------------- the drafters


def check_counted(draft: Draft, expected: Draft) -> None:
    """Check that a draft is the rule's, up to the position at which acceptance became too unlikely."""
    n = len(draft)
    assert draft.tokens == expected.tokens[:n]
    assert (draft.match_lengths, draft.context_counts) == (expected.match_lengths[:n], expected.context_counts[:n])
    assert [dict(q) for q in draft.q] == [dict(q) for q in expected.q[:n]]
    assert n == len(expected) or (n > 0 and np.prod(draft.acceptance_probs) < MIN_CHAIN_PROB)


@given(STREAMS, st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=12), st.integers(2, 5))
def test_ngram_drafter_counts_prompt_and_response(prompt: list[int], answers: list[list[int]], order: int) -> None:
    """It also counts tokens beyond its guesses and in passes without drafts; a new prompt resets the counts."""
    for drafter in (NGramDrafter(), NGramDrafter(NGramPredictor(max_order=order))):
        for text in ([], list(prompt)):
            drafter.begin(text)
            for number, tokens in enumerate(answers):
                if number % 3:
                    check_counted(drafter.propose(Ask(5)), reference(text, drafter.predictor.max_order, 5))
                drafter.accept(tokens)
                text.extend(tokens)


@given(SEEDS, STREAMS.filter(bool))
def test_nasd_drafter_counts_likely_and_emitted_tokens(seed: int, prompt: list[int]) -> None:
    """It counts the likely tokens of each accepted position before the emitted one, but no rows after a refusal."""
    rng = np.random.default_rng(seed)
    drafter, text = NasdDrafter(), list(prompt)
    drafter.begin(prompt)
    events = [(text[:i], token) for i, token in enumerate(text)]
    for _ in range(10):
        draft = drafter.propose(Ask(4))
        check_counted(draft, counted(events, text, 4, 4))
        rows = rng.standard_normal((1 + len(draft), 5)).astype(np.float32)
        if seen := bool(rng.random() < 0.8):
            drafter.observe_logits([text[-1], *draft.tokens], rows)
        emitted = [*draft.tokens[: rng.integers(len(draft) + 1)], int(rng.integers(3))]
        for token, row in zip(emitted, rows, strict=False):
            if seen:
                events += [(list(text), other) for other in sorted(np.argsort(-row)[:FILLER].tolist())]
            events.append((list(text), token))
            text.append(token)
        drafter.accept(emitted)
