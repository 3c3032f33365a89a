"""Llama 3's calls: bare JSON objects, or objects behind `<|python_tag|>`."""

from __future__ import annotations

from ngramspec.tool_calls.answer import Answer
from ngramspec.tool_calls.forms import Form, Tools, Written
from ngramspec.tool_calls.json_calls import read_calls
from ngramspec.tool_calls.json_text import quote
from ngramspec.tool_calls.reader import Reader, Reads

_TAG = "<|python_tag|>"


def _read(reader: Reader, answer: Answer, tools: Tools, start: str) -> Reads[bool]:
    if start == _TAG:
        yield from reader.space()
    else:
        reader.unread(len(start))
    # An answer may be JSON without being a call, so the name must be a tool's, and the keys those of calls.
    begun = yield from read_calls(reader, answer, tools)
    yield from reader.skip(";")
    return begun


def _write(name: str) -> Written:
    return Written(f'{{"name": {quote(name)}, "parameters": ', "}")


LLAMA = Form(
    "llama",
    ((_TAG,), ("<|start_header_id|>", '"parameters": ')),
    starts=(_TAG,),
    read=_read,
    write=_write,
    first=("{", "["),
    around=("", "; ", ""),
)
