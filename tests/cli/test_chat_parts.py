"""The parts of chat: what is a command, what is shown, and a turn that is refused, fails or is stopped."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from io import StringIO
from typing import Any

import pytest
from ngramspec_cli.chat import ChatSampling
from ngramspec_cli.chat_commands import parse
from ngramspec_cli.chat_input import StopKey, clean
from ngramspec_cli.chat_session import Session
from ngramspec_cli.chat_view import marked, totals
from ngramspec_cli.console import printable
from rich.console import Console

from ngramspec.conversation import Turn
from ngramspec.decoding.step import Stats, Step
from ngramspec.errors import ModelError, TargetError
from ngramspec.llama.passes import Feed, Passes
from ngramspec.llama.target import Target


@pytest.mark.parametrize(
    ("line", "parsed"),
    [
        ("hello", "hello"),
        ("  indented", "  indented"),
        ("/help", ("help", "")),
        ("/HELP ", ("help", "")),
        ("/system  Be brief.\nAnd kind. ", ("system", "Be brief.\nAnd kind.")),
        (" /help me", "/help me"),
        ("//help me", "/help me"),
        ("// a comment", "// a comment"),
        ("/* a comment */", "/* a comment */"),
        ("/usr/bin/env fails", "/usr/bin/env fails"),
        ("/", "/"),
    ],
)
def test_what_is_a_command(line: str, parsed: object) -> None:
    assert parse(line) == parsed


def test_control_characters_are_shown_not_obeyed() -> None:
    assert printable("a\x1b[31m\x07\x9b2J\x7f\r\n\tü\0") == "a␛[31m␇�2J␡\n\tü␀"


def test_bytes_that_are_no_text_are_replaced() -> None:
    assert clean("a\udcffb ü") == "a�b ü"


def test_the_statistics_of_a_session() -> None:
    stats = Stats()
    stats.add(Step((1,), ("a",), seconds=0.5))
    stats.add(Step((1, 2), ("a", "b"), drafted=(1, 3, 4), accepted=1, batch=4, seconds=0.25, plain_seconds=0.25))
    stats.add(Step((1,), ("a",), batch=1, seconds=0.25, plain_seconds=0.25))
    console = Console(width=90, file=StringIO())
    console.print(*totals(stats, {"model": "m\x1b[bold]"}))
    assert isinstance(console.file, StringIO)
    shown = [" ".join(re.findall(r"[^\s│┃]+", line)) for line in console.file.getvalue().splitlines()]
    assert "model m␛[bold]" in shown
    assert "tokens 4 generated, prompts read in 0.5 s" in shown
    assert "speed 6.0 tokens/s, 1.50 tokens per target pass" in shown
    assert "passes 2, 50% of them without a draft" in shown
    assert "drafts 1 of 3 drafted tokens accepted (33%)" in shown
    assert "gain about 1.50x plain decoding, by this machine's measured costs" in shown
    assert [line for line in shown if re.fullmatch(r"[\d %]+", line)] == ["1 1 1 1 100%", "2 1 1 0 0%"]
    assert len(totals(Stats(), {})) == 1


PIECES = {1: b"one ", 2: b"t\xc3", 3: b"\n\x1b", 4: b"[bold]four", 5: b""}


def spans(step: Step) -> list[tuple[str, str]]:
    text = marked(step, PIECES.__getitem__)
    return [(text.plain[s.start : s.end], str(s.style)) for s in text.spans]


def test_a_refused_draft_is_followed_by_its_correction() -> None:
    step = Step((1, 4), ("one ", "[bold]four"), drafted=(1, 2, 3), accepted=1, batch=4)
    assert spans(step) == [("one ", "green"), ("t�⏎␛", "strike red"), ("[bold]four", "bright_blue")]


def test_a_draft_accepted_whole_has_no_correction() -> None:
    step = Step((1, 4), ("one ", "[bold]four"), drafted=(1,), accepted=1, batch=2)
    assert spans(step) == [("one ", "green")]
    assert marked(step, PIECES.__getitem__).plain == "one [bold]four"


def test_a_draft_cut_by_the_end_of_the_text_was_not_refused() -> None:
    step = Step((1, 5), ("one ", ""), drafted=(1, 5, 4, 4), accepted=2, batch=5, stop="eog")
    assert spans(step) == [("one ", "green")]


def test_a_template_that_refuses_takes_the_turn_back(
    session: Session, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(_messages: object, **_variables: object) -> list[int]:
        raise ModelError("no system\nrole\x1b")

    with monkeypatch.context() as patched:
        patched.setattr(session.target, "chat", refuse)
        assert not session.ask("hello")
    assert session.conversation.turns == []
    assert capsys.readouterr() == ("", "ngramspec: no system role␛ (the turn was taken back)\n")
    assert session.ask("hello")
    assert session.answers == len(session.conversation.turns) == 1


def test_a_target_that_fails_in_the_middle_takes_the_turn_back(
    session: Session, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_tokens: object) -> None:
        raise TargetError("out of order")

    session.decoder.drafter = None
    with monkeypatch.context() as patched:
        patched.setattr(session.target, "evaluate", fail)
        assert not session.ask("hello")
    assert session.conversation.turns == []
    assert "ngramspec: out of order" in capsys.readouterr().err
    assert session.totals.generated == 1


def test_stopped_while_the_prompt_is_read(
    session: Session, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    decode = Passes.decode

    def press(passes: Passes, feeds: Sequence[Feed], **options: Any) -> None:
        decode(passes, feeds, **options)
        session.stop_key._on_signal(signal.SIGINT, None)

    with monkeypatch.context() as patched:
        patched.setattr(Passes, "decode", press)
        assert session.ask("hello")
    assert session.conversation.turns == []
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "stopped before the answer began; the turn was taken back\n")
    assert session.ask("hello")


def test_a_stopped_answer_stays_and_the_cache_agrees(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    show = session.view.show

    def press(step: Step) -> None:
        show(step)
        if step.batch:
            session.stop_key._on_signal(signal.SIGINT, None)

    session.limit = 400
    session.stop = ("never said",)
    monkeypatch.setattr(session.view, "show", press)
    assert session.ask("hello")
    assert session.totals.passes <= 1
    prompt = session.target.chat_prompt([{"role": "user", "content": "hello"}])
    assert session.target.tokens[: len(prompt)] == prompt
    assert len(session.target.tokens) == len(prompt) + session.totals.generated - 1


def test_the_next_turn_reuses_the_cache(session: Session, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    session.sampling = ChatSampling(temperature=0.0).sampling()
    session.ask("a question of some length, so that reading it again would show")
    first = len(target.chat_prompt([{"role": "user", "content": session.conversation.turns[0].user}]))
    computed = []
    decode = Passes.decode

    def count(passes: Passes, feeds: Sequence[Feed], **options: Any) -> None:
        computed.extend(len(tokens) for _, tokens, rows in feeds if rows < len(tokens))
        decode(passes, feeds, **options)

    monkeypatch.setattr(Passes, "decode", count)
    session.ask("more")
    whole = len(target.chat_prompt(session.conversation.messages()[:3]))
    assert sum(computed) <= whole - first


def test_reset_draws_a_random_seed_anew(session: Session) -> None:
    session.conversation.turns.append(Turn("a", "b"))
    session.conversation.system = "s"
    session.reset()
    assert (session.conversation.turns, session.conversation.system, session.sampling.seed) == ([], "s", 1)
    session.options = ChatSampling()
    session.reset()
    seed = session.sampling.seed
    session.reset()
    assert session.sampling.seed != seed


def test_between_answers_a_piped_session_can_be_interrupted() -> None:
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
