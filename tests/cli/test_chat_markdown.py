"""Chat with a model that says what a test wants: Markdown, thoughts, stops, changes, kept conversations."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from support import scripted_chat
from support.cli_runner import environment
from support.tmux import PATIENCE, PROMPT, Terminal

ANSWER = """\
<think>
Shall I *greet*?
</think>

# A title

Some **bold** words, `code` and a sentence that is long enough to be broken between words by a terminal, which is wide.

- one
- two

| key | value |
|-----|------:|
| 長い | 1 |

```python
def greet(name: str) -> str:
    return f"Hello, {name}"  # a line of code that is longer than the terminal is wide and must stay one when copied
```

\x1b]0;title\x07 \x1b[2J The end."""

SHOWN = """\
Shall I greet?

A title

Some bold words, code and a sentence that is long enough to be broken between words by a terminal,
which is wide.

• one
• two

key    value
────────────
長い       1

```python
def greet(name: str) -> str:
    return f"Hello, {name}"  # a line of code that is longer than the terminal is wide and must stay one when copied
```

␛]0;title␇ ␛[2J The end.
"""

STATUS = r"^(stopped; )?\d+ tokens? at "


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("home")
    return environment(folder) | {"XDG_STATE_HOME": str(folder / "state")}


def command(folder: Path, text: str, pace: float, options: Sequence[str]) -> list[str]:
    (folder / "says.md").write_text(text, "utf-8")
    script = str(Path(scripted_chat.__file__))
    return [sys.executable, script, str(folder / "says.md"), str(pace), "chat", "-t", "1", "-c", "512", *options]


@pytest.fixture
def chat(home: dict[str, str], tmp_path: Path) -> Iterator[object]:
    """Opens a window in which a model says a text, a word every `pace` seconds."""
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed")
    running: list[Terminal] = []

    def open_window(text: str, *options: str, pace: float = 0.002, variables: Sequence[str] = ()) -> Terminal:
        running.append(Terminal(home, tmp_path, command(tmp_path, text, pace, options), variables))
        return running[-1]

    yield open_window
    for terminal in running:
        terminal.close()


def answer_in(shown: str, question: str = "hello") -> str:
    """What stands between the last question and the statistics, without trailing spaces, of which tmux adds some."""
    told = re.split(rf"^> {question} *\n", shown, flags=re.MULTILINE)[-1]
    told = re.split(STATUS, told, flags=re.MULTILINE)[0]
    return "".join(f"{line.rstrip()}\n" for line in told.splitlines())


def test_markdown_at_a_terminal(chat, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    terminal: Terminal = chat(ANSWER)
    assert answer_in(terminal.ask("hello", STATUS)) == SHOWN
    coloured = terminal.text(colours=True)
    for colour, word in (("2", "Shall"), ("3", "greet"), ("1", "bold"), ("35", "def"), ("34", "greet")):
        assert re.search(rf"\x1b\[[\d;]*\b{colour}m(\x1b\[[\d;]*m)*{word}", coloured), word
    # Chat's own way of asking for a clipboard; tmux keeps what it is given.
    terminal.ask("/copy 1", "went to the terminal")
    terminal.ask("/copy 2", "/copy 2 is none of them")

    terminal.ask("/set markdown off", "markdown is off")
    assert "**bold**" in answer_in(terminal.ask("again", STATUS, 2), "again")
    terminal.ask("/undo", "took back: again")
    terminal.type('"""')
    terminal.type("two")
    terminal.type('lines"""')
    terminal.wait(STATUS, 3)
    terminal.wait(PROMPT)
    terminal.keys("-l", "and")
    terminal.keys("C-j")
    terminal.ask("more", STATUS, 4)
    terminal.ask("/retry", STATUS, 5)
    terminal.type("/edit")
    terminal.wait(r"^edit> and\n *more *$")
    terminal.keys("C-u")
    terminal.ask("less", STATUS, 6)
    terminal.type("/edit")
    terminal.wait("^edit> and\n *less *$", 2)
    terminal.keys("C-c")
    terminal.wait(PROMPT)
    terminal.ask("/save chat.json", "saved 3 turns")
    messages = json.loads((tmp_path / "chat.json").read_text())["messages"]
    assert [m["content"] for m in messages[::2]] == ["hello", "two\nlines", "and\nless"]
    assert messages[1]["content"] == ANSWER


def test_an_answer_is_stopped_and_the_window_resized(chat) -> None:  # type: ignore[no-untyped-def]
    # tmux tells programs some time later how wide they are now; nothing may be shown meanwhile.
    pauses = (30, 55, 75, 95)
    words = "".join(
        f"**word{i}**" + ("PAUSE " if i in pauses else " ") + ("\n\n" if i % 20 == 19 else "") for i in range(4000)
    )
    terminal: Terminal = chat(words, pace=0.01)
    terminal.type("hello")
    for pause, columns in zip(pauses, (60, 41, 100, 72), strict=True):
        terminal.wait(f"word{pause}\\b")
        terminal.resize(columns, 30)
    terminal.wait("word110 ")
    terminal.keys("C-c")
    shown = terminal.wait(STATUS)
    found = re.findall(r"word(\d+)", answer_in(shown))
    assert "stopped; " in shown
    assert found == [str(i) for i in range(len(found))]
    terminal.wait(PROMPT)
    terminal.keys("C-c", "C-c")
    terminal.wait("exit code 0")
    assert "-" not in terminal.wait(r"^(?:.* )?-?echo .*$").split("exit code 0")[1].split("echo ")[0][-1:]


@pytest.mark.parametrize("variable", ["NO_COLOR=1", "TERM=dumb"])
def test_plain_terminals_get_the_text(chat, variable: str) -> None:  # type: ignore[no-untyped-def]
    terminal: Terminal = chat("**bold** \x1b[2J and\n\n- more", variables=[variable])
    terminal.type("hello")
    assert answer_in(terminal.wait(STATUS)).rstrip() == "**bold** ␛[2J and\n\n- more"


def run(home: dict[str, str], folder: Path, stdin: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(folder, ANSWER, 0, options),
        input=stdin,
        env=home,
        capture_output=True,
        timeout=PATIENCE,
        check=False,
        text=True,
        cwd=folder,
    )


def test_a_conversation_is_kept_where_that_is_asked_for(home: dict[str, str], tmp_path: Path) -> None:
    kept = Path(home["XDG_STATE_HOME"]) / "ngramspec" / "chat_last.json"
    refused = run(home, tmp_path, "hello\n", "--resume")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "no conversation is kept; ngramspec chat --keep keeps one" in refused.stderr
    done = run(home, tmp_path, "first\n/set keep on\nsecond\n")
    assert done.stdout == f"{ANSWER}\n{ANSWER}\n"
    assert kept.stat().st_mode & 0o777 == 0o600
    resumed = run(home, tmp_path, "third\n/undo\n/memory\nfourth\n", "--resume")
    assert "going on with 2 turns" in resumed.stderr
    assert f"the conversation is kept in {kept}" in resumed.stderr
    questions = [m["content"] for m in json.loads(kept.read_text())["messages"][::2]]
    assert questions == ["first", "second", "fourth"]


def test_the_last_conversation_is_shown_where_it_goes_on(chat) -> None:  # type: ignore[no-untyped-def]
    first: Terminal = chat("Some **bold** words", "--keep")
    first.ask("hello", STATUS)
    first.keys("C-d")
    first.wait("exit code 0")
    shown = chat("", "--resume").wait(PROMPT)
    assert re.search(r"^going on with 1 turn\n> hello\nSome bold words\n", shown, re.MULTILINE)


def test_a_file_goes_in_front_of_the_next_message(home: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "a b.py").write_text("x = '''\n```\n'''")
    (tmp_path / "big").write_text("xq zj kw vf gb " * 400)
    (tmp_path / "raw").write_bytes(b"\xff")
    (tmp_path / "empty").touch()
    bad = "".join(f"/file {name}\n" for name in ("none", "big", "raw", "empty", "."))
    done = run(home, tmp_path, f"{bad}/file a b.py\n/retry\nwhat is this?\nand now?\n/save chat.json\n")
    complaints = [line for line in done.stderr.splitlines() if line.startswith("ngramspec: ")]
    wanted = [
        "cannot read none: No such",
        "the context has room for",
        "raw is not UTF-8",
        "empty is empty",
        "directory",
    ]
    assert all(words in line for words, line in zip([*wanted, "nothing was said"], complaints, strict=True))
    messages = json.loads((tmp_path / "chat.json").read_text())["messages"]
    assert messages[0]["content"] == "a b.py:\n\n````py\nx = '''\n```\n'''\n````\n\nwhat is this?"
    assert messages[2]["content"] == "and now?"


def test_another_model_goes_on(home: dict[str, str], tmp_path: Path) -> None:
    demo = Path(home["HOME"]) / "demo.gguf"
    shutil.copy(Path(scripted_chat.__file__).parents[2] / "ngramspec" / "demo" / "demo.gguf", demo)
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")
    done = run(home, tmp_path, f"hello\n/model none.gguf\n/model bad.gguf\n/model {demo}\n/model\nmore\n/save c.json\n")
    assert done.returncode == 1
    assert [line for line in done.stderr.splitlines() if "none.gguf" in line or "bad.gguf" in line]
    assert "goes on with the conversation" in done.stderr
    assert f"({demo})" in done.stderr
    assert len(json.loads((tmp_path / "c.json").read_text())["messages"]) == 4
