"""Parsers of calls: JSON, names and JSON arguments between marks, Python such as `[f(city="Paris")]`, and tags."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

from ngramspec.chat.stream import (
    PYTHON_STRING,
    Deltas,
    Emit,
    Reader,
    Reads,
    Tool,
    Tools,
    escape,
    read_literal,
    read_object,
    read_string,
    read_value,
    to_json,
)
from ngramspec.grammars.json_schema import find_target

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
                if (yield from read_call(reader, answer, tools)):
                    has_begun = True
                    continue
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
    if (yield from reader.peek()) == "{":
        answer.begin_call(name)
        return (yield from read_value(reader, answer.add_arguments))
    text = (yield from reader.take("null")) or (yield from read_string(reader))
    arguments = None if text is None else read_object(text)
    if arguments is not None:
        answer.begin_call(name, to_json(arguments))
    return None if arguments is None else True


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
        before = reader.at
        key = yield from read_string(reader)
        is_second = key in _ARGUMENTS and (has_begun or early_arguments is not None)
        if is_second:
            reader.at = before  # they become content, because the first ones were sent already
        if key is None or is_second or not (yield from reader.skip_space(":")):
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
            if key in _ARGUMENTS:
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
        yield match[1], _read_named(pieces), source[match.start(1) : start]
        at = start
    end = _CALL_END.match(source, at)
    if end is not None and end.end() < len(source):
        yield "", None, source[end.end() :]


def _read_named(pieces: Sequence[str]) -> dict[str, Any] | None:
    matches = [_NAMED.fullmatch(piece) for piece in pieces if piece.strip()]
    try:
        return {match[1]: read_literal(match[2]) for match in matches if match} if all(matches) else None
    except ValueError:
        return None


# --------------------------------------------------------------------------------------- parameters in tags

# Hermes' and Qwen's JSON, Qwen3-Coder's tags, and GLM's keys and values all begin with `<tool_call>`, and models mix
# the forms, so the text after the tag decides. The tool's schema gives the type of each value in the resulting JSON.

_UNKNOWN = Tool("")
_MAX_REFERENCES = 32  # within references
_TEXT = frozenset({"string"})
_KINDS = {
    str: _TEXT,
    bool: frozenset({"boolean"}),
    type(None): frozenset({"null"}),
    int: frozenset({"integer", "number"}),
    list: frozenset({"array"}),
    dict: frozenset({"object"}),
}
_HERMES_ENDS = ("</tool_call>", "</tool_calls>", "</seed:tool_call>")
_QUOTE = '<|"|>'
_BARE = re.compile(r"[^,}\]<]*")
_GEMMA_NAME = re.compile(r'[^:,{}\[\]<"]*')
_GEMMA_MARKS = ("<|tool_call>", "<tool_call|>")
_NAME = re.compile(r'[^<>"{\n]*')
_REST = re.compile(r"[^<>\n]*")
_ATTRIBUTES = re.compile(r'(?:\s+[\w-]+="[^"]*")*\s*')


class Tags(NamedTuple):
    starts: tuple[str, ...]  # of a call; the first one is before the name, unless `name_end` is after it
    parameter: str  # before the name of a parameter
    value_ends: tuple[str, str]  # after the value; models write both
    ends: tuple[str, ...]  # of a call
    name_end: str = ""  # after the name; "" for attributes and ">"
    value: str = ""  # before the value
    lines: bool = False  # whether line breaks surround the value


_QWEN = Tags(
    ("<function=", "<tool_call>"),
    "<parameter=",
    ("</parameter>", "</parameter/>"),
    ("</function>", "</function/>", *_HERMES_ENDS),
    lines=True,
)
_GLM = Tags(("<tool_call>",), "<arg_key>", ("</arg_value>", "</arg_value/>"), _HERMES_ENDS, "</arg_key>", "<arg_value>")


def read_hermes(reader: Reader, answer: Deltas, tools: Tools) -> Reads[bool]:
    """Parse the text after "<tool_call>": JSON, Qwen3-Coder's tags, or the name of a tool and GLM's keys."""
    yield from reader.skip_space()
    if (yield from reader.peek()) in {"{", "["}:
        if not (yield from read_calls(reader, answer)):
            return False
        yield from reader.skip(*_HERMES_ENDS)
        return True
    if (yield from reader.take("<function=")):
        return (yield from read_function(reader, answer, tools))
    name = (yield from reader.run(_NAME)).strip()
    yield from reader.skip_space()
    return name in tools and (yield from _read_tagged(reader, answer, name, False, tools[name], _GLM))


def read_function(reader: Reader, answer: Deltas, tools: Tools, tags: Tags = _QWEN) -> Reads[bool]:
    """Parse the text after the start of a call: a name and ">", then parameters in tags, or Qwen's all as JSON."""
    marker: str | None = tags.starts[0]
    while marker:
        yield from reader.skip_all(marker)
        name, attributes = yield from _read_name(reader)
        marker = yield from reader.skip_space(marker)
    if name and tags is _QWEN and (yield from reader.peek()) == "{":
        yield from read_arguments(reader, answer, name)
        yield from reader.skip(*tags.ends)
        return True
    return (yield from _read_tagged(reader, answer, name, attributes is not None, tools.get(name, _UNKNOWN), tags))


def make_invoke_parsers(mark: str, *openings: str) -> dict[str, ReadCall]:
    """Return the parsers of calls like `<invoke name="f">`, by the strings that they begin with.

    `mark` is at the start of the name of each tag, and `openings` are the tags around several calls.
    """
    item = f'<{mark}invoke name="'
    list_ends = {f"<{opening}>": f"</{opening}>" for opening in openings}
    tags = Tags(
        (item, *list_ends),
        f'<{mark}parameter name="',
        (f"</{mark}parameter>", f"</{mark}parameter/>"),
        (f"</{mark}invoke>", f"</{mark}invoke/>", *list_ends.values()),
    )
    return make_list_parsers(list_ends, item, partial(read_function, tags=tags))


def _read_name(reader: Reader) -> Reads[tuple[str, str | None]]:
    """Parse a name and the attributes up to ">", without which they are `None`."""
    yield from reader.take('"')
    name = (yield from reader.run(_NAME)).strip().strip("'")
    yield from reader.take('"')
    start = reader.at
    attributes = yield from reader.run(_REST)
    if _ATTRIBUTES.fullmatch(attributes) and (yield from reader.take(">")):
        return name, attributes
    reader.at = start
    return name, None


def _read_tagged(reader: Reader, answer: Deltas, name: str, is_whole: bool, tool: Tool, tags: Tags) -> Reads[bool]:
    """Parse parameters in tags as a JSON object, up to the first other text; return True if a call began.

    A call begins if a parameter or the end of the call comes next, or the end of the answer after the whole name.
    """
    marker = yield from reader.take(tags.parameter, *tags.ends)
    if not name or (marker is None and ((yield from reader.peek()) or reader.cut or not is_whole)):
        return False
    answer.begin_call(name)
    before = "{"
    while marker == tags.parameter:
        start = reader.at - len(marker)
        yield from reader.skip_all(marker)
        key, types = yield from _read_key(reader, tool, tags)
        if not (yield from reader.peek()):
            reader.at = start
            break
        yield from _read_value(reader, answer, f"{before}{to_json(key)}: ", types, tool, tags)
        before = ", "
        yield from reader.skip_all(*tags.value_ends)
        marker = yield from reader.take(tags.parameter, *tags.ends)
    if marker in tags.ends:
        answer.add_arguments("{}" if before == "{" else "}")
        yield from reader.skip(*tags.ends)
    return True


def _read_key(reader: Reader, tool: Tool, tags: Tags) -> Reads[tuple[str, frozenset[str] | None]]:
    """Parse the name of a parameter, up to its value; return its types too."""
    if not tags.name_end:
        key, attributes = yield from _read_name(reader)
        if 'string="true"' in (attributes or ""):  # DeepSeek's attribute
            return key, _TEXT
    else:
        key = (yield from reader.run(_NAME)).strip()
        yield from reader.skip_all(tags.name_end)
        while (yield from reader.take(tags.value)):
            pass
    properties = tool.parameters.get("properties")
    return key, _types_of(properties.get(key) if isinstance(properties, Mapping) else None, tool.parameters)


def _read_value(
    reader: Reader, answer: Deltas, before: str, types: frozenset[str] | None, tool: Tool, tags: Tags
) -> Reads[None]:
    """Parse a value; `before` comes before it in the JSON."""
    parts = list[str]()
    line_end = ""  # a line break that belongs to the value only if more text follows

    def push(text: str) -> None:
        nonlocal line_end
        text = line_end + text
        line_end = "\n" if tags.lines and text.endswith("\n") else ""
        text = text[: len(text) - len(line_end)]
        if types == _TEXT:
            answer.add_arguments(escape(text))
        else:
            parts.append(text)

    if types == _TEXT:
        answer.add_arguments(f'{before}"')
    if tags.lines:
        yield from reader.take("\n")
    while (marker := (yield from reader.read_until((*tags.value_ends, tags.parameter, *tags.ends), push))) is not None:
        end = reader.at
        if marker in tags.value_ends:
            break
        if (yield from _ends_value(reader, marker, tool, tags)):
            reader.at = end - len(marker)
            break
        reader.at = end
        push(marker)
    if types == _TEXT:
        answer.add_arguments('"' if marker else "")
    elif marker or not reader.cut:
        answer.add_arguments(before + convert_value("".join(parts), types))


def _ends_value(reader: Reader, marker: str, tool: Tool, tags: Tags) -> Reads[bool]:
    """Return True if a mark ends a value whose closing mark is missing; otherwise the mark is part of the value."""
    if marker == tags.parameter:
        key, _ = yield from _read_key(reader, tool, tags)
        properties = tool.parameters.get("properties")
        return key in properties if properties else key.isidentifier()
    if (yield from reader.skip_space(*tags.ends, *tags.starts)):
        return True
    return not (yield from reader.peek()) and not reader.cut


def convert_value(text: str, types: frozenset[str] | None) -> str:
    """Return a value as JSON; a value of another type than `types` becomes a string. `None` means any type."""
    try:
        value = read_literal(text.strip(), only_json=types is None)
        if not isinstance(value, str) and (types is None or _find_types(value) & types):
            return to_json(value)
        if isinstance(value, str) and types is not None and "string" not in types:
            return convert_value(value, types)  # the model put a value of another type into quotes
    except (ValueError, RecursionError):
        pass
    return to_json(text)


def _find_types(value: Any) -> frozenset[str]:
    if isinstance(value, float):
        return frozenset({"number", "integer"} if value.is_integer() else {"number"})
    return _KINDS[type(value)]


def _types_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str] | None:
    """Return the types of a parameter by its schema; `None` if that has no type."""
    if not isinstance(schema, Mapping) or depth > _MAX_REFERENCES:
        return None
    if (target := find_target(schema, root)) is not None:
        return _types_of(target, root, depth + 1)
    branches = schema.get("anyOf", schema.get("oneOf"))
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    match schema.get("type"):
        case str() | [*_] as kinds:
            return frozenset(kind for kind in ([kinds] if isinstance(kinds, str) else kinds) if isinstance(kind, str))
        case _ if isinstance(values, list):
            return frozenset().union(*map(_find_types, values))
        case _ if isinstance(branches, list):
            types = [_types_of(branch, root, depth + 1) for branch in branches]
            return None if None in types else frozenset().union(*filter(None, types))
    return None


# --------------------------------------------------------------------------- Gemma 4


def read_gemma4(reader: Reader, answer: Deltas, tools: Tools) -> Reads[bool]:
    """Parse the text after "<|tool_call>", such as `call:f{key:<|"|>text<|"|>}`."""
    if not (yield from reader.skip_space("call:")):
        return False
    name = (yield from reader.run(_GEMMA_NAME)).strip()
    if not name or (yield from reader.peek()) != "{":
        return False
    answer.begin_call(name)
    yield from read_value(reader, answer.add_arguments, _read_gemma_key, _read_gemma_leaf)
    yield from reader.skip(_GEMMA_MARKS[1])
    return True


def _read_gemma_key(reader: Reader, emit: Emit) -> Reads[bool]:
    quote = yield from reader.take(_QUOTE, '"')
    emit(to_json((yield from reader.run(_GEMMA_NAME)).strip()))
    yield from reader.take(quote or _QUOTE)
    return True


def _read_gemma_leaf(reader: Reader, emit: Emit, held: list[str]) -> Reads[bool]:
    """Parse a string in Gemma's quotes, or a bare word, which is a JSON value or a string."""
    if (yield from reader.take(_QUOTE)):
        emit("".join([*held, '"']))
        marker = yield from reader.read_until((_QUOTE, *_GEMMA_MARKS), lambda text: emit(escape(text)))
        emit('"' if marker else "")
        reader.at -= len(marker) if marker in _GEMMA_MARKS else 0
        return True
    start, word = reader.at, (yield from reader.run(_BARE)).strip()
    if not word or (reader.cut and not (yield from reader.peek())):
        reader.at = start
        return False
    emit("".join(held) + (to_json(word.strip('"')) if word.startswith('"') else convert_value(word, None)))
    return True


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
