"""`Delta`: what an answer is made of, text, thoughts and calls of tools, in pieces; `Deltas` collects them."""

from __future__ import annotations

import secrets
import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call; `parameters` is a JSON schema.

    Where `strict` is false, forced calls leave out what no grammar can say of it.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    strict: bool = False


Tools = Mapping[str, Tool]  # the tools that may be called, by their names


class Delta(NamedTuple):
    """What a further piece of the model's text adds to its answer: some text, or the beginning of a call."""

    # "text": of the answer; "thought": what the model thought before it; "call": a call of a tool begins; "arguments":
    # more of the last call's arguments, which joined are a JSON object.
    kind: Literal["text", "thought", "call", "arguments"]
    text: str = ""
    call: int = 0  # counts the calls of an answer from 0 on
    id: str = ""  # of a call that begins
    name: str = ""  # of its tool


_ID = string.ascii_letters + string.digits


class Deltas:
    """Collects the deltas of an answer.

    White space around calls and thoughts is the form's, not the answer's. So it is held until something follows: before
    a call and after one it is dropped, and at the end of an answer without calls it is content. `short_ids`: ids of
    calls are nine letters and digits, as Mistral's templates demand, not "call_...".
    """

    def __init__(self, short_ids: bool = False) -> None:
        self._deltas: list[Delta] = []
        self._short_ids = short_ids
        self._calls = 0
        self._held, self._drop = "", False
        self._thought = ""
        self._thinking = False

    def content(self, text: str) -> None:
        """A piece of content."""
        self._thought, self._thinking = "", False
        text, self._held = self._held + text, ""
        if self._drop:
            text = text.lstrip()
            self._drop = not text
        body = text.rstrip()
        self._held = text[len(body) :]
        if body:
            self._add(Delta("text", body))

    def think(self, text: str) -> None:
        """A piece of thought."""
        text = self._thought + text
        if not self._thinking:
            text = text.lstrip()
            self._thinking = bool(text)
        body = text.rstrip()
        self._thought = text[len(body) :]
        if body:
            self._add(Delta("thought", body))
        self._drop = True

    def begin(self, name: str) -> int:
        """A call begins; its number."""
        self._thought, self._thinking = "", False
        self._held, self._drop = "", True
        id_ = "".join(secrets.choice(_ID) for _ in range(9 if self._short_ids else 24))
        self._add(Delta("call", "", self._calls, id_ if self._short_ids else f"call_{id_}", name))
        self._calls += 1
        return self._calls - 1

    def arguments(self, call: int, text: str) -> None:
        """A piece of a call's arguments."""
        if text:
            self._add(Delta("arguments", text, call))

    def end(self, dropped: bool = False) -> None:
        """The answer ended; `dropped`: with half a call, which is not told, nor the white space before it."""
        self._drop = self._drop or dropped
        if self._held and not self._drop:
            self._add(Delta("text", self._held))
        self._held = ""

    def drain(self) -> list[Delta]:
        """The deltas since the last call, those of one kind joined."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def _add(self, delta: Delta) -> None:
        last = self._deltas[-1] if self._deltas else None
        if last is None or last.kind != delta.kind or delta.kind == "call":
            self._deltas.append(delta)
        else:  # a call's arguments follow its beginning, so these are of the same call
            self._deltas[-1] = last._replace(text=last.text + delta.text)
