"""Tests of the output of a chat: Markdown on a terminal, drafts in colour, and the statistics of a session."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from contextlib import suppress
from io import StringIO

import pyte
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ngramspec_cli.chat_view import AnswerView, format_step, totals
from ngramspec_cli.markdown import INTERVAL, THEME, MarkdownStream
from rich.console import Console

from ngramspec.chat.families import AnswerParser
from ngramspec.steps import Stats, Step

ANSWER = f"""\
# A title
Some **bold** and *slanted* `code`, [a link](http://x.y/z), \\(a_1\\)
in a second line <b>no HTML</b> &amp; a ~~mistake~~

- one, which is long enough to be broken into two rows
- two
  - below two
- three
  ```python
  def f():
      return 1
  ```
7. seven

| key | value |
|-----|------:|
| a   | 1     |
| 長い | 中文字 |

> a quotation
> - with an item

```c
\tint a; /* open
   still open */  // a long line of code that is wider than the terminal is and nevertheless stays one line of code

```
---
combining \u00e9, emoji \U0001f600 and {"漢字" * 22}
"""

SHOWN = f"""\
A title
Some bold and slanted code, a link
(http://x.y/z), \\(a_1\\)
in a second line <b>no HTML</b> &amp; a
mistake

 • one, which is long enough to be
   broken into two rows
 • two
    • below two
 • three
   ```python
   def f():
       return 1
   ```
 7 seven

 key    value
 ────────────
 a          1
 長い  中文字

▌ a quotation
▌  • with an item

```c
        int a; /* open
   still open */  // a long line of code that is wider than the terminal is and nevertheless stays one line of code
```
----------------------------------------
combining \u00e9, emoji \U0001f600 and
{"漢字" * 10}
{"漢字" * 10}
漢字漢字
"""

ALLOWED = re.compile(r"([^\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]|\r|\x1b\[(\d+A|\d?[CJK]|\?25[hl]|[\d;]*m))*+")
"""Sequences that an answer may send to a terminal: text, cursor movements, line breaks, and colours."""

BREAK = -1
"""Column of a row with the line break before it, unless the terminal wrapped the line there."""


class Terminal(pyte.HistoryScreen):
    """Terminal in memory that keeps rows that scroll away; `written` counts the characters that it received."""

    def __init__(self, columns: int, lines: int) -> None:
        super().__init__(columns, lines, history=10_000)
        self._stream, self.written = pyte.Stream(self), 0

    def write(self, text: str) -> None:
        """Accept the output of a program as from a line discipline, which turns a newline into a new line."""
        assert ALLOWED.fullmatch(text), f"not for a terminal: {text!r}"
        self.written += len(text)
        first, *others = text.split("\n")
        self._stream.feed(first)
        for line in others:
            self._stream.feed("\r\n")
            self.buffer[self.cursor.y][BREAK] = self.default_char._replace(data="\n")
            self._stream.feed(line)

    def linefeed(self) -> None:
        super().linefeed()
        self.buffer[self.cursor.y].pop(BREAK, None)

    def flush(self) -> None:
        pass

    encoding = "utf-8"

    @property
    def text(self) -> str:
        """All text that was shown, including scrolled rows; rows that the terminal wrapped are joined."""
        rows = [*self.history.top, *(self.buffer[y] for y in range(self.lines))]
        text = "".join(row[column].data for row in rows for column in sorted(row))
        return "".join(f"{line.rstrip()}\n" for line in text.rstrip().split("\n"))


class Watched:
    """Stream on a terminal whose pieces arrive `pace` seconds apart and take `cost` seconds to show."""

    def __init__(self, columns: int = 40, lines: int = 12, pace: float = 1.0, cost: float = 0.0) -> None:
        self.terminal = Terminal(columns, lines)
        self._now, self._pace, self._cost = 0.0, pace, cost
        console = Console(
            file=self.terminal,  # type: ignore[arg-type]
            force_terminal=True,
            width=columns,
            height=lines,
            color_system="standard",
            legacy_windows=False,
            highlight=False,
            theme=THEME,
        )
        self.stream = MarkdownStream(console, clock=self._clock)

    def _clock(self) -> float:
        self._now += self._cost
        return self._now

    def push(self, piece: str) -> None:
        self._now += self._pace
        self.stream.push(piece)


def show(pieces: Iterable[str], columns: int = 40, lines: int = 12) -> str:
    watched = Watched(columns, lines)
    for piece in pieces:
        watched.push(piece)
    watched.stream.finish()
    assert watched.terminal.cursor.x == 0
    assert not watched.terminal.cursor.hidden
    return watched.terminal.text


@pytest.mark.parametrize(("pieces", "lines"), [([ANSWER], 12), (ANSWER, 12)])
def test_markdown_stream_renders_expected_rows(pieces: Iterable[str], lines: int) -> None:
    assert show(pieces, lines=lines) == SHOWN


PIECES = st.sampled_from(
    [
        *ANSWER.splitlines(keepends=True),
        *("\n", "\n", " ", "  ", "    ", "\t", "a", "word ", "漢字", "\\"),
        *("-", "- ", "* ", "1. ", "2) ", "> ", "#", "|", "|---|\n", "| a | b |\n", "===\n", "---\n", "[a]: b\n"),
        *("```", "~~~\n", "````python\n", "'''", '"""', "/*", "*/", "<div>\n", "***", "**", "_", "`", "[", "](u)"),
    ]
)


@st.composite
def cut_texts(draw: st.DrawFn) -> tuple[str, list[str]]:
    """Generate a text that is mostly Markdown, whole and in pieces."""
    text = "".join(draw(st.lists(PIECES, max_size=25)))
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return text, [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@given(cut_texts(), st.integers(20, 60))
def test_markdown_stream_with_any_split_shows_same_rows(cut: tuple[str, list[str]], columns: int) -> None:
    text, pieces = cut
    assert show(pieces, columns, 200) == show([text], columns, 200)


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])) | PIECES, max_size=8))
def test_markdown_stream_writes_only_allowed_sequences(pieces: list[str]) -> None:
    show(pieces)  # This also checks `ALLOWED`.


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("x\n~~~\n  a\n``\n  b", "x\n~~~\n  a\n``\n  b\n~~~\n"),  # An open fence is shown to its end.
        ("> \n# A title\n", "A title\n"),  # An empty quotation shows nothing.
        ("# A title\n> ", "A title\n"),
        ("\n\nx", "x\n"),
        ("```\na\n\n  b\n```", "```\na\n\n  b\n```\n"),
        ("    x = 1\n", "x = 1\n"),
        ("```nonsense\nx\n```", "```nonsense\nx\n```\n"),
        (
            "a\x1b]0;title\x07 \x9b2J [l](http://x\x1b]8;;y) &#27;[2J\n```\x1bsh\n\x1b[?1049h\r\n",
            "a␛]0;title␇ \ufffd2J l (http://x␛]8;;y)\n&#27;[2J\n```␛sh\n␛[?1049h\n```\n",
        ),
    ],
)
def test_markdown_stream_shows_odd_blocks(text: str, shown: str) -> None:
    assert show([text]) == show(text) == show(["", text]) == shown


@pytest.mark.parametrize(
    ("start", "block"), [("", "- item {}\n"), ("", "word{} "), ("", "{}\n\n"), ("```\n", "x = {}\n\n")]
)
def test_markdown_stream_keeps_rows_that_leave_the_screen(start: str, block: str) -> None:
    pieces = [start, *(block.format(n) for n in range(100))]
    watched = Watched(40, 12)
    for number, piece in enumerate(pieces):
        watched.push(piece)
        if number % 50 == 49:  # Everything is shown, also while the block is open.
            assert re.findall(r"\d+", watched.terminal.text) == [str(n) for n in range(number)]
    watched.stream.finish()
    assert re.findall(r"\d+", watched.terminal.text) == [str(n) for n in range(100)]
    # An update rewrites at most a screen.
    assert watched.terminal.written < 100 * 12 * 60


def test_markdown_stream_limits_refresh_rate() -> None:
    watched = Watched(pace=INTERVAL / 10)
    watched.push("one ")
    watched.push("two ")
    assert watched.terminal.text == "one\n"
    for _ in range(50):
        watched.push("more ")
    assert watched.terminal.text.count("more") >= 20
    slow = Watched(pace=INTERVAL, cost=1.0)
    for word in ["one ", *["two "] * 15]:
        slow.push(word)
    assert slow.terminal.text == "one\n"


PIECES_OF = {1: b"one ", 2: b"t\xc3", 3: b"\n\x1b", 4: b"[bold]four", 5: b""}.__getitem__
REFUSING = Step((1, 4), ("one ", "[bold]four"), drafted=(1, 2, 3), accepted=1, batch=4)


@pytest.mark.parametrize(
    ("step", "spans"),
    [
        (REFUSING, [("one ", "green"), ("t�⏎␛", "strike red"), ("[bold]four", "bright_blue")]),
        (Step((1, 4), ("one ", "[bold]four"), drafted=(1,), accepted=1, batch=2), [("one ", "green")]),
        # Tokens after the end of the text were not rejected.
        (Step((1, 5), ("one ", ""), drafted=(1, 5, 4, 4), accepted=2, batch=5, stop="eog"), [("one ", "green")]),
    ],
)
def test_format_step_colours_accepted_and_rejected_tokens(step: Step, spans: list[tuple[str, str]]) -> None:
    text = format_step(step, PIECES_OF)
    assert [(text.plain[s.start : s.end], str(s.style)) for s in text.spans] == spans


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
    assert [line for line in shown if line and line[0].isalpha()][:-1] == [
        "model m␛[bold]",
        "tokens 25 generated, prompts processed in 0.5 s",
        "speed 3.0 tokens/s, 1.50 tokens per pass",
        "passes 16, 50% of them without a draft",
        "drafts 8 of 24 drafted tokens accepted (33%)",
        "gain about 1.50x plain decoding (estimated from the costs of passes here)",
        "Acceptance by position in the draft",
    ]
    assert [line for line in shown if re.fullmatch(r"[\d %]+", line)] == ["1 8 8 8 100%", "2 8 8 0 0%"]
    assert len(totals(Stats(), {})) == 1


MARKDOWN = "<think>\nhm\n</think>\n\nSome **bold** \x1b[2J and\n\n- more"


@pytest.mark.parametrize(
    ("variables", "size", "rendered"),
    [
        ({}, (10, 20), True),
        ({}, (10, 19), False),
        ({}, (9, 20), False),
        ({"NO_COLOR": "1"}, (10, 20), False),
        ({"TERM": "dumb"}, (10, 20), False),
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
        with view.answering():
            for word in re.findall(r"\s*\S+", MARKDOWN):
                view.show(Step((1,), (word,)), parser.push(word), PIECES_OF)
        view.drafts = True
        view.show(REFUSING, [], PIECES_OF)
    written = b""
    with suppress(OSError):  # Linux reports the exit of the last writer so.
        while piece := os.read(terminal, 4096):
            written += piece
    os.close(terminal)
    screen = pyte.Screen(40, 20)
    pyte.ByteStream(screen).feed(written)
    rows = [row.rstrip() for row in screen.display]
    looks = ["hm", "", "Some bold ␛[2J and", "", " • more"]
    if not rendered:
        looks[2:] = ["Some **bold** ␛[2J and", "", "- more"]
    looks.append("one t�⏎␛[bold]four")
    assert rows == looks + [""] * (len(rows) - len(looks))
    assert (b"\x1b[2mhm" in written) == (variables.get("TERM") != "dumb")
    assert (b"\x1b[32mone" in written) == (not variables)
    assert screen.buffer[2][5].bold == rendered
