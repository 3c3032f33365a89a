"""Parser of JSON that arrives in pieces (`read_value`), for the arguments of calls; and of literals in Python.

A value is emitted piece by piece as far as it is valid, so that a stream can send incomplete arguments. From the pieces
`{"a": "x`, `y"}`, it emits `{"a": "x` and `y"}`. Small models make mistakes, which it corrects: control characters in
strings and backslashes that begin no escape (`"C:\\dir"`) are escaped, commas before closing brackets are dropped, and
`True`, `False` and `None` become JSON.
"""

from __future__ import annotations

import ast
import json
import math
import re
from typing import Any

from ngramspec.tool_calls.deltas import SPACE, Emit, Reader, Reads, find_closers

PYTHON_STRING = r"""(?:'{3}.*?'{3}|"{3}.*?"{3}|'[^'\\]*(?:\\.[^'\\]*)*'|"[^"\\]*(?:\\.[^"\\]*)*")"""
"""Pattern of a string in Python, which requires `re.DOTALL`."""

MAX_DEPTH = 100
"""Maximum depth of lists and objects within each other; templates and many parsers of JSON have a limit."""

_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
_NEXT_PARTS = {",}": "key", ",]": "item"}  # parts after a comma, by the bracket that ends the list or object
_WORD = re.compile(r"[A-Za-z0-9+.-]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_ESCAPE = re.compile(r'\\["\\/bfnrt]|(?:\\u[0-9a-fA-F]{4}){1,2}')
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
_PAIR = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_ESCAPES = [f"\\{character}" for character in '"\\/bfnrtu']
_JSON_WORDS = {"true": "True", "false": "False", "null": "None"}
_PYTHON_WORDS = {word: name for name, word in _JSON_WORDS.items()}
_PYTHON_PART = re.compile(rf"{PYTHON_STRING}|\b(?:true|false|null)\b", re.DOTALL)
_PYTHON_ESCAPE = re.compile(r"\\(.)", re.DOTALL)


def read_value(reader: Reader, emit: Emit) -> Reads[bool]:
    """Parse and emit a JSON value whose first character comes next; return True if it is complete.

    If it is not, the reader is at the first character that was not emitted. Commas and keys are emitted with the value
    after them, so that `find_closers` can complete the emitted text.
    """
    brackets, held = list[str](), list[str]()
    start = reader.at  # index of the first held character
    expected_part = "value"  # or "item" of a list, "key", ":", ","
    while True:
        start = start if held else reader.at
        character = yield from reader.peek()
        if character and SPACE.fullmatch(character) and brackets:
            yield from reader.run(SPACE, held.append)
            continue
        if brackets and character == brackets[-1] and expected_part in {"item", "key", ","}:
            emit("".join(held).replace(",", "") + (yield from reader.read(1)))
            brackets.pop()
            expected_part = ","
        elif expected_part == "key":
            if character != '"' or not (yield from _read_string(reader, held.append)):
                break
            expected_part = ":"
            continue
        elif expected_part in {":", ","}:
            if character != expected_part:
                break
            held.append((yield from reader.read(1)))
            expected_part = _NEXT_PARTS.get(expected_part + brackets[-1], "value")
            continue
        elif character in {"{", "["} and len(brackets) < MAX_DEPTH:
            emit("".join(held) + (yield from reader.read(1)))
            brackets.append("}" if character == "{" else "]")
            expected_part = _NEXT_PARTS["," + brackets[-1]]
        elif (yield from _read_leaf(reader, emit, held)):
            expected_part = ","
        else:
            break
        held.clear()
        if not brackets:
            return True
    reader.at = start if held else reader.at
    return False


def read_string(reader: Reader) -> Reads[str | None]:
    """Parse a JSON string and return it decoded; `None` if no complete string comes next."""
    parts: list[str] = []
    if (yield from reader.peek()) != '"' or not (yield from _read_string(reader, parts.append)):
        return None
    text: str = json.loads("".join(parts))
    return text


def read_literal(text: str, *, only_json: bool = False) -> Any:
    """Return the value of a literal in JSON or Python, which JSON can express; raise a ValueError for other texts."""
    try:
        try:
            value = json.loads(text)
        except ValueError:
            if only_json:
                raise
            value = ast.literal_eval(_PYTHON_PART.sub(_to_python, text.strip()))
        return json.loads(json.dumps(value, allow_nan=False))
    except (SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError("not a literal") from error


def complete_object(text: str) -> dict[str, Any] | None:
    """Return the object that a text begins, as far as it is JSON; `None` if it does not begin one."""
    reader, parts = Reader(), list[str]()
    reader.feed(text.lstrip())
    reader.ended = True
    for _ in read_value(reader, parts.append):
        pass
    start = "".join(parts)
    return read_object(start + find_closers(start)) if start.startswith("{") else None


def read_object(text: str) -> dict[str, Any] | None:
    """Return the object in JSON, which may also be null or a string with an object; `None` for other texts."""
    try:
        value = json.loads(text)
        value = json.loads(value) if isinstance(value, str) else value
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return None
    value = {} if value is None else value
    return value if isinstance(value, dict) else None


def to_json(value: Any) -> str:
    """Return a value as JSON, without halves of surrogate pairs."""
    return json.dumps(value, ensure_ascii=False).encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def escape(text: str) -> str:
    """Return a piece of text as part of a JSON string."""
    return to_json(text)[1:-1]


def _read_string(reader: Reader, emit: Emit) -> Reads[bool]:
    emit((yield from reader.read(1)))
    while True:
        yield from reader.run(_PLAIN, emit)
        character = yield from reader.peek()
        if character == '"':
            emit((yield from reader.read(1)))
            return True
        if character == "\\":
            # An escape is read only when it is complete, so that half an escape is never emitted.
            start = reader.at
            text = (yield from reader.take(*_ESCAPES)) or ""
            text += (yield from reader.read(4)) if text == "\\u" else ""
            end = reader.at
            if _SURROGATE.fullmatch(text):
                text += yield from reader.read(6)
                if not _PAIR.fullmatch(text):
                    text, reader.at = "\\ufffd", end  # many parsers of JSON reject half of a pair
            if reader.cut and reader.ran_out:
                return False
            if not _ESCAPE.fullmatch(text):
                text, reader.at = "\\\\", start + 1
            emit(text)
        elif character:
            emit(escape((yield from reader.read(1))))
        else:
            return False


def _read_leaf(reader: Reader, emit: Emit, held: list[str]) -> Reads[bool]:
    """Parse and emit a string, number or word after the held text; return True if it is complete."""
    if (yield from reader.peek()) == '"':
        emit("".join(held))
        held.clear()
        return (yield from _read_string(reader, emit))
    start, parts = reader.at, list[str]()
    yield from reader.run(_WORD, parts.append)
    word = "".join(parts)
    word = _PYTHON_WORDS.get(word, word)
    if not _SCALAR.fullmatch(word):
        reader.at = start
        return False
    is_number = word not in _JSON_WORDS
    emit("".join(held) + (to_json(word) if is_number and math.isinf(float(word)) else word))  # too large for a number
    return True


def _to_python(match: re.Match[str]) -> str:
    """Return a word or string as Python, in which line breaks and unknown escapes are errors."""
    text = match[0]
    if text in _JSON_WORDS:
        return _JSON_WORDS[text]
    text = _PYTHON_ESCAPE.sub(lambda escape: escape[0] if escape[1] in "\\'\"abfnrtvxuU" else f"\\{escape[0]}", text)
    return text if text[:3] in {"'''", '"""'} else text.replace("\r", "\\r").replace("\n", "\\n")
