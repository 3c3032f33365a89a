"""Calls whose arguments are written as JSON, or all of which are Python; rows of calls; and JSON that comes in pieces.

A call is a JSON object that names the tool, `{"name": "f", "arguments": {...}}`, or a name and arguments between marks,
or one of `[f(city="Paris"), g()]`.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Container, Mapping
from functools import partial
from typing import Any

from ngramspec.tool_calls.deltas import SPACE, Deltas, Emit, Reader, Reads, Tools

_ARGUMENTS = frozenset({"arguments", "parameters"})
_KEYS = _ARGUMENTS | {"id", "type"}
_FENCE = "```"

ReadCall = Callable[[Reader, Deltas, Tools], Reads[bool]]
"""Reads what follows the beginning of a call; whether one was begun, else it may leave the reader anywhere."""


def rows(ends: Mapping[str, str], item: str, one: ReadCall) -> dict[str, ReadCall]:
    """How calls in a row begin, and who reads them. `ends`: what closes a row, by what opens it. `item`: what stands
    before each call, which `one` reads; it may begin a row of its own.
    """

    def read(reader: Reader, answer: Deltas, tools: Tools, *, end: str, begun: bool) -> Reads[bool]:
        if begun and not (yield from one(reader, answer, tools)):
            return False
        while True:
            before = reader.at
            yield from reader.space()
            found = yield from reader.take(item, end)
            if found == item and (yield from one(reader, answer, tools)):
                begun = True
                continue
            if begun and found is None:
                yield from reader.skip(item, end)
            elif begun and found == item:
                reader.at = before
            return begun

    opened: dict[str, ReadCall] = {start: partial(read, end=end, begun=False) for start, end in ends.items()}
    return {**opened, item: partial(read, end=next(iter(ends.values())), begun=True)}


def objects(*ends: str, known: bool = False) -> ReadCall:
    """Reads calls as JSON objects, up to one of `ends`; `known` as `read_calls` has it."""

    def read(reader: Reader, answer: Deltas, tools: Tools) -> Reads[bool]:
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

    def read(reader: Reader, answer: Deltas, tools: Tools) -> Reads[bool]:
        if or_objects:
            yield from reader.space()
            if (yield from reader.peek()) in {"[", "{"}:
                return (yield from read_calls(reader, answer))
        before, found = yield from reader.before(separator)
        if not found:
            return False
        yield from reader.space()
        fenced = bool(fence) and (yield from reader.peek()) != "{"
        if fenced:
            before, _ = yield from reader.before(fence, end)
            yield from reader.space()
        match = pattern.fullmatch(before.strip())
        whole = (yield from read_arguments(reader, answer, match[1])) if match else None
        if whole and fenced:
            yield from reader.skip(_FENCE)
        if whole and end:
            yield from reader.skip(end)
        return whole is not None

    return read


def read_calls(reader: Reader, answer: Deltas, known: Container[str] | None = None) -> Reads[bool]:
    """One call or a JSON list of them; whether one was begun.

    `known`: where an object may be no call at all, the tools' names: one with another name, without arguments, or with
    keys that calls do not have, is none. None: it is a call whatever it names.
    """
    if not (yield from reader.take("[")):
        return (yield from _read_call(reader, answer, known))
    yield from reader.space()
    if not (yield from _read_call(reader, answer, known)):
        return False
    while True:
        before = reader.at
        yield from reader.space()
        if not (yield from reader.take(",")):
            yield from reader.take("]")
            return True
        yield from reader.space()
        if not (yield from _read_call(reader, answer, known)):
            reader.at = before
            return True


def read_arguments(reader: Reader, answer: Deltas, name: str) -> Reads[bool | None]:
    """Begin a call if its arguments come next, and pass them on; None if it was not begun, else whether they are whole.

    They are a JSON object, or one written as a JSON string, or null for none.
    """
    opening = yield from reader.peek()
    if opening == "{":
        answer.begin(name)
        return (yield from read_value(reader, answer.arguments))
    text = yield from read_string(reader) if opening == '"' else reader.take("null")
    whole = text and _object(text)
    if not whole:
        return None
    answer.begin(name, whole)
    return True


def _read_call(reader: Reader, answer: Deltas, known: Container[str] | None) -> Reads[bool]:
    """One call as an object, from its brace on; whether it was begun."""
    name: str | None = None
    held: str | None = None  # arguments that came before the name
    begun = False
    following: str | None = ","
    if not (yield from reader.take("{")):
        return False
    while following == ",":
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
            whole = bool(name) and (known is None or name in known)
        elif key in _ARGUMENTS and name is not None and not begun:
            read = yield from read_arguments(reader, answer, name)
            begun, whole = read is not None, bool(read)
        else:
            parts: list[str] = []
            whole = (known is None or key in _KEYS) and (yield from read_value(reader, parts.append))
            if key in _ARGUMENTS and held is None:
                held = "".join(parts)
        if not whole:
            return begun
        yield from reader.space()
        following = yield from reader.take(",", "}")
    if begun or name is None or (held is None and known is not None):
        return begun
    arguments = _object(held or "null")
    if arguments is None:
        return False
    answer.begin(name, arguments)
    return True


def _object(text: str) -> str | None:
    """A text that is a JSON object, or null for an empty one, or holds one as a string; None for any other."""
    try:
        value = json.loads(text)
        value = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return None
    value = {} if value is None else value
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else None


# --------------------------------------------------------------------------------------- Python


def python(end: str, *, known: bool = False) -> ReadCall:
    """Reads calls as Python writes them, up to `end`; or as JSON objects, with `known` as `read_calls` has it."""
    as_objects = objects(end, known=known)

    def read(reader: Reader, answer: Deltas, tools: Tools) -> Reads[bool]:
        yield from reader.space()
        if (yield from reader.peek()) == "{":
            return (yield from as_objects(reader, answer, tools))
        # All at once, as only the end shows that they are calls.
        source, found = yield from reader.before(end)
        calls = _python_calls(source.strip()) if found else []
        if not calls or not all(name in tools for name, _ in calls):
            return False
        for name, arguments in calls:
            answer.begin(name, arguments)
        return True

    return read


def _python_calls(source: str) -> list[tuple[str, str]]:
    """Names and JSON arguments of the calls that an expression is; empty if it is anything else."""
    try:
        tree = ast.parse(source, mode="eval").body
        calls = tree.elts if isinstance(tree, ast.List) else [tree]
        return [_python_call(node) for node in calls]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return []


def _python_call(node: ast.expr) -> tuple[str, str]:
    if not isinstance(node, ast.Call) or node.args or not isinstance(node.func, ast.Name | ast.Attribute):
        raise ValueError("not a call with named arguments")
    arguments: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("not a named argument")
        arguments[keyword.arg] = ast.literal_eval(keyword.value)
    return ast.unparse(node.func), json.dumps(arguments, ensure_ascii=False, allow_nan=False)


# --------------------------------------------------------------------------- JSON
# It is passed on piece by piece as far as it is valid; control characters in strings, as small models write line
# breaks, are passed on escaped.

_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
_WORD = re.compile(r"[A-Za-z0-9+.-]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_HEX = re.compile(r"[0-9a-fA-F]{4}")
_ESCAPES = [f"\\{character}" for character in '"\\/bfnrtu']


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
