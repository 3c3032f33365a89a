"""`Reader`: text that arrives in pieces, read as if it were there at once, and the JSON in it.

What reads is a generator, which yields where it needs more text than has come: what it decides depends on the text
alone, never on where it was cut. JSON is passed on piece by piece as far as it is valid; control characters in strings,
as small models write line breaks, are passed on escaped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Generator
from typing import TypeVar

T = TypeVar("T")
Reads = Generator[None, None, T]
Emit = Callable[[str], None]

_SPACE = re.compile(r"[ \t\r\n]*")
_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
_WORD = re.compile(r"[A-Za-z0-9+.-]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_HEX = re.compile(r"[0-9a-fA-F]{4}")
_ESCAPES = [f"\\{character}" for character in '"\\/bfnrtu']


class Reader:
    """The text that has come, and how far it was read."""

    def __init__(self) -> None:
        self.at = 0  # the next character's place; setting it back reads again
        self.ended = False  # whether no more will come
        self.cut = False  # whether there would have been more: what had begun to be a mark is then dropped
        self._text = ""

    def feed(self, piece: str) -> None:
        """More text."""
        self._text += piece

    def rest(self) -> str:
        """What has come and is not read."""
        return self._text[self.at :]

    def peek(self) -> Reads[str]:
        """The next character, unread; "" at the end."""
        while self.at == len(self._text):
            if self.ended:
                return ""
            yield
        return self._text[self.at]

    def read(self, count: int) -> Reads[str]:
        """The next characters; fewer at the end."""
        while len(self._text) - self.at < count and not self.ended:
            yield
        found = self._text[self.at : self.at + count]
        self.at += len(found)
        return found

    def run(self, characters: re.Pattern[str], emit: Emit) -> Reads[None]:
        """Emit characters as long as they are of a kind; `characters` matches any number of them."""
        while True:
            match = characters.match(self._text, self.at)
            end = match.end() if match else self.at
            if end > self.at:
                emit(self._text[self.at : end])
                self.at = end
            if end < len(self._text) or self.ended:
                return
            yield

    def space(self) -> Reads[None]:
        """Skip white space."""
        yield from self.run(_SPACE, lambda _: None)

    def take(self, *literals: str) -> Reads[str | None]:
        """Read the longest of some strings that comes next; None where none of them does."""
        while True:
            longest = max((word for word in literals if self._text.startswith(word, self.at)), key=len, default=None)
            rest = self._text[self.at : self.at + max(map(len, literals))]
            if self.ended or not any(len(word) > len(rest) and word.startswith(rest) for word in literals):
                self.at += len(longest or "")
                return longest
            yield

    def skip(self, *ends: str) -> Reads[None]:
        """Skip white space and, if one of some strings follows, that; or its beginning, where the text breaks off."""
        yield from self.space()
        if (yield from self.take(*ends)) is None and self.ended and any(end.startswith(self.rest()) for end in ends):
            self.at = len(self._text)

    def until(self, markers: Collection[str], emit: Emit) -> Reads[str | None]:
        """Emit what comes before the first of some strings, and read that string; None: the text ended without one.

        What could begin one of them is held back. None of the strings may begin with another.
        """
        while True:
            text, at = self._text, self.at
            places = [(place, marker) for marker in markers if (place := text.find(marker, at)) >= 0]
            place, found = min(places, default=(len(text), None))
            begun = min(place, _begun(text, at, markers))
            held = place if self.ended and not (self.cut and len(text) - begun > 1) else begun
            if held > at:
                emit(text[at:held])
                self.at = held
            if held == place and found is not None:
                self.at += len(found)
                return found
            if self.ended:
                return None
            yield

    def before(self, *markers: str) -> Reads[tuple[str, str | None]]:
        """What comes before the first of some strings, all at once, and that string; as `until` finds it."""
        parts: list[str] = []
        found = yield from self.until(markers, parts.append)
        return "".join(parts), found


def _begun(text: str, at: int, markers: Collection[str]) -> int:
    """Where the longest end of a text begins that one of the markers may begin with."""
    longest = max(map(len, markers), default=1)
    for start in range(max(at, len(text) - longest + 1), len(text)):
        if any(marker.startswith(text[start:]) for marker in markers):
            return start
    return len(text)


# --------------------------------------------------------------------------- JSON


def read_value(reader: Reader, emit: Emit) -> Reads[bool]:
    """Pass a JSON value on, whose first character comes next; whether it is whole.

    If not, the reader stands where it stopped being one.
    """
    brackets: list[str] = []
    wanted = "value"  # or "key", ":", ","; with "first", what is open may also end here
    first = False
    while True:
        character = yield from reader.peek()
        if character and _SPACE.fullmatch(character) and brackets:
            yield from reader.run(_SPACE, emit)
            continue
        if brackets and character == brackets[-1] and (first or wanted == ","):
            emit((yield from reader.read(1)))
            brackets.pop()
            wanted, first = ",", False
        elif wanted in {":", ","}:
            if character != wanted:
                return False
            emit((yield from reader.read(1)))
            wanted, first = ("key" if wanted == "," and brackets[-1] == "}" else "value"), False
        elif wanted == "key":
            if character != '"' or not (yield from _read_string(reader, emit)):
                return False
            wanted, first = ":", False
        elif character and character in "{[":
            emit((yield from reader.read(1)))
            brackets.append("}" if character == "{" else "]")
            wanted, first = ("key" if character == "{" else "value"), True
        else:
            whole = yield from (_read_string if character == '"' else _read_scalar)(reader, emit)
            if not whole:
                return False
            wanted, first = ",", False
        if wanted == "," and not brackets:
            return True


def read_string(reader: Reader) -> Reads[str | None]:
    """The string whose opening quote comes next, decoded; None if there is none."""
    parts: list[str] = []
    if (yield from reader.peek()) != '"' or not (yield from _read_string(reader, parts.append)):
        return None
    text: str = json.loads("".join(parts))
    return text


def quote(text: str) -> str:
    """A text as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def escape(text: str) -> str:
    """A piece of text as it stands within a JSON string."""
    return quote(text)[1:-1]


def _read_string(reader: Reader, emit: Emit) -> Reads[bool]:
    emit((yield from reader.read(1)))
    while True:
        yield from reader.run(_PLAIN, emit)
        character = yield from reader.peek()
        if character == '"':
            emit((yield from reader.read(1)))
            return True
        if character == "\\":
            # Read only when it is whole and known, so that what is passed on is never half an escape.
            start = reader.at
            escaped = yield from reader.take(*_ESCAPES)
            code = (yield from reader.read(4)) if escaped == "\\u" else ""
            if escaped is None or (escaped == "\\u" and not _HEX.fullmatch(code)):
                reader.at = start
                return False
            emit(f"{escaped}{code}")
        elif character:
            emit(escape((yield from reader.read(1))))
        else:
            return False


def _read_scalar(reader: Reader, emit: Emit) -> Reads[bool]:
    parts: list[str] = []
    start = reader.at
    yield from reader.run(_WORD, parts.append)
    if not _SCALAR.fullmatch(word := "".join(parts)):
        reader.at = start
        return False
    emit(word)
    return True
