"""Calls in notations of their own: Gemma 4's `call:f{key:<|"|>text<|"|>}`, and Python's `[f(city="Paris"), g()]`."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from ngramspec.tool_calls.deltas import Answer, Tools
from ngramspec.tool_calls.json_calls import ReadCall, objects
from ngramspec.tool_calls.json_text import escape, quote
from ngramspec.tool_calls.reader import Emit, Reader, Reads
from ngramspec.tool_calls.tagged import as_json

_QUOTE = '<|"|>'
_BARE = re.compile(r"[^,}\]]*")


def read_gemma4(reader: Reader, answer: Answer, tools: Tools) -> Reads[bool]:
    """What follows "<|tool_call>"."""
    yield from reader.space()
    parts: list[str] = []
    if not (yield from reader.take("call:")) or not (yield from reader.until(("{",), parts.append)):
        return False
    name = "".join(parts).strip()
    if not name:
        return False
    reader.forget()
    call = answer.begin(name)
    answer.arguments(call, "{")
    if (yield from _read_rest(reader, lambda text: answer.arguments(call, text))):
        yield from reader.skip("<tool_call|>")
    return True


def _read_rest(reader: Reader, emit: Emit) -> Reads[bool]:
    """What follows an opening brace, as JSON; whether its closing brace came."""
    brackets = ["}"]
    first = True  # nothing stands in the innermost brackets yet
    while brackets:
        yield from reader.space()
        if (yield from reader.take(brackets[-1])):
            emit(brackets.pop())
            first = False
            continue
        if not first:
            if not (yield from reader.take(",")):
                return False
            emit(", ")
            yield from reader.space()
        if brackets[-1] == "}":
            reader.mark()
            key = yield from _read_key(reader)
            if key is None:
                reader.back()
                return False
            reader.forget()
            emit(f"{quote(key)}: ")
            yield from reader.space()
        opening = yield from reader.take("{", "[")
        first = opening is not None
        if opening:
            emit(opening)
            brackets.append("}" if opening == "{" else "]")
        elif not (yield from _read_value(reader, emit)):
            return False
    return True


def _read_key(reader: Reader) -> Reads[str | None]:
    """A key, in quotes or bare, and the colon behind it."""
    parts: list[str] = []
    if (yield from reader.take(_QUOTE)):
        yield from reader.until((_QUOTE,), parts.append)
        yield from reader.space()
        return "".join(parts) if (yield from reader.take(":")) else None
    found = yield from reader.until((":",), parts.append)
    return "".join(parts).strip().strip('"') if found else None


def _read_value(reader: Reader, emit: Emit) -> Reads[bool]:
    """Text in quotes, or a bare word: JSON's, or text again."""
    if (yield from reader.take(_QUOTE)):
        emit('"')
        found = yield from reader.until((_QUOTE,), lambda text: emit(escape(text)))
        emit('"' if found else "")
        return found is not None
    parts: list[str] = []
    reader.hold()
    yield from reader.run(_BARE, parts.append)
    word = "".join(parts).strip(" \t\r\n")
    whole = bool(word and (yield from reader.peek()))
    reader.release(back=not whole)
    if not whole:
        return False
    emit(as_json(word.strip('"'), None) if not word.startswith('"') else quote(word.strip('"')))
    return True


# --------------------------------------------------------------------------------------- Python


def python(end: str, *, known: bool = False) -> ReadCall:
    """Reads calls as Python writes them, up to `end`; or as JSON objects, with `known` as `read_calls` has it."""
    as_objects = objects(end, known=known)

    def read(reader: Reader, answer: Answer, tools: Tools) -> Reads[bool]:
        yield from reader.space()
        if (yield from reader.peek()) == "{":
            return (yield from as_objects(reader, answer, tools))
        # All at once, as only the end shows that they are calls.
        parts: list[str] = []
        if not (yield from reader.until((end,), parts.append)):
            return False
        calls = _calls("".join(parts).strip())
        if not calls or not all(name in tools for name, _ in calls):
            return False
        reader.forget()
        for name, arguments in calls:
            answer.arguments(answer.begin(name), arguments)
        return True

    return read


def _calls(source: str) -> list[tuple[str, str]]:
    """Names and JSON arguments of the calls that an expression is; empty if it is anything else."""
    try:
        tree = ast.parse(source, mode="eval").body
        calls = tree.elts if isinstance(tree, ast.List) else [tree]
        return [_call(node) for node in calls]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return []


def _call(node: ast.expr) -> tuple[str, str]:
    if not isinstance(node, ast.Call) or node.args or not isinstance(node.func, ast.Name | ast.Attribute):
        raise ValueError("not a call with named arguments")
    arguments: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("not a named argument")
        arguments[keyword.arg] = ast.literal_eval(keyword.value)
    return ast.unparse(node.func), json.dumps(arguments, ensure_ascii=False, allow_nan=False)
