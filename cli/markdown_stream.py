"""`MarkdownStream`: an answer in Markdown while it is written; what is finished is shown once and for all.

Only the block at the end is still open: it is shown as far as it goes, and rewritten. Of a list only the last item is
open, of code only the last line. What is finished is told from whole lines alone, so the rows that stay do not depend
on the pieces in which the text came.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markdown_it.tree import SyntaxTreeNode
from rich.text import Text

from .code_colours import CodeColours
from .console import printable
from .live_rows import LiveRows, Size
from .markdown_rows import Row, block_rows, fence_row, is_blank, language_of, parse

INTERVAL = 1 / 15
"""Seconds between two looks of the open block."""

SHARE = 1 / 40
"""Of the time that goes into showing at most, however long the open block is."""

_FENCE = re.compile(r"( {0,3})(`{3,}|~{3,})[ \t]*(.*)")


@dataclass(slots=True)
class _Code:
    """Code between fences: the opening one's indent and text, and the colours of what follows."""

    indent: int
    mark: str
    colours: CodeColours

    def closes(self, line: str) -> bool:
        found = _FENCE.fullmatch(line)
        return found is not None and found[2].startswith(self.mark) and not found[3].strip()

    def content(self, line: str) -> str:
        """A line without the indent of the fence."""
        indent = len(line) - len(line.lstrip(" "))
        return line[min(indent, self.indent) :]


class MarkdownStream:
    """Shows one text.

    Args:
        screen: where it is shown.
        size: of the terminal now.
        style: of the whole text.
        clock: the time in seconds.
    """

    def __init__(
        self,
        screen: LiveRows,
        size: Callable[[], Size],
        *,
        style: str = "",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._screen, self._size, self._style, self._clock = screen, size, style, clock
        self._tail = ""
        self._code: _Code | None = None
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
            rows.append(Row(self._code.colours.line(self._code.content(line)), True))
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
        opening = _FENCE.fullmatch(lines[end])
        assert opening is not None
        self._code = _Code(len(opening[1]), opening[2], CodeColours(language_of(opening[3])))
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
        line = self._code.content(self._tail)
        return [Row(self._code.colours.unfinished(line), True)]
