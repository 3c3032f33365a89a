"""Parsers of calls whose parameters are in tags; the tool's schema gives the type of each value in the resulting JSON.

The parser of `<tool_call>` supports Hermes' and Qwen's JSON, Qwen3-Coder's tags, and GLM's keys and values. They all
begin with this tag, and models mix the forms, so the text after the tag decides. Gemma 4 has a separate parser for
`call:f{key:<|"|>text<|"|>}`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ngramspec.tool_calls.calls import ReadCall, make_list_parsers, read_arguments, read_calls
from ngramspec.tool_calls.deltas import Deltas, Emit, Reader, Reads, Tool, Tools
from ngramspec.tool_calls.json_stream import escape, quote

_MAX_DEPTH = 32  # maximum depth of references within references
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
_BARE = re.compile(r"[^,}\]]*")
_PYTHON = {"True": "true", "False": "false", "None": "null"}


@dataclass(frozen=True, slots=True)
class Tags:
    """The marks around parameters."""

    parameter: str  # mark before the name of a parameter
    name_end: str  # mark after the name; attributes may follow it up to `value`
    value: str  # mark before the value; "" if the value follows `name_end`
    value_end: str  # mark at the end of the value
    end: str  # mark at the end of the call
    lines: bool = False  # whether line breaks surround the value


_QWEN = Tags("<parameter=", ">", "", "</parameter>", "</function>", lines=True)
_GLM = Tags("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>")


def read_hermes(reader: Reader, answer: Deltas, tools: Tools) -> Reads[bool]:
    """Parse the text after "<tool_call>"."""
    yield from reader.skip_space()
    if (yield from reader.peek()) in {"{", "["}:
        has_begun = yield from read_calls(reader, answer)
    elif (yield from reader.take("<function=")):
        return (yield from read_function(reader, answer, tools))
    else:
        return (yield from _read_keys(reader, answer, tools))
    if has_begun:
        yield from reader.skip(*_HERMES_ENDS)
    return has_begun


def read_function(reader: Reader, answer: Deltas, tools: Tools) -> Reads[bool]:
    """Parse the text after "<function=": a name and ">", then parameters in tags, or all parameters as JSON."""
    name, marker = yield from reader.read_before(">")
    name = name.strip().strip("\"'")
    if not marker or not name:
        return False
    yield from reader.skip_space()
    if (yield from reader.peek()) == "{":
        if (yield from read_arguments(reader, answer, name)):
            yield from reader.skip("</function>")
    elif not (yield from _read_tagged(reader, answer, name, tools.get(name), _QWEN)):
        return False
    yield from reader.skip(*_HERMES_ENDS)
    return True


def _read_keys(reader: Reader, answer: Deltas, tools: Tools) -> Reads[bool]:
    """Parse a call: the name of an existing tool, then keys and values."""
    name, marker = yield from reader.read_before(_GLM.parameter, _GLM.end)
    name = name.strip()
    if marker is None or name not in tools:
        return False
    reader.at -= len(marker)
    return (yield from _read_tagged(reader, answer, name, tools[name], _GLM))


def make_invoke_parsers(mark: str, *openings: str) -> dict[str, ReadCall]:
    """Return the parsers of calls like `<invoke name="f">`, by the strings that they begin with.

    `mark` is at the start of the name of each tag, and `openings` are the tags around several calls.
    """
    item = f'<{mark}invoke name="'
    tags = Tags(f'<{mark}parameter name="', '"', ">", f"</{mark}parameter>", f"</{mark}invoke>")

    def read_invoke(reader: Reader, answer: Deltas, tools: Tools) -> Reads[bool]:
        name, _ = yield from reader.read_before('">')
        return bool(name) and (yield from _read_tagged(reader, answer, name, tools.get(name), tags))

    return make_list_parsers({f"<{opening}>": f"</{opening}>" for opening in openings}, item, read_invoke)


def _read_tagged(reader: Reader, answer: Deltas, name: str, tool: Tool | None, tags: Tags) -> Reads[bool]:
    """Parse parameters in tags as a JSON object; return True if a call began.

    A call begins if a parameter or the end of the call comes next. Strings are emitted as they arrive, and other values
    when they are complete. The object ends before the first text that is not a parameter. If the answer ends inside the
    call, the object stays incomplete.
    """
    yield from reader.skip_space()
    marker = yield from reader.take(tags.parameter, tags.end)
    if marker is None:
        return False
    answer.begin_call(name)
    before = "{"
    while marker == tags.parameter:
        key, _ = yield from reader.read_before(tags.name_end)
        attributes = (yield from reader.read_before(tags.value))[0] if tags.value else ""
        if not (yield from reader.peek()):
            break
        answer.add_arguments(f"{before}{quote(key)}: ")
        types = _TEXT if 'string="true"' in attributes else _types(tool, key)  # DeepSeek's attribute
        if not (yield from _read_value(reader, answer.add_arguments, types, tags)):
            return True
        before = ", "
        yield from reader.skip_space()
        marker = yield from reader.take(tags.parameter, tags.end)
    answer.add_arguments("{" if before == "{" else "")
    if marker == tags.end or (yield from reader.peek()):
        answer.add_arguments("}")
    return True


def _read_value(reader: Reader, emit: Emit, types: frozenset[str] | None, tags: Tags) -> Reads[bool]:
    """Parse a value; return True if its end was found."""
    if types == _TEXT:
        emit('"')
        line_end = ""  # a line break that belongs to the value only if more text follows

        def push(text: str) -> None:
            nonlocal line_end
            text = line_end + text
            line_end = "\n" if tags.lines and text.endswith("\n") else ""
            emit(escape(text[: len(text) - len(line_end)]))

        if tags.lines:
            yield from reader.take("\n")
        marker = yield from reader.read_until((tags.value_end,), push)
        emit('"' if marker else "")
        return marker is not None
    text, marker = yield from reader.read_before(tags.value_end)
    if tags.lines:
        text = text.removeprefix("\n").removesuffix("\n")
    if marker:
        emit(convert_value(text, types))
    return marker is not None


def convert_value(text: str, types: frozenset[str] | None) -> str:
    """Return a value as JSON; a value of another type than `types` becomes a string. `None` means any type."""
    bare = text.strip()
    if types is not None:
        bare = _PYTHON.get(bare, bare)
    try:
        value = json.loads(bare, parse_constant=_refuse)
        if not isinstance(value, str) and (types is None or _find_types(value) & types):
            return json.dumps(value, ensure_ascii=False)
        if isinstance(value, str) and types is not None and "string" not in types:
            return convert_value(value, types)  # the model put a value of another type into quotes
    except (ValueError, RecursionError):
        pass
    return quote(text)


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def _find_types(value: Any) -> frozenset[str]:
    if isinstance(value, float):
        return frozenset({"number", "integer"} if value.is_integer() else {"number"})
    return _KINDS[type(value)]


def _types(tool: Tool | None, key: str) -> frozenset[str] | None:
    """Return the types of a parameter in the schema of a tool; `None` if the schema has no type."""
    root: Mapping[str, Any] = tool.parameters if tool is not None else {}
    properties = root.get("properties")
    return _types_of(properties.get(key) if isinstance(properties, Mapping) else None, root, 0)


def _types_of(schema: Any, root: Mapping[str, Any], depth: int) -> frozenset[str] | None:
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return None
    if isinstance(reference := schema.get("$ref"), str) and reference.startswith("#/"):
        target: Any = root
        for step in reference[2:].split("/"):
            target = target.get(step) if isinstance(target, Mapping) else None
        return _types_of(target, root, depth + 1)
    types: list[frozenset[str] | None] = [None]
    branches = schema.get("anyOf", schema.get("oneOf"))
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    match schema.get("type"):
        case str(kind):
            types = [frozenset({kind})]
        case [*names]:
            types = [frozenset(kind for kind in names if isinstance(kind, str))]
        case _ if isinstance(values, list):
            types = [_find_types(value) for value in values]
        case _ if isinstance(branches, list):
            types = [_types_of(branch, root, depth + 1) for branch in branches]
    known_types = [kind for kind in types if kind is not None]
    return frozenset().union(*known_types) if len(known_types) == len(types) else None


# --------------------------------------------------------------------------- Gemma 4


def read_gemma4(reader: Reader, answer: Deltas, tools: Tools) -> Reads[bool]:
    """Parse the text after "<|tool_call>"."""
    yield from reader.skip_space()
    if not (yield from reader.take("call:")):
        return False
    name, marker = yield from reader.read_before("{")
    if not marker or not name.strip():
        return False
    answer.begin_call(name.strip())
    answer.add_arguments("{")
    if (yield from _read_rest(reader, answer.add_arguments)):
        yield from reader.skip("<tool_call|>")
    return True


def _read_rest(reader: Reader, emit: Emit) -> Reads[bool]:
    """Parse the text after an opening brace as JSON; return True if its closing brace was found."""
    brackets = ["}"]
    first = True  # whether the innermost brackets are still empty
    while brackets:
        yield from reader.skip_space()
        if (yield from reader.take(brackets[-1])):
            emit(brackets.pop())
            first = False
            continue
        if not first:
            if not (yield from reader.take(",")):
                return False
            emit(", ")
            yield from reader.skip_space()
        if brackets[-1] == "}":
            start = reader.at
            key = yield from _read_key(reader)
            if key is None:
                reader.at = start
                return False
            emit(f"{quote(key)}: ")
            yield from reader.skip_space()
        opening = yield from reader.take("{", "[")
        first = opening is not None
        if opening:
            emit(opening)
            brackets.append("}" if opening == "{" else "]")
        elif not (yield from _read_word(reader, emit)):
            return False
    return True


def _read_key(reader: Reader) -> Reads[str | None]:
    """Parse a key, with or without quotes, and the colon after it."""
    if (yield from reader.take(_QUOTE)):
        key, _ = yield from reader.read_before(_QUOTE)
        yield from reader.skip_space()
        return key if (yield from reader.take(":")) else None
    key, marker = yield from reader.read_before(":")
    return key.strip().strip('"') if marker else None


def _read_word(reader: Reader, emit: Emit) -> Reads[bool]:
    """Parse a string in quotes, or a bare word, which is a JSON value or a string; return True if it is complete."""
    if (yield from reader.take(_QUOTE)):
        emit('"')
        marker = yield from reader.read_until((_QUOTE,), lambda text: emit(escape(text)))
        emit('"' if marker else "")
        return marker is not None
    parts: list[str] = []
    start = reader.at
    yield from reader.run(_BARE, parts.append)
    word = "".join(parts).strip(" \t\r\n")
    if not word or not (yield from reader.peek()):
        reader.at = start
        return False
    emit(convert_value(word.strip('"'), None) if not word.startswith('"') else quote(word.strip('"')))
    return True
