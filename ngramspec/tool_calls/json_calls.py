"""Calls whose arguments are written as JSON, and rows of calls.

A call is a JSON object that names the tool, `{"name": "f", "arguments": {...}}`, or a name and arguments between marks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Mapping
from functools import partial

from ngramspec.tool_calls.deltas import Answer, Tools
from ngramspec.tool_calls.json_text import read_string, read_value
from ngramspec.tool_calls.reader import Reader, Reads

_ARGUMENTS = frozenset({"arguments", "parameters"})
_OTHER = frozenset({"id", "type"})
_FENCE = "```"

ReadCall = Callable[[Reader, Answer, Tools], Reads[bool]]
"""Reads what follows the beginning of a call; whether a call was begun.

Where none was, it may leave the reader anywhere: the text becomes content.
"""


def rows(ends: Mapping[str, str], item: str, one: ReadCall) -> dict[str, ReadCall]:
    """How calls in a row begin, and who reads them.

    `ends`: what closes a row, by what opens it. `item`: what stands before each call, which `one` reads; it may begin a
    row of its own.
    """

    def read(reader: Reader, answer: Answer, tools: Tools, *, end: str, begun: bool) -> Reads[bool]:
        if begun and not (yield from one(reader, answer, tools)):
            return False
        while True:
            if begun:
                reader.mark()
            yield from reader.space()
            found = yield from reader.take(item, end)
            if found == item and (yield from one(reader, answer, tools)):
                begun = True
                continue
            if begun and found is None:
                yield from reader.skip(item, end)
            elif begun and found == item:
                reader.back()
            return begun

    opened: dict[str, ReadCall] = {start: partial(read, end=end, begun=False) for start, end in ends.items()}
    return {**opened, item: partial(read, end=next(iter(ends.values())), begun=True)}


def objects(*ends: str, known: bool = False) -> ReadCall:
    """Reads calls as JSON objects, up to one of `ends`; `known` as `read_calls` has it."""

    def read(reader: Reader, answer: Answer, tools: Tools) -> Reads[bool]:
        yield from reader.space()
        begun = yield from read_calls(reader, answer, tools if known else None)
        yield from reader.skip(*ends)
        return begun

    return read


def named(separator: str, name: str, end: str = "", *, fence: str = "", or_objects: bool = False) -> ReadCall:
    """Reads a call whose name comes next, then a separator, and its JSON arguments.

    Args:
        separator: what stands between the two.
        name: a pattern of what stands before it, whose group is the name.
        end: what ends the call.
        fence: where it is not the arguments that follow the separator, but the name: what stands behind that.
        or_objects: whether calls as JSON objects may come instead.
    """
    pattern = re.compile(name, re.DOTALL)

    def read(reader: Reader, answer: Answer, tools: Tools) -> Reads[bool]:
        if or_objects:
            yield from reader.space()
            if (yield from reader.peek()) in {"[", "{"}:
                return (yield from read_calls(reader, answer))
        parts: list[str] = []
        if not (yield from reader.until((separator,), parts.append)):
            return False
        yield from reader.space()
        fenced = bool(fence) and (yield from reader.peek()) != "{"
        if fenced:
            parts = []
            yield from reader.until((fence, end), parts.append)
            yield from reader.space()
        match = pattern.fullmatch("".join(parts).strip())
        whole = (yield from read_arguments(reader, answer, match[1])) if match else None
        if whole and fenced:
            yield from reader.skip(_FENCE)
        if whole and end:
            yield from reader.skip(end)
        return whole is not None

    return read


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
