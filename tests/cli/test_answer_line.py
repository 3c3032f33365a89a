"""Tests of the line after an answer and of the notes below it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from ngramspec_cli.answer_line import AnswerReport, format_gain, format_speed
from support.mock_target import MockTarget

from ngramspec.cost.times import PassTimes
from ngramspec.cpu.cores import CpuLoad, CpuSeconds
from ngramspec.cpu.thread_governor import ThreadGovernor
from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.steps import Stats, Step

Captured = pytest.CaptureFixture[str]

TIMES = PassTimes({1: 1.0, 4: 3.8}, pairs=9)
FIRST = Step((1,), ("a",), seconds=0.5)
GAINING = Step(
    (1, 2),
    ("a", "b"),
    drafted=(1, 3),
    accepted=1,
    batch=3,
    seconds=0.25,
    cost=1.25,
    elapsed=0.25,
)


def counted(step: Step, passes: int = 16) -> Stats:
    stats = Stats()
    for each in (FIRST, *[step] * passes):
        stats.add(each)
    return stats


def test_format_speed_counts_tokens_and_needs_two() -> None:
    assert format_speed(counted(GAINING)) == "33 tokens at 8.0 tokens/s"
    assert format_speed(counted(GAINING, passes=0)) == "1 token"
    assert format_speed(Stats()) == "0 tokens"


def test_format_gain_an_undisturbed_answer_is_a_factor_or_a_reason() -> None:
    def gain(passes: int = 16, times: PassTimes | None = TIMES, **changes: object) -> str | None:
        return format_gain(counted(replace(GAINING, **changes), passes), times)  # type: ignore[arg-type]

    assert gain() == "about 1.60 times as fast as without drafts"
    assert gain(passes=15) is None
    for even in (1.992, 2.5):  # The first is 1.004 times as fast.
        assert gain(cost=even, drafted=(1, 3, 4)) == "no gain: 16 of 48 draft tokens accepted"
    assert gain(cost=2.5, drafted=(1,)) == "no gain: 4 tokens at once cost 3.8 times one token"
    assert gain(tokens=(1,), drafted=(3,), accepted=0) == "no gain: 0 of 16 draft tokens accepted"
    none = {"tokens": (1,), "drafted": (), "accepted": 0}
    assert gain(**none) == "no drafts: 4 tokens at once cost 3.8 times one token"
    for unseen in (None, PassTimes()):
        assert gain(times=unseen, **none) == "no drafts"
        assert gain(times=unseen, cost=2.5, drafted=(1,)) == "no gain"


def test_format_gain_a_disturbed_answer_is_unknown() -> None:
    surprising = replace(GAINING, is_surprising=True)
    disturbed = counted(surprising)
    assert format_gain(disturbed, TIMES) == "gain unknown: passes took different times"
    assert disturbed.estimated_gain is None
    nothing = replace(surprising, tokens=(1,), drafted=(), accepted=0)
    assert format_gain(counted(nothing), TIMES) == "no drafts"


@pytest.mark.parametrize("accepted", [0, 1, 2])
def test_estimated_gain_never_exceeds_tokens_per_decode_call(accepted: int) -> None:
    """An earlier version reported 1.62 times the speed with one of ten draft tokens accepted."""
    tokens = tuple(range(accepted + 1))
    for cost in (0.01, 0.25, 4.0):
        drafted = Step(tokens, drafted=(*tokens, *range(9 - accepted)), accepted=accepted, batch=11, cost=cost)
        gain = counted(drafted).estimated_gain
        assert gain is not None
        assert gain <= 1 + accepted


def test_answer_report_prints_one_line_and_each_note_once(capsys: Captured) -> None:
    decoder = SpeculativeDecoder(MockTarget(), times=TIMES)
    stats = counted(replace(GAINING, close_calls=1))
    report = AnswerReport()
    shown = []
    for ending, seed in (("length", 2**32 - 1), ("length", 2**32 - 1), ("stopped", 7)):
        report.show(stats, decoder, None, ending, seed=seed)
        shown.append(capsys.readouterr().err.splitlines())
    line = "33 tokens at 8.0 tokens/s, about 1.60 times as fast as without drafts"
    limit = "stopped at the token limit (-n/--predict)"
    rounding = "note: rounding could have changed 16 tokens; --exact on prevents this"
    assert shown == [[f"{line}; seed 4294967295", limit, rounding], [line, limit], [f"stopped; {line}; seed 7"]]
    assert max(map(len, itertools.chain(*shown))) <= 100


def test_answer_report_on_fixed_threads_notes_load_once(capsys: Captured) -> None:
    now, used = 0.0, 0.0
    load = CpuLoad(lambda: CpuSeconds(used), lambda: now)
    decoder, report = SpeculativeDecoder(MockTarget(), times=TIMES), AnswerReport()

    def is_noted(*, adapts: bool = False) -> bool:
        governor = ThreadGovernor(2, 2, adapts=(adapts, adapts), load=load, cores=2)
        report.show(counted(GAINING), decoder, governor, "stopped")
        return "faster without -t" in capsys.readouterr().err

    assert not is_noted()
    now, used = 1.0, 1.26
    assert [is_noted(adapts=True), is_noted(), is_noted()] == [False, True, False]
