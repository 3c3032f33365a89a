"""Parsers of calls with JSON arguments and of calls in Python, and of lists of calls.

A call is a JSON object such as `{"name": "f", "arguments": {...}}`, a name and arguments between marks, or an item of a
Python list such as `[f(city="Paris"), g()]`.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Container, Mapping
from functools import partial
from typing import Any

from ngramspec.tool_calls.deltas import Deltas, Reader, Reads, Tools
from ngramspec.tool_calls.json_stream import read_string, read_value

_ARGUMENTS = frozenset({"arguments", "parameters"})
_KEYS = _ARGUMENTS | {"id", "type"}

ReadCall = Callable[[Reader, Deltas, Tools], Reads[bool]]
"""Parser of the text after the start of a call, which returns True if a call began. Otherwise the reader's position is
undefined."""


def make_list_parsers(ends: Mapping[str, str], item: str, read_call: ReadCall) -> dict[str, ReadCall]:
    """Return the parsers of a list of calls, by the strings that they begin with.

    `ends` maps the strings that open a list to those that close it. `item` comes before each call, and may also begin a
    list. `read_call` parses one call.
    """

    def read(reader: Reader, answer: Deltas, tools: Tools, *, end: str, has_begun: bool) -> Reads[bool]:
        if has_begun and not (yield from read_call(reader, answer, tools)):
            return False
        while True:
            before = reader.at
            yield from reader.skip_space()
            marker = yield from reader.take(item, end)
            if marker == item and (yield from read_call(reader, answer, tools)):
                has_begun = True
                continue
            if has_begun and marker is None:
                yield from reader.skip(item, end)
            elif has_begun and marker == item:
                reader.at = before
            return has_begun

    parsers: dict[str, ReadCall] = {start: partial(read, end=end, has_begun=False) for start, end in ends.items()}
    return {**parsers, item: partial(read, end=next(iter(ends.values())), has_begun=True)}


def make_object_parser(*ends: str, known_only: bool = False) -> ReadCall:
    """Return a parser of calls that are JSON objects before one of `ends`; for `known_only` see `read_calls`."""

    def read(reader: Reader, answer: Deltas, tools: Tools) -> Reads[bool]:
        yield from reader.skip_space()
        has_begun = yield from read_calls(reader, answer, tools if known_only else None)
        yield from reader.skip(*ends)
        return has_begun

    return read


def make_named_parser(
    separator: str, name: str, end: str = "", *, fence: str = "", or_objects: bool = False
) -> ReadCall:
    """Return a parser of calls that consist of a name, a separator, and JSON arguments.

    Args:
        separator: String after the name.
        name: Pattern of the text before the separator, whose group is the name.
        end: String at the end of the call.
        fence: String after the name, in the form in which the name is after the separator; "" excludes that form.
        or_objects: Whether calls may also be JSON objects.
    """
    pattern = re.compile(name, re.DOTALL)

    def read(reader: Reader, answer: Deltas, tools: Tools) -> Reads[bool]:
        if or_objects:
            yield from reader.skip_space()
            if (yield from reader.peek()) in {"[", "{"}:
                return (yield from read_calls(reader, answer))
        before, marker = yield from reader.read_before(separator)
        if not marker:
            return False
        yield from reader.skip_space()
        in_fence = bool(fence) and (yield from reader.peek()) != "{"
        if in_fence:
            before, _ = yield from reader.read_before(fence, end)
            yield from reader.skip_space()
        match = pattern.fullmatch(before.strip())
        is_complete = (yield from read_arguments(reader, answer, match[1])) if match else None
        if is_complete and in_fence:
            yield from reader.skip("```")
        if is_complete and end:
            yield from reader.skip(end)
        return is_complete is not None

    return read


def read_calls(reader: Reader, answer: Deltas, names: Container[str] | None = None) -> Reads[bool]:
    """Parse one call or a JSON list of calls; return True if a call began.

    With `names`, an object with another name, without arguments, or with keys that calls do not have, is not a call.
    """
    if not (yield from reader.take("[")):
        return (yield from _read_call(reader, answer, names))
    yield from reader.skip_space()
    if not (yield from _read_call(reader, answer, names)):
        return False
    while True:
        before = reader.at
        yield from reader.skip_space()
        if not (yield from reader.take(",")):
            yield from reader.take("]")
            return True
        yield from reader.skip_space()
        if not (yield from _read_call(reader, answer, names)):
            reader.at = before
            return True


def read_arguments(reader: Reader, answer: Deltas, name: str) -> Reads[bool | None]:
    """Begin a call if its arguments come next, and add them to the answer; return whether they are complete.

    Arguments are a JSON object, a JSON string that contains one, or null. `None` means that no call began.
    """
    opening = yield from reader.peek()
    if opening == "{":
        answer.begin_call(name)
        return (yield from read_value(reader, answer.add_arguments))
    text = yield from read_string(reader) if opening == '"' else reader.take("null")
    arguments = text and _object(text)
    if not arguments:
        return None
    answer.begin_call(name, arguments)
    return True


def _read_call(reader: Reader, answer: Deltas, names: Container[str] | None) -> Reads[bool]:
    """Parse a call that is a JSON object; return True if it began."""
    name: str | None = None
    early_arguments: str | None = None  # arguments that came before the name
    has_begun = False
    separator: str | None = ","
    if not (yield from reader.take("{")):
        return False
    while separator == ",":
        yield from reader.skip_space()
        if (yield from reader.take("}")):
            break
        key = yield from read_string(reader)
        yield from reader.skip_space()
        if key is None or not (yield from reader.take(":")):
            return has_begun
        yield from reader.skip_space()
        if key == "name" and name is None:
            name = yield from read_string(reader)
            is_complete = bool(name) and (names is None or name in names)
        elif key in _ARGUMENTS and name is not None and not has_begun:
            read = yield from read_arguments(reader, answer, name)
            has_begun, is_complete = read is not None, bool(read)
        else:
            parts: list[str] = []
            is_complete = (names is None or key in _KEYS) and (yield from read_value(reader, parts.append))
            if key in _ARGUMENTS and early_arguments is None:
                early_arguments = "".join(parts)
        if not is_complete:
            return has_begun
        yield from reader.skip_space()
        separator = yield from reader.take(",", "}")
    if has_begun or name is None or (early_arguments is None and names is not None):
        return has_begun
    arguments = _object(early_arguments or "null")
    if arguments is None:
        return False
    answer.begin_call(name, arguments)
    return True


def _object(text: str) -> str | None:
    """Return the JSON object in a text, which may also be null or a string with an object; `None` for other texts."""
    try:
        value = json.loads(text)
        value = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return None
    value = {} if value is None else value
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else None


# --------------------------------------------------------------------------------------- Python


def make_python_parser(end: str, *, known_only: bool = False) -> ReadCall:
    """Return a parser of calls that are Python expressions or JSON objects; for `known_only` see `read_calls`."""
    read_objects = make_object_parser(end, known_only=known_only)

    def read(reader: Reader, answer: Deltas, tools: Tools) -> Reads[bool]:
        yield from reader.skip_space()
        if (yield from reader.peek()) == "{":
            return (yield from read_objects(reader, answer, tools))
        # The text is parsed as a whole, because only its end shows that it contains calls.
        source, marker = yield from reader.read_before(end)
        calls = _python_calls(source.strip()) if marker else []
        if not calls or not all(name in tools for name, _ in calls):
            return False
        for name, arguments in calls:
            answer.begin_call(name, arguments)
        return True

    return read


def _python_calls(source: str) -> list[tuple[str, str]]:
    """Return the names and JSON arguments of the calls in an expression; [] if it contains anything else."""
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
