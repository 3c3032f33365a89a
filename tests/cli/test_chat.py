"""`ngramspec chat` as a user has it: through a pipe, and at a terminal (tmux)."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cli_runner import ENDLESS, UNENDED, environment
from support.tmux import PATIENCE, PROMPT, Terminal

CHAT = [sys.executable, "-m", "ngramspec_cli.app", "chat", "-t", "1"]
SMALL = ["-c", "512", "-n", "30", "-s", "1", *UNENDED]
UNENDING = ["-c", "16384", "-n", "-1", *ENDLESS]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment with folders of its own; the cost curve is measured once."""
    folder = tmp_path_factory.mktemp("home")
    return environment(folder) | {"XDG_STATE_HOME": str(folder / "state")}


class Done:
    """What a run of the command left."""

    def __init__(self, run: subprocess.CompletedProcess[bytes]) -> None:
        self.code = run.returncode
        self.out = run.stdout.decode()
        self.err = run.stderr.decode()


def pipe(home: dict[str, str], stdin: str | bytes, *options: str) -> Done:
    raw = stdin.encode() if isinstance(stdin, str) else stdin
    return Done(
        subprocess.run(
            [*CHAT, *SMALL, *options], input=raw, env=home, capture_output=True, timeout=PATIENCE, check=False
        )
    )


# ---------------------------------------------------------------------- a pipe


def test_each_line_is_a_turn_and_stdout_is_the_answers(home: dict[str, str], tmp_path: Path) -> None:
    kept = tmp_path / "chat.json"
    done = pipe(home, f"first\r\n\n  \n//help\nlast\n/save {kept}\n/stats", "-sys", "Be brief.")
    assert done.code == 0, done.err
    saved = json.loads(kept.read_text())
    assert [m["role"] for m in saved["messages"]] == ["system"] + ["user", "assistant"] * 3
    assert [m["content"] for m in saved["messages"][1::2]] == ["first", "/help", "last"]
    answers = [m["content"] for m in saved["messages"][2::2]]
    assert any(answers)
    assert done.out == "".join(a if a.endswith("\n") or not a else a + "\n" for a in answers)
    sampling = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "seed": 1, "repeat_penalty": 1.0}
    assert saved["sampling"].items() >= sampling.items()
    assert len(re.findall(r"^\d+ tokens", done.err, re.MULTILINE)) == 3
    assert re.search(r"answers +3\b", done.err)


def test_a_command_that_fails_is_one_line_and_an_exit_code(home: dict[str, str]) -> None:
    done = pipe(home, "/nothing\n/load\n/load none.json\n/quit now\n/drafts\nhello\n/quit\nnever asked")
    assert done.code == 1
    assert done.out
    complaints = [line for line in done.err.splitlines() if line.startswith("ngramspec: ")]
    wanted = ["unknown command /nothing", "a file is needed", "cannot read none.json", "nothing after it", "terminal"]
    assert len(complaints) == len(wanted)
    assert all(words in line for words, line in zip(wanted, complaints, strict=True))
    assert len(re.findall(r"^\d+ tokens", done.err, re.MULTILINE)) == 1


def test_a_line_that_does_not_fit_or_is_no_text_is_left_out(home: dict[str, str], tmp_path: Path) -> None:
    kept = tmp_path / "chat.json"
    lines = b"one\n" + b"far too long " * 300 + b"\n\xff\xfe\ntwo\n/save " + bytes(kept)
    done = pipe(home, lines)
    assert done.code == 1
    assert re.search(r"a prompt of \d+ tokens, but the context has room for 482 beside", done.err)
    assert "not UTF-8" in done.err
    assert "standard input is not UTF-8" in pipe(home, b"a\xff", "-f", "-").err
    assert "standard input is empty" in pipe(home, "\n\n", "-f", "-").err
    assert [m["content"] for m in json.loads(kept.read_text())["messages"][::2]] == ["one", "two"]


def test_the_oldest_turns_make_room(home: dict[str, str]) -> None:
    # Letters that hardly merge into tokens: any one of the questions fits, five of them do not.
    done = pipe(home, ("xq zj kw vf gb " * 4 + "\n") * 5, "-c", "128")
    assert done.code == 0, done.err
    assert re.search(r"oldest turns? no longer fits? in the context", done.err)


def test_a_file_is_the_first_message(home: dict[str, str], tmp_path: Path) -> None:
    question, kept = tmp_path / "question.txt", tmp_path / "chat.json"
    question.write_text("/save is\n\ta word\n")
    done = pipe(home, f"/save {kept}\n", "-f", str(question))
    assert (done.code, kept.exists()) == (0, False), done.err
    assert done.out
    assert done.err.count(" tokens") >= 1
    # The whole of stdin, not a turn a line.
    piped = pipe(home, question.read_text(), "-f", "-")
    assert (piped.code, piped.out) == (0, done.out)


def test_a_seed_repeats_a_session_and_a_random_one_is_shown(home: dict[str, str]) -> None:
    first = pipe(home, "hello\nand then\n", "-s", "-1")
    seeds = set(re.findall(r"seed (\d+)$", first.err, re.MULTILINE))
    assert len(seeds) == 1
    assert pipe(home, "hello\nand then\n", "-s", seeds.pop()).out == first.out
    assert "seed" not in pipe(home, "hello\n", "--temp", "0").err


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["-n", "0"], 2, "-n/--predict"),
        (["--stop", ""], 2, "--stop"),
        (["--temp", "-1"], 2, "temperature"),
        (["--show-drafts"], 2, "terminal"),
        (["-f", "none.txt"], 1, "none.txt: No such file"),
        (["-f", os.devnull], 1, "is empty"),
    ],
)
def test_bad_usage_is_one_line(home: dict[str, str], options: list[str], code: int, words: str) -> None:
    done = pipe(home, "hello\n", *options)
    assert (done.code, done.out) == (code, "")
    assert words in done.err.splitlines()[-1]
    assert "Traceback" not in done.err


def test_nobody_reads_the_answer(home: dict[str, str]) -> None:
    command = f"{shlex.join([*CHAT, *SMALL])} | true; echo ${{PIPESTATUS[0]}}"
    run = subprocess.run(
        ["bash", "-c", command], input=b"hello\n" * 3, env=home, capture_output=True, timeout=PATIENCE, check=False
    )
    assert run.stdout == b"0\n"
    assert b"Traceback" not in run.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_piped_session(home: dict[str, str], number: int, code: int) -> None:
    with subprocess.Popen(
        [*CHAT, *UNENDING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=home
    ) as running:
        assert running.stdin
        assert running.stdout
        running.stdin.write(b"hello\n")
        running.stdin.flush()
        running.stdout.read(1)
        running.send_signal(number)
        _, errors = running.communicate(timeout=PATIENCE)
    assert running.returncode == code, errors
    assert b"Traceback" not in errors


# ---------------------------------------------------------------------- a terminal


@pytest.fixture
def terminal(home: dict[str, str], tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Terminal]:
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed")
    running = Terminal(home, tmp_path, [*CHAT, *request.param])
    yield running
    running.close()


STATUS = r"^\d+ tokens? at .* tokens/s"


@pytest.mark.parametrize("terminal", [[*SMALL, "--policy", "fixed"]], indirect=True)
def test_a_session_at_a_terminal(terminal: Terminal, tmp_path: Path) -> None:
    terminal.ask("hello there", STATUS)
    shown = terminal.ask("/help", r"/quit .*Ctrl-D")
    assert all(name in shown for name in ("/reset", "/system", "/stats", "/drafts", "/save", "/load"))

    terminal.ask("/drafts", "drafts are shown: accepted, refused")
    terminal.ask("again again again again again again", STATUS, 2)
    terminal.ask("/drafts", "drafts are not shown")
    shown = terminal.ask("/stats", r"answers +2\b")
    assert re.search(r"passes +\d+, \d+% of them without a draft", shown)

    terminal.ask("/system", "there is no system message")
    terminal.ask("/system Be brief.", "applies from the next turn on")
    terminal.ask("/system", "^Be brief.$")
    terminal.ask("/save chat.json", "saved 2 turns to chat.json")
    terminal.ask("/reset", "starts afresh")
    terminal.ask("/save empty.json", "saved 0 turns")
    terminal.ask("/load chat.json", "loaded 2 turns")
    terminal.ask("/load nothing.json", "cannot read nothing.json")
    terminal.ask("/frobnicate", "unknown command /frobnicate")

    terminal.paste("two\nlines")
    terminal.wait(r"^> two\n *lines")
    terminal.keys("Enter")
    terminal.wait(STATUS, 3)
    terminal.wait(PROMPT)
    terminal.ask("/save chat.json", "saved 3 turns")
    messages = json.loads((tmp_path / "chat.json").read_text())["messages"]
    assert messages[0] == {"role": "system", "content": "Be brief."}
    assert messages[-2] == {"role": "user", "content": "two\nlines"}
    assert json.loads((tmp_path / "empty.json").read_text())["messages"] == messages[:1]
    terminal.keys("C-d")
    terminal.wait("exit code 0")


@pytest.mark.parametrize("terminal", [UNENDING], indirect=True)
def test_ctrl_c_stops_the_answer_and_keeps_the_session(terminal: Terminal, tmp_path: Path) -> None:
    terminal.type("hello")
    # The status line at the foot of the screen is no answer.
    terminal.wait(r"^> hello\n+(?!ngramspec demo).*\w")
    terminal.keys("C-c", "C-c")
    assert "^C" not in terminal.wait(r"^stopped; \d+ tokens?")
    terminal.wait(PROMPT)
    terminal.ask("/save chat.json", "saved 1 turn")
    messages = json.loads((tmp_path / "chat.json").read_text())["messages"]
    assert messages[-1]["role"] == "assistant"
    assert messages[-1]["content"]

    terminal.keys("-l", "abc")
    terminal.wait("^> abc")
    terminal.keys("C-c")
    assert "leaves" not in terminal.wait(PROMPT).split("lists commands")[1].split("\n", 1)[1]
    terminal.keys("C-c")
    terminal.wait("^Ctrl-C again, Ctrl-D or /quit leaves")
    terminal.wait(PROMPT)
    terminal.type("/quit")
    terminal.wait("exit code 0")


@pytest.mark.parametrize("terminal", [SMALL], indirect=True)
def test_the_history_outlives_the_session(terminal: Terminal, home: dict[str, str]) -> None:
    terminal.ask("/system unforgettable", "applies")
    history = Path(home["XDG_STATE_HOME"]) / "ngramspec" / "chat_history"
    assert "/system unforgettable" in history.read_text()
    assert history.stat().st_mode & 0o077 == 0
    terminal.keys("C-d")
    terminal.wait("exit code 0")
