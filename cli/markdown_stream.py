"""`MarkdownStream`: an answer in Markdown while it is written; what is finished is shown once and for all.

Only the block at the end is still open: it is shown as far as it goes, and rewritten. Of a list only the last item is
open, of code only the last line. What is finished is told from whole lines alone, so the rows that stay do not depend
on the pieces in which the text came.
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
from .markdown_rows import FENCE, Code, fence_row, is_blank, parse, stacked

INTERVAL = 1 / 15
"""Seconds between two looks of the open block."""

SHARE = 1 / 40
"""Of the time that goes into showing at most, however long the open block is."""


class MarkdownStream:
    """Shows one text on a screen, in a style for the whole of it; `size` tells that of the terminal now."""

    def __init__(
        self,
        screen: LiveRows,
        size: Callable[[], terminal_size],
        *,
        style: str = "",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._screen, self._size, self._style, self._clock = screen, size, style, clock
        self._tail = ""  # of the text, from what is open on
        self._code: Code | None = None  # the block of code that is open
        self._begun = False  # whether rows are finished
        self._gap = False  # whether there is a blank line above the tail
        self._due = 0.0

    def push(self, text: str) -> None:
        """Take a further piece; it is shown at once, unless something was shown just now."""
        self._tail += printable(text)
        if self._clock() >= self._due:
            self._show()

    def finish(self) -> None:
        """Show everything: the text ended."""
        self._show(ended=True)

    def _show(self, *, ended: bool = False) -> None:
        began = self._clock()
        width = self._size().columns
        final = self._finished(width, ended)
        live = self._open_rows(width)
        if self._style:
            for row in (*final, *live):
                row.stylize(self._style)
        self._screen.update(final, live)
        now = self._clock()
        self._due = now + max(INTERVAL, (now - began) / SHARE)

    def _finished(self, width: int, ended: bool) -> list[Text]:
        """Take from the text what can no longer change; its rows."""
        rows: list[Text] = []
        *lines, rest = self._tail.split("\n")
        if ended and rest:
            lines, rest = [*lines, rest], ""
        while lines:
            code = self._code
            taken = self._take_blocks(lines, rows, width, ended) if code is None else self._take_code(code, lines, rows)
            if taken:
                self._gap = is_blank(lines[taken - 1])
                del lines[:taken]
            if self._code is code:
                break  # no block of code began or ended: all that is left is open
        self._tail = "\n".join([*lines, rest])
        return rows

    def _take_code(self, code: Code, lines: Sequence[str], rows: list[Text]) -> int:
        """Take lines up to the closing fence; how many."""
        for number, line in enumerate(lines, 1):
            if code.closes(line):
                rows.append(fence_row(line))
                self._code = None
                return number
            rows.append(code.row(line))
        return len(lines)

    def _take_blocks(self, lines: Sequence[str], rows: list[Text], width: int, ended: bool) -> int:
        """Take blocks up to the first fence, and that, or up to the one that is still open; how many lines."""
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
        rows += stacked(nodes, lines, width, begun=self._begun, gap=self._gap)
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
        return stacked(parse(self._tail), self._tail.split("\n"), width, begun=self._begun, gap=self._gap)


def _first_line(node: SyntaxTreeNode) -> int:
    return node.map[0] if node.map else 0


# --------------------------------------------------------------------------- the rows on the terminal

_TAB = 8
_UP = "\x1b[{}A"
# Cleared from the second cell on, and then the first row: tmux takes clearing from its top left on, where a row may be
# after the window became narrower, for clearing the screen, and keeps what was there in its history.
_CLEAR_BELOW = "\r\x1b[C\x1b[J\r\x1b[K"
_NO_WRAP, _WRAP = "\x1b[?7l", "\x1b[?7h"


class LiveRows:
    """Writes rows to a terminal whose cursor stands at the start of a line.

    Only what changed is written again, so nothing flickers. After each update the cursor stands behind the last row
    that may still change, or, where there is none, at the start of a line.
    """

    def __init__(self, write: Callable[[str], None], size: Callable[[], terminal_size]) -> None:
        self._write, self._size = write, size
        self._shown: list[str] = []
        self._cells: list[int] = []
        self._columns = 0

    def update(self, final: Sequence[Text], live: Sequence[Text]) -> None:
        """Show finished rows for good, and below them those that may still change: the last that there is room for."""
        columns, lines = self._size()
        rows = [part for row in live for part in _folded(row, columns)][-max(lines - 2, 1) :]
        shown, self._shown = self._shown, [_ansi(row, columns) for row in rows]
        new = [*map(_ansi, final), *self._shown]
        if columns == self._columns:
            same = sum(takewhile(bool, map(eq, shown, new)))
            if same == len(new) < len(shown):  # the cursor is to end up behind the last row: it is written again
                same = max(same - 1, 0)
            up = len(shown) - 1 - same
        else:
            # A terminal that became narrower has broken the rows again.
            same, up = 0, sum(max(1, -(-cells // columns)) for cells in self._cells) - 1
        self._cells, self._columns = [row.cell_len for row in rows], columns
        out = "\n".join(new[same:])
        if same < len(shown):
            out = (_UP.format(up) if up > 0 else "") + _CLEAR_BELOW + out
        elif 0 < same < len(new):
            out = f"\n{out}"
        if new and not rows:
            out += "\n"
        if out:
            self._write(out)


_console = Console(highlight=False, markup=False, emoji=False)  # knows styles; never writes


def _ansi(row: Text, columns: int | None = None) -> str:
    """A row with its colours. One that may be erased must be one row of the terminal, which has so many `columns`."""
    parts = [
        part.style.render(part.text, color_system=ColorSystem.STANDARD) if part.style else part.text
        for part in row.render(_console)
    ]
    # Not every terminal takes a character for as wide as it is counted here, and deep lists may leave no room.
    fits = columns is None or (row.plain.isascii() and len(row) <= columns)
    return "".join(parts if fits else [_NO_WRAP, *parts, _WRAP])


def _folded(row: Text, columns: int) -> list[Text]:
    """A row in pieces that are no wider than the terminal."""
    text = row.copy()
    text.expand_tabs(_TAB)
    if not row.no_wrap or text.cell_len <= columns:
        return [text]
    ends = accumulate(len(part) for part in chop_cells(text.plain, columns))
    return list(text.divide(list(ends)[:-1]))
