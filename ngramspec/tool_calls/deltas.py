"""What an answer is made of: text, thoughts, and calls of tools. Every delta is a piece that extends those before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call; `parameters` is a JSON schema."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})


Span = tuple[int, int]
"""Where a part of a text begins and ends, in characters."""


class Content(NamedTuple):
    """Text of the answer; `drafted`: what of it is known to be accepted drafts, where somebody asked for that."""

    text: str
    drafted: tuple[Span, ...] = ()


class Reasoning(NamedTuple):
    """Text that the model thought before its answer; `drafted` as in `Content`."""

    text: str
    drafted: tuple[Span, ...] = ()


class CallBegin(NamedTuple):
    """A tool call begins: the only delta that names it. `call` counts the calls of an answer from 0 on."""

    call: int
    id: str
    name: str


class CallArguments(NamedTuple):
    """A further piece of a call's arguments, which joined are a JSON object; `drafted` as in `Content`."""

    call: int
    text: str
    drafted: tuple[Span, ...] = ()


Delta = Content | Reasoning | CallBegin | CallArguments
