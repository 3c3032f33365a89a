"""Tests of `ngramspec chat` at a terminal (tmux): keys, and Markdown from a scripted model."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import scripted_chat
from support.cli_runner import COMMAND, ENDLESS
from support.tmux import PROMPT, Terminal

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
    last = json.loads((tmp_path / "chat.json").read_text())["messages"][-1]
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
    saved = json.loads((tmp_path / "chat.json").read_text())["messages"]
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
