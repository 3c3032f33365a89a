"""predictor.py against a reference that keeps plain lists, searches them, and knows no hash."""

from __future__ import annotations

import doctest
import random
from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ngramspec.drafting import context_table, predictor
from ngramspec.drafting.context_table import BoundedTable, Continuations, ExactTable
from ngramspec.drafting.draft import Draft
from ngramspec.drafting.predictor import NGramPredictor, fnv1a, roll

Evict = Literal["keep", "decrement"]
EVICTS: tuple[Evict, ...] = ("keep", "decrement")

# Three letters: every context soon has several continuations, equally frequent ones among them.
STREAMS = st.lists(st.integers(0, 2), max_size=60)
exhaustive = settings(max_examples=200, derandomize=True, deadline=None)


def followers(seen: list[int], context: list[int]) -> list[int]:
    """Every token that followed `context` in `seen`, in order."""
    n = len(context)
    return [seen[i + n] for i in range(len(seen) - n) if seen[i : i + n] == context]


def reference(seen: list[int], max_order: int, limit: int) -> Draft:
    """What a predictor whose tables cover exactly `seen` has to draft."""
    text = list(seen)
    tokens, q, match, support = [], [], [], []
    for _ in range(limit):
        for length in range(min(max_order - 1, len(text)), 0, -1):
            found = followers(seen, text[-length:])
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


def entries(table: BoundedTable | ExactTable) -> list[Continuations]:
    return [e if isinstance(e, Continuations) else Continuations(e) for e in table.values()]


def contents(p: NGramPredictor) -> list[dict[int, tuple[list[tuple[int, int]], int, int]]]:
    """Per table: key -> (continuations from the least to the most recent, best, total)."""
    return [
        {
            key: (list(entry.counts.items()), entry.best, entry.total)
            for key, entry in zip(table, entries(table), strict=True)
        }
        for table in p._tables
    ]


def state(p: NGramPredictor) -> tuple[Any, ...]:
    """All that decides what a predictor does; the order of contexts, only where it drops some."""
    order = [list(table) for table in p._tables] if p.evict == "keep" else None
    return list(p._history), p.keys, contents(p), order


def fed(tokens: list[int], **options: Any) -> NGramPredictor:
    p = NGramPredictor(**options)
    for token in tokens:
        p.update(token)
    return p


# --- hash -----------------------------------------------------------------------------------------


def test_fnv1a_against_published_and_hand_computed_values() -> None:
    assert fnv1a([]) == 0xCBF29CE484222325
    assert fnv1a(b"a") == 0xAF63DC4C8601EC8C  # test vectors of the FNV authors
    assert fnv1a(b"foobar") == 0x85944171F73967E8
    # Ids beyond a byte enter whole: (basis xor 151935) * prime, and so on.
    assert fnv1a([151935]) == (0xCBF29CE484222325 ^ 151935) * 0x100000001B3 % 2**64
    assert fnv1a([1, 2]) != fnv1a([2, 1])


@exhaustive
@given(st.lists(st.integers(0, 200_000), min_size=1, max_size=12), st.integers(1, 7))
def test_rolled_keys_are_the_hashes_of_the_last_tokens(tokens: list[int], orders: int) -> None:
    keys: list[int] = []
    for token in tokens:
        keys = roll(keys, token, orders)
    assert keys == [fnv1a(tokens[-n:]) for n in range(1, min(orders, len(tokens)) + 1)]


# --- drafts ---------------------------------------------------------------------------------------


def test_worked_examples_in_the_docstrings() -> None:
    result = doctest.testmod(predictor)
    assert result.attempted > 5
    assert result.failed == 0


@exhaustive
@given(STREAMS, st.integers(2, 6), st.integers(0, 7))
def test_keep_drafts_from_all_that_was_ever_seen(stream: list[int], max_order: int, limit: int) -> None:
    p = fed(stream, max_order=max_order, window=max_order)
    assert p.predict(limit) == reference(stream, max_order, limit)


@exhaustive
@given(STREAMS, st.integers(2, 5), st.integers(0, 6), st.integers(0, 7))
def test_decrement_drafts_from_the_window_alone(stream: list[int], max_order: int, extra: int, limit: int) -> None:
    window = max_order + extra
    p = NGramPredictor(max_order=max_order, window=window, evict="decrement")
    for end, token in enumerate(stream, start=1):
        p.update(token)
        assert p.predict(limit) == reference(stream[max(0, end - window) : end], max_order, limit)


@exhaustive
@given(STREAMS, st.integers(2, 5), st.integers(0, 6))
def test_decrement_tables_equal_those_built_from_the_window(stream: list[int], max_order: int, extra: int) -> None:
    window = max_order + extra
    slid = fed(stream, max_order=max_order, window=window, evict="decrement")
    seen = stream[-window:]
    assert len(slid) == len(seen)
    contexts = [{tuple(seen[i : i + n]) for i in range(len(seen) - n)} for n in range(1, max_order)]
    for table, known in zip(contents(slid), contexts, strict=True):
        assert set(table) == {fnv1a(context) for context in known}
        for context in known:
            found = followers(seen, list(context))
            latest = list(dict.fromkeys(reversed(found)))[::-1]
            assert table[fnv1a(context)][0] == [(t, found.count(t)) for t in latest]
    assert contents(slid) == contents(fed(seen, max_order=max_order, window=window))


@pytest.mark.parametrize("evict", EVICTS)
@exhaustive
@given(data=st.data())
def test_batches_equal_single_updates(evict: Evict, data: st.DataObject) -> None:
    batches = data.draw(st.lists(st.lists(st.integers(0, 2), max_size=14), max_size=5))
    options: dict[str, Any] = {"max_order": 4, "window": 9, "evict": evict}
    p = NGramPredictor(**options)
    for batch in batches:
        p.update_batch(batch)
    assert state(p) == state(fed([token for batch in batches for token in batch], **options))


@pytest.mark.parametrize("evict", EVICTS)
def test_the_latest_of_equally_frequent_tokens_wins(evict: Evict) -> None:
    assert fed([1, 7, 1, 8, 1, 9, 1], evict=evict).predict(1).tokens == (9,)
    assert fed([1, 7, 1, 8, 1, 7, 1, 8, 1, 9, 1], evict=evict).predict(1).tokens == (8,)
    assert fed([1, 8, 1, 7, 1, 7, 1, 8, 1, 9, 1], evict=evict).predict(1).tokens == (8,)


def test_a_leaving_token_hands_the_lead_to_the_latest_of_the_next_best() -> None:
    # After 1: 7 7 7 8 8 9 9 4. When all but one of the 7s have left the window, 9 leads.
    stream = [1, 7, 1, 7, 1, 7, 1, 8, 1, 8, 1, 9, 1, 9, 1, 4, 1]
    full = fed(stream, max_order=2, window=17, evict="decrement")
    less = fed(stream, max_order=2, window=13, evict="decrement")
    assert full.predict(1).tokens == (7,)
    assert less.predict(1).tokens == (9,)
    assert dict(less.predict(1).q[0]) == {7: 1 / 6, 8: 2 / 6, 9: 2 / 6, 4: 1 / 6}


def test_window_edge() -> None:
    # The pair (1, 2) lies just inside a window of 6 tokens and just outside one of 5.
    stream = [1, 2, 5, 6, 7, 1]
    assert fed(stream, window=6, evict="decrement").predict(1).tokens == (2,)
    assert fed(stream, window=5, evict="decrement").predict() == Draft(source="ngram")
    assert fed(stream, window=5, evict="keep").predict(1).tokens == (2,)
    # The smallest window there is still holds one n-gram of the longest order.
    p = fed([1, 1, 1, 1, 1, 1], max_order=4, window=4, evict="decrement")
    assert p.predict(2).match == (3, 3)
    assert p.predict(1).support == (1,)


@pytest.mark.parametrize("evict", EVICTS)
def test_length_is_what_the_window_holds(evict: Evict) -> None:
    p = NGramPredictor(window=5, evict=evict)
    lengths = []
    for token in range(7):
        p.update(token)
        lengths.append(len(p))
    p.update_batch(list(range(12)))
    assert lengths == [1, 2, 3, 4, 5, 5, 5]
    assert len(p) == 5


def test_unknown_context_gives_an_empty_draft() -> None:
    for stream in ([], [1], [1, 2, 3], [1, 2, 1, 3]):
        draft = fed(stream).predict()
        assert len(draft) == 0
        assert draft == Draft(source="ngram")


def test_limit_bounds_the_draft_and_draft_count_is_its_default() -> None:
    p = fed([1, 2, 3] * 5, draft_count=6)
    assert [len(p.predict(limit)) for limit in (0, 1, 2, 9)] == [0, 1, 2, 9]
    assert p.predict().tokens == (1, 2, 3, 1, 2, 3)
    assert fed([1, 2, 3] * 5).predict().tokens == (1, 2, 3, 1)
    with pytest.raises(ValueError, match="limit must be 0 or more"):
        p.predict(-1)


def test_fields_of_a_draft() -> None:
    draft = fed([5, 6, 7, 5, 6, 8, 5, 6, 8, 9, 6]).predict(2)
    assert draft.tokens == (8, 9)  # (8, 9, 6) and (9, 6) are new, 6 was followed by 7, 8, 8
    assert draft.match == (1, 2)
    assert draft.support == (3, 2)
    assert [dict(q) for q in draft.q] == [{7: 1 / 3, 8: 2 / 3}, {5: 0.5, 9: 0.5}]
    assert draft.chances == ()
    assert draft.source == "ngram"


@exhaustive
@given(STREAMS, st.sampled_from(EVICTS))
def test_q_is_a_distribution_over_the_counts_and_holds_the_token(stream: list[int], evict: Evict) -> None:
    draft = fed(stream, window=16, evict=evict).predict(6)
    for token, q in zip(draft.tokens, draft.q, strict=True):
        assert sum(q.values()) == pytest.approx(1)
        assert q[token] == max(q.values())
        assert q.get(99) is None


def test_q_is_a_copy() -> None:
    p = fed([1, 2, 1, 3, 1])
    q = p.predict(1).q[0]
    p.update_batch([3, 1, 4, 1])
    assert q == {2: 0.5, 3: 0.5}
    assert p.predict(1).q[0] == {2: 0.25, 3: 0.5, 4: 0.25}


@pytest.mark.parametrize("evict", EVICTS)
def test_predict_changes_nothing(evict: Evict) -> None:
    rng = random.Random(3)
    p = NGramPredictor(window=30, evict=evict)
    for _ in range(200):
        p.update(rng.randrange(4))
        before = state(p)
        assert p.predict(9) == p.predict(9)
        p.predict(5, lambda offset, counts: min(counts))
        assert state(p) == before


def test_choose_sees_offsets_and_counts_and_decides() -> None:
    calls = []

    def rarest(offset: int, counts: Mapping[int, int]) -> int:
        calls.append((offset, dict(counts)))
        return min(counts, key=counts.__getitem__)

    p = fed([1, 2, 5, 1, 2, 6, 1, 3, 7, 1], max_order=2)
    assert p.predict(2).tokens == (2, 6)
    draft = p.predict(2, rarest)
    assert draft.tokens == (3, 7)
    assert calls == [(0, {2: 2, 3: 1}), (1, {7: 1})]
    assert [dict(q) for q in draft.q] == [{2: 2 / 3, 3: 1 / 3}, {7: 1.0}]
    with pytest.raises(ValueError, match="choose returned 4"):
        p.predict(2, lambda offset, counts: 4)


@pytest.mark.parametrize("evict", EVICTS)
def test_reset_forgets_everything(evict: Evict) -> None:
    p = fed([1, 2, 3] * 9, evict=evict)
    p.reset()
    assert len(p) == 0
    assert state(p) == state(NGramPredictor(evict=evict))
    p.update_batch([2, 1, 2])
    assert p.predict(1).tokens == (1,)


# --- collisions -----------------------------------------------------------------------------------


def emit(p: NGramPredictor, count: int) -> tuple[list[int], list[Draft]]:
    """Greedy speculative decoding of a made-up target: two tokens decide the next, period 19."""
    text, drafts = [0, 1], []
    p.update_batch(text)
    while len(text) < count:
        draft = p.predict(4)
        drafts.append(draft)
        kept: list[int] = []
        for guess in (*draft.tokens, None):
            last = [*text, *kept][-2:]
            kept.append((2 * last[1] + 2 * last[0] * last[0] + 2) % 11)
            if guess != kept[-1]:
                break
        text += kept
        p.update_batch(kept)
    return text[:count], drafts


@pytest.mark.parametrize("evict", EVICTS)
def test_collisions_change_drafts_but_never_output(evict: Evict, monkeypatch: pytest.MonkeyPatch) -> None:
    text, drafts = emit(NGramPredictor(window=40, evict=evict), 300)
    monkeypatch.setattr(predictor, "FNV_PRIME", 0)  # every context has the key 0 now
    assert fnv1a([1, 2]) == fnv1a([3]) == 0
    collided_text, collided_drafts = emit(NGramPredictor(window=40, evict=evict), 300)
    assert collided_text == text
    assert len(collided_drafts) > 1.5 * len(drafts)  # more passes, that is all


@pytest.mark.parametrize("evict", EVICTS)
@exhaustive
@given(stream=STREAMS)
def test_a_draft_states_the_q_of_the_shared_counts(evict: Evict, stream: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(predictor, "FNV_PRIME", 0)
        draft = fed(stream, max_order=3, window=8, evict=evict).predict(3)
    seen = stream if evict == "keep" else stream[-8:]
    pooled = seen[2:] or seen[1:]  # whatever followed two tokens; one, if nothing did
    assert draft.support == ((len(pooled),) * 3 if pooled else ())
    for q in draft.q:
        assert q == {token: pooled.count(token) / len(pooled) for token in set(pooled)}


# --- bounded memory -------------------------------------------------------------------------------


def bounded(p: NGramPredictor) -> list[BoundedTable]:
    return [table for table in p._tables if isinstance(table, BoundedTable)]


@pytest.mark.parametrize("vocabulary", [3, 60, 100_000])
def test_keep_is_bounded_over_a_long_stream(vocabulary: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context_table, "MAX_PAIRS", 500)
    monkeypatch.setattr(context_table, "MAX_CONTINUATIONS", 20)
    rng = random.Random(4)
    p = NGramPredictor(window=64)
    for step in range(12_000):
        p.update(rng.randrange(vocabulary))
        if step % 500 == 499:
            for table in bounded(p):
                found = entries(table)
                assert table.pairs == sum(len(e.counts) for e in found) <= 500
                assert max(len(e.counts) for e in found) <= 20
                assert all(e.total == sum(e.counts.values()) for e in found)
                assert all(e.counts[e.best] == max(e.counts.values()) for e in found)
    if vocabulary > 20:
        assert all(table.pairs > 400 for table in bounded(p))  # full: the bound was at work
    assert len(p) == 64


def test_batches_equal_single_updates_when_tables_overflow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(context_table, "MAX_PAIRS", 40)
    monkeypatch.setattr(context_table, "MAX_CONTINUATIONS", 5)
    rng = random.Random(5)
    stream = [rng.randrange(12) for _ in range(600)]
    p = NGramPredictor()
    p.update_batch(stream)
    assert state(p) == state(fed(stream))


# --- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_order": 1}, "max_order must be 2 to 8, not 1"),
        ({"max_order": 9}, "max_order must be 2 to 8, not 9"),
        ({"draft_count": 0}, "draft_count must be 1 or more, not 0"),
        ({"max_order": 5, "window": 4}, r"window must be max_order \(5\) or more, not 4"),
        ({"evict": "lru"}, "evict must be .* not 'lru'"),
    ],
)
def test_bad_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NGramPredictor(**options)


def test_defaults_are_akunus() -> None:
    p = NGramPredictor()
    assert (p.max_order, p.draft_count, p.window, p.evict) == (4, 4, 512, "keep")
    assert (context_table.MAX_PAIRS, context_table.MAX_CONTINUATIONS) == (65_536, 256)
    longest = NGramPredictor(max_order=8, window=8)
    longest.update_batch([*range(8), *range(7)])
    assert longest.predict(1).match == (7,)
