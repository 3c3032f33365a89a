"""`Reader`: text that arrives in pieces, read as if it were there at once.

What reads is a generator, which yields where it needs more text than has come: what it decides depends on the text
alone, never on where it was cut.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Generator
from typing import TypeVar

T = TypeVar("T")
Reads = Generator[None, None, T]
Emit = Callable[[str], None]

SPACE = re.compile(r"[ \t\r\n]*")


class Reader:
    """The text that has come, and how far it was read."""

    def __init__(self) -> None:
        self.ended = False  # whether no more will come
        self.cut = False  # whether there would have been more: what had begun to be a mark is then dropped
        self._text, self._at = "", 0
        self._mark: int | None = None
        self._hold: int | None = None

    def feed(self, piece: str) -> None:
        """More text."""
        keep = min(place for place in (self._at, self._mark, self._hold) if place is not None)
        self._text = self._text[keep:] + piece
        self._at -= keep
        self._mark = None if self._mark is None else self._mark - keep
        self._hold = None if self._hold is None else self._hold - keep

    def mark(self, before: int = 0) -> None:
        """Remember this place, or that so many characters before it, for `back`."""
        self._mark = self._at - before

    def back(self) -> None:
        """Go back to the place that was marked, unless `forget` was called since."""
        if self._mark is not None:
            self._at, self._mark = self._mark, None

    def hold(self) -> None:
        """Remember this place for `release`: a word that may turn out to be none, within what was marked or not."""
        self._hold = self._at

    def release(self, back: bool) -> None:
        """Forget the place of `hold`, and go back to it if so wanted."""
        if back and self._hold is not None:
            self._at = self._hold
        self._hold = None

    def rest(self) -> str:
        """What has come and is not read."""
        return self._text[self._at :]

    def unread(self, count: int) -> None:
        """Go back so many characters, none of which came before the last wait for text."""
        self._at -= count

    def forget(self) -> None:
        """There will be no way back: the text read so far need not be held."""
        self._mark = None

    def peek(self) -> Reads[str]:
        """The next character, unread; "" at the end."""
        while self._at == len(self._text):
            if self.ended:
                return ""
            yield
        return self._text[self._at]

    def read(self, count: int) -> Reads[str]:
        """The next characters; fewer at the end."""
        while len(self._text) - self._at < count and not self.ended:
            yield
        found = self._text[self._at : self._at + count]
        self._at += len(found)
        return found

    def run(self, characters: re.Pattern[str], emit: Emit) -> Reads[None]:
        """Emit characters as long as they are of a kind; `characters` matches any number of them."""
        while True:
            match = characters.match(self._text, self._at)
            end = match.end() if match else self._at
            if end > self._at:
                emit(self._text[self._at : end])
                self._at = end
            if end < len(self._text) or self.ended:
                return
            yield

    def space(self) -> Reads[None]:
        """Skip white space."""
        yield from self.run(SPACE, lambda _: None)

    def take(self, *literals: str) -> Reads[str | None]:
        """Read the longest of some strings that comes next; None where none of them does."""
        while True:
            longest = max((word for word in literals if self._text.startswith(word, self._at)), key=len, default=None)
            rest = self._text[self._at : self._at + max(map(len, literals))]
            if self.ended or not any(len(word) > len(rest) and word.startswith(rest) for word in literals):
                self._at += len(longest or "")
                return longest
            yield

    def skip(self, *ends: str) -> Reads[None]:
        """Skip white space and, if one of some strings follows, that; or its beginning, where the text breaks off."""
        yield from self.space()
        if (yield from self.take(*ends)) is None and self.ended:
            rest = self._text[self._at :]
            if any(end.startswith(rest) for end in ends):
                self._at = len(self._text)

    def until(self, markers: Collection[str], emit: Emit) -> Reads[str | None]:
        """Emit what comes before the first of some strings, and read that string; None: the text ended without one.

        What could begin one of them is held back. None of the strings may begin with another.
        """
        while True:
            text, at = self._text, self._at
            places = [(place, marker) for marker in markers if (place := text.find(marker, at)) >= 0]
            place, found = min(places, default=(len(text), None))
            begun = min(place, _begun(text, at, markers))
            held = place if self.ended and not (self.cut and len(text) - begun > 1) else begun
            if held > at:
                emit(text[at:held])
                self._at = held
            if held == place and found is not None:
                self._at += len(found)
                return found
            if self.ended:
                return None
            yield


def _begun(text: str, at: int, markers: Collection[str]) -> int:
    """Where the longest end of a text begins that one of the markers may begin with."""
    longest = max(map(len, markers), default=1)
    for start in range(max(at, len(text) - longest + 1), len(text)):
        if any(marker.startswith(text[start:]) for marker in markers):
            return start
    return len(text)
