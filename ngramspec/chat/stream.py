"""Text that arrives in pieces (`Reader`), JSON in it (`read_value`), and the pieces of an answer (`Answer`, `Delta`).

JSON is emitted as far as it is valid, so that a stream can send incomplete arguments: `{"a": "x`, then `y"}`. Mistakes
of small models are corrected: control characters in strings and backslashes that begin no escape (`"C:\\dir"`) are
escaped, commas before closing brackets are dropped, and `True`, `False` and `None` become JSON.
"""

from __future__ import annotations

import ast
import json
import math
import re
import secrets
import string
from collections.abc import Callable, Collection, Generator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeVar


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call; `parameters` is a JSON schema."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    strict: bool = False  # if false, forced calls ignore the parts of the schema that no grammar can express


class Delta(NamedTuple):
    """Addition to an answer: "text" is content; joined "arguments" of a call are a JSON object."""

    kind: Literal["text", "reasoning", "call", "arguments"]
    text: str = ""
    call: int = 0  # index of the call in the answer
    id: str = ""  # of a call that begins
    name: str = ""  # name of the tool of a call that begins


T = TypeVar("T")
Reads = Generator[None, None, T]
Emit = Callable[[str], None]

SPACE = r"[ \t\r\n]"


@lru_cache(256)
def _patterns(markers: tuple[str, ...]) -> tuple[re.Pattern[str], re.Pattern[str], int]:
    """Return patterns of a whole marker, and of the beginning of one at the end of a text, and the longest length."""
    whole = "|".join(map(re.escape, markers)) or "(?!)"
    partial = "|".join(re.escape(marker[:n]) for marker in markers for n in range(1, len(marker))) or "(?!)"
    return re.compile(whole), re.compile(rf"(?:{partial})\Z"), max(map(len, markers), default=1)


def _ignore(_: str) -> None:
    pass


class Reader:
    """Text that arrives in pieces, and the current position.

    Parsers are generators, which yield if they need more text. So how the text is divided never changes their results.
    """

    def __init__(self) -> None:
        self.text = ""  # text that has arrived; more may be appended until it has ended
        self.at = 0  # index of the next character; a parser can set it back to read again
        self.ended = False  # whether the text is complete
        self.cut = False  # whether a limit ended the text; an incomplete mark at the end is then dropped
        self.is_cut_off = False  # whether a parser needed text that a limit cut off

    def _wait(self) -> Reads[bool]:
        """Wait for more text; return False at its end."""
        if self.ended:
            self.is_cut_off = self.cut
            return False
        yield
        return True

    def peek(self, count: int = 1) -> Reads[str]:
        """Return the next characters without reading them; fewer at the end."""
        while len(self.text) - self.at < count and (yield from self._wait()):
            pass
        return self.text[self.at : self.at + count]

    def run(self, characters: str, emit: Emit = _ignore) -> Reads[str]:
        """Read, emit and return all characters of a class (a pattern) that come next."""
        start, pattern = self.at, re.compile(f"{characters}*")
        while True:
            match = pattern.match(self.text, self.at)
            end = match.end() if match else self.at
            if end > self.at:
                emit(self.text[self.at : end])
                self.at = end
            if end < len(self.text) or not (yield from self._wait()):
                return self.text[start : self.at]

    def skip_space(self, *literals: str) -> Reads[str | None]:
        """Skip white space; read and return the string that comes next, as `take` does."""
        yield from self.run(SPACE)
        return (yield from self.take(*literals))

    def skip_all(self, *words: str) -> Reads[None]:
        """Skip white space, and all repetitions of several strings with the white space after them."""
        while (yield from self.skip_space(*words)):
            pass

    def take(self, *literals: str) -> Reads[str | None]:
        """Read and return the longest of several strings that comes next; `None` if no string does."""
        while True:
            longest = max((word for word in literals if self.text.startswith(word, self.at)), key=len, default=None)
            rest = self.text[self.at : self.at + max(map(len, literals), default=0)]
            may_grow = any(len(word) > len(rest) and word.startswith(rest) for word in literals)
            if not may_grow or not (yield from self._wait()):
                self.at += len(longest or "")
                return longest

    def skip(self, *ends: str) -> Reads[None]:
        """Skip white space, closing brackets and several strings, or the beginning of one at the end of the text."""
        closing = r"[ \t\r\n}\]]"
        yield from self.run(closing)
        while mark := (yield from self.take(*ends)):
            yield from self.run(closing)
            ends = tuple(end for end in ends if end != "```" or mark != end)  # a second fence begins something
        if self.ended and any(end.startswith(self.text[self.at :]) for end in ends):
            self.at = len(self.text)

    def read_until(self, markers: Collection[str], emit: Emit) -> Reads[str | None]:
        """Emit the text before the first of several strings, and read and return that string; `None` if the text ended.

        Text that could be the beginning of such a string is held back. No string may be a prefix of another.
        """
        whole, partial, longest = _patterns(tuple(markers))
        while True:
            text, at = self.text, self.at
            match, rest = whole.search(text, at), partial.search(text, max(at, len(text) - longest + 1))
            place = len(text) if match is None else match.start()
            stop = place if rest is None or rest.start() > place else rest.start()
            stop = place if self.ended and not (self.cut and len(text) - stop > 1) else stop
            if stop > at:
                emit(text[at:stop])
                self.at = stop
            if stop == place and match is not None:
                self.at = match.end()
                return match[0]
            if self.ended:  # here without `_wait`, because this runs for every token
                self.is_cut_off = self.cut
                return None
            yield

    def read_before(self, *markers: str) -> Reads[tuple[str, str | None]]:
        """Return the text before the first of several strings, and that string; see `read_until`."""
        start = self.at
        marker = yield from self.read_until(markers, _ignore)
        return self.text[start : self.at - len(marker or "")], marker


class Answer(Reader):
    """The text of an answer, the deltas parsed from it, and the tools that it may call, by their names."""

    def __init__(self, tools: Mapping[str, Tool], short_ids: bool, parallel: bool) -> None:
        super().__init__()
        self.tools = tools
        self._deltas: list[Delta] = []
        self._short_ids, self._parallel = short_ids, parallel
        self._calls = 0
        self.schema: Mapping[str, Any] = {}  # of the arguments of the last call
        self._kind: Literal["text", "reasoning"] = "text"
        # White space after and before text of this kind: around calls and reasoning it belongs to the form.
        self._held_space, self._drops_space = "", False

    def add_content(self, text: str, kind: Literal["text", "reasoning"] = "text") -> None:
        if kind != self._kind:
            self._kind, self._held_space, self._drops_space = kind, "", True
        text = self._held_space + text
        if self._drops_space:
            text = text.lstrip()
            self._drops_space = not text
        body = text.rstrip()
        self._held_space = text[len(body) :]
        if body:
            self._add(Delta(kind, body))

    def begin_call(self, name: str, arguments: str = "") -> None:
        self.schema = self.tools[name].parameters if name in self.tools else {}
        self._kind, self._held_space, self._drops_space = "text", "", True
        id_ = "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9 if self._short_ids else 24))
        self._add(Delta("call", "", self._calls, id_ if self._short_ids else f"call_{id_}", name))
        self._calls += 1
        self.add_arguments(arguments)

    def add_arguments(self, text: str) -> None:
        if text:
            self._add(Delta("arguments", text, self._calls - 1))

    @property
    def is_full(self) -> bool:
        """True if no further call is allowed."""
        return not self._parallel and self._calls > 0

    def drain(self, is_complete: bool) -> list[Delta]:
        """Return the deltas since the last `drain`; white space at the end belongs to a complete answer."""
        if is_complete and self._held_space and self._kind == "text":
            self._add(Delta("text", self._held_space))
            self._held_space = ""
        deltas, self._deltas = self._deltas, []
        return deltas

    def _add(self, delta: Delta) -> None:
        last = self._deltas[-1] if self._deltas else None
        if last is None or last.kind != delta.kind or delta.kind == "call":
            self._deltas.append(delta)
        else:  # a call's arguments follow its beginning, so these are of the same call
            self._deltas[-1] = last._replace(text=last.text + delta.text)


# Pattern of a string in Python, which requires `re.DOTALL`.
PYTHON_STRING = r"""(?:'{3}.*?'{3}|"{3}.*?"{3}|'[^'\\]*(?:\\.[^'\\]*)*'|"[^"\\]*(?:\\.[^"\\]*)*")"""
_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
_NEXT_PARTS = {",}": "key", ",]": "item"}  # parts after a comma, by the bracket that ends the list or object
_PYTHON_WORDS = {"true": "True", "false": "False", "null": "None"}


ReadKey = Callable[[Reader, Emit], Reads[bool]]
ReadLeaf = Callable[[Reader, Emit, list[str]], Reads[bool]]


def _read_string(reader: Reader, emit: Emit) -> Reads[bool]:
    if (yield from reader.peek()) != '"':
        return False
    reader.at += 1
    emit('"')
    while True:
        yield from reader.run(r'[^"\\\x00-\x1f]', emit)
        character = text = yield from reader.peek()
        length = len(text)
        if character == "\\":
            # An escape is read only when it is complete, so that half an escape is never emitted.
            text = yield from reader.peek(2)
            text = (yield from reader.peek(6)) if text == "\\u" else text
            length = len(text)
            if re.fullmatch(r"\\u[dD][89a-fA-F][0-9a-fA-F]{2}", text):
                pair = yield from reader.peek(12)
                is_pair = re.fullmatch(r"\\u.[89abAB]..\\u[dD][c-fC-F][0-9a-fA-F]{2}", pair) is not None
                text, length = (pair, 12) if is_pair else ("\\ufffd", 6)  # many parsers of JSON reject half of a pair
            if not re.fullmatch(r'\\["\\/bfnrt]|(?:\\u[0-9a-fA-F]{4}){1,2}', text):
                text, length = "\\\\", 1
        elif character != '"':
            text = escape(character)
        if reader.is_cut_off and character in {"\\", ""}:
            return False
        reader.at += length
        emit(text or '"')  # the end of the answer closes the string
        if character in {'"', ""}:
            return bool(character)


def _read_leaf(reader: Reader, emit: Emit, held: list[str]) -> Reads[bool]:
    """Parse and emit a string, number or word after the held text; return True if it is complete."""
    if (yield from reader.peek()) == '"':
        emit("".join(held))
        held.clear()
        return (yield from _read_string(reader, emit))
    start, word = reader.at, (yield from reader.run("[A-Za-z0-9+.-]"))
    word = {"True": "true", "False": "false", "None": "null"}.get(word, word)
    if not _SCALAR.fullmatch(word):
        reader.at = start
        return False
    is_too_large = word not in _PYTHON_WORDS and math.isinf(float(word))
    emit("".join(held) + (to_json(word) if is_too_large else word))
    return True


def read_value(
    reader: Reader, emit: Emit, read_key: ReadKey = _read_string, read_leaf: ReadLeaf = _read_leaf
) -> Reads[bool]:
    """Parse and emit a JSON value as far as it is valid; return True if it is complete.

    Commas and keys are emitted with the value after them, so that a value that is not valid can be closed, unless a
    limit cut it. With other parsers of keys and scalars, the white space between the parts is that of `to_json`.
    """
    brackets, held, is_json = list[str](), list[str](), read_key is _read_string
    start = reader.at  # index of the first held character
    expected_part = "value"  # or "item" of a list, "key", ":", ","
    while True:
        start = start if held else reader.at
        character = yield from reader.peek()
        if character in {" ", "\t", "\r", "\n"} and brackets:
            yield from reader.run(SPACE, held.append if is_json else _ignore)
            continue
        if brackets and character == brackets[-1] and expected_part in {"item", "key", ","}:
            reader.at += 1
            emit(("".join(held).replace(",", "") if is_json else "") + brackets.pop())
            expected_part = ","
        elif expected_part == "key":
            if not (yield from read_key(reader, held.append)):
                break
            expected_part = ":"
            continue
        elif expected_part in {":", ","}:
            if character != expected_part:
                break
            reader.at += 1
            held.append(character + ("" if is_json else " "))
            expected_part = _NEXT_PARTS.get(expected_part + brackets[-1], "value")
            continue
        elif character in {"{", "["} and len(brackets) < 100:  # templates and many parsers of JSON have a limit
            reader.at += 1
            emit("".join(held) + character)
            brackets.append("}" if character == "{" else "]")
            expected_part = _NEXT_PARTS["," + brackets[-1]]
        elif (yield from read_leaf(reader, emit, held)):
            expected_part = ","
        else:
            break
        held.clear()
        if not brackets:
            return True
    reader.at = start if held else reader.at
    emit("" if reader.is_cut_off else "".join(reversed(brackets)))
    return False


def read_string(reader: Reader) -> Reads[str | None]:
    """Parse a JSON string and return it decoded; `None` if no complete string comes next."""
    parts: list[str] = []
    is_complete = yield from _read_string(reader, parts.append)
    return json.loads("".join(parts)) if is_complete else None


def read_literal(text: str, *, only_json: bool = False) -> Any:
    """Return the value of a literal in JSON or Python, which JSON can express; raise a ValueError for other texts."""
    try:
        try:
            value = json.loads(text)
        except ValueError:
            if only_json:
                raise
            pattern = rf"(?s){PYTHON_STRING}|\b(?:true|false|null)\b"
            value = ast.literal_eval(re.sub(pattern, _to_python, text.strip()))
        return json.loads(json.dumps(value, allow_nan=False))
    except (SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError("not a literal") from error


def complete_object(text: str) -> dict[str, Any] | None:
    """Return the object that a text begins, as far as it is JSON; `None` if it does not begin one."""
    reader, parts = Reader(), list[str]()
    reader.text, reader.ended = text.lstrip(), True
    for _ in read_value(reader, parts.append):
        pass
    return read_object("".join(parts)) if parts[0] == "{" else None


def read_object(text: str) -> dict[str, Any] | None:
    """Return the object in JSON, which may also be null or a string with an object; `None` for other texts."""
    try:
        value = json.loads(text)
        value = json.loads(value) if isinstance(value, str) else value
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return None
    value = {} if value is None else value
    return value if isinstance(value, dict) else None


def to_json(value: Any) -> str:
    """Return a value as JSON, without halves of surrogate pairs."""
    return json.dumps(value, ensure_ascii=False).encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def escape(text: str) -> str:
    """Return a piece of text as part of a JSON string."""
    return to_json(text)[1:-1]


def _to_python(match: re.Match[str]) -> str:
    """Return a word or string as Python, in which line breaks and unknown escapes are errors."""
    text = match[0]
    if text in _PYTHON_WORDS:
        return _PYTHON_WORDS[text]
    text = re.sub(r"(?s)\\([^\\'\"abfnrtvxuU])|\\.", lambda escape: f"\\{escape[0]}" if escape[1] else escape[0], text)
    return text if text[:3] in {"'''", '"""'} else text.replace("\r", "\\r").replace("\n", "\\n")
