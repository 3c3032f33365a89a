"""Tests of the chat commands that change the conversation or the settings, on a session in this process."""

from __future__ import annotations

import base64
import json
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
from ngramspec_cli import chat_settings
from ngramspec_cli.chat import ChatCompleter, _talk
from ngramspec_cli.chat_commands import parse, run
from ngramspec_cli.chat_input import Terminal, unquote
from ngramspec_cli.chat_session import Session, conversation_path, load_last
from ngramspec_cli.markdown_rows import code_blocks
from prompt_toolkit.application import create_app_session
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.input import create_pipe_input

from ngramspec.acceptance.verifier import Acceptance
from ngramspec.chat.conversation import Conversation, Turn
from ngramspec.llama.vocabulary import CHATML
from ngramspec.memory import Memory
from ngramspec.sampling.settings import SAMPLERS, Sampling, options

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _short(session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session.limit = 4
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def users(session: Session) -> list[str]:
    return [turn.user for turn in session.conversation.turns]


def heard(session: Session) -> int:
    return sum(index.size for index in session.memory.indexes)


# ---------------------------------------------------------------------- turns


def test_chat_retry_changes_seed_and_edit_replaces_message(session: Session) -> None:
    session.ask("one")
    session.ask("two")
    session.attachments = ["waits"]
    assert run(session, "retry", "")
    assert (users(session), session.sampling.seed, session.attachments) == (["one", "two"], 2, ["waits"])
    turns = list(session.conversation.turns)
    assert not run(session, "edit", "far too long " * 300)
    assert (session.conversation.turns, session.sampling.seed) == (turns, 2)
    assert run(session, "edit", "short")
    assert users(session) == ["one", "short"]


def test_chat_adds_removed_turns_to_memory(session: Session) -> None:
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
    session.switch_conversation(Conversation(turns=[Turn("a", "b")]))
    assert heard(session) > second
    third = heard(session)
    run(session, "undo", "")  # This session generated no answer.
    assert (heard(session), users(session)) == (third, [])


def test_chat_commands_without_turn_or_terminal_fail(session: Session, capsys: Captured) -> None:
    for name in ("undo", "retry", "edit", "copy"):
        assert not run(session, name, "")
        assert ("requires a terminal" if name == "copy" else "the conversation is empty") in capsys.readouterr().err
    session.conversation.turns.append(Turn("a", "b"))
    assert not run(session, "edit", "")
    assert "is not a terminal" in capsys.readouterr().err
    session.interactive = True
    assert run(session, "edit", "")
    assert session.editing


def test_chat_session_used_counts_tokens_of_turns(session: Session) -> None:
    empty = session.n_tokens
    session.ask("one")
    used = session.n_tokens
    assert used == len(session.target.sequences[0].tokens) > empty
    session.ask("two")
    assert session.n_tokens > used
    run(session, "undo", "")
    assert abs(session.n_tokens - used) < 12  # for the template's text after the answer
    run(session, "reset", "")
    assert session.n_tokens == empty


def test_chat_copy_sends_answer_or_code_block_to_clipboard(
    session: Session, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = "So:\n\n- this\n  ```py\n  a = 1\n\n  b\n  ```\n\n~~~\nsecönd\n~~~\n"
    session.conversation.turns.append(Turn("q", answer, "hm"))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for argument, text in (("", answer), ("1", "a = 1\n\nb\n"), ("2", "secönd\n")):
        assert run(session, "copy", argument)
        sent = capsys.readouterr().out
        assert sent.startswith("\x1b]52;c;")
        assert base64.b64decode(sent[7:-1]).decode() == text
    assert not run(session, "copy", "3")
    assert not run(session, "copy", "x")


def test_code_blocks_finds_fenced_blocks_only() -> None:
    assert code_blocks("```\na\n```\n> ```\n> b\n> ```\n\n    c\n") == ["a\n", "b\n", "c\n"]


# ---------------------------------------------------------------------- settings


def test_chat_set_finds_every_sampling_option() -> None:
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
    ],
)
def test_chat_set_changes_shows_and_resets_option(
    session: Session, line: str, field: str, value: object, capsys: Captured
) -> None:
    if field == "samplers":
        session.sampling = replace(session.sampling, top_p=0.95)
    before, name = getattr(session.sampling, field), line.split(maxsplit=1)[0]
    assert run(session, "set", line), capsys.readouterr().err
    assert getattr(session.sampling, field) == value
    shown = chat_settings.find(name).show(session)
    assert run(session, "set", f"{name} default")
    assert getattr(session.sampling, field) == before
    # Displayed values are valid input.
    assert run(session, "set", f"{name} {shown}")
    assert getattr(session.sampling, field) == value


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("nonsense 1", "unknown setting 'nonsense'; choose from: temp, top-k, "),
        ("temp hot", "'hot' is not a number"),
        ("top-k 1.5", "'1.5' is not a whole number"),
        ("top-p 7", "must be above 0 and at most 1"),
        ("mirostat 3", "0 (off), 1 or 2"),
        ("grammar nothing", "grammar"),
        ("logit-bias 99999+1", "99999"),
        ("logit-bias x", "such as 15043+1"),
        ("stop ''", "must not be empty"),
        ("stop 'open", "quotation"),
        ("predict 0", "at least 1"),
        ("predict many", "at least 1"),
        ("keep maybe", "must be on or off"),
        ("think on", "has no variable for reasoning"),
        ("reasoning-budget 5", "has no reasoning tags"),
        ("reasoning-budget few", "at least 0, or -1 (no limit)"),
        ("min-tokens -1", "must be at least 0, got -1"),
        ("markdown on", "in a terminal"),
        ("json-schema {", "json-schema"),
    ],
)
def test_chat_set_rejects_invalid_value_and_keeps_settings(
    session: Session, line: str, words: str, capsys: Captured
) -> None:
    before = session.sampling
    assert not run(session, "set", line)
    complaint = capsys.readouterr().err
    assert words in " ".join(complaint.split())
    assert complaint.startswith("ngramspec: ")
    assert (session.sampling, session.limit, session.keep) == (before, 4, False)


def test_chat_reset_keeps_system_message_and_chosen_seed(session: Session) -> None:
    session.conversation = Conversation("s", [Turn("a", "b")])
    run(session, "set", "seed 9")
    run(session, "reset", "")
    assert (session.conversation.turns, session.conversation.system, session.sampling.seed) == ([], "s", 9)
    run(session, "set", "seed -1")
    seeds = set()
    for _ in range(3):
        run(session, "reset", "")
        seeds.add(session.sampling.seed)
    assert len(seeds) == 3


def test_chat_set_changes_and_lists_other_settings(
    session: Session, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(session.target.vocabulary), "chat_template", "{{ enable_thinking }}")
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


def test_chat_set_reasoning_budget_limits_reasoning(own_session: Session, capsys: Captured) -> None:
    session = own_session
    session.target.vocabulary.use_chat_template(
        CHATML.replace("assistant\n", "assistant\n<think>\n") + "{# </think> #}"
    )
    session.reasoning_message = " so"
    lengths = []
    for value in ("4", "0", "default"):
        assert run(session, "set", f"reasoning-budget {value}")
        assert session.ask("one")
        reasoning = session.conversation.turns[-1].reasoning
        begin = reasoning.removesuffix("so").rstrip()
        n_tokens = len(session.target.vocabulary.tokenize(begin, add_bos=False))
        lengths.append(n_tokens if reasoning.endswith("so") else None)
        run(session, "reset", "")
    assert lengths == [3, 0, None]  # The line end after the opening tag counts.
    for line in ("reasoning-budget 4", "min-tokens 4"):
        assert run(session, "set", line)
    session.acceptance = Acceptance(lenience=0.5)
    capsys.readouterr()
    assert not run(session, "set", "temp 0")
    assert "cannot be combined with a reasoning budget" in " ".join(capsys.readouterr().err.split())
    session.reasoning_budget = -1
    assert not run(session, "set", "temp 0")
    assert "cannot be combined with min_tokens" in " ".join(capsys.readouterr().err.split())


def test_chat_set_changes_drafting_threads_and_memory(own_session: Session, capsys: Captured) -> None:
    session = own_session
    assert session.ask("one")
    for line in ("policy fixed", "draft-max 3", "-t 1", "no-memory on"):
        assert run(session, "set", line)
    assert session.decoder.policy.name == "fixed"
    assert (session.load.draft_max, session.load.threads, session.load.no_memory) == (3, 1, True)
    assert run(session, "set", "no-draft on")
    assert session.decoder.drafter is None
    assert session.ask("two")
    assert users(session) == ["one", "two"]
    capsys.readouterr()
    for line, words in (
        ("policy lucky", "unknown policy 'lucky'"),
        ("threads many", "'many' is not a whole number"),
        ("memory work", "cannot be combined"),
    ):
        assert not run(session, "set", line)
        assert words in capsys.readouterr().err
    assert run(session, "set", "no-draft default")
    assert session.decoder.drafter is not None
    assert session.ask("three")


# ---------------------------------------------------------------------- what is kept


def test_chat_set_keep_saves_current_conversation(session: Session) -> None:
    kept = conversation_path()
    session.ask("one")
    assert not kept.exists()
    assert run(session, "set", "keep on")
    session.ask("two")
    assert kept.parent.stat().st_mode & 0o777 == 0o700
    assert [m["content"] for m in json.loads(kept.read_text())["messages"][::2]] == ["one", "two"]
    run(session, "undo", "")
    run(session, "system", "Be brief.")
    assert [m["role"] for m in json.loads(kept.read_text())["messages"]] == ["system", "user", "assistant"]
    assert load_last()[0] == session.conversation
    run(session, "reset", "")
    assert not kept.exists()
    session.ask("three")
    assert kept.exists()
    assert run(session, "set", "keep off")
    assert not kept.exists()
    session.ask("four")
    assert not kept.exists()


def test_chat_keep_with_unwritable_folder_warns_and_stops_saving(session: Session, capsys: Captured) -> None:
    conversation_path().parent.parent.mkdir()
    conversation_path().parent.write_text("in the way")
    session.keep = True
    assert session.ask("one")
    assert "the conversation could not be saved" in capsys.readouterr().err
    assert not session.keep


# ---------------------------------------------------------------------- typing


def test_chat_terminal_handles_editing_keys(tmp_path: Path, capsys: Captured) -> None:
    """Ctrl-J, Alt-Enter, and Enter inside triple quotes start a new line; Ctrl-C clears the input; Tab completes."""
    old: list[str | None] = [None]
    clear, end = "\x03", "\x04"
    with create_pipe_input() as keys, create_app_session(input=keys):
        lines = iter(Terminal(ChatCompleter(), lambda: "", lambda: old[0]))

        def typed(text: str) -> str:
            keys.send_text(text)
            return next(lines)

        assert typed("hello\r") == "hello"
        assert typed("one\ntwo\x1b\rthree\r") == "one\ntwo\nthree"
        assert typed('"""\rtwo\r\rlines\r"""\r') == "two\n\nlines"
        assert typed("\x1b[200~pasted\nlines\x1b[201~\r") == "pasted\nlines"
        assert typed(f"abc{clear}/me\t\r") == "/memory"
        assert typed(f"{clear}again\r") == "again"
        old[0] = "the old one"
        assert typed("\x15new\r") == "new"
        assert typed(clear) == ""
        assert capsys.readouterr().err == "press Ctrl-C again, or use Ctrl-D or /quit, to exit\n"
        old[0] = None
        for leaving in (clear + clear, end):
            keys.send_text(leaving)
            assert list(Terminal(ChatCompleter(), lambda: "", lambda: None)) == []
    history = tmp_path / "state" / "ngramspec" / "chat_history"
    assert "+/memory" in history.read_text().splitlines()
    assert history.stat().st_mode & 0o077 == 0


def test_chat_edit_at_terminal_resends_changed_message(session: Session) -> None:
    session.interactive = True
    with create_pipe_input() as keys, create_app_session(input=keys):
        # The last message appears as it was typed and is answered again unchanged; then Ctrl-C leaves it.
        keys.send_text("one\r/edit\r\x15//help\r/edit\r\r/edit\r\x03\r/quit\r")
        _talk(session, "first")
    assert (users(session), session.answers) == (["first", "/help"], 4)


def test_unquoted_strips_triple_quotes() -> None:
    assert unquote('"""\na\n\n"""') == "a\n"
    assert unquote('"""a"""  ') == "a"
    assert unquote('/system """a\nb"""') == "/system a\nb"
    for text in ('"""a', 'a """b"""'):
        assert unquote(text) == text


def test_parse_separates_commands_from_messages() -> None:
    for message in ("hello", "  indented", "// a comment", "/* a comment */", "/usr/bin/env fails", "/"):
        assert parse(message) == message
    assert parse(" /help me") == parse("//help me") == "/help me"
    for line, name in {"/HELP ": "help", "/?": "help", "/clear": "reset", "/bye": "quit", "/Exit": "quit"}.items():
        assert parse(line) == (name, "")
    assert parse("/system  Be brief.\nAnd kind. ") == ("system", "Be brief.\nAnd kind.")


def test_chat_completer_offers_commands_and_settings() -> None:
    for typed, offered in {
        "/me": {"/memory"},
        "/cl": {"/clear"},
        "/set top": {"top-k", "top-p", "top-n-sigma"},
        "/set TEM": {"temp"},
        "what /me": set(),
        "/retry x": set(),
    }.items():
        found = ChatCompleter().get_completions(Document(typed), CompleteEvent())
        assert {completion.text for completion in found} == offered, typed


def test_chat_completer_offers_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "notes.md").touch()
    monkeypatch.chdir(tmp_path)
    for command in ("/file ", "/load ./no", "/model no"):
        found = list(ChatCompleter().get_completions(Document(command), CompleteEvent()))
        assert any("notes.md".endswith(completion.text) for completion in found)


def test_chat_prediction_applies_to_next_answer_only(session: Session, tmp_path: Path, capsys: Captured) -> None:
    file = tmp_path / "notes.md"
    file.write_text("It was a fine day.")
    assert run(session, "prediction", str(file))
    assert (session.prediction, session.attachments) == ("It was a fine day.", [])
    assert session.ask("hello")
    drafter = session.decoder.drafter
    assert drafter is not None
    assert drafter.prediction == session.target.vocabulary.tokenize("It was a fine day.", add_bos=False)
    assert session.prediction == ""  # It only applies to the next answer.
    assert session.ask("hello again")
    assert not drafter.prediction
    assert run(session, "prediction", str(file))
    assert run(session, "prediction", "-")
    assert session.prediction == ""
    assert not run(session, "prediction", str(tmp_path / "none"))
    session.decoder.set_drafter(None, session.decoder.policy)
    assert not run(session, "prediction", str(file))
    assert "/prediction has no effect here" in capsys.readouterr().err
