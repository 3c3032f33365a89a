"""Counters over steps."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ngramspec.decoding.step import Stats, Step

PREFILL = Step((9,), ("x",), seconds=2.0)


def step(drafted: int, accepted: int, emitted: int | None = None, **options: Any) -> Step:
    emitted = accepted + 1 if emitted is None else emitted
    return Step(
        tuple(range(emitted)),
        ("x",) * emitted,
        drafted=tuple(range(drafted)),
        accepted=accepted,
        batch=1 + drafted,
        seconds=1.0,
        **options,
    )


def counted(*steps: Step) -> Stats:
    stats = Stats()
    for s in steps:
        stats.add(s)
    return stats


def test_nothing_counted() -> None:
    stats = Stats()
    assert stats.tokens_per_pass == 1.0
    assert stats.acceptance_rate is None
    assert stats.tokens_per_second is None
    assert stats.estimated_gain is None


def test_the_prefill_is_left_out() -> None:
    stats = counted(PREFILL)
    assert (stats.generated, stats.tokens, stats.passes, stats.prefill_seconds, stats.seconds) == (1, 0, 0, 2.0, 0.0)
    stats.add(step(0, 0))
    assert (stats.generated, stats.tokens, stats.passes, stats.passes_without_draft) == (2, 1, 1, 1)


def test_a_worked_example() -> None:
    # 4 drafted and 2 kept, none drafted, 2 drafted and kept, 3 drafted and none kept.
    stats = counted(PREFILL, step(4, 2), step(0, 0), step(2, 2), step(3, 0))
    assert (stats.tokens, stats.passes, stats.passes_without_draft, stats.generated) == (8, 4, 1, 9)
    assert (stats.drafted, stats.accepted) == (9, 4)
    assert stats.tokens_per_pass == 2.0
    assert stats.acceptance_rate == pytest.approx(4 / 9)
    assert stats.drafted_at == [3, 3, 2, 1]
    assert stats.tested_at == [3, 2, 1, 0]
    assert stats.accepted_at == [2, 2, 0, 0]
    assert stats.tokens_per_second == pytest.approx(2.0)


def test_the_end_of_a_text_says_nothing_about_what_came_after() -> None:
    # 5 drafted; the text ended with the second of them.
    stats = counted(step(5, 2, emitted=2))
    assert stats.drafted_at == [1] * 5
    assert stats.tested_at == stats.accepted_at == [1, 1, 0, 0, 0]
    # It ended with the target's own token instead.
    stats = counted(step(5, 2))
    assert stats.tested_at == [1, 1, 1, 0, 0]


def test_the_gain_is_plain_time_over_time_taken() -> None:
    stats = counted(step(3, 3, plain_seconds=0.5, draft_seconds=0.25), step(0, 0, plain_seconds=1.0, draft_seconds=0.0))
    assert stats.plain_seconds == pytest.approx(4 * 0.5 + 1.0)
    assert stats.estimated_gain == pytest.approx(3.0 / 2.25)
    assert stats.tokens_per_second == pytest.approx(5 / 2.25)
    assert counted(step(1, 1)).estimated_gain is None


steps = st.integers(0, 9).flatmap(
    lambda k: st.integers(0, k).flatmap(
        lambda a: st.builds(
            lambda inside, plain: step(k, a, emitted=a if inside and a else None, plain_seconds=plain),
            st.booleans(),
            st.sampled_from([0.25, 0.5, 1.0]),
        )
    )
)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(steps), st.lists(steps))
def test_sums_are_consistent_and_merge_adds(one: list[Step], two: list[Step]) -> None:
    stats = counted(PREFILL, *one)
    assert sum(stats.drafted_at) == stats.drafted
    assert sum(stats.accepted_at) == stats.accepted
    assert all(a <= t <= d for a, t, d in zip(stats.accepted_at, stats.tested_at, stats.drafted_at, strict=True))
    assert stats.generated == stats.tokens + 1
    # A position is reached exactly when the one before it was accepted, unless the text ended there.
    assert all(t <= a for t, a in zip(stats.tested_at[1:], stats.accepted_at, strict=False))
    other = counted(PREFILL, *two)
    before = dataclasses.asdict(other)
    stats.merge(other)
    assert stats == counted(PREFILL, PREFILL, *one, *two)
    assert dataclasses.asdict(other) == before


def test_merging_shares_no_lists() -> None:
    mine, other = Stats(), counted(step(2, 1))
    mine.merge(other)
    mine.add(step(2, 1))
    assert other.drafted_at == [1, 1]


def test_a_step_knows_its_text_and_what_was_refused() -> None:
    s = Step((1, 2), ("a", "b"), drafted=(1, 5, 6), accepted=1, batch=4)
    assert s.text == "ab"
    assert s.refused == (5, 6)
    assert step(3, 3).refused == ()
