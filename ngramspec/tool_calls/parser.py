"""`parser_for`: what turns the text of an answer into content, thoughts and calls while it is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from ngramspec.tool_calls.answer import Answer
from ngramspec.tool_calls.deltas import Delta, Tool
from ngramspec.tool_calls.families import family_of
from ngramspec.tool_calls.forms import Form
from ngramspec.tool_calls.hermes import HERMES
from ngramspec.tool_calls.reader import Reader, Reads
from ngramspec.tool_calls.thoughts import opened, thought_tags


class AnswerParser(Protocol):
    """Reads one answer. No text makes it raise."""

    def push(self, text: str) -> list[Delta]:
        """What a further piece of the answer, control tokens shown, adds to it."""

    def finish(self) -> list[Delta]:
        """What was held back, now that the answer ended."""


def parser_for(template: str | None, tools: Sequence[Tool] = (), *, opening: str = "") -> AnswerParser:
    """A parser for one answer of a model.

    Args:
        template: the model's chat template, in Jinja; None if it has none.
        tools: that may be called; without any, what looks like a call is content.
        opening: what the prompt ends in (`ChatPrompt.opening`): an answer may begin within thoughts.
    """
    known = {tool.name: tool for tool in tools}
    return _Parser(family_of(template) or HERMES, known, thought_tags(template), opening)


def thoughts_parser(template: str | None, *, opening: str = "") -> AnswerParser:
    """A parser that tells thoughts from content and takes nothing for a call.

    Args:
        template: the model's chat template; where it speaks of no tags around thoughts, they are <think> and </think>.
        opening: as in `parser_for`.
    """
    return _Parser(HERMES, {}, thought_tags(template) or thought_tags("<think>"), opening)


class _Parser:
    def __init__(self, form: Form, tools: Mapping[str, Tool], tags: Mapping[str, str], opening: str) -> None:
        self._reader = Reader()
        self._answer = Answer(form.short_ids)
        self._form, self._tools, self._tags = form, tools, tags
        self._reads = self._all(opening)
        self._over = False

    def push(self, text: str) -> list[Delta]:
        self._reader.feed(text)
        return self._go_on()

    def finish(self) -> list[Delta]:
        self._reader.ended = True
        return self._go_on()

    def _go_on(self) -> list[Delta]:
        if not self._over:
            try:
                next(self._reads)
            except StopIteration:
                self._answer.end()
                self._over = True
        return self._answer.drain()

    def _all(self, opening: str) -> Reads[None]:
        reader, form = self._reader, self._form
        if form.whole is not None:
            yield from form.whole(reader, self._answer, self._tools)
            return
        yield from self._thoughts(opening)
        if not self._tools:
            yield from reader.until((), self._answer.content)
            return
        while True:
            # What a call may begin with only here; then what it may begin with anywhere.
            reader.mark()
            yield from reader.space()
            start = yield from reader.take(*form.first) if form.first else _none()
            if start and (yield from form.read(reader, self._answer, self._tools, start)):
                reader.forget()
                continue
            reader.back()
            while (start := (yield from reader.until(form.starts, self._answer.content))) is not None:
                reader.mark(before=len(start))
                if (yield from form.read(reader, self._answer, self._tools, start)):
                    reader.forget()
                    break
                reader.back()
                self._answer.content((yield from reader.read(len(start))))
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


def _none() -> Reads[None]:
    return None
    yield
