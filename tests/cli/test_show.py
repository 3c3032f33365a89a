"""Tests of what commands print: the line after an answer, its notes, text between notes, and command lines."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from ngramspec_cli.console import note, write_stdout
from ngramspec_cli.show import AnswerReport, Output, command_line, format_gain, format_speed
from support.mock_target import MockTarget

from ngramspec.cost.times import PassTimes
from ngramspec.cpu.cores import CpuLoad, CpuSeconds
from ngramspec.cpu.thread_governor import ThreadGovernor
from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.loading.settings import LoadSettings
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
    draft_seconds=0.001,
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


PLAIN = {"tokens": (1,), "drafted": (), "accepted": 0}
MISSED = PLAIN | {"correct_guesses": 2}
WRONG = {"tokens": (1,), "drafted": (3,), "accepted": 0}
SURPRISING = {"is_surprising": True}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "1.60 times as fast with drafts"),
        (PLAIN, "no gain: nothing repeated"),
        (PLAIN | SURPRISING, "no gain: nothing repeated"),
        (MISSED, "no gain: batches are expensive here"),
        (MISSED | SURPRISING, "gain unknown: times varied"),
        (WRONG, "no gain: drafts were wrong"),
        (WRONG | SURPRISING, "no gain: drafts were wrong"),
        ({"drafted": (1, 3, 4), "cost": 1.992}, "no gain: drafts were wrong"),  # 1.004 times as fast
        ({"drafted": (1,), "cost": 2.5}, "no gain: batches are expensive here"),
        (SURPRISING, "gain unknown: times varied"),
        # Half of the draft tokens were wrong, but without a known cost they may have gained.
        (SURPRISING | {"drafted": (1, 3, 4)}, "gain unknown: times varied"),
    ],
)
def test_format_gain_is_a_factor_or_one_reason(changes: dict[str, object], expected: str) -> None:
    stats = counted(replace(GAINING, **changes))  # type: ignore[arg-type]
    assert format_gain(stats, TIMES) == expected
    if "expensive" in expected:
        for cheap in (PassTimes(), PassTimes({1: 1.0, 4: 1.5}, pairs=9)):
            assert format_gain(stats, cheap) == "no gain: little repeated"
        assert format_gain(stats) == "no gain"
    busy = expected.replace("times varied", "other programs ran")
    busy = busy.replace("batches are expensive here", "other programs ran")
    assert format_gain(stats, TIMES, is_busy=True) == busy
    assert format_gain(counted(replace(GAINING, **changes), passes=15), TIMES) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("missed", "expected"), [(3, "no gain: nothing repeated"), (30, "no gain: batches are expensive here")]
)
def test_format_gain_of_few_drafts_names_the_reason_for_their_absence(missed: int, expected: str) -> None:
    stats = counted(replace(GAINING, **MISSED), missed)  # type: ignore[arg-type]
    stats.add(replace(GAINING, **WRONG, cost=2.0))  # type: ignore[arg-type]
    for _ in range(40):
        stats.add(replace(GAINING, **PLAIN))  # type: ignore[arg-type]
    assert format_gain(stats, TIMES) == expected


UNASKED = PLAIN | {"draft_seconds": 0.0}


@pytest.mark.parametrize(
    ("asked", "n_asked", "n_unasked", "expected"),
    [
        (PLAIN, 16, 100, "no gain: nothing repeated"),
        (PLAIN, 10, 10, "no gain: nothing repeated"),
        (PLAIN, 9, 10, "no gain: drafting took too long"),
        (MISSED, 15, 100, "no gain: drafting took too long"),
        (MISSED, 16, 100, "no gain: batches are expensive here"),
        (WRONG, 2, 100, "no gain: drafting took too long"),
        (WRONG, 0, 16, "no gain: nothing was drafted"),
        (WRONG, 16, 100, "no gain: drafts were wrong"),
        (MISSED | SURPRISING, 30, 100, "gain unknown: times varied"),
    ],
)
def test_format_gain_counts_only_passes_for_which_the_drafter_was_called(
    asked: dict[str, object], n_asked: int, n_unasked: int, expected: str
) -> None:
    stats = counted(replace(GAINING, **asked), n_asked)  # type: ignore[arg-type]
    for _ in range(n_unasked):
        stats.add(replace(GAINING, **UNASKED))  # type: ignore[arg-type]
    assert format_gain(stats, TIMES) == expected


def test_answer_report_prints_one_line_and_each_note_once(capsys: Captured) -> None:
    decoder = SpeculativeDecoder(MockTarget(), times=TIMES)
    stats = counted(replace(GAINING, close_calls=1))
    report = AnswerReport()
    shown = []
    for ending, seed in (("length", 2**32 - 1), ("length", 2**32 - 1), ("stopped", 7)):
        report.show(stats, decoder, ThreadGovernor(1, 1), ending, seed=seed)
        shown.append(capsys.readouterr().err.splitlines())
    line = "33 tokens at 8.0 tokens/s, 1.60 times as fast with drafts"
    limit = "stopped at the token limit (-n/--predict)"
    rounding = "note: rounding could have changed 16 tokens; --exact on prevents this"
    assert shown == [[f"{line}; seed 4294967295", limit, rounding], [line, limit], [f"stopped; {line}; seed 7"]]


@pytest.mark.parametrize("is_busy", [False, True])
@pytest.mark.parametrize("changes", [{}, PLAIN, MISSED, WRONG, {"drafted": (1,), "cost": 2.5}, SURPRISING])
def test_answer_report_of_longest_figures_has_100_characters(
    changes: dict[str, object], is_busy: bool, capsys: Captured
) -> None:
    now, used = 0.0, 0.0
    governor = ThreadGovernor(2, 2, load=CpuLoad(lambda: CpuSeconds(used), lambda: now), cores=2)
    now, used = 1.0, 1.26 if is_busy else 0.0
    stats = counted(replace(GAINING, elapsed=0.0, **changes))  # type: ignore[arg-type]
    stats.generated, stats.decode_seconds = 999_999, stats.tokens / 99_999
    decoder = SpeculativeDecoder(MockTarget(), times=TIMES)
    AnswerReport().show(stats, decoder, governor, "interrupted", seed=2**32 - 1)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("interrupted; 999,999 tokens at 99,999 tokens/s, ")
    assert line.endswith("; seed 4294967295")
    assert len(line) <= 100
    assert "other programs" not in line or is_busy


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


def shown(patch: pytest.MonkeyPatch, stdout: int | Path | None = None) -> str:
    """Return what texts on stdout and notes write to a terminal that is stderr and, by default, also stdout."""
    terminal, end = os.openpty()
    with open(end, "w") as err, open(os.dup(end) if stdout is None else stdout, "w") as out, patch.context() as patched:
        patched.setenv("TERM", "dumb")
        patched.setattr(sys, "stderr", err)
        patched.setattr(sys, "stdout", out)
        for text in ("one", "two\n", "three", "", "four"):
            write_stdout(text)
            note("note")
            note("more")
    found = b""
    with suppress(OSError):  # Linux reports the last close of the other end so.
        while piece := os.read(terminal, 4096):
            found += piece
    os.close(terminal)
    return found.decode().replace("\r\n", "\n")


def test_note_after_partial_stdout_line_starts_new_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    notes = "note\nmore\n"
    assert shown(monkeypatch) == f"one\n{notes}two\n{notes}three\n{notes}{notes}four\n{notes}"
    assert shown(monkeypatch, os.openpty()[1]) == notes * 5
    assert shown(monkeypatch, tmp_path / "out") == notes * 5
    assert (tmp_path / "out").read_text() == "onetwo\nthreefour"


def test_command_line_contains_only_names_of_files(tmp_path: Path) -> None:
    model = tmp_path / "a model.gguf"
    model.touch()
    own = {"-n": 16, "--limit": None, "--category": ["a", "b c"], "--strict": True, "--memory": False}
    line = command_line("bench", [str(model), None], own, Output(svg="x.svg"))
    assert line == "ngramspec bench 'a model.gguf' -n 16 --category a --category 'b c' --strict --svg x.svg"
    adapters = LoadSettings(lora=((str(model), 1.0), ("a,b", 1.0)), lora_scaled=(("c", 0.5),))
    line = command_line("bench", [], {}, adapters)
    assert line == "ngramspec bench --lora 'a model.gguf' --lora '\"a,b\"' --lora-scaled c:0.5"
