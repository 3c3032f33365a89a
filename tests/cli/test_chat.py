"""Tests of `ngramspec chat` in a pipe, where stdout contains only the answers, and at a terminal (tmux)."""

from __future__ import annotations

import json
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import scripted_chat
from support.cli_runner import COMMAND, DEMO, ENDLESS, NO_END_OPTIONS, RunResult, run, shell
from support.http import demo_vocabulary
from support.model_files import write_model
from support.scripted_chat import TEMPLATE, make_generate
from support.signals import by_signal, signal_after
from support.tmux import PROMPT, Terminal

from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.llama.vocabulary import Vocabulary

CHAT = ("chat", "-t", "1", "-c", "512", "-n", "12", "-s", "1", *NO_END_OPTIONS)

ANSWER = "Some **bold**\n\n```py\nx = 1\n```\n\n\x1b[2J the end."


def pipe(env: dict[str, str], stdin: str | bytes, *options: str, folder: Path | None = None) -> RunResult:
    return run(env, *CHAT, *options, stdin=stdin.encode() if isinstance(stdin, str) else stdin, cwd=folder)


def messages(path: Path) -> list[dict[str, str]]:
    return list(json.loads(path.read_text())["messages"])


def assert_complaints(done: RunResult, *words: str) -> None:
    """Check that each error contains some words."""
    errors = [line for line in done.err.splitlines() if line.startswith("ngramspec: ")]
    assert all(word in error for word, error in zip(words, errors, strict=True)), errors


def test_chat_in_pipe_answers_each_line_on_stdout(env: dict[str, str], tmp_path: Path) -> None:
    kept = tmp_path / "chat.json"
    done = pipe(env, f"first\r\n\n  \n//help\nlast\n/save {kept}\n/stats", "-sys", "Be brief.").ok()
    saved = messages(kept)
    assert [m["role"] for m in saved] == ["system"] + ["user", "assistant"] * 3
    assert [m["content"] for m in saved[1::2]] == ["first", "/help", "last"]
    answers = [m["content"] for m in saved[2::2]]
    assert any(answers)
    assert done.out == "".join(a if a.endswith("\n") or not a else a + "\n" for a in answers)
    sampling = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "seed": 1, "repeat_penalty": 1.0}
    assert json.loads(kept.read_text())["sampling"].items() >= sampling.items()
    assert len(re.findall(r"^\d+ tokens", done.err, re.MULTILINE)) == 3
    assert re.search(r"exact +off\b", done.err)
    assert re.search(r"answers +3\b", done.err)


def test_chat_skips_oversized_and_undecodable_lines(env: dict[str, str], tmp_path: Path) -> None:
    kept = tmp_path / "chat.json"
    lines = b"one\n" + b"far too long " * 300 + b"\n\xff\xfe\ntwo\n/save " + bytes(kept)
    done = pipe(env, lines)
    assert done.code == 1
    assert_complaints(done, " tokens, but the context has room for 500 and an answer", "not UTF-8")
    assert [m["content"] for m in messages(kept)[::2]] == ["one", "two"]


def test_chat_with_full_context_drops_oldest_turns(env: dict[str, str]) -> None:
    # These letters rarely merge into tokens, so each question fits into the context, but five do not.
    done = pipe(env, ("xq zj kw vf gb " * 4 + "\n") * 5, "-c", "128").ok()
    assert re.search(r"oldest turns? do(es)? not fit in the context", done.err)


def test_min_tokens_delays_the_end_of_an_answer(env: dict[str, str]) -> None:
    vocabulary = demo_vocabulary()
    end = next(token for token in range(vocabulary.n_vocab) if vocabulary.is_eog(token))
    # The bias makes a token that ends the answer the most likely one.
    options = ["-t", "1", "-c", "512", "-n", "12", "--logit-bias", f"{end}+1000", "--min-tokens", "5"]
    done = run(env, "chat", *options, stdin=b"one\n/set min-tokens default\ntwo\n").ok()
    assert re.findall(r"^(\d+) tokens?", done.err, re.MULTILINE) == ["6", "1"]
    assert done.out


def test_chat_with_file_sends_it_as_first_message(env: dict[str, str], tmp_path: Path) -> None:
    question, kept = tmp_path / "question.txt", tmp_path / "chat.json"
    question.write_text("/save is\n\ta word\n")
    done = pipe(env, f"/save {kept}\n", "-f", str(question)).ok()
    assert (bool(done.out), kept.exists()) == (True, False)
    # The whole of stdin is one turn.
    assert pipe(env, question.read_text(), "-f", "-").ok().out == done.out
    assert pipe(env, "not this", "-m", str(DEMO), "-p", question.read_text().rstrip()).ok().out == done.out


def test_chat_with_random_seed_prints_seed_that_repeats_session(env: dict[str, str]) -> None:
    first = pipe(env, "hello\nand then\n", "-s", "-1")
    seeds = set(re.findall(r"; seed (\d+)", first.err))
    assert len(seeds) == 1
    assert pipe(env, "hello\nand then\n", "-s", seeds.pop()).out == first.out
    assert "seed" not in pipe(env, "hello\n", "--temp", "0").err


def test_chat_with_invalid_template_fails(env: dict[str, str], tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", "llama", chat_template="{% if %}")
    done = run(env, "chat", str(path), "-c", "64", stdin=b"hi\n")
    done.assert_failed("the chat template is not valid Jinja: ")
    assert "the turn was removed" not in done.err, "it fails before the first message"


def test_chat_with_closed_stdout_exits_normally(env: dict[str, str]) -> None:
    quick = ("--exact", "off", "--no-draft")
    done = shell(env, 'yes hello | head -3 | "$@" | true; echo ${PIPESTATUS[2]}', *CHAT, *quick)
    assert done.out == "0\n"


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SpeculativeDecoder, "generate", make_generate(ANSWER))


def test_chat_separates_reasoning_from_answers(
    env: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Vocabulary, "chat_template", TEMPLATE)
    generate, prompts = make_generate("<think>\nHm.\n</think>\n\nHello."), list[list[int]]()
    monkeypatch.setattr(SpeculativeDecoder, "generate", lambda _, p, **more: prompts.append(p) or generate(p))
    done = pipe(env, "hi\nagain\n/save chat.json\n", folder=tmp_path).ok()
    assert done.out == "Hello.\nHello.\n"
    assert done.err.splitlines().count("Hm.") == 2
    assert "think>" not in done.err
    answer = {"role": "assistant", "content": "Hello.", "reasoning_content": "Hm."}
    talk = [{"role": "user", "content": "hi"}, answer, {"role": "user", "content": "again"}, answer]
    assert messages(tmp_path / "chat.json") == talk
    # The next prompt is the one that the server makes of these messages.
    assert prompts[1] == Vocabulary(DEMO).chats.tokens(talk[:3])


@pytest.mark.usefixtures("says")
def test_chat_commands_write_to_stderr_and_set_exit_code_on_failure(env: dict[str, str], tmp_path: Path) -> None:
    system = ("/system", "/system Be brief.", "hello", "/system")
    files = ("/save chat.json", "/reset", "/save empty.json", "/load chat.json")
    wrong = {
        "/nothing": "unknown command /nothing",
        "/load": "requires a file name",
        "/load none.json": "cannot read none.json",
        "/quit now": "does not accept an argument",
        "/drafts": "terminal",
    }
    done = pipe(env, "\n".join(["/help", *system, *files, *wrong, "/quit", "never asked"]), folder=tmp_path)
    assert (done.code, done.out) == (1, f"{ANSWER}\n")
    assert_complaints(done, *wrong.values())
    told = ["/help .*/reset.*/quit.*Ctrl-D", "no system message", "applies to the following turns", "Be brief."]
    told += ["saved 1 turn to", "started a new conversation", "saved 0 turns", "loaded 1 turn from chat.json"]
    assert re.search(".*".join(told), done.err, re.DOTALL)
    assert [m["role"] for m in messages(tmp_path / "chat.json")] == ["system", "user", "assistant"]
    assert messages(tmp_path / "empty.json") == messages(tmp_path / "chat.json")[:1]


@by_signal
@pytest.mark.usefixtures("says")
def test_chat_in_pipe_with_signal_ends_session(env: dict[str, str], number: int, code: int) -> None:
    with signal_after(number, steps=3):
        done = pipe(env, "hello\nnever asked\n")
    assert done.code == code
    assert done.out.startswith("Some **bold**")
    assert "the end" not in done.out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.usefixtures("says")
def test_chat_with_keep_saves_turn_interrupted_by_signal(env: dict[str, str], tmp_path: Path, number: int) -> None:
    mine = env | {"XDG_STATE_HOME": str(tmp_path)}
    kept = tmp_path / "ngramspec" / "chat_last.json"
    with signal_after(number, steps=3):
        done = pipe(mine, "hello\nnever asked\n", "--keep")
    assert done.code == 143
    (question, answer) = messages(kept)
    assert (question["content"], bool(answer["content"])) == ("hello", True)
    assert ANSWER.startswith(answer["content"])
    with signal_after(number, steps=0):
        pipe(mine, "/retry\n", "--resume")
    assert messages(kept) == [question, answer]
    with signal_after(number, steps=0):
        pipe(mine, "more\n", "--resume")
    assert [one["content"] for one in messages(kept)[2:]] == ["more", ""]
    assert "continuing a conversation of 2 turns" in pipe(mine, "", "--resume").ok().err


@pytest.mark.usefixtures("says")
def test_chat_with_keep_saves_and_resumes_conversation(env: dict[str, str], tmp_path: Path) -> None:
    mine = env | {"XDG_STATE_HOME": str(tmp_path)}
    kept = tmp_path / "ngramspec" / "chat_last.json"
    done = pipe(mine, "first\n/set keep on\nsecond\n")
    assert done.out == f"{ANSWER}\n{ANSWER}\n"
    resumed = pipe(mine, "third\n/undo\n/memory\nfourth\n", "--resume")
    assert "continuing a conversation of 2 turns" in resumed.err
    assert f"the conversation is saved in {kept}" in resumed.err
    assert [m["content"] for m in messages(kept)[::2]] == ["first", "second", "fourth"]


@pytest.mark.usefixtures("says")
def test_chat_file_command_precedes_next_message(env: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "a b.py").write_text("x = '''\n```\n'''")
    (tmp_path / "big").write_text("xq zj kw vf gb " * 400)
    (tmp_path / "raw").write_bytes(b"\xff")
    (tmp_path / "empty").touch()
    bad = "".join(f"/file {name}\n" for name in ("none", "big", "raw", "empty", "."))
    lines = f"{bad}/file a b.py\n/retry\nwhat is this?\n/file a b.py\n/file -\nand now?\n/save chat.json\n"
    done = pipe(env, lines, folder=tmp_path)
    unusable = ("none: No such", "fit in the context", "raw is not UTF-8", "empty is empty", "directory")
    assert_complaints(done, *unusable, "the conversation is empty")
    saved = messages(tmp_path / "chat.json")
    assert saved[0]["content"] == "a b.py:\n\n````py\nx = '''\n```\n'''\n````\n\nwhat is this?"
    assert saved[2]["content"] == "and now?"


@pytest.mark.usefixtures("says")
def test_chat_model_command_continues_conversation(env: dict[str, str], tmp_path: Path) -> None:
    demo = tmp_path / "demo.gguf"
    shutil.copy(DEMO, demo)
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")
    lines = ("hello", "/model none.gguf", "/model bad.gguf", f"/model {demo}", "/model", "more", "/save c.json")
    done = pipe(env, "\n".join(lines), folder=tmp_path)
    assert done.code == 1
    assert_complaints(done, "none.gguf", "bad.gguf")
    assert "continues the conversation" in done.err
    assert f"demo.gguf ({demo})" in done.err
    assert len(messages(tmp_path / "c.json")) == 4


CODE = "```python\ndef greet(name):\n    return name\n```"
CONTENT = f"Some **bold** words\n\n{CODE}\n\n\x1b]0;title\x07 \x1b[2J The end."
SHOWN = f"Shall I greet?\n\nSome bold words\n\n{CODE}\n\n␛]0;title␇ ␛[2J The end.\n"

STATUS = r"^(stopped; )?\d+ tokens? at "

Chat = Callable[..., Terminal]


@pytest.fixture
def chat(env: dict[str, str], tmp_path: Path) -> Iterator[Chat]:
    """Yield a function that opens a window with the demo model, or with a text that appears word by word."""
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed")
    running: list[Terminal] = []

    def open_window(*options: str, text: str | None = None, pace: float = 0.002) -> Terminal:
        command = COMMAND
        if text is not None:
            (tmp_path / "says.md").write_text(text, "utf-8")
            command = [sys.executable, scripted_chat.__file__, str(tmp_path / "says.md"), str(pace)]
        running.append(Terminal(env, tmp_path, [*command, "chat", "-t", "1", "-c", "512", *options]))
        return running[-1]

    yield open_window
    for terminal in running:
        terminal.close()


def answer_in(shown: str, question: str = "hello") -> str:
    """Return the text between the last question and the statistics, without the trailing spaces that tmux adds."""
    told = re.split(rf"^> {question} *\n", shown, flags=re.MULTILINE)[-1]
    told = re.split(STATUS, told, flags=re.MULTILINE)[0]
    return "".join(f"{line.rstrip()}\n" for line in told.splitlines())


def test_chat_ctrl_c_stops_answer_and_keeps_session(chat: Chat, tmp_path: Path) -> None:
    terminal = chat("-c", "4096", "-n", "-1", "--no-draft", "--exact", "off", *ENDLESS)
    terminal.type("hello")
    # The status line at the bottom of the screen is not part of the answer.
    terminal.wait(r"^> hello\n+(?!demo).*\w")
    terminal.keys("C-c", "C-c")
    assert "^C" not in terminal.wait(r"^stopped; \d+ tokens?")
    terminal.wait(PROMPT)
    terminal.ask("/save chat.json", "saved 1 turn")
    last = messages(tmp_path / "chat.json")[-1]
    assert last["role"] == "assistant"
    assert last["content"]

    terminal.keys("-l", "abc")
    terminal.wait("^> abc")
    terminal.keys("C-c")
    assert "leaves" not in terminal.wait(PROMPT).split("lists commands")[1].split("\n", 1)[1]
    terminal.keys("C-c")
    terminal.wait("^press Ctrl-C again, or use Ctrl-D or /quit, to exit")
    terminal.wait(PROMPT)
    terminal.type("/quit")
    terminal.wait("exit code 0")
    # From now on, typed text is echoed again.
    assert "-" not in terminal.wait(r"^(?:.* )?-?echo .*$").split("exit code 0")[1].split("echo ")[0][-1:]


@pytest.mark.exhaustive
def test_chat_at_terminal_shows_markdown_and_resumes_session(chat: Chat, tmp_path: Path) -> None:
    terminal = chat("--keep", text=f"<think>\nShall I *greet*?\n</think>\n\n{CONTENT}")
    assert answer_in(terminal.ask("hello", STATUS)) == SHOWN
    coloured = terminal.text(colours=True)
    for colour, word in (("2", "Shall"), ("3", "greet"), ("1", "bold"), ("94", "def"), ("92", "greet")):
        assert re.search(rf"\x1b\[[\d;]*\b{colour}m(\x1b\[[\d;]*m)*{word}", coloured), word
    # Chat uses an escape sequence for the clipboard, and tmux stores the text.
    terminal.ask("/copy 1", "copied ")
    terminal.ask("/drafts", "drafts are shown: accepted, rejected")
    assert "**bold**" in answer_in(terminal.ask("shown", STATUS, 2), "shown")
    terminal.ask("/drafts", "drafts are hidden")
    terminal.ask("/undo", "removed: shown")

    terminal.paste("pasted\nlines")
    terminal.wait(r"^> pasted\n *lines")
    terminal.keys("Enter")
    terminal.wait(STATUS, 3)
    terminal.wait(PROMPT)
    terminal.ask("/save chat.json", "saved 2 turns")
    saved = messages(tmp_path / "chat.json")
    assert [m["content"] for m in saved] == ["hello", CONTENT, "pasted\nlines", CONTENT]
    assert {m["reasoning_content"] for m in saved[1::2]} == {"Shall I *greet*?"}
    terminal.keys("C-d")
    terminal.wait("exit code 0")
    resumed = chat("--resume", text="").wait(PROMPT)
    assert re.search(
        r"^continuing a conversation of 2 turns\n> pasted\n+lines\nShall I greet\?\n", resumed, re.MULTILINE
    )


@pytest.mark.exhaustive
def test_chat_at_resized_terminal_keeps_all_words(chat: Chat) -> None:
    # tmux reports the new width with a delay; meanwhile, nothing may be shown.
    pauses = (30, 55, 75, 95)
    words = "".join(
        f"**word{i}**" + ("PAUSE " if i in pauses else " ") + ("\n\n" if i % 20 == 19 else "") for i in range(4000)
    )
    terminal = chat(text=words, pace=0.01)
    terminal.type("hello")
    for pause, columns in zip(pauses, (60, 41, 100, 72), strict=True):
        terminal.wait(f"word{pause}\\b")
        terminal.resize(columns, 30)
    terminal.wait("word110 ")
    terminal.keys("C-c")
    shown = terminal.wait(STATUS)
    found = re.findall(r"word(\d+)", answer_in(shown))
    assert "stopped; " in shown
    # Rows that could still change when the window became narrower may be there twice.
    assert list(dict.fromkeys(found)) == [str(i) for i in range(len({*found}))]
    terminal.wait(PROMPT)
