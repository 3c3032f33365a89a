"""Parser of JSON that arrives in pieces (`read_value`), for the arguments of calls.

A value is emitted piece by piece as far as it is valid, so that a stream can send incomplete arguments. From the pieces
`{"a": "x`, `y"}`, it emits `{"a": "x` and `y"}`. Control characters in strings are escaped, because small models write
line breaks unescaped.
"""

from __future__ import annotations

import json
import re

from ngramspec.tool_calls.deltas import SPACE, Emit, Reader, Reads

_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
_WORD = re.compile(r"[A-Za-z0-9+.-]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_HEX = re.compile(r"[0-9a-fA-F]{4}")
_ESCAPES = [f"\\{character}" for character in '"\\/bfnrtu']


def read_value(reader: Reader, emit: Emit) -> Reads[bool]:
    """Parse and emit a JSON value whose first character comes next; return True if it is complete.

    If it is not, the reader is at the first character that is not part of the value.
    """
    brackets: list[str] = []
    expected_part = "value"  # or "key", ":", ","; if `first` is set, the open list or object may also end here
    first = False
    while True:
        character = yield from reader.peek()
        if character and SPACE.fullmatch(character) and brackets:
            yield from reader.run(SPACE, emit)
            continue
        if brackets and character == brackets[-1] and (first or expected_part == ","):
            emit((yield from reader.read(1)))
            brackets.pop()
            expected_part, first = ",", False
        elif expected_part in {":", ","}:
            if character != expected_part:
                return False
            emit((yield from reader.read(1)))
            expected_part, first = ("key" if expected_part == "," and brackets[-1] == "}" else "value"), False
        elif expected_part == "key":
            if character != '"' or not (yield from _read_string(reader, emit)):
                return False
            expected_part, first = ":", False
        elif character and character in "{[":
            emit((yield from reader.read(1)))
            brackets.append("}" if character == "{" else "]")
            expected_part, first = ("key" if character == "{" else "value"), True
        else:
            is_complete = yield from (_read_string if character == '"' else _read_scalar)(reader, emit)
            if not is_complete:
                return False
            expected_part, first = ",", False
        if expected_part == "," and not brackets:
            return True


def read_string(reader: Reader) -> Reads[str | None]:
    """Parse a JSON string and return it decoded; `None` if no complete string comes next."""
    parts: list[str] = []
    if (yield from reader.peek()) != '"' or not (yield from _read_string(reader, parts.append)):
        return None
    text: str = json.loads("".join(parts))
    return text


def quote(text: str) -> str:
    """Return a text as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def escape(text: str) -> str:
    """Return a piece of text as part of a JSON string."""
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
            # An escape is read only when it is complete and valid, so that half an escape is never emitted.
            start = reader.at
            escape_start = yield from reader.take(*_ESCAPES)
            code = (yield from reader.read(4)) if escape_start == "\\u" else ""
            if escape_start is None or (escape_start == "\\u" and not _HEX.fullmatch(code)):
                reader.at = start
                return False
            emit(f"{escape_start}{code}")
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
