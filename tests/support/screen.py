"""A terminal in memory: rows that scroll away, a cursor, wide characters, and the few commands that chat may send."""

from __future__ import annotations

import re

from wcwidth import wcwidth

_COMMAND = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])")


class Screen:
    """What a terminal shows of what is written to it, as a line discipline passes it on (a newline is a new line).

    Args:
        columns, lines: its size.

    Raises:
        AssertionError: on a control character or a command that no answer may send.
    """

    def __init__(self, columns: int, lines: int) -> None:
        self.columns, self.lines = columns, lines
        self._rows: list[list[str]] = [[]]
        self._joined: list[bool] = [False]
        self._y = self._x = 0
        self._wrap = True

    def write(self, text: str) -> None:
        """Take what a program writes."""
        at = 0
        while at < len(text):
            if text[at] == "\x1b":
                found = _COMMAND.match(text, at)
                assert found, f"a broken command: {text[at : at + 20]!r}"
                self._command(found[1], found[2])
                at = found.end()
            else:
                self._character(text[at])
                at += 1

    def _command(self, arguments: str, letter: str) -> None:
        if letter == "A":
            self._y = max(self._y - int(arguments), self._top, 0)
        elif letter == "C":
            assert arguments == ""
            self._x += 1
        elif letter == "J":
            assert arguments == ""
            assert (self._y, self._x) != (max(self._top, 0), 0), "tmux keeps what is cleared from its top left on"
            del self._rows[self._y + 1 :], self._joined[self._y + 1 :]
            del self._rows[self._y][self._x :]
        elif letter == "K":
            assert arguments == ""
            del self._rows[self._y][self._x :]
        elif (arguments, letter) in (("?7", "l"), ("?7", "h")):
            self._wrap = letter == "h"
        else:
            assert letter == "m", f"an unexpected command {arguments}{letter}"

    def _character(self, character: str) -> None:
        if character == "\n":
            self._next(joined=False)
        elif character == "\r":
            self._x = 0
        elif character == "\t":
            for _ in range(min(8 - self._x % 8, self.columns - self._x)):
                self._put(" ")
        else:
            assert ord(character) >= 0x20
            assert not 0x7F <= ord(character) < 0xA0
            width = wcwidth(character)
            if width <= 0:
                if self._rows[self._y] and self._x:
                    self._rows[self._y][self._x - 1] += character
                return
            if self._x + width > self.columns:
                if self._wrap:
                    self._next(joined=True)
                else:
                    self._x = self.columns - width
            self._put(character)
            for _ in range(width - 1):
                self._put("")

    def _put(self, cell: str) -> None:
        row = self._rows[self._y]
        row += [" "] * (self._x - len(row))
        row[self._x : self._x + 1] = [cell]
        self._x += 1

    def _next(self, *, joined: bool) -> None:
        self._y, self._x = self._y + 1, 0
        if self._y == len(self._rows):
            self._rows.append([])
            self._joined.append(False)
        self._joined[self._y] = joined

    @property
    def _top(self) -> int:
        return len(self._rows) - self.lines

    @property
    def text(self) -> str:
        """All that was shown, what scrolled away included; rows that the terminal itself broke are joined."""
        found = ""
        for row, joined in zip(self._rows, self._joined, strict=True):
            found += ("" if joined else "\n") + "".join(row)
        return found[1:]

    @property
    def cursor(self) -> tuple[int, int]:
        """Row, from the top of what was ever shown, and column."""
        return self._y, self._x
