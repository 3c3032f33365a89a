"""gpt-oss' channels: analysis are thoughts, a recipient makes a call, everything else is content."""

from __future__ import annotations

import re

from ngramspec.tool_calls.answer import Answer
from ngramspec.tool_calls.forms import Form, Tools, Written
from ngramspec.tool_calls.json_calls import read_arguments
from ngramspec.tool_calls.reader import Reader, Reads

_CHANNEL, _START, _MESSAGE, _TO = "<|channel|>", "<|start|>", "<|message|>", " to="
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
_NAMED = re.compile(r"<\|channel\|>\s*(\w+)")


def _read_answer(reader: Reader, answer: Answer, tools: Tools) -> Reads[None]:
    """Messages, one after the other; what is in no message is content."""
    while (yield from reader.peek()):
        reader.mark()
        start = yield from reader.take(_CHANNEL, _START, _TO)
        if start is not None:
            if (yield from _read_message(reader, answer, tools, start)):
                reader.forget()
                continue
            reader.back()
            answer.content((yield from reader.read(len(start))))
        reader.forget()
        found = yield from reader.until((_CHANNEL, _START), answer.content)
        reader.unread(len(found or ""))


def _read_message(reader: Reader, answer: Answer, tools: Tools, start: str) -> Reads[bool]:
    """A message behind the start of its header; whether it is one."""
    parts = [start]
    if (yield from reader.until((_MESSAGE, *_ENDS), parts.append)) != _MESSAGE:
        return False
    header = "".join(parts)
    recipient, channel = _RECIPIENT.search(header), _NAMED.search(header)
    take = answer.think if channel and channel[1] == "analysis" else answer.content
    if recipient:
        yield from reader.space()
        if not tools or (yield from read_arguments(reader, answer, recipient[1])) is None:
            return False
        yield from reader.space()
        take = answer.content  # of what is no JSON
    elif not channel:
        return False
    reader.forget()
    found = yield from reader.until((*_ENDS, _CHANNEL, _START), take)
    if found in {_CHANNEL, _START}:
        reader.unread(len(found))
    return True


def _read_nothing(reader: Reader, answer: Answer, tools: Tools, start: str) -> Reads[bool]:
    return False
    yield


def _write(name: str) -> Written:
    return Written(f"{_CHANNEL}commentary to=functions.{name} <|constrain|>json{_MESSAGE}", "")


HARMONY = Form(
    "harmony",
    ((_CHANNEL, _MESSAGE),),
    (),
    _read_nothing,
    _write,
    around=("", None, ""),
    whole=_read_answer,
)
