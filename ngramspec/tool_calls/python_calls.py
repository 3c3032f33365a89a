"""Calls as Python writes them: `[f(city="Paris"), g()]` of LFM2, and of Gemma in its fences."""

from __future__ import annotations

import ast
import json
from typing import Any

from ngramspec.tool_calls.answer import Answer
from ngramspec.tool_calls.forms import Form, Tools
from ngramspec.tool_calls.hermes import TAG, read_hermes, write_hermes
from ngramspec.tool_calls.json_calls import read_calls
from ngramspec.tool_calls.reader import Reader, Reads

_START, _END = "<|tool_call_start|>", "<|tool_call_end|>"


def read_python(reader: Reader, answer: Answer, tools: Tools, end: str) -> Reads[bool]:
    """Calls up to `end`, all at once as only the end shows that they are calls; whether they are."""
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


def _read(reader: Reader, answer: Answer, tools: Tools, start: str) -> Reads[bool]:
    if start == TAG:
        return (yield from read_hermes(reader, answer, tools, start))
    yield from reader.space()
    if (yield from reader.peek()) == "{":
        begun = yield from read_calls(reader, answer)
        yield from reader.skip(_END)
        return begun
    return (yield from read_python(reader, answer, tools, _END))


LFM2 = Form("lfm2", ((_START,),), (_START, TAG), _read, write_hermes)
