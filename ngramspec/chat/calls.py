"""Parsers of calls: JSON objects, names and JSON arguments between marks, Python such as `[f(city="Paris"), g()]`."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from ngramspec.chat.stream import (
    PYTHON_STRING,
    Deltas,
    Reader,
    Reads,
    Tools,
    read_literal,
    read_object,
    read_string,
    read_value,
    to_json,
)

_ARGUMENTS = frozenset({"arguments", "parameters"})
_KEYS = _ARGUMENTS | {"id", "type"}

ReadCall = Callable[[Reader, Deltas, Tools], Reads[bool]]
"""Parser of the text after the start of a call: True if a call began; if not, the reader's position is undefined."""


def make_list_parsers(ends: Mapping[str, str], item: str, read_call: ReadCall) -> dict[str, ReadCall]:
    """Return the parsers of lists of calls by their openings, which `ends` maps to closings.

    `item` comes before each call, and may also begin a list.
    """

    def read(reader: Reader, answer: Deltas, tools: Tools, *, end: str, has_begun: bool) -> Reads[bool]:
        if has_begun and not (yield from read_call(reader, answer, tools)):
            return False
        while not answer.is_full:
            before = reader.at
            marker = yield from reader.skip_space(item, end)
            if marker == item:
                yield from reader.skip_all(item)
            if marker == item and (yield from read_call(reader, answer, tools)):
                has_begun = True
                continue
            if has_begun and marker == item:
                reader.at = before
            elif has_begun:
                yield from reader.skip(*([end] if marker else [item, end]))
            return has_begun
        return True

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
    """Return a parser of calls that consist of a name, a separator, and JSON arguments; some may be JSON objects.

    The group of the pattern `name` is the name. Before `fence`, unless it is "", the name may be after the separator.
    """
    pattern = re.compile(name, re.DOTALL)

    def read(reader: Reader, answer: Deltas, tools: Tools) -> Reads[bool]:
        if or_objects:
            yield from reader.skip_space()
            if (yield from reader.peek()) in {"[", "{"}:
                return (yield from read_calls(reader, answer))
        before, marker = yield from reader.read_before(separator, *filter(None, ("{", '"', end)))
        if marker != separator:
            return False
        yield from reader.skip_all(separator)
        in_fence = bool(fence) and (yield from reader.peek()) != "{"
        if in_fence:
            before, marker = yield from reader.read_before(fence, "{")
            reader.at -= marker == "{"
            yield from reader.skip_space()
        match = pattern.fullmatch(before.strip())
        is_complete = (yield from read_arguments(reader, answer, match[1])) if match else None
        if is_complete is not None:
            yield from reader.skip(*filter(None, ("```" if in_fence else "", end)))
        return is_complete is not None

    return read


def read_calls(reader: Reader, answer: Deltas, names: Container[str] | None = None) -> Reads[bool]:
    """Parse a JSON list of calls, or calls with only white space between them; return True if a call began.

    With `names`, an object with another name, without arguments, or with other keys than those of calls is no call.
    """
    is_list = bool((yield from reader.take("[")))
    yield from reader.skip_space()
    if not (yield from _read_call(reader, answer, names)):
        return False
    while not answer.is_full:
        before = reader.at
        yield from reader.skip_space()
        if is_list and not (yield from reader.take(",")):
            yield from reader.take("]")
            break
        yield from reader.skip_space()
        if not (yield from _read_call(reader, answer, names)):
            reader.at = before
            break
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
    arguments = None if text is None else read_object(text)
    if arguments is None:
        return None
    answer.begin_call(name, to_json(arguments))
    return True


def _read_call(reader: Reader, answer: Deltas, names: Container[str] | None) -> Reads[bool]:
    """Parse a call that is a JSON object; return True if it began."""
    name: str | None = None
    early_arguments: str | None = None  # which came before the name
    has_others = False  # whether there are other keys than those of calls
    has_begun = False
    separator: str | None = ","
    if not (yield from reader.take("{")):
        return False
    while separator == ",":
        if (yield from reader.skip_space("}")):
            break
        key = yield from read_string(reader)
        if key is None or not (yield from reader.skip_space(":")):
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
            has_others = has_others or key not in _KEYS
            is_complete = (names is None or key in _KEYS) and (yield from read_value(reader, parts.append))
            if key in _ARGUMENTS and early_arguments is None:
                early_arguments = "".join(parts)
        if not is_complete:
            return has_begun
        separator = yield from reader.skip_space(",", "}")
    if has_begun or name is None or (early_arguments is None and (names is not None or has_others)):
        return has_begun
    arguments = read_object(early_arguments or "null")
    if arguments is None:
        return False
    answer.begin_call(name, to_json(arguments))
    return True


# --------------------------------------------------------------------------------------- Python


def make_python_parser(end: str, *, known_only: bool = False) -> ReadCall:
    """Return a parser of calls that are Python expressions or JSON objects; for `known_only` see `read_calls`.

    Calls of other functions than the tools, and with other arguments than named literals, are content.
    """
    read_objects = make_object_parser(end, known_only=known_only)

    def read(reader: Reader, answer: Deltas, tools: Tools) -> Reads[bool]:
        start = reader.at
        if (yield from read_objects(reader, answer, tools)):
            return True
        reader.at = start
        # The text is parsed as a whole, because only its end shows that it contains calls.
        source, marker = yield from reader.read_before(end)
        calls = list(_split_calls(source))
        if not any(name in tools and arguments is not None for name, arguments, _ in calls):
            return False
        for name, arguments, text in calls:
            if name in tools and arguments is not None:
                answer.begin_call(name, to_json(arguments))
            elif name or marker or not reader.cut:  # otherwise a limit cut this call
                answer.add_content(text)
            if answer.is_full:
                break
        if marker != "```":
            yield from reader.skip(end)
        return True

    return read


_CALL_START = re.compile(r"[\s,\[]*([^\s()\[\]{},'\"=]+)\(")
_CALL_MARK = re.compile(rf"{PYTHON_STRING}|[()\[\]{{}},]", re.DOTALL)
_CALL_END = re.compile(r"[\s,\]]*")
_NAMED = re.compile(r"\s*([^\s=]+)\s*=(.*)", re.DOTALL)


def _split_calls(source: str) -> Iterator[tuple[str, dict[str, Any] | None, str]]:
    """Yield name, arguments (`None` if they are not named literals) and text of calls, and the rest without a name."""
    at = 0
    while (match := _CALL_START.match(source, at)) is not None:
        pieces, start, depth = list[str](), match.end(), 1
        for mark in _CALL_MARK.finditer(source, start):
            depth += (mark[0] in {"(", "[", "{"}) - (mark[0] in {")", "]", "}"})
            if depth == 0 or (depth == 1 and mark[0] == ","):
                pieces.append(source[start : mark.start()])
                start = mark.end()
            if depth == 0:
                break
        else:
            break
        arguments = _read_named([piece for piece in pieces if piece.strip()])
        yield match[1], arguments, source[match.start(1) : start]
        at = start
    end = _CALL_END.match(source, at)
    if end is not None and end.end() < len(source):
        yield "", None, source[end.end() :]


def _read_named(pieces: Sequence[str]) -> dict[str, Any] | None:
    matches = [_NAMED.fullmatch(piece) for piece in pieces]
    try:
        return {match[1]: read_literal(match[2]) for match in matches if match} if all(matches) else None
    except ValueError:
        return None


# --------------------------------------------------------------------------------------- gpt-oss

TO = " to="  # before the recipient of a call, also without a channel before it
_CHANNEL, _START, _MESSAGE = "<|channel|>", "<|start|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")


def read_message(reader: Reader, answer: Deltas, tools: Tools, start: str | None = None) -> Reads[bool]:
    """Parse a message after the start of its header: reasoning ("analysis"), a call if it has a recipient, or text."""
    start = start or (yield from reader.take(TO))
    if start is None:
        return False
    header, marker = yield from reader.read_before(_MESSAGE, _START, *_ENDS)
    if marker != _MESSAGE:
        return False
    header = start + header
    recipient, channel = _RECIPIENT.search(header), _CHANNEL_NAME.search(header)
    kind: Literal["text", "reasoning"] = "reasoning" if channel and channel[1] == "analysis" else "text"
    if recipient:
        yield from reader.skip_space()
        if not tools or (yield from read_arguments(reader, answer, recipient[1])) is None:
            return False
        if answer.is_full:
            return True
        yield from reader.skip()
        kind = "text"  # after the JSON
    elif not channel:
        return False
    marker = yield from reader.read_until((*_ENDS, _CHANNEL, _START), partial(answer.add_content, kind=kind))
    if marker in (_CHANNEL, _START):
        reader.at -= len(marker)
    return True
