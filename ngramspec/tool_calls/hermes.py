"""`<tool_call>` and what stands in it: Hermes' and Qwen's JSON, Qwen3-Coder's tags, GLM's keys and values.

They begin alike, and models mix them up, so what follows decides. Every family whose own calls hold no JSON reads this
form, too: it is the one that calls are forced in, and that tools are described in where a template cannot.
"""

from __future__ import annotations

from ngramspec.tool_calls.answer import Answer
from ngramspec.tool_calls.forms import Form, Tools, Written
from ngramspec.tool_calls.json_calls import read_arguments, read_calls
from ngramspec.tool_calls.json_text import quote
from ngramspec.tool_calls.reader import Reader, Reads
from ngramspec.tool_calls.tagged import Tags, read_tagged

TAG = "<tool_call>"
_QWEN = Tags("<parameter=", ">", "", "</parameter>", "</function>", lines=True)
_GLM = Tags("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>")
_FUNCTION = "<function="


def read_hermes(reader: Reader, answer: Answer, tools: Tools, start: str) -> Reads[bool]:
    """What follows "<tool_call>", or "<function=" of a call without it."""
    if start != _FUNCTION:
        yield from reader.space()
        opening = yield from reader.peek()
        if opening in {"{", "["}:
            begun = yield from read_calls(reader, answer)
        elif (yield from reader.take(_FUNCTION)):
            begun = yield from _read_function(reader, answer, tools)
        else:
            return (yield from _read_keys(reader, answer, tools))
    else:
        begun = yield from _read_function(reader, answer, tools)
    if begun:
        yield from reader.skip("</tool_call>", "</tool_calls>", "</seed:tool_call>")
    return begun


def write_hermes(name: str) -> Written:
    """A call as JSON in "<tool_call>"."""
    return Written(f'<tool_call>\n{{"name": {quote(name)}, "arguments": ', "}\n</tool_call>")


def _read_function(reader: Reader, answer: Answer, tools: Tools) -> Reads[bool]:
    """A call whose name comes next: "name>", and parameters in tags, or all of them as JSON."""
    parts: list[str] = []
    if not (yield from reader.until((">",), parts.append)):
        return False
    name = "".join(parts).strip().strip("\"'")
    yield from reader.space()
    if (yield from reader.peek()) != "{":
        return bool(name) and (yield from read_tagged(reader, answer, name, tools.get(name), _QWEN))
    if not name or not (yield from read_arguments(reader, answer, name)):
        return bool(name)
    yield from reader.skip("</function>")
    return True


def _read_keys(reader: Reader, answer: Answer, tools: Tools) -> Reads[bool]:
    """A call whose name comes next, of a tool that there is, and then keys and values."""
    parts: list[str] = []
    found = yield from reader.until((_GLM.parameter, _GLM.end), parts.append)
    name = "".join(parts).strip()
    if found is None or name not in tools:
        return False
    reader.unread(len(found))
    return (yield from read_tagged(reader, answer, name, tools[name], _GLM))


HERMES = Form("hermes", ((TAG,),), (TAG, "<tool_calls>"), read_hermes, write_hermes)
QWEN_CODER = Form("qwen-coder", ((_FUNCTION,),), (TAG, "<seed:tool_call>", _FUNCTION), read_hermes, write_hermes)
GLM = Form("glm", (("<arg_key>",),), (TAG,), read_hermes, write_hermes)
GRANITE = Form("granite", (("<|tool_call|>",),), ("<|tool_call|>", TAG), read_hermes, write_hermes)
