"""Streaming display of a Markdown answer in a terminal; finished rows are written only once.

Only the last block is open: its rows are shown and then rewritten. In a list only the last item is open, in a code
block only the last line. Only complete lines can finish a block. The final rows therefore do not depend on the pieces
in which the text arrives.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import accumulate, takewhile
from operator import eq
from os import terminal_size

from markdown_it.tree import SyntaxTreeNode
from rich.cells import chop_cells
from rich.color import ColorSystem
from rich.console import Console
from rich.text import Text

from .console import printable
from .markdown_rows import FENCE, Code, fence_row, is_blank, parse, stack_blocks

INTERVAL = 1 / 15
"""Minimum time in seconds between two updates of the open block."""

SHARE = 1 / 40
"""Maximum share of the time that is spent on updates, independent of the length of the open block."""


class MarkdownStream:
    """Writer of one Markdown text to the terminal; `size` returns the terminal's current size."""

    def __init__(
        self,
        screen: LiveRows,
        size: Callable[[], terminal_size],
        *,
        style: str = "",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._screen, self._size, self._style, self._clock = screen, size, style, clock
        self._tail = ""  # text from the start of the open block
        self._code: Code | None = None  # open code block
        self._begun = False  # True if there are finished rows
        self._gap = False  # True if the line above the tail is blank
        self._due = 0.0

    def push(self, text: str) -> None:
        """Add a piece of the text and show it, unless the last update was too recent."""
        self._tail += printable(text)
        if self._clock() >= self._due:
            self._show()

    def finish(self) -> None:
        """Show the rest of the text at its end."""
        self._show(ended=True)

    def _show(self, *, ended: bool = False) -> None:
        start = self._clock()
        width = self._size().columns
        final = self._take_final_rows(width, ended)
        live = self._open_rows(width)
        if self._style:
            for row in (*final, *live):
                row.stylize(self._style)
        self._screen.update(final, live)
        now = self._clock()
        self._due = now + max(INTERVAL, (now - start) / SHARE)

    def _take_final_rows(self, width: int, ended: bool) -> list[Text]:
        """Remove the blocks that can no longer change from the tail and return their rows."""
        rows: list[Text] = []
        *lines, rest = self._tail.split("\n")
        if ended and rest:
            lines, rest = [*lines, rest], ""
        while lines:
            code = self._code
            n_lines = (
                self._take_blocks(lines, rows, width, ended) if code is None else self._take_code(code, lines, rows)
            )
            if n_lines:
                self._gap = is_blank(lines[n_lines - 1])
                del lines[:n_lines]
            if self._code is code:
                break  # no code block began or ended, so the remaining lines are open
        self._tail = "\n".join([*lines, rest])
        return rows

    def _take_code(self, code: Code, lines: Sequence[str], rows: list[Text]) -> int:
        """Append the rows of lines up to the closing fence and return the number of lines."""
        for number, line in enumerate(lines, 1):
            if code.closes(line):
                rows.append(fence_row(line))
                self._code = None
                return number
            rows.append(code.row(line))
        return len(lines)

    def _take_blocks(self, lines: Sequence[str], rows: list[Text], width: int, ended: bool) -> int:
        """Append the rows of finished blocks and return the number of their lines.

        The finished blocks end with the first opening fence. Without a fence they end before the open block.
        """
        nodes = parse("\n".join(lines))
        fence = next((number for number, node in enumerate(nodes) if node.type == "fence"), None)
        end = len(lines)
        if fence is not None:
            end = _first_line(nodes[fence])
            del nodes[fence:]
        elif nodes and not ended:
            last = nodes.pop()
            if last.type.endswith("_list"):
                *items, last = last.children
                nodes += items
            end = _first_line(last)
        rows += stack_blocks(nodes, lines, width, begun=self._begun, gap=self._gap)
        self._begun = self._begun or bool(rows)
        if fence is None:
            return end
        if self._begun and (is_blank(lines[end - 1]) if end else self._gap):
            rows.append(Text())
        rows.append(fence_row(lines[end]))
        self._begun = True
        opening = FENCE.fullmatch(lines[end])
        assert opening is not None
        self._code = Code(opening[3], len(opening[1]), opening[2])
        return end + 1

    def _open_rows(self, width: int) -> list[Text]:
        if not self._tail:
            return []
        if self._code is not None:
            return [self._code.row(self._tail, whole=False)]
        return stack_blocks(parse(self._tail), self._tail.split("\n"), width, begun=self._begun, gap=self._gap)


def _first_line(node: SyntaxTreeNode) -> int:
    return node.map[0] if node.map else 0


# --------------------------------------------------------------------------- rows on the terminal

_TAB = 8
_UP = "\x1b[{}A"
# After the window became narrower, a row may be at the top left of the screen. If clearing starts in that cell, tmux
# treats it as clearing the whole screen and copies the rows into its history. Clearing therefore starts in the second
# cell, and the first row is cleared afterwards.
_CLEAR_BELOW = "\r\x1b[C\x1b[J\r\x1b[K"
_NO_WRAP, _WRAP = "\x1b[?7l", "\x1b[?7h"


class LiveRows:
    """Writer of rows to a terminal whose cursor is at the start of a line.

    Only changed rows are written again, so the terminal does not flicker. After each update the cursor is at the end
    of the last row that may still change. If no row may change, the cursor is at the start of a line.
    """

    def __init__(self, write: Callable[[str], None], size: Callable[[], terminal_size]) -> None:
        self._write, self._size = write, size
        self._shown: list[str] = []
        self._cells: list[int] = []
        self._columns = 0

    def update(self, final: Sequence[Text], live: Sequence[Text]) -> None:
        """Write the final rows and, below them, as many of the last live rows as fit on the screen."""
        columns, lines = self._size()
        rows = [part for row in live for part in _fold(row, columns)][-max(lines - 2, 1) :]
        previous, self._shown = self._shown, [_ansi(row, columns) for row in rows]
        new = [*map(_ansi, final), *self._shown]
        if columns == self._columns:
            same = sum(takewhile(bool, map(eq, previous, new)))
            if same == len(new) < len(previous):  # the last row is written again to place the cursor at its end
                same = max(same - 1, 0)
            up = len(previous) - 1 - same
        else:
            # A terminal that became narrower has wrapped the rows again.
            same, up = 0, sum(max(1, -(-cells // columns)) for cells in self._cells) - 1
        self._cells, self._columns = [row.cell_len for row in rows], columns
        out = "\n".join(new[same:])
        if same < len(previous):
            out = (_UP.format(up) if up > 0 else "") + _CLEAR_BELOW + out
        elif 0 < same < len(new):
            out = f"\n{out}"
        if new and not rows:
            out += "\n"
        if out:
            self._write(out)


_console = Console(highlight=False, markup=False, emoji=False)  # console that resolves styles and never writes


def _ansi(row: Text, columns: int | None = None) -> str:
    """Return a row with its colours as ANSI codes.

    A row that may be erased must not exceed the width `columns` of the terminal; `None` allows any width.
    """
    parts = [
        part.style.render(part.text, color_system=ColorSystem.STANDARD) if part.style else part.text
        for part in row.render(_console)
    ]
    # Some terminals use other widths for some characters than rich, and rows of deep lists may be too wide.
    fits = columns is None or (row.plain.isascii() and len(row) <= columns)
    return "".join(parts if fits else [_NO_WRAP, *parts, _WRAP])


def _fold(row: Text, columns: int) -> list[Text]:
    """Split a row into pieces that fit the width of the terminal."""
    text = row.copy()
    text.expand_tabs(_TAB)
    if not row.no_wrap or text.cell_len <= columns:
        return [text]
    ends = accumulate(len(part) for part in chop_cells(text.plain, columns))
    return list(text.divide(list(ends)[:-1]))
