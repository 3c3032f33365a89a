"""Tests of Markdown on a terminal: the look of blocks, and its independence of the pieces of the text."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

import pyte
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ngramspec_cli.markdown_stream import INTERVAL, LiveRows, MarkdownStream
from wcwidth import wcwidth

ANSWER = f"""\
# A title
Some **bold** and *slanted* `code`, [a link](http://x.y/z), \\(a_1\\) and 1\\. no list
in a second line <b>no HTML</b> &amp; a ~~mistake~~

- one, which is long enough to be broken into two rows where it stands
- two
  - below two

    once more
- three
  ```python
  def f():
      return 1
  ```
7. seven
7. seven again

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
combining e\u0301, emoji \U0001f600 and {"漢字" * 22}
"""

SHOWN = f"""\
A title
Some bold and slanted code, a link
(http://x.y/z), \\(a_1\\) and 1. no list
in a second line <b>no HTML</b> &amp; a
mistake

• one, which is long enough to be broken
  into two rows where it stands
• two
  • below two

    once more
• three
```python
def f():
    return 1
```
7. seven
7. seven again

key     value
─────────────
a           1
長い   中文字

│ a quotation
│ • with an item

```c
        int a; /* open
   still open */  // a long line of code that is wider than the terminal is and nevertheless stays one line of code

```
────────────────────────────────────────
combining e\u0301, emoji \U0001f600 and
{"漢字" * 10}
{"漢字" * 10}
漢字漢字
"""


ALLOWED = re.compile(r"([^\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]|\x1b\[(\d+A|C|J|K|\?7[hl]|[\d;]*m))*+")
"""Sequences that an answer may send to a terminal: text, cursor movements, line breaks, and colours."""

BREAK = -1
"""Column of a row with the line break before it, unless the terminal wrapped the line there."""


class Screen(pyte.HistoryScreen):
    """Terminal that keeps rows that scroll away, and distinguishes a space from an empty cell."""

    default_char = pyte.screens.Char("")

    def __init__(self, columns: int, lines: int) -> None:
        super().__init__(columns, lines, history=10_000)
        self.cursor.attrs = self.default_char
        self._stream = pyte.Stream(self)

    def draw(self, data: str) -> None:
        for character in data:
            if wcwidth(character) > 0:
                super().draw(character)
            elif self.cursor.x:  # pyte drops joiners and the characters after them.
                row, column = self.buffer[self.cursor.y], self.cursor.x - 1
                row[column] = row[column]._replace(data=row[column].data + character)

    def tab(self) -> None:
        self.draw(" " * min(8 - self.cursor.x % 8, self.columns - self.cursor.x))

    def erase_in_display(self, how: int = 0, *_: int, **__: bool) -> None:
        assert (self.cursor.y, self.cursor.x) != (0, 0), "tmux keeps what is cleared from its top left on"
        super().erase_in_display(how)

    def write(self, text: str) -> None:
        """Accept the output of a program as from a line discipline, which turns a newline into a new line."""
        assert ALLOWED.fullmatch(text), f"not for a terminal: {text!r}"
        first, *others = text.split("\n")
        self._stream.feed(first)
        for line in others:
            self._stream.feed("\r\n")
            self.buffer[self.cursor.y][BREAK] = self.default_char._replace(data="\n")
            self._stream.feed(line)

    @property
    def text(self) -> str:
        """All text that was shown, including scrolled rows; rows that the terminal wrapped are joined."""
        rows = [*self.history.top, *(self.buffer[y] for y in range(self.lines))]
        return "".join(row[column].data for row in rows for column in sorted(row))


class Watched:
    """Stream on a screen in memory whose pieces arrive `pace` seconds apart and take `cost` seconds to show."""

    def __init__(self, columns: int = 40, lines: int = 12, pace: float = 1.0, cost: float = 0.0) -> None:
        self.screen = Screen(columns, lines)
        self.written = 0
        self._now, self._pace, self._cost = 0.0, pace, cost
        rows = LiveRows(self._write, self.size)
        self.stream = MarkdownStream(rows, self.size, clock=self._clock)

    def size(self) -> os.terminal_size:
        return os.terminal_size((self.screen.columns, self.screen.lines))

    def _write(self, text: str) -> None:
        self.written += len(text)
        self.screen.write(text)

    def _clock(self) -> float:
        self._now += self._cost
        return self._now

    def push(self, piece: str) -> None:
        self._now += self._pace
        self.stream.push(piece)


def shown(pieces: Iterable[str], columns: int = 40, lines: int = 12) -> str:
    watched = Watched(columns, lines)
    for piece in pieces:
        watched.push(piece)
    watched.stream.finish()
    assert watched.screen.cursor.x == 0
    return watched.screen.text


@pytest.mark.parametrize(("pieces", "lines"), [([ANSWER], 12), (ANSWER, 3), (ANSWER, 12), (ANSWER, 100)])
def test_markdown_stream_renders_expected_screen(pieces: Iterable[str], lines: int) -> None:
    assert shown(pieces, lines=lines) == SHOWN


PIECES = st.sampled_from(
    [
        *ANSWER.splitlines(keepends=True),
        *("\n", "\n", " ", "  ", "    ", "\t", "a", "word ", "漢字", "\u0301", "\U0001f468\u200d\U0001f469", "\\"),
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


@given(cut_texts(), st.integers(20, 60), st.integers(3, 30))
def test_markdown_stream_with_any_split_shows_same_screen(cut: tuple[str, list[str]], columns: int, lines: int) -> None:
    text, pieces = cut
    assert shown(pieces, columns, lines) == shown([text], columns, 1000)


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])) | PIECES, max_size=8))
def test_markdown_stream_writes_only_allowed_sequences(pieces: list[str]) -> None:
    shown(pieces)  # This also checks `ALLOWED`.


def test_markdown_stream_replaces_hostile_sequences_with_symbols() -> None:
    hostile = "a\x1b]0;title\x07 \x9b2J `\x1b[31m` [l](http://x\x1b]8;;y) &#27;[2J\n```\x1bsh\n\x1b[?1049h\r\n"
    assert shown([hostile], 80).splitlines() == [
        "a␛]0;title␇ \ufffd2J ␛[31m l (http://x␛]8;;y) &#27;[2J",
        "```␛sh",
        "␛[?1049h",
    ]


@pytest.mark.parametrize(
    ("text", "looks"),
    [
        ("x\n~~~\n  a\n``\n  b", "x\n~~~\n  a\n``\n  b\n"),  # An open fence is shown to its end.
        ("> \n# A title\n", "A title\n"),  # An empty quotation shows nothing.
        ("# A title\n> ", "A title\n"),
        ("```\na  \n\n  b\n```", "```\na  \n\n  b\n```\n"),  # Code keeps its trailing spaces.
    ],
)
def test_markdown_stream_shows_open_empty_and_spaced_blocks(text: str, looks: str) -> None:
    assert shown([text]) == shown(text) == shown(["", text]) == looks


def test_markdown_stream_does_not_rewrite_finished_blocks() -> None:
    watched = Watched()
    for _ in range(500):
        watched.push("- an item of a list\n")
    # Each item is rendered once while open and once when finished, with few commands.
    assert watched.written < 500 * 2 * 60


def test_markdown_stream_with_long_open_block_shows_its_end() -> None:
    watched = Watched(40, 8)
    watched.push(" ".join(f"word{i}" for i in range(200)))
    assert watched.screen.text.count("\n") == 5
    assert watched.screen.text.endswith("word199")


def test_markdown_stream_limits_refresh_rate() -> None:
    watched = Watched(pace=INTERVAL / 10)
    watched.push("one ")
    watched.push("two ")
    assert watched.screen.text == "one"
    for _ in range(50):
        watched.push("more ")
    assert watched.screen.text.count("more") >= 20
    slow = Watched(pace=INTERVAL, cost=1.0)
    for word in ["one ", *["two "] * 20]:
        slow.push(word)
    assert slow.screen.text == "one"


def test_markdown_stream_on_narrowed_terminal_shows_open_block_once() -> None:
    watched = Watched(40, 12)
    watched.push("finished\n\nthis paragraph is open and has some words")
    # These are the current rows of a terminal that wraps its lines again.
    watched.screen = Screen(20, 12)
    watched.screen.write("> hello\nfinished\n\nthis paragraph is open and has some\nwords")
    watched.push(" more")
    watched.stream.finish()
    assert watched.screen.text == "> hello\nfinished\n\nthis paragraph is\nopen and has some\nwords more\n"


def test_markdown_stream_with_deep_list_shows_it_once() -> None:
    text = "".join(f"{'   ' * depth}1. of depth {depth}\n" for depth in range(8))
    at_the_end = Watched(20, 40, pace=-1.0)
    at_the_end.push(text)
    at_the_end.stream.finish()
    assert shown(text, 20, 40) == at_the_end.screen.text


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("```\nx\n```\n", "\x1b[2m```\x1b[0m\nx\n\x1b[2m```\x1b[0m\n"),
        ("    x = 1\n", "\x1b[36mx = 1\x1b[0m\n"),
        ("---\n", f"\x1b[2m{'─' * 40}\x1b[0m\n"),
    ],
)
def test_markdown_stream_dims_fences_and_rules_and_colours_code(text: str, written: str) -> None:
    parts: list[str] = []
    size = Watched(40).size
    stream = MarkdownStream(LiveRows(parts.append, size), size)
    stream.push(text)
    stream.finish()
    assert "".join(parts).endswith(written)
