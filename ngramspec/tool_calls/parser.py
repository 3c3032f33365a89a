"""Streaming parser that divides the text of an answer into content, reasoning and calls."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial

from ngramspec.tool_calls.calls import read_arguments
from ngramspec.tool_calls.deltas import Delta, Deltas, Reader, Reads, Tool, Tools
from ngramspec.tool_calls.families import HERMES, Family, family_of, find_open_tag, find_reasoning_tags

_CALL_START = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"]+)')  # start of a call without a mark before it
_SHORT, _NEAR = 12, 80
"""Number of characters below which a text may still become a call, and number within which a call has its name."""


def parser_for(
    template: str | None, tools: Sequence[Tool] = (), *, opening: str = "", parallel: bool = True
) -> AnswerParser:
    """Return a parser for one answer of a model with a chat template in Jinja; without tools, calls are content.

    `opening` is the text at the end of the prompt (`ChatPrompt.opening`), which may open reasoning. Without `parallel`,
    the answer ends after its first call.
    """
    return AnswerParser(family_of(template) or HERMES, tools, find_reasoning_tags(template), opening, parallel)


class AnswerParser:
    """A parser of one answer, made by `parser_for`. It raises no errors, whatever the text is.

    Attributes:
        ended: Whether the answer has ended after a call, so that later text is dropped; `None` if several calls are
            allowed, because the answer then ends only with the text.
    """

    def __init__(
        self, family: Family, tools: Sequence[Tool], tags: Mapping[str, str], opening: str, parallel: bool = True
    ) -> None:
        self.ended: bool | None = None if parallel or not tools else False
        self._reader, self._answer = Reader(), Deltas(family.short_ids, parallel)
        tools_by_name = {tool.name: tool for tool in tools}
        reads = _read_channels if family.channels else partial(_read_answer, family=family, tags=tags, opening=opening)
        self._reads = reads(self._reader, self._answer, tools_by_name)

    def push(self, text: str) -> list[Delta]:
        """Parse a further piece of the answer, including control tokens."""
        self._reader.feed(text)
        try:
            next(self._reads)
        except StopIteration:
            self.ended = self._answer.is_full or self.ended
            self._answer.end(self._reader.cut, drops_call=bool(self._reader.peek_rest()))
        return self._answer.drain()

    def finish(self, cut: bool = False) -> list[Delta]:
        """Return the held-back text at the end; `cut`: a limit ended it, so an incomplete call is dropped."""
        self._reader.ended, self._reader.cut = True, cut
        return self.push("")


def _read_answer(
    reader: Reader, answer: Deltas, tools: Tools, *, family: Family, tags: Mapping[str, str], opening: str
) -> Reads[None]:
    """Parse reasoning, at the beginning or opened by the prompt, then content and calls."""
    tag: str | None = find_open_tag(tags, opening)
    if tag is None and tags:
        yield from reader.skip_space()
        tag = yield from reader.take(*tags)
    if tag is None:
        reader.at = 0
    else:
        yield from reader.read_until((tags[tag],), answer.add_reasoning)
    if not tools:
        yield from reader.read_until((), answer.add_content)
        return
    reader.ran_out = False
    # If a limit cut the text within a call, the rest of the text belongs to the call.
    while not (answer.is_full or (reader.cut and reader.ran_out)):
        # Calls without a start may only begin here. Calls with a start may begin anywhere after this place.
        if family.bare:
            before = reader.at
            yield from reader.skip_space()
            if (yield from family.bare(reader, answer, tools)):
                continue
            reader.at = before
            match = _CALL_START.match(reader.peek_rest()) if reader.cut else None
            if match and any(name.startswith(match[1]) for name in tools):
                return
        while (start := (yield from reader.read_until(family.starts, answer.add_content))) is not None:
            before = reader.at - len(start)
            yield from reader.skip_all(start)
            end = reader.at
            reader.ran_out = False
            if (yield from family.starts[start](reader, answer, tools)):
                break
            reader.at = before
            if _is_cut_call(reader, start, tools):
                return
            answer.add_content((yield from reader.read(end - before)))
        else:
            return


def _is_cut_call(reader: Reader, start: str, tools: Tools) -> bool:
    """Return True if the text, which begins like a call, would have become one if a limit had not cut it."""
    text = reader.peek_rest().removeprefix(start).strip()
    return reader.cut and (len(text) < _SHORT or text[0] in "{[<" or any(name in text[:_NEAR] for name in tools))


# ----------------------------------------------------------------------------- gpt-oss' channels

_CHANNEL, _START, _MESSAGE, _TO = "<|channel|>", "<|start|>", "<|message|>", " to="
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")


def _read_channels(reader: Reader, answer: Deltas, tools: Tools) -> Reads[None]:
    """Parse gpt-oss' messages: the analysis channel is reasoning, a recipient makes a call, other text is content."""
    while (yield from reader.peek()):
        before = reader.at
        start = yield from reader.take(_CHANNEL, _START, _TO)
        if start is not None:
            reader.ran_out = False
            if (yield from _read_message(reader, answer, tools, start)):
                if answer.is_full or (reader.cut and reader.ran_out):
                    return
                continue
            reader.at = before
            if _is_cut_call(reader, start, tools):
                return
            answer.add_content((yield from reader.read(len(start))))
        marker = yield from reader.read_until((_CHANNEL, _START), answer.add_content)
        if marker is None:
            return
        reader.at -= len(marker)


def _read_message(reader: Reader, answer: Deltas, tools: Tools, start: str) -> Reads[bool]:
    """Parse a message after the start of its header; return True if it is a message."""
    header, marker = yield from reader.read_before(_MESSAGE, _START, *_ENDS)
    if marker != _MESSAGE:
        return False
    header = start + header
    recipient, channel = _RECIPIENT.search(header), _CHANNEL_NAME.search(header)
    add_text = answer.add_reasoning if channel and channel[1] == "analysis" else answer.add_content
    if recipient:
        yield from reader.skip_space()
        if not tools or (yield from read_arguments(reader, answer, recipient[1])) is None:
            return False
        if answer.is_full:
            return True
        yield from reader.skip()
        add_text = answer.add_content  # for text after the JSON
    elif not channel:
        return False
    marker = yield from reader.read_until((*_ENDS, _CHANNEL, _START), add_text)
    if marker in (_CHANNEL, _START):
        reader.at -= len(marker)
    return True
