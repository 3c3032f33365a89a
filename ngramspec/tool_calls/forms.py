"""What a family of models is: how calls begin in its answers, who reads them, and how calls are written for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ngramspec.tool_calls.answer import Answer
from ngramspec.tool_calls.deltas import Tool
from ngramspec.tool_calls.reader import Reader, Reads

Tools = Mapping[str, Tool]
ReadCall = Callable[[Reader, Answer, Tools, str], Reads[bool]]


class Written(NamedTuple):
    """What stands before and after the JSON arguments of a call."""

    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Form:
    """How a family writes calls.

    Attributes:
        name: of the family.
        signs: what its chat templates contain: all strings of one of these groups.
        starts: what a call begins with, anywhere in an answer. None of them begins with another.
        read: reads what follows one of `starts`, which it is told; whether a call was begun. Where none was, it may
            leave the reader anywhere: the text becomes content.
        write: a call of a tool around its JSON arguments, as `read` reads it.
        around: what stands before the first call so written, between two (None: there is one only), after the last.
        first: what a call begins with only where the answer begins, or behind another call.
        whole: reads a whole answer, where it is more than content and calls; instead of `read`.
        short_ids: whether ids of calls have nine characters.
    """

    name: str
    signs: tuple[tuple[str, ...], ...]
    starts: tuple[str, ...]
    read: ReadCall
    write: Callable[[str], Written]
    around: tuple[str, str | None, str] = ("", "\n", "")
    first: tuple[str, ...] = ()
    whole: Callable[[Reader, Answer, Tools], Reads[None]] | None = None
    short_ids: bool = False


def read_each(reader: Reader, start: str, item: str, end: str, read: Callable[[], Reads[bool]]) -> Reads[bool]:
    """Calls in a row, each behind `item`, up to `end`; whether one was begun.

    `start` was read: what opens the row, or the first `item`.
    """
    begun = start == item and (yield from read())
    if start == item and not begun:
        return False
    while True:
        if begun:
            reader.mark()
        yield from reader.space()
        found = yield from reader.take(item, end)
        if found == item and (yield from read()):
            begun = True
            continue
        if begun and found is None:
            yield from reader.skip(item, end)
        elif begun and found == item:
            reader.back()
        return begun
