"""Parsers of calls: JSON, names and JSON arguments between marks, Python such as `[f(city="Paris")]`, and tags."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

from ngramspec.chat.stream import (
    PYTHON_STRING,
    Answer,
    Emit,
    Reader,
    Reads,
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

ReadCall = Callable[[Answer], Reads[bool]]
"""Parser of the text after the start of a call: True if a call began; if not, the position is undefined."""


def make_list_parsers(ends: Mapping[str, str], item: str, read_call: ReadCall) -> dict[str, ReadCall]:
    """Return parsers of lists of calls by opening; `ends` has the closings. An `item`, before a call, may begin one."""

    def read(answer: Answer, *, end: str, has_begun: bool) -> Reads[bool]:
        if has_begun and not (yield from read_call(answer)):
            return False
        while not answer.is_full:
            before = answer.at
            marker = yield from answer.skip_space(item, end)
            if marker == item:
                yield from answer.skip_all(item)
                if (yield from read_call(answer)):
                    has_begun = True
                    continue
                answer.at = before
            elif has_begun:
                yield from answer.skip(*([end] if marker else [item, end]))
            return has_begun
        return True

    parsers: dict[str, ReadCall] = {start: partial(read, end=end, has_begun=False) for start, end in ends.items()}
    return {**parsers, item: partial(read, end=next(iter(ends.values())), has_begun=True)}


def read_named(
    answer: Answer, *, separator: str, name: str, end: str = "", fence: str = "", or_objects: bool = False
) -> Reads[bool]:
    """Parse a call that consists of a name, a separator, and JSON arguments, or with `or_objects` of JSON objects.

    The group of the pattern `name` is the name. Before `fence`, unless it is "", the name may be after the separator.
    """
    if or_objects:
        yield from answer.skip_space()
        if (yield from answer.peek()) in {"[", "{"}:
            return (yield from read_objects(answer))
    before, marker = yield from answer.read_before(separator, *filter(None, ("{", '"', end)))
    if marker != separator:
        return False
    yield from answer.skip_all(separator)
    in_fence = bool(fence) and (yield from answer.peek()) != "{"
    if in_fence:
        before, marker = yield from answer.read_before(fence, "{")
        answer.at -= marker == "{"
        yield from answer.skip_space()
    match = re.fullmatch(name, before.strip(), re.DOTALL)
    if match is None or (yield from read_arguments(answer, match[1])) is None:
        return False
    yield from answer.skip(*filter(None, ("```" if in_fence else "", end)))
    return True


def read_objects(answer: Answer, *, ends: Sequence[str] = (), known_only: bool = False) -> Reads[bool]:
    """Parse a JSON list of calls, or calls in a row; with `known_only`, objects that may be other JSON are no calls."""
    yield from answer.skip_space()
    is_list = bool((yield from answer.take("[")))
    yield from answer.skip_space()
    if not (yield from _read_call(answer, known_only)):
        return False
    while not answer.is_full:
        before = answer.at
        yield from answer.skip_space()
        if is_list and not (yield from answer.take(",")):
            yield from answer.take("]")
            break
        yield from answer.skip_space()
        if not (yield from _read_call(answer, known_only)):
            answer.at = before
            break
    if ends:
        yield from answer.skip(*ends)
    return True


def read_arguments(answer: Answer, name: str) -> Reads[bool | None]:
    """Begin a call if its arguments come next, and return whether they are complete; `None` if no call began."""
    if (yield from answer.peek()) == "{":
        answer.begin_call(name)
        return (yield from read_value(answer, answer.add_arguments))
    text = (yield from answer.take("null")) or (yield from read_string(answer))
    arguments = None if text is None else read_object(text)
    if arguments is not None:
        answer.begin_call(name, to_json(arguments))
    return None if arguments is None else True


def _read_call(answer: Answer, known_only: bool) -> Reads[bool]:
    """Parse a call that is a JSON object; return True if it began."""
    name: str | None = None
    early_arguments: str | None = None  # which came before the name
    has_begun = has_others = False  # whether there are other keys than those of calls
    separator = "," if (yield from answer.take("{")) else None
    while separator == ",":
        if (yield from answer.skip_space("}")):
            break
        before = answer.at
        key = yield from read_string(answer)
        is_second = key in _ARGUMENTS and (has_begun or early_arguments is not None)
        if key is None or is_second or not (yield from answer.skip_space(":")):
            # Second arguments become content, because the first ones were sent already.
            answer.at = before if is_second else answer.at
            return has_begun
        yield from answer.skip_space()
        if key == "name" and name is None:
            name = yield from read_string(answer)
            is_complete = bool(name) and (name in answer.tools or not known_only)
        elif key in _ARGUMENTS and name is not None and not has_begun:
            read = yield from read_arguments(answer, name)
            has_begun, is_complete = read is not None, bool(read)
        else:
            parts: list[str] = []
            has_others = has_others or key not in _KEYS
            is_complete = (key in _KEYS or not known_only) and (yield from read_value(answer, parts.append))
            if key in _ARGUMENTS:
                early_arguments = "".join(parts)
        if not is_complete:
            return has_begun
        separator = yield from answer.skip_space(",", "}")
    if has_begun or name is None or (early_arguments is None and (known_only or has_others)):
        return has_begun
    arguments = read_object(early_arguments or "null")
    if arguments is None:
        return False
    answer.begin_call(name, to_json(arguments))
    return True


def read_python(answer: Answer, *, end: str, known_only: bool = False) -> Reads[bool]:
    """Parse calls that are Python expressions, or JSON objects (see `read_objects`); other code is content."""
    start = answer.at
    if (yield from read_objects(answer, ends=(end,), known_only=known_only)):
        return True
    answer.at = start
    # The text is parsed as a whole, because only its end shows that it contains calls.
    source, marker = yield from answer.read_before(end)
    calls = list(_split_calls(source))
    if not any(name in answer.tools and arguments is not None for name, arguments, _ in calls):
        return False
    for name, arguments, text in calls:
        if name in answer.tools and arguments is not None:
            answer.begin_call(name, to_json(arguments))
        elif name or marker or not answer.cut:  # otherwise a limit cut this call
            answer.add_content(text)
        if answer.is_full:
            break
    if marker != "```":
        yield from answer.skip(end)
    return True


def _split_calls(source: str) -> Iterator[tuple[str, dict[str, Any] | None, str]]:
    """Yield name, arguments (`None` if they are not named literals) and text of calls, and the rest without a name."""
    at, opening = 0, re.compile(r"[\s,\[]*([^\s()\[\]{},'\"=]+)\(")
    marks = re.compile(rf"{PYTHON_STRING}|[()\[\]{{}},]", re.DOTALL)
    while (match := opening.match(source, at)) is not None:
        pieces, start, depth = list[str](), match.end(), 1
        for mark in marks.finditer(source, start):
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
    if rest := re.sub(r"^[\s,\]]*", "", source[at:]):
        yield "", None, rest


def _read_named(pieces: Sequence[str]) -> dict[str, Any] | None:
    matches = [re.fullmatch(r"\s*([^\s=]+)\s*=(.*)", piece, re.DOTALL) for piece in pieces if piece.strip()]
    try:
        return {match[1]: read_literal(match[2]) for match in matches if match} if all(matches) else None
    except ValueError:
        return None


# Hermes' and Qwen's JSON, Qwen3-Coder's tags, and GLM's keys and values all begin with `<tool_call>`, and models mix
# the forms, so the text after the tag decides. The tool's schema gives the type of each value in the resulting JSON.

_HERMES_ENDS = ("</tool_call>", "</tool_calls>", "</seed:tool_call>")
_QUOTE = '<|"|>'
_GEMMA_NAME = r'[^:,{}\[\]<"]'
_GEMMA_MARKS = ("<|tool_call>", "<tool_call|>")
_NAME = r'[^<>"{\n]'


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


def read_hermes(answer: Answer) -> Reads[bool]:
    """Parse the text after "<tool_call>": JSON, Qwen3-Coder's tags, or the name of a tool and GLM's keys."""
    yield from answer.skip_space()
    if (yield from answer.peek()) in {"{", "["}:
        return (yield from read_objects(answer, ends=_HERMES_ENDS))
    if (yield from answer.take("<function=")):
        return (yield from read_function(answer))
    name = (yield from answer.run(_NAME)).strip()
    yield from answer.skip_space()
    return name in answer.tools and (yield from _read_tagged(answer, name, False, _GLM))


def read_function(answer: Answer, tags: Tags = _QWEN) -> Reads[bool]:
    """Parse the text after the start of a call: a name and ">", then parameters in tags, or Qwen's all as JSON."""
    marker: str | None = tags.starts[0]
    while marker:
        yield from answer.skip_all(marker)
        name, attributes = yield from _read_name(answer)
        marker = yield from answer.skip_space(marker)
    if name and tags is _QWEN and (yield from answer.peek()) == "{":
        yield from read_arguments(answer, name)
        yield from answer.skip(*tags.ends)
        return True
    return (yield from _read_tagged(answer, name, attributes is not None, tags))


def make_invoke_parsers(mark: str, *openings: str) -> dict[str, ReadCall]:
    """Return the parsers of calls like `<invoke name="f">` by their starts; `openings` are around several calls."""
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
    start, text = reader.at, (yield from reader.run(r"[^<>\n]"))
    match = re.match(r'"?([^"{]*)"?', text)
    assert match is not None  # the pattern matches any text
    attributes = text[match.end() :]
    if not (re.fullmatch(r'(?:\s+[\w-]+="[^"]*")*\s*', attributes) and (yield from reader.take(">"))):
        reader.at = start + match.end()
        return match[1].strip().strip("'"), None
    return match[1].strip().strip("'"), attributes


def _read_tagged(answer: Answer, name: str, is_whole: bool, tags: Tags) -> Reads[bool]:
    """Parse parameters in tags as a JSON object, up to the first other text; return True if a call began."""
    marker = yield from answer.take(tags.parameter, *tags.ends)
    if not name or (marker is None and ((yield from answer.peek()) or answer.cut or not is_whole)):
        return False
    answer.begin_call(name)
    before = "{"
    while marker == tags.parameter:
        start = answer.at - len(marker)
        yield from answer.skip_all(marker)
        key, types = yield from _read_key(answer, tags)
        if not (yield from answer.peek()):
            answer.at = start
            break
        yield from _read_value(answer, f"{before}{to_json(key)}: ", types, tags)
        before = ", "
        yield from answer.skip_all(*tags.value_ends)
        marker = yield from answer.take(tags.parameter, *tags.ends)
    if marker in tags.ends or not answer.is_cut_off:
        answer.add_arguments("{}" if before == "{" else "}")
    if marker in tags.ends:
        yield from answer.skip(*tags.ends)
    return True


def _read_key(answer: Answer, tags: Tags) -> Reads[tuple[str, frozenset[str] | None]]:
    """Parse the name of a parameter, up to its value; return its types too."""
    if not tags.name_end:
        key, attributes = yield from _read_name(answer)
        if 'string="true"' in (attributes or ""):  # DeepSeek's attribute
            return key, frozenset({"string"})
    else:
        key = (yield from answer.run(_NAME)).strip()
        yield from answer.skip_all(tags.name_end)
        while (yield from answer.take(tags.value)):
            pass
    properties = answer.schema.get("properties")
    return key, _types_of(properties.get(key) if isinstance(properties, Mapping) else None, answer.schema)


def _read_value(answer: Answer, before: str, types: frozenset[str] | None, tags: Tags) -> Reads[None]:
    """Parse a value; `before` comes before it in the JSON."""
    parts, is_text = list[str](), types == frozenset({"string"})
    line_end = ""  # a line break that belongs to the value only if more text follows

    def push(text: str) -> None:
        nonlocal line_end
        text = line_end + text
        line_end = "\n" if tags.lines and text.endswith("\n") else ""
        text = text.removesuffix(line_end)
        if is_text:
            answer.add_arguments(escape(text))
        else:
            parts.append(text)

    if is_text:
        answer.add_arguments(f'{before}"')
    if tags.lines:
        yield from answer.take("\n")
    while True:
        marker = yield from answer.read_until((*tags.value_ends, tags.parameter, *tags.ends), push)
        if marker is None or marker in tags.value_ends:
            break
        end = answer.at
        # Another mark ends a value whose closing mark is missing, or is part of the value.
        if marker == tags.parameter:
            key, _ = yield from _read_key(answer, tags)
            properties = answer.schema.get("properties")
            ends_value = key in properties if properties else key.isidentifier()
        else:
            ends_value = bool((yield from answer.skip_space(*tags.ends, *tags.starts)))
            ends_value = ends_value or not ((yield from answer.peek()) or answer.cut)
        if ends_value:
            answer.at = end - len(marker)
            break
        answer.at = end
        push(marker)
    if is_text:
        answer.add_arguments('"' if marker or not answer.cut else "")
    elif marker or not answer.cut:
        answer.add_arguments(before + convert_value("".join(parts), types))


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
    if type(value) in {int, float}:
        return frozenset({"number", "integer"} if value % 1 == 0 else {"number"})
    kinds = {str: "string", bool: "boolean", type(None): "null", list: "array", dict: "object"}
    return frozenset({kinds[type(value)]})


def _types_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str] | None:
    """Return the types of a parameter by its schema; `None` if that has no type."""
    if not isinstance(schema, Mapping) or depth > 32:  # of references within references
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


def read_gemma4(answer: Answer) -> Reads[bool]:
    """Parse the text after "<|tool_call>", such as `call:f{key:<|"|>text<|"|>}`."""
    if not (yield from answer.skip_space("call:")):
        return False
    name = (yield from answer.run(_GEMMA_NAME)).strip()
    if not name or (yield from answer.peek()) != "{":
        return False
    answer.begin_call(name)
    yield from read_value(answer, answer.add_arguments, _read_gemma_key, _read_gemma_leaf)
    yield from answer.skip(_GEMMA_MARKS[1])
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
        emit('"' if marker or not reader.cut else "")
        reader.at -= len(marker) if marker in _GEMMA_MARKS else 0
        return True
    start, word = reader.at, (yield from reader.run(r"[^,}\]<]")).strip()
    if not word or (reader.cut and not (yield from reader.peek())):
        reader.at = start
        return False
    emit("".join(held) + (to_json(word.strip('"')) if word.startswith('"') else convert_value(word, None)))
    return True


TO = " to="  # before the recipient of a call, also without a channel before it
_CHANNEL, _START, _MESSAGE = "<|channel|>", "<|start|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")


def read_message(answer: Answer, start: str | None = None) -> Reads[bool]:
    """Parse a message after the start of its header: reasoning ("analysis"), a call if it has a recipient, or text."""
    start = start or (yield from answer.take(TO))
    if start is None:
        return False
    header, marker = yield from answer.read_before(_MESSAGE, _START, *_ENDS)
    if marker != _MESSAGE:
        return False
    header = start + header
    recipient = re.search(r"\bto=(?:functions\.)?([^\s<]+)", header)
    channel = re.search(r"<\|channel\|>\s*(\w+)", header)
    kind: Literal["text", "reasoning"] = "reasoning" if channel and channel[1] == "analysis" else "text"
    if recipient:
        yield from answer.skip_space()
        if not answer.tools or (yield from read_arguments(answer, recipient[1])) is None:
            return False
        if answer.is_full:
            return True
        yield from answer.skip()
        kind = "text"  # after the JSON
    elif not channel:
        return False
    marker = yield from answer.read_until((*_ENDS, _CHANNEL, _START), partial(answer.add_content, kind=kind))
    if marker in (_CHANNEL, _START):
        answer.at -= len(marker)
    return True
