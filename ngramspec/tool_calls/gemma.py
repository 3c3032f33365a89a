"""Gemma's calls: `call:f{key:<|"|>text<|"|>}` of Gemma 4, and the code fences in which earlier ones answer."""

from __future__ import annotations

from ngramspec.tool_calls.answer import Answer
from ngramspec.tool_calls.forms import Form, Tools
from ngramspec.tool_calls.hermes import TAG, read_hermes, write_hermes
from ngramspec.tool_calls.json_calls import read_calls
from ngramspec.tool_calls.json_text import escape, quote
from ngramspec.tool_calls.python_calls import read_python
from ngramspec.tool_calls.reader import SPACE, Emit, Reader, Reads
from ngramspec.tool_calls.tagged import as_json

_CALL, _CALL_END, _QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_BARE_ENDS = ",}]"


def _read_gemma4(reader: Reader, answer: Answer, tools: Tools, start: str) -> Reads[bool]:
    if start == TAG:
        return (yield from read_hermes(reader, answer, tools, start))
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
        yield from reader.skip(_CALL_END)
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
    yield from reader.run(_bare, parts.append)
    word = "".join(parts).strip(SPACE)
    whole = bool(word and (yield from reader.peek()))
    reader.release(back=not whole)
    if not whole:
        return False
    emit(as_json(word.strip('"'), None) if not word.startswith('"') else quote(word.strip('"')))
    return True


def _bare(text: str, at: int) -> int:
    while at < len(text) and text[at] not in _BARE_ENDS:
        at += 1
    return at


GEMMA4 = Form("gemma4", ((_CALL,),), (_CALL, TAG), _read_gemma4, write_hermes)

# ---------------------------------------------------------------------------------- before Gemma 4

_FENCES = ("```tool_code", "```tool_call", "```json")


def _read_fenced(reader: Reader, answer: Answer, tools: Tools, start: str) -> Reads[bool]:
    if start == TAG:
        return (yield from read_hermes(reader, answer, tools, start))
    yield from reader.space()
    if start == _FENCES[0] and (yield from reader.peek()) != "{":
        return (yield from read_python(reader, answer, tools, "```"))
    begun = yield from read_calls(reader, answer, tools)
    yield from reader.skip("```")
    return begun


GEMMA = Form("gemma", (("<start_of_turn>",),), (*_FENCES, TAG), _read_fenced, write_hermes)
