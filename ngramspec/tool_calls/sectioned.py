"""Calls between control tokens, with a name and JSON arguments: DeepSeek up to V3.1, Kimi K2, and Mistral."""

from __future__ import annotations

import re

from ngramspec.tool_calls.answer import Answer
from ngramspec.tool_calls.forms import Form, Tools, Written, read_each
from ngramspec.tool_calls.hermes import TAG, read_hermes, write_hermes
from ngramspec.tool_calls.json_calls import read_arguments, read_calls
from ngramspec.tool_calls.json_text import quote
from ngramspec.tool_calls.reader import Reader, Reads

# ------------------------------------------------------------------------------------- DeepSeek

_ROW, _ROW_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END, _SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_FENCE = "```json"


def _read_deepseek(reader: Reader, answer: Answer, tools: Tools, start: str) -> Reads[bool]:
    if start == TAG:
        return (yield from read_hermes(reader, answer, tools, start))

    def one() -> Reads[bool]:
        # V3.1: name, separator, arguments. V3 and R1: "function", separator, name, arguments in a fence.
        parts: list[str] = []
        if not (yield from reader.until((_SEPARATOR,), parts.append)):
            return False
        yield from reader.space()
        fenced = (yield from reader.peek()) != "{"
        if fenced:
            parts = []
            yield from reader.until((_FENCE, _CALL_END), parts.append)
            yield from reader.space()
        name = "".join(parts).strip()
        whole = (yield from read_arguments(reader, answer, name)) if name else None
        if whole:
            yield from reader.space()
            if fenced:
                yield from reader.skip("```")
            yield from reader.skip(_CALL_END)
        return whole is not None

    return (yield from read_each(reader, start, _CALL, _ROW_END, one))


def _write_v31(name: str) -> Written:
    return Written(f"{_CALL}{name}{_SEPARATOR}", _CALL_END)


def _write_v3(name: str) -> Written:
    return Written(f"{_CALL}function{_SEPARATOR}{name}\n{_FENCE}\n", f"\n```{_CALL_END}")


_DEEPSEEK = (_ROW, _CALL, TAG)
DEEPSEEK_V3 = Form(
    "deepseek-v3", ((_ROW, _FENCE),), _DEEPSEEK, _read_deepseek, _write_v3, around=(_ROW, "\n", _ROW_END)
)
DEEPSEEK_V31 = Form("deepseek-v3.1", ((_ROW,),), _DEEPSEEK, _read_deepseek, _write_v31, around=(_ROW, "", _ROW_END))

# ----------------------------------------------------------------------------------------- Kimi

_KIMI_ROW, _KIMI_ROW_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_KIMI_CALL, _KIMI_CALL_END, _KIMI_ARGUMENTS = (
    "<|tool_call_begin|>",
    "<|tool_call_end|>",
    "<|tool_call_argument_begin|>",
)
_KIMI_ID = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?")


def _read_kimi(reader: Reader, answer: Answer, tools: Tools, start: str) -> Reads[bool]:
    if start == TAG:
        return (yield from read_hermes(reader, answer, tools, start))

    def one() -> Reads[bool]:
        parts: list[str] = []
        if not (yield from reader.until((_KIMI_ARGUMENTS,), parts.append)):
            return False
        match = _KIMI_ID.fullmatch("".join(parts).strip())
        yield from reader.space()
        whole = (yield from read_arguments(reader, answer, match[1])) if match else None
        if whole:
            yield from reader.skip(_KIMI_CALL_END)
        return whole is not None

    return (yield from read_each(reader, start, _KIMI_CALL, _KIMI_ROW_END, one))


KIMI = Form("kimi", ((_KIMI_ROW,),), (_KIMI_ROW, _KIMI_CALL, TAG), _read_kimi, write_hermes)

# -------------------------------------------------------------------------------------- Mistral

_CALLS, _ARGUMENTS, _CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


def _read_mistral(reader: Reader, answer: Answer, tools: Tools, start: str) -> Reads[bool]:
    yield from reader.space()
    if (yield from reader.peek()) in {"[", "{"}:
        return (yield from read_calls(reader, answer))
    parts: list[str] = []
    found = yield from reader.until((_ARGUMENTS, _CALL_ID), parts.append)
    if found == _CALL_ID:
        found = yield from reader.until((_ARGUMENTS,), lambda _: None)
    yield from reader.space()
    name = "".join(parts).strip()
    return bool(found and name) and (yield from read_arguments(reader, answer, name)) is not None


def _write_list(name: str) -> Written:
    return Written(f'{{"name": {quote(name)}, "arguments": ', "}")


def _write_named(name: str) -> Written:
    return Written(f"{_CALLS}{name}{_ARGUMENTS}", "")


MISTRAL = Form(
    "mistral", ((_CALLS, _ARGUMENTS),), (_CALLS,), _read_mistral, _write_named, around=("", "", ""), short_ids=True
)
MISTRAL_LIST = Form(
    "mistral-list",
    ((_CALLS,),),
    (_CALLS,),
    _read_mistral,
    _write_list,
    around=(f"{_CALLS}[", ", ", "]"),
    short_ids=True,
)
