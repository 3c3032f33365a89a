"""context_table.py: what is forgotten, and in which order; the best token is always known."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ngramspec.drafting import context_table
from ngramspec.drafting.context_table import BoundedTable, Continuations, ExactTable, Shares

exhaustive = settings(max_examples=300, derandomize=True, deadline=None)


def counts(table: BoundedTable | ExactTable, key: int) -> dict[int, int]:
    """Continuations of a context, least recently seen first."""
    entry = table[key]
    return entry.counts if isinstance(entry, Continuations) else {entry: 1}


def continuations(*tokens: int) -> Continuations:
    result = Continuations(tokens[0])
    for token in tokens[1:]:
        result.add(token)
    return result


def best_of(seen: list[int]) -> int:
    """The most frequent token, the most recently seen among equals."""
    return max(reversed(seen), key=seen.count)


@exhaustive
@given(st.lists(st.integers(0, 4), min_size=1, max_size=30), st.integers(0, 29))
def test_best_total_and_recency_match_the_list_of_occurrences(seen: list[int], gone: int) -> None:
    found = continuations(*seen)
    gone = min(gone, len(seen) - 1)
    for token in seen[:gone]:
        found.subtract(token)
    left = seen[gone:]
    assert found.best == best_of(left)
    assert found.total == len(left)
    assert list(found.counts) == sorted(set(left), key=left[::-1].index, reverse=True)
    assert all(count == left.count(token) for token, count in found.counts.items())


def test_probabilities_are_a_mapping_that_stays_as_it_was() -> None:
    found = continuations(7, 8, 8, 9)
    shares = found.probabilities()
    assert isinstance(shares, Shares)
    found.add(7)
    assert shares == {7: 0.25, 8: 0.5, 9: 0.25}
    assert list(shares) == [7, 8, 9]
    assert len(shares) == 3
    assert (shares[8], shares.get(8), shares.get(1), 1 in shares) == (0.5, 0.5, None, False)
    with pytest.raises(KeyError):
        shares[1]
    assert continuations(5, 5).probabilities() == {5: 1.0}


@exhaustive
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=30), st.integers(0, 30))
def test_exact_table_holds_what_was_added_and_not_subtracted(pairs: list[tuple[int, int]], gone: int) -> None:
    table = ExactTable()
    for key, token in pairs:
        table.add(key, token)
    for key, token in pairs[:gone]:
        table.subtract(key, token)
    left = pairs[gone:]
    assert set(table) == {key for key, _ in left}
    for key in table:
        followed = [token for k, token in left if k == key]
        assert counts(table, key) == {token: followed.count(token) for token in followed}


def test_exact_table_refuses_what_it_never_held() -> None:
    table = ExactTable()
    table.add(1, 5)
    with pytest.raises(KeyError):
        table.subtract(2, 5)


def test_the_contexts_not_updated_for_longest_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context_table, "MAX_PAIRS", 4)
    table = BoundedTable()
    for key, token in [(1, 5), (2, 5), (3, 5), (1, 5), (1, 6)]:
        table.add(key, token)
    assert list(table) == [2, 3, 1]
    assert table.pairs == 4  # as many as there may be: contexts 2 and 3 have one, context 1 has two
    table.add(4, 5)
    assert list(table) == [3, 1, 4]
    table.add(4, 6)
    table.add(4, 7)  # one too many again, and context 1 has to go with both of its tokens
    assert list(table) == [4]
    assert table.pairs == 3


def test_a_full_context_drops_its_stalest_token_but_not_its_best(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(context_table, "MAX_CONTINUATIONS", 3)
    for tokens, left in [
        ((4, 7, 7, 5, 6), {7: 2, 5: 1, 6: 1}),
        ((7, 7, 4, 5, 6), {7: 2, 5: 1, 6: 1}),  # 7 is the stalest, but the most frequent
        ((4, 5, 6, 7), {5: 1, 6: 1, 7: 1}),
        ((4, 4, 5, 5, 6, 7), {5: 2, 6: 1, 7: 1}),  # of two as frequent, the later one is the best
    ]:
        table = BoundedTable()
        for token in tokens:
            table.add(1, token)
        entry = table[1]
        assert isinstance(entry, Continuations)
        assert entry.counts == left
        assert entry.best == max(reversed(left), key=left.__getitem__)
        assert entry.total == sum(left.values())
        assert table.pairs == 3
