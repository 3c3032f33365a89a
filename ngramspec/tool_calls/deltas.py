"""`Delta`: what an answer is made of, text, thoughts and calls of tools, in pieces, which `Deltas` collects; `Reader`:
the text it is read from.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Collection, Generator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeVar


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
    """Addition to an answer by a further piece of the model's text: text, or the start of a call."""

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

    def begin(self, name: str, arguments: str = "") -> None:
        """A call begins, with the beginning of its arguments."""
        self._thought, self._thinking = "", False
        self._held, self._drop = "", True
        id_ = "".join(secrets.choice(_ID) for _ in range(9 if self._short_ids else 24))
        self._calls += 1
        self._add(Delta("call", "", self._calls - 1, id_ if self._short_ids else f"call_{id_}", name))
        self.arguments(arguments)

    def arguments(self, text: str) -> None:
        """A piece of the last call's arguments."""
        if text:
            self._add(Delta("arguments", text, self._calls - 1))

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


# --------------------------------------------------------------------------- what is read


T = TypeVar("T")
Reads = Generator[None, None, T]
Emit = Callable[[str], None]

SPACE = re.compile(r"[ \t\r\n]*")


@lru_cache(256)
def _patterns(markers: tuple[str, ...]) -> tuple[re.Pattern[str], re.Pattern[str], int]:
    """Return patterns for a whole marker and for the beginning of one at the end of a text, and the longest length."""
    nothing = "(?!)"
    whole = "|".join(map(re.escape, markers)) or nothing
    begun = "|".join(re.escape(marker[:n]) for marker in markers for n in range(1, len(marker))) or nothing
    return re.compile(whole), re.compile(rf"(?:{begun})\Z"), max(map(len, markers), default=1)


class Reader:
    """Text that arrives in pieces, read as if it were there at once, and how far it was read.

    What reads is a generator, which yields where it needs more text than has come: what it decides depends on the text
    alone, never on where it was cut.
    """

    def __init__(self) -> None:
        self.at = 0  # the next character's place; setting it back reads again
        self.ended = False  # whether no more will come
        self.cut = False  # whether there would have been more: what had begun to be a mark is then dropped
        self._text = ""

    def feed(self, piece: str) -> None:
        """More text."""
        self._text += piece

    def rest(self) -> str:
        """Text that has arrived and is unread."""
        return self._text[self.at :]

    def peek(self) -> Reads[str]:
        """The next character, unread; "" at the end."""
        while self.at == len(self._text):
            if self.ended:
                return ""
            yield
        return self._text[self.at]

    def read(self, count: int) -> Reads[str]:
        """The next characters; fewer at the end."""
        while len(self._text) - self.at < count and not self.ended:
            yield
        found = self._text[self.at : self.at + count]
        self.at += len(found)
        return found

    def run(self, characters: re.Pattern[str], emit: Emit) -> Reads[None]:
        """Emit characters as long as they are of a kind; `characters` matches any number of them."""
        while True:
            match = characters.match(self._text, self.at)
            end = match.end() if match else self.at
            if end > self.at:
                emit(self._text[self.at : end])
                self.at = end
            if end < len(self._text) or self.ended:
                return
            yield

    def space(self) -> Reads[None]:
        """Skip white space."""
        yield from self.run(SPACE, lambda _: None)

    def take(self, *literals: str) -> Reads[str | None]:
        """Read the longest of some strings that comes next; None where none of them does."""
        while True:
            longest = max((word for word in literals if self._text.startswith(word, self.at)), key=len, default=None)
            rest = self._text[self.at : self.at + max(map(len, literals))]
            if self.ended or not any(len(word) > len(rest) and word.startswith(rest) for word in literals):
                self.at += len(longest or "")
                return longest
            yield

    def skip(self, *ends: str) -> Reads[None]:
        """Skip white space and, if one of some strings follows, that; or its beginning, where the text breaks off."""
        yield from self.space()
        if (yield from self.take(*ends)) is None and self.ended and any(end.startswith(self.rest()) for end in ends):
            self.at = len(self._text)

    def until(self, markers: Collection[str], emit: Emit) -> Reads[str | None]:
        """Emit what comes before the first of some strings, and read that string; None: the text ended without one.

        What could begin one of them is held back. None of the strings may begin with another.
        """
        whole, partial, longest = _patterns(tuple(markers))
        while True:
            text, at = self._text, self.at
            match, rest = whole.search(text, at), partial.search(text, max(at, len(text) - longest + 1))
            place = len(text) if match is None else match.start()
            held = place if rest is None or rest.start() > place else rest.start()
            held = place if self.ended and not (self.cut and len(text) - held > 1) else held
            if held > at:
                emit(text[at:held])
                self.at = held
            if held == place and match is not None:
                self.at = match.end()
                return match[0]
            if self.ended:
                return None
            yield

    def before(self, *markers: str) -> Reads[tuple[str, str | None]]:
        """Return the text before the first of several strings, as a whole, and that string; as `until` finds it."""
        parts: list[str] = []
        found = yield from self.until(markers, parts.append)
        return "".join(parts), found
