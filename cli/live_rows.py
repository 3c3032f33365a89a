"""The last rows on a terminal, rewritten in place: those that are finished scroll away, the others may still change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from rich.cells import cell_len
from rich.color import ColorSystem
from rich.console import Console
from rich.text import Text

from .console import printable
from .markdown_rows import Row

_TAB = 8
_UP = "\x1b[{}A"
# Cleared from the second cell on, and then the first row: tmux takes clearing from its top left on, where a row may be
# after the window became narrower, for clearing the screen, and keeps what was there in its history.
_CLEAR_BELOW = "\x1b[C\x1b[J\r\x1b[K"
# Rows that may be erased must be one row each, whatever the terminal takes for the width of a character.
_NO_WRAP, _WRAP = "\x1b[?7l", "\x1b[?7h"


class Size(NamedTuple):
    """Of a terminal, in cells."""

    columns: int
    lines: int


class LiveRows:
    """Writes rows to a terminal whose cursor stands at the start of a line.

    Only what changed is written again, so nothing flickers. After each update the cursor stands behind the last row
    that may still change, or, where there is none, at the start of a line.

    Args:
        write: takes what the terminal is to get.
        size: of the terminal now.
    """

    def __init__(self, write: Callable[[str], None], size: Callable[[], Size]) -> None:
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
    cuts, cells = [], 0
    for at, character in enumerate(text.plain):
        width = cell_len(character)
        if cells + width > columns:
            cuts.append(at)
            cells = 0
        cells += width
    return list(text.divide(cuts))
