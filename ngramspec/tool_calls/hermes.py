"""`<tool_call>` and what stands in it: Hermes' and Qwen's JSON, Qwen3-Coder's XML, GLM's keys and values.

All three begin alike, and models mix them up, so what follows decides.
"""

from __future__ import annotations

from ngramspec.tool_calls.answer import Answer
from ngramspec.tool_calls.forms import Form, Tools, Written
from ngramspec.tool_calls.json_calls import read_calls
from ngramspec.tool_calls.json_text import quote
from ngramspec.tool_calls.reader import Reader, Reads


def _read(reader: Reader, answer: Answer, tools: Tools, start: str) -> Reads[bool]:
    yield from reader.space()
    begun = yield from read_calls(reader, answer)
    yield from reader.space()
    yield from reader.take("</tool_call>")
    return begun


def _write(name: str) -> Written:
    return Written(f'<tool_call>\n{{"name": {quote(name)}, "arguments": ', "}\n</tool_call>")


HERMES = Form("hermes", (("<tool_call>",),), ("<tool_call>",), _read, write=_write)
