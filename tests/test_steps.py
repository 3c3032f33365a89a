"""Tests of counters over steps, and of spans of a text by draft and result."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from support.mock_target import Clock, MockTarget

from ngramspec.cost.fixed_curves import make_fixed_curve
from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.instruments.reports.report import draft_section
from ngramspec.steps import Stats, Step

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
        **{"elapsed": 1.25, "cost": 1.0} | options,
    )


def counted(*steps: Step) -> Stats:
    stats = Stats()
    for s in steps:
        stats.add(s)
    return stats


def test_stats_exclude_the_prefill() -> None:
    none = Stats()
    assert (none.tokens_per_pass, none.acceptance_rate, none.tokens_per_second, none.estimated_gain) == (1, *[None] * 3)
    stats = counted(PREFILL)
    assert (stats.generated, stats.tokens, stats.passes, stats.prefill_seconds, stats.seconds) == (1, 0, 0, 2.0, 0.0)
    stats.add(step(0, 0))
    assert (stats.generated, stats.tokens, stats.passes, stats.passes_without_draft) == (2, 1, 1, 1)


def test_stats_of_several_steps_equal_worked_example() -> None:
    # The steps draft 4 tokens and keep 2, draft none, draft and keep 2, and draft 3 and keep none.
    stats = counted(PREFILL, step(4, 2), step(0, 0), step(2, 2), step(3, 0))
    assert (stats.tokens, stats.passes, stats.passes_without_draft, stats.generated) == (8, 4, 1, 9)
    assert (stats.drafted, stats.accepted) == (9, 4)
    assert stats.tokens_per_pass == 2.0
    assert stats.acceptance_rate == pytest.approx(4 / 9)
    assert stats.drafted_at == [3, 3, 2, 1]
    assert stats.tested_at == [3, 2, 1, 0]
    assert stats.accepted_at == [2, 2, 0, 0]
    # This is wall-clock time, which includes passes and drafting.
    assert stats.decode_seconds == pytest.approx(5.0)
    assert stats.tokens_per_second == pytest.approx(8 / 5.0)
    one, other = counted(PREFILL, step(4, 2)), counted(step(0, 0), step(2, 2), step(3, 0))
    before = dataclasses.asdict(other)
    one.merge(other)
    assert one == stats
    one.add(step(9, 9))
    assert dataclasses.asdict(other) == before, "lists are not shared"


def test_stats_at_end_of_text_count_only_tested_positions() -> None:
    # The text ended with the second of 5 draft tokens.
    stats = counted(step(5, 2, emitted=2))
    assert stats.drafted_at == [1] * 5
    assert stats.tested_at == stats.accepted_at == [1, 1, 0, 0, 0]
    # The text ended with the target's token after two accepted ones.
    stats = counted(step(5, 2))
    assert stats.tested_at == [1, 1, 1, 0, 0]


def test_stats_estimated_gain_is_plain_cost_over_actual_cost() -> None:
    drafted = step(3, 3, cost=1.5, draft_cost=0.25), step(0, 0, cost=1.25)
    stats = counted(*drafted * 8)
    assert stats.cost == pytest.approx(8 * 3.0)
    assert stats.estimated_gain == pytest.approx(5 / 3.0)
    assert counted(*drafted).estimated_gain is None, "too few passes"
    assert counted(*[step(0, 0)] * 16).estimated_gain is None, "nothing was drafted"
    assert counted(*[step(1, 1, cost=0.1)] * 16).estimated_gain == 2.0, "it cannot exceed the tokens per pass"
    surprising = dataclasses.replace(drafted[0], is_surprising=True)
    few = counted(*drafted * 8, *[surprising] * 4)
    assert (few.surprises, few.is_disturbed, few.estimated_gain) == (4, False, pytest.approx(56 / 31))
    many = counted(*drafted * 8, *[surprising] * 5)
    assert (many.is_disturbed, many.estimated_gain) == (True, None)


PIECES = {1: b"one ", 2: b"t\xc3", 3: b"three", 4: b"four"}


def spans(*steps: Step) -> list[tuple[str, str]]:
    (passage,) = draft_section("", {"code": ("a prompt", steps)}, PIECES.__getitem__).figures
    return passage.spans


def test_draft_spans_place_rejected_tokens_before_correction() -> None:
    refused = Step((1, 4), ("one ", "four"), drafted=(1, 2, 3), accepted=1, batch=4)
    told = [("three", ""), ("one ", "kept"), ("t\ufffdthree", "refused"), ("four", "corrected")]
    assert spans(Step((3,), ("three",)), refused) == told


def test_draft_spans_join_neighbours_and_omit_untested_rest() -> None:
    whole = Step((1, 3, 4), ("one ", "three", ""), drafted=(1, 3), accepted=2, batch=3)
    ended = Step((1, 3), ("one ", "three"), drafted=(1, 3, 4), accepted=2, batch=4)
    assert spans(whole, ended) == [("one threeone three", "kept")]


def test_stats_tokens_per_second_includes_time_between_steps() -> None:
    """The time includes the consumer of the steps, the grammar and all other work between two passes."""
    clock = Clock()
    target = MockTarget(seconds=lambda n: 1.0, clock=clock)
    decoder = SpeculativeDecoder(target, drafter=None, times=make_fixed_curve({1: 1.0}), clock=clock.perf_counter)
    stats = Stats()
    for done in decoder.generate([1, 2, 3], max_tokens=11):
        stats.add(done)
        clock.now += 0.5
    assert stats.decode_seconds == pytest.approx(10 * 1.5, rel=1e-3)
    assert stats.tokens_per_second == pytest.approx(10 / 15, rel=1e-3)
