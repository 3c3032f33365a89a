"""JSON as it arrives: a value is passed on piece by piece as far as it is valid.

One liberty is taken: a line break or another control character that stands in a string as it is, as small models write
it, is passed on escaped.
"""

from __future__ import annotations

import json
import re

from ngramspec.tool_calls.reader import SPACE, Emit, Reader, Reads

_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
_WORD = re.compile(r"[A-Za-z0-9+.-]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_HEX = re.compile(r"[0-9a-fA-F]{4}")


def read_value(reader: Reader, emit: Emit) -> Reads[bool]:
    """Pass a JSON value on, whose first character comes next; whether it is whole.

    If not, the reader stands where it stopped being one.
    """
    brackets: list[str] = []
    wanted = "value"  # or "key", ":", ","; with "first", what is open may also end here
    first = False
    while True:
        character = yield from reader.peek()
        if character and SPACE.fullmatch(character) and brackets:
            yield from reader.run(SPACE, emit)
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
            reader.hold()
            escaped = yield from reader.take(*_ESCAPES)
            code = (yield from reader.read(4)) if escaped == "\\u" else ""
            whole = escaped is not None and bool(escaped != "\\u" or _HEX.fullmatch(code))
            reader.release(back=not whole)
            if not whole:
                return False
            emit(f"{escaped}{code}")
        elif character:
            emit(escape((yield from reader.read(1))))
        else:
            return False


_ESCAPES = [f"\\{character}" for character in '"\\/bfnrtu']


def _read_scalar(reader: Reader, emit: Emit) -> Reads[bool]:
    parts: list[str] = []
    reader.hold()
    yield from reader.run(_WORD, parts.append)
    word = "".join(parts)
    whole = bool(_SCALAR.fullmatch(word))
    reader.release(back=not whole)
    emit(word if whole else "")
    return whole
