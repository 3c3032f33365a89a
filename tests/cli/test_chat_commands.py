"""Tests of slash commands, settings and turns, on a session in this process."""

from __future__ import annotations

import base64
import json
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from ngramspec_cli.chat import ChatCompleter, _handle, _talk
from ngramspec_cli.chat_commands import SETTINGS, find_setting, parse, run
from ngramspec_cli.chat_input import StopKey, Terminal, clean, unquote
from ngramspec_cli.chat_session import Session, conversation_path, load_last
from prompt_toolkit.application import create_app_session
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.input import create_pipe_input

from ngramspec.acceptance.verifier import Acceptance
from ngramspec.chat.conversation import Conversation, Turn
from ngramspec.chat.stream import Delta
from ngramspec.data import ModelError, TargetError
from ngramspec.instruments.reports.report import Piece
from ngramspec.llama.chat_format import CHATML
from ngramspec.llama.passes import Feed, Passes
from ngramspec.llama.target import Target
from ngramspec.memory.memory import Memory
from ngramspec.sampling.settings import SAMPLERS, Sampling, options
from ngramspec.steps import Step

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _short(session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session.options = replace(session.options, predict=4)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def users(session: Session) -> list[str]:
    return [turn.user for turn in session.conversation.turns]


def heard(session: Session) -> int:
    return sum(index.size for index in session.memory.indexes)


def do(session: Session, *lines: str) -> None:
    """Type commands and messages, which succeed."""
    for line in lines:
        assert _handle(session, line), line


def check_refused(session: Session, capsys: Captured, refused: Mapping[str, str]) -> None:
    """Check that commands fail with an error that contains some words and change no option."""
    for line, words in refused.items():
        before = session.options
        capsys.readouterr()
        assert not _handle(session, line)
        error = " ".join(capsys.readouterr().err.split())
        assert error.startswith("ngramspec: ")
        assert words in error
        assert session.options == before


def test_retry_changes_seed_and_edit_replaces_message(session: Session) -> None:
    do(session, "one", "two")
    session.attachments = ["waits"]
    do(session, "/retry")
    assert (users(session), session.options.sampling.seed, session.attachments) == (["one", "two"], 2, ["waits"])
    turns = list(session.conversation.turns)
    assert not run(session, "edit", "far too long " * 300)
    with mock.patch.object(session.target.vocabulary.chats, "prompt", side_effect=ModelError("no")):
        assert not run(session, "retry", "")
    assert (session.conversation.turns, session.options.sampling.seed) == (turns, 2)
    do(session, "/edit short")
    assert users(session) == ["one", "short"]


def test_removed_turns_are_added_to_memory(session: Session) -> None:
    session.memory = Memory()
    do(session, "one", "two", "three")
    sizes = [heard(session)]
    for line in ("/undo", "/retry"):
        do(session, line)
        sizes.append(heard(session))
    session.switch_conversation(Conversation(turns=[Turn("a", "b")]))
    sizes.append(heard(session))
    assert sizes[0] == 0
    assert all(before < after for before, after in pairwise(sizes))
    do(session, "/undo")  # This session generated no answer.
    assert (heard(session), users(session)) == (sizes[-1], [])


def test_commands_without_turn_or_terminal_fail(session: Session, capsys: Captured) -> None:
    empty = "the conversation is empty"
    check_refused(session, capsys, {"/undo": empty, "/retry": empty, "/edit": empty, "/copy": "requires a terminal"})
    session.conversation.turns.append(Turn("a", "b"))
    check_refused(session, capsys, {"/edit": "is not a terminal"})
    shown = list[str]()
    session.edit_line = lambda line: shown.append(line) or " "
    do(session, "/edit")
    assert (shown, users(session)) == (["a"], ["a"])


def test_n_tokens_follows_turns(session: Session) -> None:
    empty = session.n_tokens
    do(session, "one")
    used = session.n_tokens
    assert used == len(session.target.sequences[0].tokens) > empty
    do(session, "two")
    assert session.n_tokens > used
    do(session, "/undo")
    assert abs(session.n_tokens - used) < 12  # for the template's text after the answer
    do(session, "/reset")
    assert session.n_tokens == empty


def test_copy_sends_answer_or_code_block_to_clipboard(
    session: Session, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = "So:\n\n- this\n  ```py\n  a = 1\n\n  b\n  ```\n\n~~~\nsecönd\n~~~\n> ```\n> \tc  \n> ```\n\n    d\n"
    session.conversation.turns.append(Turn("q", answer, "hm"))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    texts = {"": answer, "1": "a = 1\n\nb\n", "2": "secönd\n", "3": "\tc  \n", "4": "d\n"}
    for argument, text in texts.items():
        assert run(session, "copy", argument)
        sent = capsys.readouterr().out
        assert sent.startswith("\x1b]52;c;")
        assert base64.b64decode(sent[7:-1]).decode() == text
    assert not run(session, "copy", "5")
    assert not run(session, "copy", "x")


def test_prediction_applies_to_next_answer_only(session: Session, tmp_path: Path, capsys: Captured) -> None:
    file = tmp_path / "notes.md"
    file.write_text("It was a fine day.")
    drafter = session.decoder.drafter
    do(session, f"/prediction {file}", "hello")
    assert drafter.prediction == session.target.vocabulary.tokenize("It was a fine day.", add_bos=False)
    do(session, "hello again")
    assert not drafter.prediction
    do(session, f"/prediction {file}", "/prediction -")
    assert (session.prediction, session.attachments) == ("", [])
    check_refused(session, capsys, {f"/prediction {tmp_path / 'none'}": "No such file"})
    session.decoder.set_drafter(None, session.decoder.policy)
    check_refused(session, capsys, {f"/prediction {file}": "/prediction has no effect here"})


@pytest.mark.parametrize(
    ("name", "error", "shown"),
    [
        ("prompt", ModelError("no system\nrole\x1b"), "no system role␛"),
        ("submit", TargetError("out of order"), "out of order"),
    ],
)
def test_ask_after_error_removes_turn(
    session: Session, capsys: Captured, name: str, error: Exception, shown: str
) -> None:
    session.decoder.set_drafter(None, session.decoder.policy)
    owner = session.decoder.sequence if name == "submit" else session.target.vocabulary.chats
    with mock.patch.object(owner, name, side_effect=error):
        assert not session.ask("hello")
    assert session.conversation.turns == []
    assert capsys.readouterr().err == f"ngramspec: {shown} (the turn was removed)\n"
    assert session.totals.generated == (name == "submit")
    assert session.ask("hello")
    assert session.answers == len(session.conversation.turns) == 1


def test_ask_when_stopped_during_prefill_removes_turn(session: Session, capsys: Captured) -> None:
    decode = Passes.decode

    def press(passes: Passes, feeds: Sequence[Feed], **more: Any) -> None:
        decode(passes, feeds, **more)
        session.stop_key._on_signal(signal.SIGINT, None)

    with mock.patch.object(Passes, "decode", press):
        assert session.ask("hello")
    assert session.conversation.turns == []
    assert capsys.readouterr() == ("", "stopped before the answer began; the turn was removed\n")
    assert session.ask("hello")


def test_ask_when_stopped_keeps_answer_and_cache(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    show = session.view.show

    def press(step: Step, deltas: Sequence[Delta], piece: Piece) -> None:
        show(step, deltas, piece)
        if step.batch:
            session.stop_key._on_signal(signal.SIGINT, None)

    session.options = replace(session.options, predict=400, stop=("never said",))
    monkeypatch.setattr(session.view, "show", press)
    assert session.ask("hello")
    assert session.totals.passes <= 1
    prompt = session.target.vocabulary.chats.tokens([{"role": "user", "content": "hello"}])
    assert session.target.sequences[0].tokens[: len(prompt)] == prompt
    assert len(session.target.sequences[0].tokens) == len(prompt) + session.totals.generated - 1


def test_next_turn_reuses_cache(session: Session, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    do(session, "/set temp 0", "a question of some length, so that reading it again would show")
    first = len(target.vocabulary.chats.tokens([{"role": "user", "content": users(session)[0]}]))
    computed, decode = list[int](), Passes.decode

    def count(passes: Passes, feeds: Sequence[Feed], **more: Any) -> None:
        computed.extend(len(tokens) for _, tokens, rows in feeds if rows < len(tokens))
        decode(passes, feeds, **more)

    monkeypatch.setattr(Passes, "decode", count)
    do(session, "more")
    whole = len(target.vocabulary.chats.tokens(session.conversation.messages()[:3]))
    assert sum(computed) <= whole - first


def test_stop_key_between_answers_interrupts_only_piped_session() -> None:
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


def test_set_finds_every_option_by_all_its_names() -> None:
    for field in fields(Sampling):
        for name in (field.name, *options(Sampling)[field.name].flags, field.name.replace("_", "-").upper()):
            if len(name) > 2:
                assert find_setting(name).field == field.name
    assert find_setting("-rea") is SETTINGS["think"]


@pytest.mark.parametrize(
    ("line", "group", "field", "value"),
    [
        ("temp 0.7", "sampling", "temperature", 0.7),
        ("TOP_K 5", "sampling", "top_k", 5),
        ("--min-p 0", "sampling", "min_p", 0.0),
        ("seed 9", "sampling", "seed", 9),
        ("samplers top_k;temp", "sampling", "samplers", ("top_k", "temperature")),
        ("logit-bias 5+1.5 7-inf", "sampling", "logit_bias", ((5, 1.5), (7, float("-inf")))),
        (r"dry-sequence-breaker '\n' : 'ü b'", "sampling", "dry_sequence_breakers", ("\n", ":", "ü b")),
        ("dry-sequence-breaker none", "sampling", "dry_sequence_breakers", ()),
        ('grammar root ::= "a"', "sampling", "grammar", 'root ::= "a"'),
        ("min-tokens 3", "rules", "min_tokens", 3),
        ("think off", "reasoning", "reasoning", "off"),
        ("reasoning-budget 3", "reasoning", "reasoning_budget", 3),
        (r"stop 'a b' \n", "", "stop", ("a b", "\n")),
        ("predict 3", "", "predict", 3),
        ("markdown off", "", "markdown", False),
        ("keep on", "", "keep", True),
    ],
)
def test_set_changes_shows_and_resets_setting(
    session: Session, line: str, group: str, field: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = "{{ enable_thinking }}{# <think> </think> #}"
    monkeypatch.setattr(type(session.target.vocabulary), "chat_template", template)
    if field == "samplers":
        do(session, "/set top-p 0.95")

    def present(line: str) -> object:
        do(session, f"/set {line}")
        return getattr(getattr(session.options, group) if group else session.options, field)

    name = line.split(maxsplit=1)[0]
    default = present(f"{name} default")
    assert present(line) == value
    shown = find_setting(name).show(session)
    assert present(f"{name} default") == default or field == "seed"
    assert present(f"{name} {shown}") == value, "displayed values are valid input"
    assert session.view.markdown == session.options.markdown


def test_set_rejects_invalid_value_and_keeps_settings(session: Session, capsys: Captured) -> None:
    refused = {
        "/set nonsense 1": "unknown setting 'nonsense'; choose from: temp, top-k, ",
        "/set temp hot": "'hot' is not a number",
        "/set top-k 1.5": "'1.5' is not a whole number",
        "/set top-p 7": "must be above 0 and at most 1",
        "/set mirostat 3": "0 (off), 1 or 2",
        "/set grammar nothing": "grammar",
        "/set logit-bias 99999+1": "99999",
        "/set logit-bias x": "such as 15043+1",
        "/set stop ''": "must not be empty",
        "/set stop 'open": "quotation",
        "/set predict 0": "must be at least 1, or -1 (until the context is full), got 0",
        "/set predict many": "'many' is not a whole number",
        "/set keep maybe": "must be on or off, got 'maybe'",
        "/set think maybe": "must be auto or on or off, got 'maybe'",
        "/set think on": "has no variable for reasoning",
        "/set reasoning-budget 5": "has no reasoning tags",
        "/set reasoning-budget -2": "must be at least -1, got -2",
        "/set min-tokens -1": "must be at least 0, got -1",
        "/set markdown on": "in a terminal",
        "/set json-schema {": "json-schema",
    }
    check_refused(session, capsys, refused)


def test_set_lists_all_settings_and_translates_a_schema(session: Session, capsys: Captured) -> None:
    do(session, '/set json-schema {"type": "boolean"}')
    assert "true" in (session.options.sampling.grammar or "")
    do(session, "/set json-schema default")
    assert session.options.sampling.grammar is None
    capsys.readouterr()
    do(session, "/set")
    listed = capsys.readouterr().err
    assert all(f" {name} " in listed for name in SETTINGS)
    assert ";".join(SAMPLERS)[:18] in listed
    do(session, "/set temp")
    assert capsys.readouterr().err.startswith("temp is 0.8. Temperature")


def test_reset_keeps_system_message_and_chosen_seed(session: Session) -> None:
    session.conversation = Conversation("s", [Turn("a", "b")])
    do(session, "/set seed 9", "/reset")
    conversation, sampling = session.conversation, session.options.sampling
    assert (conversation.turns, conversation.system, sampling.seed) == ([], "s", 9)
    do(session, "/set seed -1")
    seeds = {session.options.sampling.seed}
    for _ in range(3):
        do(session, "/reset")
        seeds.add(session.options.sampling.seed)
    assert len(seeds) == 4


def test_set_reasoning_budget_limits_reasoning(own_session: Session, capsys: Captured) -> None:
    session = own_session
    template = CHATML.replace("assistant\n", "assistant\n<think>\n") + "{# </think> #}"
    session.target.vocabulary.use_chat_template(template)
    do(session, "/set reasoning-budget-message  so")
    lengths = []
    for value in ("4", "0", "default"):
        do(session, f"/set reasoning-budget {value}", "one")
        reasoning = session.conversation.turns[-1].reasoning
        begin = reasoning.removesuffix("so").rstrip()
        n_tokens = len(session.target.vocabulary.tokenize(begin, add_bos=False))
        lengths.append(n_tokens if reasoning.endswith("so") else None)
        do(session, "/reset")
    assert lengths == [3, 0, None]  # The line end after the opening tag counts.
    do(session, "/set reasoning-budget 4", "/set min-tokens 4")
    session.options = replace(session.options, acceptance=Acceptance(lenience=0.5))
    check_refused(session, capsys, {"/set temp 0": "cannot be combined with a reasoning budget"})
    session.options = replace(session.options, reasoning=replace(session.options.reasoning, reasoning_budget=-1))
    check_refused(session, capsys, {"/set temp 0": "cannot be combined with min_tokens"})


def test_set_changes_drafting_threads_and_memory(own_session: Session, capsys: Captured) -> None:
    session = own_session
    do(session, "one", "/set policy fixed", "/set draft-max 3", "/set -t 1", "/set no-memory on")
    assert session.decoder.policy.name == "fixed"
    load = session.options.load
    assert (load.draft_max, load.threads, load.no_memory) == (3, 1, True)
    do(session, "/set no-draft on")
    assert session.decoder.drafter is None
    do(session, "two")
    assert users(session) == ["one", "two"]
    refused = {
        "/set policy lucky": "unknown policy 'lucky'",
        "/set threads many": "'many' is not a whole number",
        "/set memory work": "cannot be combined",
    }
    check_refused(session, capsys, refused)
    do(session, "/set no-draft default", "/set threads auto")
    assert session.decoder.drafter is not None
    assert session.options.load.threads is None
    do(session, "three")


def test_set_keep_saves_current_conversation(session: Session) -> None:
    kept = conversation_path()

    def saved() -> list[str]:
        return [message["content"] for message in json.loads(kept.read_text())["messages"]]

    do(session, "one")
    assert not kept.exists()
    do(session, "/set keep on", "two")
    assert kept.parent.stat().st_mode & 0o777 == 0o700
    assert saved()[::2] == ["one", "two"]
    do(session, "/undo", "/system Be brief.")
    assert saved()[:2] == ["Be brief.", "one"]
    assert load_last()[0] == session.conversation
    do(session, "/reset")
    assert not kept.exists()
    do(session, "three")
    assert kept.exists()
    for _ in range(2):
        do(session, "/set keep off")
        assert not kept.exists()
        do(session, "four")
        assert not kept.exists()
        kept.touch()  # of another chat


def test_keep_with_unwritable_folder_warns_and_stops_saving(session: Session, capsys: Captured) -> None:
    conversation_path().parent.parent.mkdir()
    conversation_path().parent.write_text("in the way")
    session.options = replace(session.options, keep=True)
    do(session, "one")
    assert "the conversation could not be saved" in capsys.readouterr().err
    assert not session.options.keep


def test_terminal_handles_editing_keys(tmp_path: Path, capsys: Captured) -> None:
    """Ctrl-J, Alt-Enter, and Enter inside triple quotes start a new line; Ctrl-C clears the input; Tab completes."""
    clear, end = "\x03", "\x04"
    with create_pipe_input() as keys, create_app_session(input=keys):
        terminal = Terminal(ChatCompleter(), lambda: "")
        lines = iter(terminal)

        def typed(text: str) -> str:
            keys.send_text(text)
            return next(lines)

        assert typed("hello\r") == "hello"
        assert typed("one\ntwo\x1b\rthree\r") == "one\ntwo\nthree"
        assert typed('"""\rtwo\r\rlines\r"""\r') == "two\n\nlines"
        assert typed("\x1b[200~pasted\nlines\x1b[201~\r") == "pasted\nlines"
        assert typed(f"abc{clear}/me\t\r") == "/memory"
        assert typed(f"{clear}again\r") == "again"
        keys.send_text("\x15new\r" + clear)
        assert [terminal.edit("the old one"), terminal.edit("the old one")] == ["new", ""]
        assert capsys.readouterr().err == "press Ctrl-C again, or use Ctrl-D or /quit, to exit\n"
        for leaving in (clear + clear, end):
            keys.send_text(leaving)
            assert list(terminal) == []
    history = tmp_path / "state" / "ngramspec" / "chat_history"
    assert "+/memory" in history.read_text().splitlines()
    assert history.stat().st_mode & 0o077 == 0


def test_talk_starts_with_hint_or_first_answer_and_edits_messages(session: Session, capsys: Captured) -> None:
    session.interactive = True
    commands = "/help lists commands, Ctrl-D exits"
    with create_pipe_input() as keys, create_app_session(input=keys):
        keys.send_text("/quit\r")
        _talk(session, None)
        assert capsys.readouterr().err.splitlines()[0] == commands
        # The last message appears as it was typed and is answered again unchanged; then Ctrl-C leaves it.
        keys.send_text("one\r/edit\r\x15//help\r/edit\r\r/edit\r\x03\r/quit\r")
        _talk(session, "first")
    shown = capsys.readouterr()
    assert shown.out
    assert f"the chat continues; {commands}" in shown.err.splitlines()
    assert (users(session), session.answers) == (["first", "/help"], 4)


def test_input_is_unquoted_and_cleaned() -> None:
    assert clean("a\udcffb ü") == "a�b ü"
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


def test_completer_offers_commands_settings_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "notes.md").touch()
    monkeypatch.chdir(tmp_path)
    for typed, offered in {
        "/me": {"/memory"},
        "/cl": {"/clear"},
        "/set top": {"top-k", "top-p", "top-n-sigma"},
        "/set TEM": {"temp"},
        "what /me": set(),
        "/retry x": set(),
        "/file ": {"notes.md"},
        "/load ./no": {"tes.md"},
        "/save no": {"tes.md"},
        "/model no": {"tes.md"},
    }.items():
        found = ChatCompleter().get_completions(Document(typed), CompleteEvent())
        assert {completion.text for completion in found} >= offered, typed
        assert offered or not {*ChatCompleter().get_completions(Document(typed), CompleteEvent())}
