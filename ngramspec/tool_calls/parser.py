"""`parser_for`: what turns the text of an answer into content, thoughts and calls while it is written."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ngramspec.tool_calls.deltas import Answer, Delta, Tool, Tools
from ngramspec.tool_calls.families import HERMES, Family, family_of, opened, thought_tags
from ngramspec.tool_calls.json_calls import read_arguments
from ngramspec.tool_calls.reader import Reader, Reads

_NAMING = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"]+)')  # a call that has no mark before it
_SHORT, _NEAR = 12, 80  # characters of a text that says nothing yet, and of one in which a call would have a name


def parser_for(template: str | None, tools: Sequence[Tool] = (), *, opening: str = "") -> AnswerParser:
    """A parser for one answer of a model.

    Args:
        template: the model's chat template, in Jinja; None if it has none.
        tools: that may be called; without any, what looks like a call is content.
        opening: what the prompt ends in (`ChatPrompt.opening`): an answer may begin within thoughts.
    """
    known = {tool.name: tool for tool in tools}
    return AnswerParser(family_of(template) or HERMES, known, thought_tags(template), opening)


def thoughts_parser(template: str | None, *, opening: str = "") -> AnswerParser:
    """A parser that tells thoughts from content and takes nothing for a call.

    Where the template speaks of no tags around thoughts, they are <think> and </think>.
    """
    return AnswerParser(HERMES, {}, thought_tags(template) or thought_tags("<think>"), opening)


class AnswerParser:
    """Reads one answer. No text makes it raise. Made by `parser_for` and `thoughts_parser`."""

    def __init__(self, family: Family, tools: Tools, tags: Mapping[str, str], opening: str) -> None:
        self._reader = Reader()
        self._answer = Answer(family.short_ids)
        self._family, self._tools, self._tags = family, tools, tags
        self._reads = _read_channels(self._reader, self._answer, tools) if family.channels else self._all(opening)
        self._over = False

    def push(self, text: str) -> list[Delta]:
        """What a further piece of the answer, control tokens shown, adds to it."""
        self._reader.feed(text)
        return self._go_on()

    def finish(self, cut: bool = False) -> list[Delta]:
        """What was held back, now that the answer ended; `cut`: by a limit, so that half a call is no content."""
        self._reader.ended, self._reader.cut = True, cut
        return self._go_on()

    def _go_on(self) -> list[Delta]:
        if not self._over:
            try:
                next(self._reads)
            except StopIteration:
                self._answer.end(dropped=bool(self._reader.rest()))
                self._over = True
        return self._answer.drain()

    def _all(self, opening: str) -> Reads[None]:
        reader, answer, tools, starts = self._reader, self._answer, self._tools, self._family.starts
        yield from self._thoughts(opening)
        if not tools:
            yield from reader.until((), answer.content)
            return
        while True:
            # Here calls may begin that begin nowhere else; behind, those that begin anywhere.
            if self._family.bare:
                reader.mark()
                yield from reader.space()
                if (yield from self._family.bare(reader, answer, tools)):
                    reader.forget()
                    continue
                reader.back()
                if (
                    reader.cut
                    and (named := _NAMING.match(reader.rest()))
                    and any(name.startswith(named[1]) for name in tools)
                ):
                    return
            while (start := (yield from reader.until(starts, answer.content))) is not None:
                reader.mark(before=len(start))
                if (yield from starts[start](reader, answer, tools)):
                    reader.forget()
                    break
                reader.back()
                if reader.cut and _like_call(reader.rest().removeprefix(start), tools):
                    return
                answer.content((yield from reader.read(len(start))))
            else:
                return

    def _thoughts(self, opening: str) -> Reads[None]:
        """Thoughts at the beginning of the answer, or those that the prompt began."""
        start: str | None = opened(self._tags, opening)
        if start is None and self._tags:
            self._reader.mark()
            yield from self._reader.space()
            start = yield from self._reader.take(*self._tags)
            if start is None:
                self._reader.back()
            self._reader.forget()
        if start is not None:
            yield from self._reader.until((self._tags[start],), self._answer.think)


def _like_call(text: str, tools: Tools) -> bool:
    """Whether a text that was cut, behind the beginning of a call, may have been going to be one."""
    text = text.strip()
    return len(text) < _SHORT or text[0] in "{[<" or any(name in text[:_NEAR] for name in tools)


# ----------------------------------------------------------------------------- gpt-oss' channels

_CHANNEL, _START, _MESSAGE, _TO = "<|channel|>", "<|start|>", "<|message|>", " to="
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
_NAMED = re.compile(r"<\|channel\|>\s*(\w+)")


def _read_channels(reader: Reader, answer: Answer, tools: Tools) -> Reads[None]:
    """gpt-oss' messages, one after the other: analysis are thoughts, a recipient makes a call, all else is content."""
    while (yield from reader.peek()):
        reader.mark()
        start = yield from reader.take(_CHANNEL, _START, _TO)
        if start is not None:
            if (yield from _read_message(reader, answer, tools, start)):
                reader.forget()
                continue
            reader.back()
            if reader.cut and _like_call(reader.rest().removeprefix(start), tools):
                return
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
