"""`MarkdownStream`: an answer in Markdown while it is written; what is finished is shown once and for all.

Only the block at the end is still open: it is shown as far as it goes, and rewritten. Of a list only the last item is
open, of code only the last line. What is finished is told from whole lines alone, so the rows that stay do not depend
on the pieces in which the text came.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from os import terminal_size

from markdown_it.tree import SyntaxTreeNode
from rich.cells import chop_cells
from rich.color import ColorSystem
from rich.console import Console
from rich.text import Text

from .console import printable
from .markdown_rows import FENCE, Code, Row, block_rows, fence_row, is_blank, parse

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
        self._tail = ""
        self._code: Code | None = None
        self._begun = False
        self._gap = False
        self._due = 0.0

    def push(self, text: str) -> None:
        """Take a further piece; it is shown at once, unless something was shown just now."""
        self._tail += printable(text)
        if self._clock() >= self._due:
            self._show(ended=False)

    def finish(self) -> None:
        """Show everything: the text ended."""
        self._show(ended=True)

    def _show(self, *, ended: bool) -> None:
        began = self._clock()
        width = self._size().columns
        final = self._settle(width, ended)
        live = [] if ended else self._open_rows(width)
        if self._style:
            for row in (*final, *live):
                row.text.stylize(self._style)
        self._screen.update(final, live)
        now = self._clock()
        self._due = now + max(INTERVAL, (now - began) / SHARE)

    # ------------------------------------------------------------------ what is finished

    def _settle(self, width: int, ended: bool) -> list[Row]:
        """Take from the text what can no longer change; its rows."""
        rows: list[Row] = []
        while True:
            *lines, rest = self._tail.split("\n")
            lines += [rest] if ended and rest else []
            if self._code is not None:
                if not self._take_code(lines, rows):
                    return rows
            elif not self._take_blocks(lines, rows, width, ended):
                return rows

    def _take_code(self, lines: Sequence[str], rows: list[Row]) -> bool:
        """Lines up to the closing fence; whether it has come."""
        assert self._code is not None
        for number, line in enumerate(lines):
            if self._code.closes(line):
                rows.append(fence_row(line))
                self._code = None
                self._drop(lines[: number + 1])
                return True
            rows.append(self._code.line(line))
        self._drop(lines)
        return False

    def _take_blocks(self, lines: Sequence[str], rows: list[Row], width: int, ended: bool) -> bool:
        """Blocks up to the first fence, or to the one that is still open; whether there was a fence."""
        if not lines:
            return False
        nodes = parse("\n".join(lines))
        fence = next((node for node in nodes if node.type == "fence"), None)
        if fence is not None:
            nodes = nodes[: nodes.index(fence)]
            end = fence.map[0] if fence.map else 0
        elif ended or not nodes:
            end = len(lines)
        else:
            last = nodes.pop()
            if last.type.endswith("_list"):
                *items, last = last.children
                nodes += items
            end = last.map[0] if last.map else 0
        rows += self._spaced(nodes, lines, width)
        self._begun = self._begun or bool(rows)
        if fence is None:
            self._drop(lines[:end])
            return False
        opening = FENCE.fullmatch(lines[end])
        assert opening is not None
        self._code = Code(opening[3], len(opening[1]), opening[2])
        if self._begun and self._gap_before(end, lines):
            rows.append(Row(Text()))
        rows.append(fence_row(lines[end]))
        self._begun = True
        self._drop(lines[: end + 1])
        return True

    def _spaced(self, nodes: Sequence[SyntaxTreeNode], lines: Sequence[str], width: int) -> list[Row]:
        """Rows of blocks, with a blank one where there are blank lines in the text."""
        rows: list[Row] = []
        for node in nodes:
            shown = block_rows(node, lines, width)  # nothing for an empty quotation
            if shown and (self._begun or rows) and self._gap_before(node.map[0] if node.map else 0, lines):
                rows.append(Row(Text()))
            rows += shown
        return rows

    def _gap_before(self, line: int, lines: Sequence[str]) -> bool:
        return is_blank(lines[line - 1]) if line else self._gap

    def _drop(self, lines: Sequence[str]) -> None:
        if lines:
            self._gap = is_blank(lines[-1])
            self._tail = self._tail[sum(map(len, lines)) + len(lines) :]

    # ------------------------------------------------------------------ what is open

    def _open_rows(self, width: int) -> list[Row]:
        if not self._tail:
            return []
        if self._code is None:
            return self._spaced(parse(self._tail), self._tail.split("\n"), width)
        return [self._code.unfinished(self._tail)]


# --------------------------------------------------------------------------- the rows on the terminal

_TAB = 8
_UP = "\x1b[{}A"
# Cleared from the second cell on, and then the first row: tmux takes clearing from its top left on, where a row may be
# after the window became narrower, for clearing the screen, and keeps what was there in its history.
_CLEAR_BELOW = "\x1b[C\x1b[J\r\x1b[K"
# Rows that may be erased must be one row each, whatever the terminal takes for the width of a character.
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

    def update(self, final: Sequence[Row], live: Sequence[Row]) -> None:
        """Show finished rows for good, and below them those that may still change: the last that there is room for."""
        columns, lines = self._size()
        rows = [part for row in live for part in _folded(row, columns)][-max(lines - 2, 1) :]
        done = [_ansi(row.text) for row in final]
        new = done + [_ansi(row) for row in rows]
        if columns == self._columns:
            same = self._same(new, len(done))
            up = len(self._shown) - 1 - same
        else:
            # A terminal that became narrower has broken the rows anew.
            same, up = 0, sum(max(1, -(-cells // columns)) for cells in self._cells) - 1
        out = self._back_to(same, up, bool(new))
        out += [f"{row}\n" for row in new[same : len(done)]]
        if rest := new[max(same, len(done)) :]:
            out.append(f"{_NO_WRAP}{chr(10).join(rest)}{_WRAP}")
        if out:
            self._write("".join(out))
        self._shown, self._cells, self._columns = new[len(done) :], [row.cell_len for row in rows], columns

    def _same(self, new: Sequence[str], done: int) -> int:
        """How many of the rows that are shown stay."""
        same = 0
        for shown, wanted in zip(self._shown, new, strict=False):
            # What was cut at the edge, as it is wider than it seemed, is whole once it is finished.
            if shown != wanted or (same < done and not shown.isascii()):
                break
            same += 1
        # The cursor is to end up behind the last row, so that one is written again if others go.
        return min(same, max(len(new) - 1, 0)) if len(new) < len(self._shown) else same

    def _back_to(self, same: int, up: int, more: bool) -> list[str]:
        """From behind the last row to where the first one that changes begins."""
        if not self._shown or (same == len(self._shown) and not more):
            return []
        if same == len(self._shown):
            return ["\n"]
        return [_UP.format(up) if up > 0 else "", "\r", _CLEAR_BELOW]


_console = Console(highlight=False, markup=False, emoji=False)  # knows styles; never writes


def _ansi(text: Text) -> str:
    """A row with its colours, and no other control character than tabs."""
    parts = []
    for segment in text.render(_console):
        shown = printable(segment.text)
        parts.append(segment.style.render(shown, color_system=ColorSystem.STANDARD) if segment.style else shown)
    return "".join(parts)


def _folded(row: Row, columns: int) -> list[Text]:
    """A row in pieces that are no wider than the terminal."""
    text = row.text.copy()
    if "\t" in text.plain:
        text.expand_tabs(_TAB)
    if not row.code or text.cell_len <= columns:
        return [text]
    ends = accumulate(len(part) for part in chop_cells(text.plain, columns))
    return list(text.divide(list(ends)[:-1]))
