"""Calls written as JSON objects that name the tool: `{"name": "f", "arguments": {...}}`, one or a list of them."""

from __future__ import annotations

import json
from collections.abc import Container

from ngramspec.tool_calls.answer import Answer
from ngramspec.tool_calls.json_text import read_string, read_value
from ngramspec.tool_calls.reader import Reader, Reads

_ARGUMENTS = frozenset({"arguments", "parameters"})
_OTHER = frozenset({"id", "type"})


def read_arguments(reader: Reader, answer: Answer, name: str, given: str | None = None) -> Reads[bool]:
    """Begin a call if its arguments come next, and pass them on; whether it was begun.

    They are a JSON object, or one written as a JSON string, or null for none.
    """
    opening = yield from reader.peek()
    if opening == "{":
        reader.forget()
        call = answer.begin(name, given)
        yield from read_value(reader, lambda text: answer.arguments(call, text))
        return True
    text = yield from read_string(reader) if opening == '"' else reader.take("null")
    whole = "{}" if text == "null" else text and _object(text)
    if not whole:
        return False
    reader.forget()
    answer.arguments(answer.begin(name, given), whole)
    return True


def read_call(
    reader: Reader, answer: Answer, known: Container[str] | None = None, *, strict: bool = False
) -> Reads[bool]:
    """A call as an object, whose brace comes next; whether it was begun.

    Args:
        reader: the text.
        answer: takes the call.
        known: names of tools; another is no call. None: any name is one.
        strict: an object without arguments, or with keys that a call does not have, is no call.
    """
    if not (yield from reader.take("{")):
        return False
    name: str | None = None
    held: str | None = None  # arguments that came before the name
    begun = False
    while True:
        yield from reader.space()
        if (yield from reader.take("}")):
            break
        key = yield from read_string(reader)
        yield from reader.space()
        if key is None or not (yield from reader.take(":")):
            return begun
        yield from reader.space()
        if key == "name" and name is None:
            name = yield from read_string(reader)
            if not name or not name.isprintable() or (known is not None and name not in known):
                return False
        elif key in _ARGUMENTS and not begun and name is not None:
            begun = yield from read_arguments(reader, answer, name)
            if not begun:
                return False
        elif strict and key not in _ARGUMENTS | _OTHER:
            return begun
        else:
            parts: list[str] = []
            if not (yield from read_value(reader, parts.append)):
                return begun
            if key in _ARGUMENTS and held is None:
                held = "".join(parts)
        yield from reader.space()
        if not (yield from reader.take(",")):
            yield from reader.take("}")
            break
    if begun or name is None or (held is None and strict):
        return begun
    whole = "{}" if held in {None, "null"} else _object(held or "")
    if whole is None:
        return False
    reader.forget()
    answer.arguments(answer.begin(name), whole)
    return True


def read_calls(
    reader: Reader, answer: Answer, known: Container[str] | None = None, *, strict: bool = False
) -> Reads[bool]:
    """One call or a JSON list of them; whether one was begun."""
    if not (yield from reader.take("[")):
        return (yield from read_call(reader, answer, known, strict=strict))
    yield from reader.space()
    if not (yield from read_call(reader, answer, known, strict=strict)):
        return False
    while True:
        reader.mark()
        yield from reader.space()
        if not (yield from reader.take(",")):
            yield from reader.take("]")
            reader.forget()
            return True
        yield from reader.space()
        if not (yield from read_call(reader, answer, known, strict=strict)):
            reader.back()
            return True


def _object(text: str) -> str | None:
    """A text that is a JSON object, or holds one as a string; None for any other."""
    try:
        value = json.loads(text)
        value = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return None
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else None
