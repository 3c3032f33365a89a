"""Tests of the parts of chat: the output, and turns that are rejected, fail or are stopped."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from io import StringIO
from typing import Any
from unittest import mock

import pyte
import pytest
from ngramspec_cli import chat
from ngramspec_cli.chat_input import StopKey, clean
from ngramspec_cli.chat_session import Session
from ngramspec_cli.chat_view import AnswerView, format_step, totals
from ngramspec_cli.console import printable
from rich.console import Console

from ngramspec.chat.families import AnswerParser
from ngramspec.chat.stream import Delta
from ngramspec.data import ModelError, TargetError
from ngramspec.instruments.reports.report import Piece
from ngramspec.llama.passes import Feed, Passes
from ngramspec.llama.target import Target
from ngramspec.memory import Memory
from ngramspec.steps import Stats, Step

Captured = pytest.CaptureFixture[str]


def test_printable_shows_control_characters_and_clean_replaces_bytes() -> None:
    assert printable("a\x1b[31m\x07\x9b2J\x7f\r\n\tü\0") == "a␛[31m␇�2J␡\n\tü␀"
    assert clean("a\udcffb ü") == "a�b ü"


def test_totals_of_session_report_counts_rates_and_gain() -> None:
    stats = Stats()
    stats.add(Step((1,), ("a",), seconds=0.5))
    timed = {"seconds": 0.25, "cost": 1.0, "elapsed": 0.5}
    for _ in range(8):
        stats.add(Step((1, 2), ("a", "b"), drafted=(1, 3, 4), accepted=1, batch=4, **timed))
        stats.add(Step((1,), ("a",), batch=1, **timed))
    written = StringIO()
    Console(width=90, file=written).print(*totals(stats, {"model": "m\x1b[bold]"}))
    shown = [" ".join(re.findall(r"[^\s│┃]+", line)) for line in written.getvalue().splitlines()]
    assert "model m␛[bold]" in shown
    assert "tokens 25 generated, prompts processed in 0.5 s" in shown
    assert "speed 3.0 tokens/s, 1.50 tokens per pass" in shown
    assert "passes 16, 50% of them without a draft" in shown
    assert "drafts 8 of 24 drafted tokens accepted (33%)" in shown
    assert "gain about 1.50x plain decoding (estimated from the costs of passes here)" in shown
    assert [line for line in shown if re.fullmatch(r"[\d %]+", line)] == ["1 8 8 8 100%", "2 8 8 0 0%"]
    assert len(totals(Stats(), {})) == 1


PIECES = {1: b"one ", 2: b"t\xc3", 3: b"\n\x1b", 4: b"[bold]four", 5: b""}

REFUSING = Step((1, 4), ("one ", "[bold]four"), drafted=(1, 2, 3), accepted=1, batch=4)


def test_marked_step_colours_accepted_and_rejected_tokens() -> None:
    def spans(step: Step) -> list[tuple[str, str]]:
        text = format_step(step, PIECES.__getitem__)
        return [(text.plain[s.start : s.end], str(s.style)) for s in text.spans]

    assert spans(REFUSING) == [("one ", "green"), ("t�⏎␛", "strike red"), ("[bold]four", "bright_blue")]
    whole = Step((1, 4), ("one ", "[bold]four"), drafted=(1,), accepted=1, batch=2)
    assert spans(whole) == [("one ", "green")]
    assert format_step(whole, PIECES.__getitem__).plain == "one [bold]four"
    # Tokens after the end of the text were not rejected.
    assert spans(Step((1, 5), ("one ", ""), drafted=(1, 5, 4, 4), accepted=2, batch=5, stop="eog")) == [
        ("one ", "green")
    ]


MARKDOWN = "<think>\nhm\n</think>\n\nSome **bold** \x1b[2J and\n\n- more"


@pytest.mark.parametrize(
    ("variables", "size", "rendered"),
    [
        ({}, (5, 20), True),
        ({}, (5, 19), False),
        ({}, (4, 20), False),
        ({"NO_COLOR": "1"}, (5, 20), False),
        ({"TERM": "dumb"}, (5, 20), False),
    ],
)
def test_answer_view_renders_markdown_only_on_capable_terminal(
    variables: dict[str, str], size: tuple[int, int], rendered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    termios = pytest.importorskip("termios")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"TERM": "xterm"} | variables).items():
        monkeypatch.setenv(name, value)
    terminal, end = os.openpty()
    termios.tcsetwinsize(end, size)
    with open(end, "w", encoding="utf-8") as stdout, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", stdout)
        view = AnswerView()
        parser = AnswerParser("<think>")
        view.begin()
        for word in re.findall(r"\s*\S+", MARKDOWN):
            view.show(Step((1,), (word,)), parser.push(word), PIECES.__getitem__)
        view.end()
        view.drafts = True
        view.show(REFUSING, [], PIECES.__getitem__)
    written = b""
    with suppress(OSError):  # Linux reports the exit of the last writer so.
        while piece := os.read(terminal, 4096):
            written += piece
    os.close(terminal)
    screen = pyte.Screen(40, 20)
    pyte.ByteStream(screen).feed(written)
    rows = [row.rstrip() for row in screen.display]
    looks = ["hm", "", "Some bold ␛[2J and", "", "• more"]
    if not rendered:
        looks[2:] = ["Some **bold** ␛[2J and", "", "- more"]
    looks.append("one t�⏎␛[bold]four")
    assert rows == looks + [""] * (len(rows) - len(looks))
    assert (b"\x1b[2mhm" in written) == (variables.get("TERM") != "dumb")
    assert (b"\x1b[32mone" in written) == (not variables)
    assert screen.buffer[2][5].bold == rendered


@pytest.mark.parametrize("first", [None, "hello"])
def test_chat_at_terminal_starts_with_hint_or_first_answer(
    session: Session, capsys: Captured, monkeypatch: pytest.MonkeyPatch, first: str | None
) -> None:
    monkeypatch.setattr(chat, "Terminal", lambda *_: [])
    session.memory = Memory()
    chat._talk(session, first)
    shown = capsys.readouterr()
    commands = "/help lists commands, Ctrl-D exits"
    if first is None:
        assert shown == ("", f"{commands}\n")
    else:
        assert shown.out
        line, *_, last = shown.err.splitlines()
        assert re.match(r"\d+ tokens? at ", line)
        assert last == f"the chat continues; {commands}"


@pytest.mark.parametrize(
    ("name", "error", "told"),
    [
        ("chat", ModelError("no system\nrole\x1b"), "no system role␛"),
        ("submit", TargetError("out of order"), "out of order"),
    ],
)
def test_chat_ask_after_error_removes_turn(
    session: Session, capsys: Captured, name: str, error: Exception, told: str
) -> None:
    session.decoder.set_drafter(None, session.decoder.policy)
    owner = session.decoder.sequence if name == "submit" else session.target.vocabulary
    with mock.patch.object(owner, name, side_effect=error):
        assert not session.ask("hello")
    assert session.conversation.turns == []
    assert capsys.readouterr().err == f"ngramspec: {told} (the turn was removed)\n"
    assert session.totals.generated == (name == "submit")
    assert session.ask("hello")
    assert session.answers == len(session.conversation.turns) == 1


def test_chat_ask_when_stopped_during_prefill_removes_turn(session: Session, capsys: Captured) -> None:
    decode = Passes.decode

    def press(passes: Passes, feeds: Sequence[Feed], **options: Any) -> None:
        decode(passes, feeds, **options)
        session.stop_key._on_signal(signal.SIGINT, None)

    with mock.patch.object(Passes, "decode", press):
        assert session.ask("hello")
    assert session.conversation.turns == []
    assert capsys.readouterr() == ("", "stopped before the answer began; the turn was removed\n")
    assert session.ask("hello")


def test_chat_ask_when_stopped_keeps_answer_and_cache(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    show = session.view.show

    def press(step: Step, deltas: Sequence[Delta], piece: Piece) -> None:
        show(step, deltas, piece)
        if step.batch:
            session.stop_key._on_signal(signal.SIGINT, None)

    session.limit = 400
    session.stop = ("never said",)
    monkeypatch.setattr(session.view, "show", press)
    assert session.ask("hello")
    assert session.totals.passes <= 1
    prompt = session.target.vocabulary.chat_prompt([{"role": "user", "content": "hello"}])
    assert session.target.sequences[0].tokens[: len(prompt)] == prompt
    assert len(session.target.sequences[0].tokens) == len(prompt) + session.totals.generated - 1


def test_chat_ask_of_next_turn_reuses_cache(session: Session, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    session.sampling = replace(session.sampling, temperature=0.0)
    session.ask("a question of some length, so that reading it again would show")
    first = len(target.vocabulary.chat_prompt([{"role": "user", "content": session.conversation.turns[0].user}]))
    computed = []
    decode = Passes.decode

    def count(passes: Passes, feeds: Sequence[Feed], **options: Any) -> None:
        computed.extend(len(tokens) for _, tokens, rows in feeds if rows < len(tokens))
        decode(passes, feeds, **options)

    monkeypatch.setattr(Passes, "decode", count)
    session.ask("more")
    whole = len(target.vocabulary.chat_prompt(session.conversation.messages()[:3]))
    assert sum(computed) <= whole - first


def test_stop_key_between_answers_interrupts_piped_session() -> None:
    key = StopKey(keep_session=False)
    with key:
        key._on_signal(signal.SIGINT, None)
    assert key.pressed
    with pytest.raises(KeyboardInterrupt):
        key._on_signal(signal.SIGINT, None)
    staying = StopKey(keep_session=True)
    staying._on_signal(signal.SIGINT, None)
    with staying:
        assert not staying.pressed


def test_no_echo_when_killed_by_sigquit_restores_echo() -> None:
    termios = pytest.importorskip("termios")
    # A background job starts with the signal ignored.
    program = "signal.signal(signal.SIGQUIT, signal.SIG_DFL)\nwith disable_echo(): signal.raise_signal(signal.SIGQUIT)"
    terminal, end = os.openpty()
    ended = subprocess.run(
        [sys.executable, "-P", "-c", f"from ngramspec_cli.chat_input import *\n{program}"], stdin=end, check=False
    )
    assert ended.returncode == -signal.SIGQUIT
    assert termios.tcgetattr(end)[3] & termios.ECHO
    os.close(terminal)
    os.close(end)
