"""The commands of chat that change what was said and how it is answered, on a session in this process."""

from __future__ import annotations

import base64
import json
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
from ngramspec_cli import chat_kept, chat_settings
from ngramspec_cli.chat_commands import COMMANDS, NAMES, parse, run
from ngramspec_cli.chat_completion import ChatCompleter
from ngramspec_cli.chat_input import unquoted
from ngramspec_cli.chat_session import Session
from ngramspec_cli.chat_view import said
from ngramspec_cli.markdown_rows import code_blocks
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document

from ngramspec.conversation import Conversation, Turn
from ngramspec.memory import Memory
from ngramspec.sampling.option import options
from ngramspec.sampling.settings import SAMPLERS, Sampling


@pytest.fixture(autouse=True)
def _short(session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session.limit = 4
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def users(session: Session) -> list[str]:
    return [turn.user for turn in session.conversation.turns]


def heard(session: Session) -> int:
    assert session.memory is not None
    return sum(index.size for index in session.memory.indexes)


# ---------------------------------------------------------------------- turns


def test_retry_asks_again_with_another_seed(session: Session) -> None:
    session.ask("one")
    session.ask("two")
    session.attached = ["waits"]
    assert run(session, "retry", "")
    assert (users(session), session.sampling.seed, session.attached) == (["one", "two"], 2, ["waits"])


def test_where_no_answer_comes_the_old_turn_stays(session: Session) -> None:
    session.ask("one")
    turns = list(session.conversation.turns)
    assert not run(session, "edit", "far too long " * 300)
    assert (session.conversation.turns, session.sampling.seed) == (turns, 1)
    assert run(session, "edit", "short")
    assert users(session) == ["short"]


def test_what_leaves_the_context_is_heard_by_the_memory(session: Session) -> None:
    session.memory = Memory()
    for question in ("one", "two", "three"):
        session.ask(question)
    assert heard(session) == 0
    run(session, "undo", "")
    first = heard(session)
    assert first > 0
    run(session, "retry", "")
    second = heard(session)
    assert second > first
    session.go_on_with(Conversation(turns=[Turn("a", "b")]))
    assert heard(session) > second
    third = heard(session)
    run(session, "undo", "")  # nothing that this session generated
    assert (heard(session), users(session)) == (third, [])


@pytest.mark.parametrize("name", ["undo", "retry", "edit", "copy"])
def test_there_must_be_a_turn(session: Session, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert not run(session, name, "")
    wanted = "terminal" if name == "copy" else "nothing was said yet"
    assert wanted in capsys.readouterr().err


def test_an_edit_without_a_text_needs_a_terminal(session: Session, capsys: pytest.CaptureFixture[str]) -> None:
    session.conversation.turns.append(Turn("a", "b"))
    assert not run(session, "edit", "")
    assert "there is no terminal" in capsys.readouterr().err
    session.interactive = True
    assert run(session, "edit", "")
    assert session.editing


def test_the_context_used_is_what_the_turns_take(session: Session) -> None:
    empty = session.used
    session.ask("one")
    used = session.used
    assert used == len(session.target.tokens) > empty
    session.ask("two")
    assert session.used > used
    run(session, "undo", "")
    assert abs(session.used - used) < 12  # the template's own text behind the answer
    run(session, "reset", "")
    assert session.used == empty


def test_copy_hands_an_answer_or_its_code_to_the_terminal(
    session: Session, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = "<think>\nhm\n</think>\n\nSo:\n\n- this\n  ```py\n  a = 1\n\n  b\n  ```\n\n~~~\nsecönd\n~~~\n"
    session.conversation.turns.append(Turn("q", answer))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for argument, text in (("", answer.split("\n\n", 1)[1]), ("1", "a = 1\n\nb\n"), ("2", "secönd\n")):
        assert run(session, "copy", argument)
        sent = capsys.readouterr().out
        assert sent.startswith("\x1b]52;c;")
        assert base64.b64decode(sent[7:-1]).decode() == text
    assert not run(session, "copy", "3")
    assert not run(session, "copy", "x")


def test_a_file_that_waits_can_be_taken_back(session: Session, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("words\n")
    assert run(session, "file", str(tmp_path / "a.txt"))
    assert session.attached == ["a.txt:\n\n```txt\nwords\n```"]
    assert run(session, "file", "-")
    session.ask("one")
    assert users(session) == ["one"]


def test_thoughts_are_not_said(session: Session) -> None:
    assert said(session.thoughts(), "<think>a</think>\n\nb") == "b"
    assert said(session.thoughts(), "a <think>b</think>") == "a <think>b</think>"


def test_code_is_found_wherever_it_stands() -> None:
    assert code_blocks("```\na\n```\n> ```\n> b\n> ```\n\n    c\n") == ["a\n", "b\n", "c\n"]


# ---------------------------------------------------------------------- settings


def test_every_sampling_option_can_be_set() -> None:
    for field in fields(Sampling):
        for name in (field.name, *options(Sampling)[field.name].flags, field.name.replace("_", "-").upper()):
            if len(name) > 2:
                assert chat_settings.find(name)


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        ("temp 0.7", "temperature", 0.7),
        ("TOP_K 5", "top_k", 5),
        ("--min-p 0", "min_p", 0.0),
        ("samplers top_k;temp", "samplers", ("top_k", "temperature")),
        ("logit-bias 5+1.5 7-inf", "logit_bias", ((5, 1.5), (7, float("-inf")))),
        (r"dry-sequence-breaker '\n' : 'ü b'", "dry_sequence_breakers", ("\n", ":", "ü b")),
        ("dry-sequence-breaker none", "dry_sequence_breakers", ()),
        ('grammar root ::= "a"', "grammar", 'root ::= "a"'),
        ("seed 7", "seed", 7),
    ],
)
def test_an_option_is_set_shown_and_taken_back(
    session: Session, line: str, field: str, value: object, capsys: pytest.CaptureFixture[str]
) -> None:
    before = getattr(session.sampling, field)
    if field == "samplers":
        session.sampling = replace(session.sampling, top_p=0.95)
    assert run(session, "set", line), capsys.readouterr().err
    assert getattr(session.sampling, field) == value
    shown = chat_settings.find(line.split(maxsplit=1)[0]).show(session)
    if field != "seed":
        assert run(session, "set", f"{line.split(maxsplit=1)[0]} default")
        assert getattr(session.sampling, field) == before
        # What is shown can be typed.
        assert run(session, "set", f"{line.split(maxsplit=1)[0]} {shown}")
        assert getattr(session.sampling, field) == value


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("nonsense 1", "there is no setting 'nonsense'; there are: temp, top-k, "),
        ("temp hot", "'hot' is no number"),
        ("top-k 1.5", "'1.5' is no whole number"),
        ("top-p 7", "must be above 0 and at most 1"),
        ("mirostat 3", "0 (off), 1 or 2"),
        ("grammar nothing", "grammar"),
        ("logit-bias 99999+1", "99999"),
        ("logit-bias x", "looks like 15043+1"),
        ("stop ''", "must not be empty"),
        ("stop 'open", "quotation"),
        ("predict 0", "at least 1"),
        ("predict many", "at least 1"),
        ("keep maybe", "must be on or off"),
        ("think on", "does not ask whether to think"),
        ("markdown on", "on a terminal"),
        ("json-schema {", "json-schema"),
    ],
)
def test_a_wrong_value_is_one_line_and_changes_nothing(
    session: Session, line: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = session.sampling
    assert not run(session, "set", line)
    complaint = capsys.readouterr().err
    assert words in " ".join(complaint.split())
    assert complaint.startswith("ngramspec: ")
    assert (session.sampling, session.limit, session.keeper.on) == (before, 4, False)


def test_a_random_seed_and_a_chosen_one(session: Session) -> None:
    run(session, "set", "seed -1")
    assert session.options.seed == -1
    run(session, "set", "seed 9")
    run(session, "reset", "")
    assert session.sampling.seed == 9


def test_what_else_can_be_set(
    session: Session, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(session.target), "chat_template", "{{ enable_thinking }}")
    for line in (r"stop 'a b' \n", "predict 3", "think off", "markdown off", 'json-schema {"type": "boolean"}'):
        assert run(session, "set", line)
    assert (session.stop, session.limit, session.variables) == (("a b", "\n"), 3, {"enable_thinking": False})
    assert not session.view.markdown
    assert session.sampling.grammar is not None
    for name in ("stop", "predict", "think", "markdown", "json-schema"):
        assert run(session, "set", f"{name} default")
    assert (session.stop, session.variables, session.view.markdown) == ((), {}, True)
    assert session.sampling.grammar is None
    capsys.readouterr()
    assert run(session, "set", "")
    listed = capsys.readouterr().err
    assert all(f" {name} " in listed for name in chat_settings.SETTINGS)
    assert ";".join(SAMPLERS)[:18] in listed


# ---------------------------------------------------------------------- what is kept


def test_what_is_kept_is_the_conversation_as_it_is(session: Session) -> None:
    kept = chat_kept.path()
    session.ask("one")
    assert not kept.exists()
    assert run(session, "set", "keep on")
    session.ask("two")
    assert kept.stat().st_mode & 0o777 == 0o600
    assert kept.parent.stat().st_mode & 0o777 == 0o700
    assert [m["content"] for m in json.loads(kept.read_text())["messages"][::2]] == ["one", "two"]
    run(session, "undo", "")
    run(session, "system", "Be brief.")
    assert [m["role"] for m in json.loads(kept.read_text())["messages"]] == ["system", "user", "assistant"]
    assert chat_kept.last().conversation == session.conversation
    run(session, "reset", "")
    assert not kept.exists()
    session.ask("three")
    assert kept.exists()
    assert run(session, "set", "keep off")
    assert not kept.exists()
    session.ask("four")
    assert not kept.exists()


def test_where_nothing_can_be_kept_a_line_says_so(session: Session, capsys: pytest.CaptureFixture[str]) -> None:
    chat_kept.path().parent.parent.mkdir()
    chat_kept.path().parent.write_text("in the way")
    session.keeper.on = True
    assert session.ask("one")
    assert "the conversation is not kept" in capsys.readouterr().err
    assert not session.keeper.on


# ---------------------------------------------------------------------- typing


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ('"""a\nb"""', "a\nb"),
        ('"""\na\n\n"""', "a\n"),
        ('"""a"""  ', "a"),
        ('/system """a\nb"""', "/system a\nb"),
        ('"""a', '"""a'),
        ('a """b"""', 'a """b"""'),
    ],
)
def test_three_quotes_hold_a_message(typed: str, meant: str) -> None:
    assert unquoted(typed) == meant


def test_other_names_of_commands() -> None:
    assert [parse(line) for line in ("/?", "/clear", "/bye", "/Exit")] == [
        ("help", ""),
        ("reset", ""),
        ("quit", ""),
        ("quit", ""),
    ]
    assert {f"/{name}" for name in ("?", "clear", "bye", "exit")} < set(NAMES)
    assert len(NAMES) == len(COMMANDS) + 4


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("/me", {"/memory"}),
        ("/set top", {"top-k", "top-p", "top-n-sigma"}),
        ("/set TEM", {"temp"}),
        ("what /me", set()),
        ("/retry x", set()),
    ],
)
def test_what_tab_offers(typed: str, offered: set[str]) -> None:
    found = ChatCompleter().get_completions(Document(typed), CompleteEvent())
    assert {completion.text for completion in found} == offered


def test_tab_offers_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "notes.md").touch()
    monkeypatch.chdir(tmp_path)
    for command in ("/file ", "/load ./no", "/model no"):
        found = list(ChatCompleter().get_completions(Document(command), CompleteEvent()))
        assert any("notes.md".endswith(completion.text) for completion in found)
