"""Streaming parser that divides the text of an answer into content, reasoning and calls."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial

from ngramspec.tool_calls.calls import read_arguments
from ngramspec.tool_calls.deltas import Delta, Deltas, Reader, Reads, Tool, Tools
from ngramspec.tool_calls.families import HERMES, Family, family_of, opened, thought_tags

_NAMING = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"]+)')  # start of a call without a mark before it
_SHORT, _NEAR = 12, 80
"""Number of characters below which a text may still become a call, and number within which a call has its name."""


def parser_for(template: str | None, tools: Sequence[Tool] = (), *, opening: str = "") -> AnswerParser:
    """Return a parser for one answer of a model.

    Args:
        template: Chat template of the model, in Jinja; `None` if it lacks one.
        tools: Tools that may be called; without tools, calls are content.
        opening: Text at the end of the prompt (`ChatPrompt.opening`), which may open reasoning.
    """
    return AnswerParser(family_of(template) or HERMES, tools, thought_tags(template), opening)


def thoughts_parser(template: str | None, *, opening: str = "") -> AnswerParser:
    """Return a parser that separates reasoning from content, and parses no calls.

    If the template mentions no tags around reasoning, they are <think> and </think>.
    """
    return AnswerParser(HERMES, (), thought_tags(template) or thought_tags("<think>"), opening)


class AnswerParser:
    """A parser of one answer, made by `parser_for` or `thoughts_parser`. It raises no errors, whatever the text is."""

    ended: bool | None = None  # it never ends a text early

    def __init__(self, family: Family, tools: Sequence[Tool], tags: Mapping[str, str], opening: str) -> None:
        self._reader, self._answer = Reader(), Deltas(family.short_ids)
        known = {tool.name: tool for tool in tools}
        reads = _read_channels if family.channels else partial(_read_answer, family=family, tags=tags, opening=opening)
        self._reads = reads(self._reader, self._answer, known)

    def push(self, text: str) -> list[Delta]:
        """Parse a further piece of the answer, including control tokens."""
        self._reader.feed(text)
        try:
            next(self._reads)
        except StopIteration:
            self._answer.end(dropped=bool(self._reader.rest()))
        return self._answer.drain()

    def finish(self, cut: bool = False) -> list[Delta]:
        """Return the held-back text at the end; `cut`: a limit ended it, so an incomplete call is dropped."""
        self._reader.ended, self._reader.cut = True, cut
        return self.push("")


def _read_answer(
    reader: Reader, answer: Deltas, tools: Tools, *, family: Family, tags: Mapping[str, str], opening: str
) -> Reads[None]:
    """Parse reasoning, at the beginning or opened by the prompt, then content and calls."""
    tag: str | None = opened(tags, opening)
    if tag is None and tags:
        yield from reader.space()
        tag = yield from reader.take(*tags)
    if tag is None:
        reader.at = 0
    else:
        yield from reader.until((tags[tag],), answer.think)
    if not tools:
        yield from reader.until((), answer.content)
        return
    while True:
        # Calls without a start may only begin here. Calls with a start may begin anywhere after this place.
        if family.bare:
            before = reader.at
            yield from reader.space()
            if (yield from family.bare(reader, answer, tools)):
                continue
            reader.at = before
            named = _NAMING.match(reader.rest()) if reader.cut else None
            if named and any(name.startswith(named[1]) for name in tools):
                return
        while (start := (yield from reader.until(family.starts, answer.content))) is not None:
            before = reader.at - len(start)
            if (yield from family.starts[start](reader, answer, tools)):
                break
            reader.at = before
            if _cut_off(reader, start, tools):
                return
            answer.content((yield from reader.read(len(start))))
        else:
            return


def _cut_off(reader: Reader, start: str, tools: Tools) -> bool:
    """Return True if the text, which begins like a call, would have become one if a limit had not cut it."""
    text = reader.rest().removeprefix(start).strip()
    return reader.cut and (len(text) < _SHORT or text[0] in "{[<" or any(name in text[:_NEAR] for name in tools))


# ----------------------------------------------------------------------------- gpt-oss' channels

_CHANNEL, _START, _MESSAGE, _TO = "<|channel|>", "<|start|>", "<|message|>", " to="
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
_NAMED = re.compile(r"<\|channel\|>\s*(\w+)")


def _read_channels(reader: Reader, answer: Deltas, tools: Tools) -> Reads[None]:
    """Parse gpt-oss' messages: the analysis channel is reasoning, a recipient makes a call, other text is content."""
    while (yield from reader.peek()):
        before = reader.at
        start = yield from reader.take(_CHANNEL, _START, _TO)
        if start is not None:
            if (yield from _read_message(reader, answer, tools, start)):
                continue
            reader.at = before
            if _cut_off(reader, start, tools):
                return
            answer.content((yield from reader.read(len(start))))
        found = yield from reader.until((_CHANNEL, _START), answer.content)
        if found is None:
            return
        reader.at -= len(found)


def _read_message(reader: Reader, answer: Deltas, tools: Tools, start: str) -> Reads[bool]:
    """Parse a message after the start of its header; return True if it is a message."""
    header, found = yield from reader.before(_MESSAGE, *_ENDS)
    if found != _MESSAGE:
        return False
    header = start + header
    recipient, channel = _RECIPIENT.search(header), _NAMED.search(header)
    take = answer.think if channel and channel[1] == "analysis" else answer.content
    if recipient:
        yield from reader.space()
        if not tools or (yield from read_arguments(reader, answer, recipient[1])) is None:
            return False
        yield from reader.space()
        take = answer.content  # for text after the JSON
    elif not channel:
        return False
    found = yield from reader.until((*_ENDS, _CHANNEL, _START), take)
    if found in (_CHANNEL, _START):
        reader.at -= len(found)
    return True
