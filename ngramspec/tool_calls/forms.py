"""How families of models write calls, thoughts and results, and which family a chat template belongs to."""

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
        starts: what a call begins with, anywhere in an answer.
        read: reads what follows one of `starts`, which it is told; whether a call was begun. Where none was, it may
            leave the reader anywhere: the text becomes content.
        first: what a call begins with only where the answer begins, or behind another call.
        write: a call in this form around its JSON arguments; None where arguments are not JSON.
        around: what stands before the first call, between two, and after the last.
        short_ids: whether ids of calls have nine characters.
    """

    name: str
    signs: tuple[tuple[str, ...], ...]
    starts: tuple[str, ...]
    read: ReadCall
    first: tuple[str, ...] = ()
    write: Callable[[str], Written] | None = None
    around: tuple[str, str, str] = ("", "\n", "")
    short_ids: bool = False
