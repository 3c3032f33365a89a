"""Calls written as JSON objects that name the tool: `{"name": "f", "arguments": {...}}`, one or a list of them."""

from __future__ import annotations

import json
from collections.abc import Container

from ngramspec.tool_calls.answer import Answer
from ngramspec.tool_calls.json_text import read_string, read_value
from ngramspec.tool_calls.reader import Reader, Reads

_ARGUMENTS = frozenset({"arguments", "parameters"})
_OTHER = frozenset({"id", "type"})


def read_calls(reader: Reader, answer: Answer, known: Container[str] | None = None) -> Reads[bool]:
    """One call or a JSON list of them; whether one was begun.

    Args:
        reader: the text.
        answer: takes the calls.
        known: where an object may be no call at all, the tools' names: one with another name, without arguments, or
            with keys that calls do not have, is none. None: it is a call whatever it names.
    """
    if not (yield from reader.take("[")):
        return (yield from _Call(reader, answer, known).read())
    yield from reader.space()
    if not (yield from _Call(reader, answer, known).read()):
        return False
    while True:
        reader.mark()
        yield from reader.space()
        if not (yield from reader.take(",")):
            yield from reader.take("]")
            reader.forget()
            return True
        yield from reader.space()
        if not (yield from _Call(reader, answer, known).read()):
            reader.back()
            return True


def read_arguments(reader: Reader, answer: Answer, name: str) -> Reads[bool | None]:
    """Begin a call if its arguments come next, and pass them on; None if it was not begun, else whether they are whole.

    They are a JSON object, or one written as a JSON string, or null for none.
    """
    opening = yield from reader.peek()
    if opening == "{":
        reader.forget()
        call = answer.begin(name)
        return (yield from read_value(reader, lambda text: answer.arguments(call, text)))
    text = yield from read_string(reader) if opening == '"' else reader.take("null")
    whole = text and _object(text)
    if not whole:
        return None
    reader.forget()
    answer.arguments(answer.begin(name), whole)
    return True


class _Call:
    """One call as an object."""

    def __init__(self, reader: Reader, answer: Answer, known: Container[str] | None) -> None:
        self._reader, self._answer, self._known = reader, answer, known
        self._name: str | None = None
        self._held: str | None = None  # arguments that came before the name
        self._begun = False

    def read(self) -> Reads[bool]:
        """Read it, from its brace on; whether it was begun."""
        if not (yield from self._reader.take("{")):
            return False
        following: str | None = ","
        while following == ",":
            yield from self._reader.space()
            if (yield from self._reader.take("}")):
                break
            if not (yield from self._field()):
                return self._begun
            yield from self._reader.space()
            following = yield from self._reader.take(",", "}")
        if self._begun or self._name is None or (self._held is None and self._known is not None):
            return self._begun
        whole = _object(self._held or "null")
        if whole is None:
            return False
        self._reader.forget()
        self._answer.arguments(self._answer.begin(self._name), whole)
        return True

    def _field(self) -> Reads[bool]:
        """A key and its value; whether both are those of a call."""
        key = yield from read_string(self._reader)
        yield from self._reader.space()
        if key is None or not (yield from self._reader.take(":")):
            return False
        yield from self._reader.space()
        if key == "name" and self._name is None:
            self._name = yield from read_string(self._reader)
            return bool(self._name) and (self._known is None or self._name in self._known)
        if key in _ARGUMENTS and self._name is not None and not self._begun:
            said = yield from read_arguments(self._reader, self._answer, self._name)
            self._begun = said is not None
            return bool(said)
        if self._known is not None and key not in _ARGUMENTS | _OTHER:
            return False
        parts: list[str] = []
        whole = yield from read_value(self._reader, parts.append)
        if key in _ARGUMENTS and self._held is None:
            self._held = "".join(parts)
        return whole


def _object(text: str) -> str | None:
    """A text that is a JSON object, or null for an empty one, or holds one as a string; None for any other."""
    try:
        value = json.loads(text)
        value = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return None
    value = {} if value is None else value
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else None
