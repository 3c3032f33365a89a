"""GBNF, llama.cpp's language for grammars, as a tree of nodes; `lexemes` writes it as `Lark`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ngramspec.data import GrammarError
from ngramspec.grammars.lark import MAX_SIZE

LAST = 0x10FFFF
"""The last code point."""

MAX_BRACKETS = 60
"""Maximum depth of brackets within each other."""

MAX_REPETITIONS = 1_000_000
"""Maximum bound of a repetition."""

Ranges = tuple[tuple[int, int], ...]  # code points from and to, both included, ascending


@dataclass(slots=True, eq=False)
class Chars:
    """One character of a class."""

    ranges: Ranges


@dataclass(slots=True, eq=False)
class Text:
    """Several characters in a row."""

    text: str


@dataclass(slots=True, eq=False)
class Reference:
    """A rule by its name."""

    name: str
    at: int  # index in the text of the grammar


@dataclass(slots=True, eq=False)
class Token:
    """One token, or any other than this."""

    token: int
    is_negated: bool


@dataclass(slots=True, eq=False)
class Sequence:
    """Parts one after the other."""

    parts: list[Any]  # nodes; `lexemes` puts its own into them


@dataclass(slots=True, eq=False)
class Choice:
    """One of several."""

    options: list[Any]


@dataclass(slots=True, eq=False)
class Repetition:
    """A part several times; a `maximum` of `None` means no limit, and it is not 0."""

    part: Any
    minimum: int
    maximum: int | None


Node = Chars | Text | Reference | Token | Sequence | Choice | Repetition

FindToken = Callable[[str], int | None]
"""Returns the token with a name such as "<think>"."""


def parse(text: str, find_token: FindToken = lambda name: None) -> Mapping[str, Node]:
    """Return the rules of a grammar by name; raise a GrammarError with the line if the text is not GBNF."""
    if len(text) > MAX_SIZE:
        raise GrammarError(f"the grammar has {len(text):,} characters, but may have at most {MAX_SIZE:,}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise GrammarError(f"the grammar does not parse: character {error.start} of it is not valid text") from error
    rules = _Parser(text, find_token).read_rules()
    if "root" not in rules:
        raise GrammarError("the grammar has no rule named root")
    for rule in rules.values():
        for node in walk(rule):
            if isinstance(node, Reference) and node.name not in rules:
                line = _line(text, node.at)
                raise GrammarError(f"the grammar does not parse: there is no rule {node.name!r}, in line {line}")
    return rules


def walk(node: Any) -> Iterator[Any]:
    """Yield a node and all nodes below it."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += children(node)


def children(node: Any) -> list[Any]:
    """Return the nodes right below a node."""
    match node:
        case Sequence(inner) | Choice(inner):
            return inner
        case Repetition(part):
            return [part]
    return []


NAMED_TOKEN = re.compile(r"<[^>\[\r\n][^>\r\n]*>")
"""Names that may be those of tokens in a grammar."""

_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_SPACE_AND_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_BOUNDS = re.compile(r"\{\s*(\d{1,18})\s*(?:(,)\s*(\d{1,18})?\s*)?\}")
_TOKEN = re.compile(r"(!?)<(?:\[(\d{1,9})\]|([^>\r\n]*))>")
_PLAIN = re.compile(r'[^"\\]+')
_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))", re.DOTALL)
_SIMPLE = {"t": "\t", "r": "\r", "n": "\n", "\\": "\\", '"': '"', "[": "[", "]": "]", "-": "-", "^": "^"}
_SUFFIXES = {"*": (0, None), "+": (1, None), "?": (0, 1)}


class _Parser:
    """Reads a grammar from its start to its end."""

    def __init__(self, text: str, find_token: FindToken) -> None:
        self._text, self._find_token = text, find_token
        self._at = self._depth = 0

    def read_rules(self) -> dict[str, Node]:
        rules: dict[str, Node] = {}
        self._skip(_SPACE_AND_LINES)
        while self._at < len(self._text):
            name = _NAME.match(self._text, self._at)
            if name is None:
                raise self._error("expected the name of a rule")
            self._at = name.end()
            self._skip(_SPACE)
            if not self._text.startswith("::=", self._at):
                raise self._error("expected ::=")
            self._at += 3
            self._skip(_SPACE_AND_LINES)
            rules[name[0]] = self._choice()
            if self._at < len(self._text) and self._text[self._at] not in "\r\n":
                raise self._error("expected a line end")
            self._skip(_SPACE_AND_LINES)
        return rules

    def _choice(self) -> Node:
        options = [self._sequence()]
        while self._text.startswith("|", self._at):
            self._at += 1
            self._skip(_SPACE_AND_LINES)
            options.append(self._sequence())
        return Choice(options) if len(options) > 1 else options[0]

    def _sequence(self) -> Node:
        parts: list[Node] = []
        while self._at < len(self._text) and self._text[self._at] not in "|)\r\n":
            parts.append(self._part())
            self._skip_inside()
            self._repeat(parts)
        return Sequence(parts) if len(parts) != 1 else parts[0]

    def _part(self) -> Node:
        start, text = self._at, self._text
        character = text[start]
        if character == '"':
            return self._literal()
        if character == "[":
            return self._class()
        if character == ".":
            self._at += 1
            return Chars(((0, LAST),))
        if character == "(":
            return self._group()
        if character in "<!":
            return self._token()
        name = _NAME.match(text, start)
        if name is None:
            what = "expected something to repeat before it" if character in "*+?{" else "unexpected character"
            raise self._error(what)
        self._at = name.end()
        return Reference(name[0], start)

    def _literal(self) -> Node:
        start = self._at
        self._at += 1
        pieces: list[str] = []
        while not self._text.startswith('"', self._at):
            plain = _PLAIN.match(self._text, self._at)
            if plain is not None:
                pieces.append(plain[0])
                self._at = plain.end()
            else:
                pieces.append(chr(self._character("the text that begins", start)))
        self._at += 1
        text = "".join(pieces)
        if len(text) == 1:
            return Chars(((ord(text), ord(text)),))
        return Text(text) if text else Sequence([])

    def _class(self) -> Node:
        start = self._at
        is_negated = self._text.startswith("[^", start)
        self._at += 1 + is_negated
        ranges: list[tuple[int, int]] = []
        while not self._text.startswith("]", self._at):
            low = high = self._character("the class that begins", start)
            if self._text.startswith("-", self._at) and not self._text.startswith("]", self._at + 1):
                self._at += 1
                high = self._character("the class that begins", start)
            ranges.append((low, high))
        self._at += 1
        merged_ranges = _merge(ranges)
        merged_ranges = _complement(merged_ranges) if is_negated else merged_ranges
        if not merged_ranges:
            raise self._error("the class contains no character", start)
        return Chars(merged_ranges)

    def _character(self, what: str, start: int) -> int:
        """Read a character or an escape; `what` and `start` are the element and its place, for error messages."""
        text, at = self._text, self._at
        if at >= len(text):
            raise self._error(f"{what} here has no end", start)
        if text[at] != "\\":
            self._at += 1
            return ord(text[at])
        match = _ESCAPE.match(text, at)
        if match is None or (match[4] is not None and match[4] not in _SIMPLE):
            raise self._error("unknown escape")
        self._at = match.end()
        if match[4] is not None:
            return ord(_SIMPLE[match[4]])
        code = int(match[1] or match[2] or match[3], 16)
        if code > LAST or 0xD800 <= code < 0xE000:
            raise self._error("the escape is not a character", at)
        return code

    def _group(self) -> Node:
        start = self._at
        self._depth += 1
        if self._depth > MAX_BRACKETS:
            line = _line(self._text, start)
            raise GrammarError(f"the grammar is nested more than {MAX_BRACKETS} brackets deep in line {line}")
        self._at += 1
        self._skip(_SPACE_AND_LINES)
        node = self._choice()
        if not self._text.startswith(")", self._at):
            raise self._error("expected ')'")
        self._at += 1
        self._depth -= 1
        return node

    def _token(self) -> Node:
        start = self._at
        match = _TOKEN.match(self._text, start)
        if match is None:
            raise self._error("expected a token: <[ID]> or <NAME>")
        self._at = match.end()
        token = int(match[2]) if match[2] is not None else self._find_token(f"<{match[3]}>")
        if token is None:
            raise self._error("the vocabulary has no such token", start)
        return Token(token, is_negated=bool(match[1]))

    def _repeat(self, parts: list[Node]) -> None:
        """Apply the suffixes that follow to the last part."""
        while self._at < len(self._text) and self._text[self._at] in "*+?{":
            minimum, maximum = _SUFFIXES.get(self._text[self._at], (-1, None))
            start = self._at
            self._at += 1
            if minimum < 0:
                bounds = _BOUNDS.match(self._text, start)
                if bounds is None:
                    raise self._error("expected {N}, {N,} or {N,M}", start)
                self._at = bounds.end()
                minimum = int(bounds[1])
                maximum = int(bounds[3]) if bounds[3] else None if bounds[2] else minimum
            if max(minimum, maximum or 0) > MAX_REPETITIONS or (maximum is not None and maximum < minimum):
                raise self._error(f"the bounds must ascend and be at most {MAX_REPETITIONS:,}", start)
            parts[-1] = Repetition(parts[-1], minimum, maximum) if maximum != 0 else Sequence([])
            self._skip_inside()

    # ------------------------------------------------------------------ places

    def _skip(self, what: re.Pattern[str]) -> None:
        if (match := what.match(self._text, self._at)) is not None:
            self._at = match.end()

    def _skip_inside(self) -> None:
        """Skip white space; within brackets line ends are white space."""
        self._skip(_SPACE_AND_LINES if self._depth else _SPACE)

    def _error(self, what: str, at: int | None = None) -> GrammarError:
        at = self._at if at is None else at
        near = self._text[at:].split("\n", 1)[0].strip()[:40] if at < len(self._text) else ""
        place = f", at {near!r}" if near else ""
        return GrammarError(f"the grammar does not parse: {what} in line {_line(self._text, at)}{place}")


def _line(text: str, at: int) -> int:
    return text.count("\n", 0, at) + 1


def _merge(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return ranges in ascending order that do not touch each other; those that are empty are dropped."""
    merged_ranges: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if low > high:
            continue
        if merged_ranges and low <= merged_ranges[-1][1] + 1:
            merged_ranges[-1] = merged_ranges[-1][0], max(merged_ranges[-1][1], high)
        else:
            merged_ranges.append((low, high))
    return tuple(merged_ranges)


def _complement(ranges: Ranges) -> Ranges:
    edges = [-1, *(edge for low, high in ranges for edge in (low, high)), LAST + 1]
    return tuple((low + 1, high - 1) for low, high in zip(edges[::2], edges[1::2], strict=True) if low + 1 <= high - 1)
