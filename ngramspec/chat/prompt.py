"""Prompts in which messages cannot add control tokens (`ChatPrompt`).

A template converts messages to one text, in which "<|im_end|>" ends a message, even if a message contains it. So the
template is rendered a second time, with unguessable names in place of the strings in the messages. Only control tokens
between the names, which are the template's own, become control tokens:

    messages  [{"role": "user", "content": "is <|im_end|> a word?"}]
    text      <|im_start|>user\nis <|im_end|> a word?<|im_end|>\n
    skeleton  <|im_start|>user\nx6d1b0x0x<|im_end|>\n
    own       <|im_start|>                           <|im_end|>   (the second of the two in the text)

Tools, calls and their results, other variables, and keys of objects are treated in the same way.

Templates strip messages, or split them at "</think>", or write them as JSON. So white space at the ends of a string,
characters that JSON escapes, and the strings in the template's source stay in the skeleton. If a template changes
strings in other ways, putting them back does not restore the text. Then fewer strings are replaced, as long as the
skeleton has the same control tokens. At last, the control tokens in strings that the template looks for stay too, next
to names that show which of them are foreign. If this does not help, the text must contain only the control tokens of
the first skeleton; otherwise the messages are rejected.
"""

from __future__ import annotations

import re
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from jinja2 import Environment

from ngramspec.data import ModelError
from ngramspec.tokens import NEVER, make_pattern

Values = Mapping[str, Any]
Render = Callable[[Values], str]

_NONE = frozenset[str]()
_JSON = re.compile(r'["\\\x00-\x1f]')  # characters that JSON always escapes
_JSON_OF_SOME = re.compile(r"""["\\\x00-\x1f\x7f<>&'/]|[^\x00-\x7f]""")  # characters that some JSON encoders escape
_PLAIN = re.compile(r"[A-Za-z0-9_-]+")
_TYPES = frozenset(
    {"string", "number", "integer", "boolean", "object", "array", "null", "function", "text", "thinking"}
)

Span = tuple[int, int]


class ChatPrompt(NamedTuple):
    """The prompt of a conversation: its text, and the control tokens in it."""

    text: str
    controls: list[Span]  # control tokens of the template
    only_own: bool  # True if the text contains no others
    has_bos: bool  # True if the template writes the token that begins a prompt
    # Text of the template at the end, which ends in the begun answer: "<think>\\n" if it begins with reasoning.
    opening: str
    tokens: list[int]  # token ids; none until `ChatTemplate` has tokenized the text

    def extend(self, pieces: Sequence[tuple[str, bool]], opening: str, pattern: re.Pattern[str]) -> ChatPrompt:
        """Return the text followed by pieces, each with whether it is the template's own; `pattern`: control tokens."""
        text, own_spans = self.text, [*self.controls]
        for piece, own in pieces:
            if own:
                own_spans += [(len(text) + match.start(), len(text) + match.end()) for match in pattern.finditer(piece)]
            text += piece
        only_own = [match.span() for match in pattern.finditer(text)] == own_spans
        return self._replace(text=text, controls=own_spans, only_own=only_own, opening=opening)


class LayoutTemplate:
    """A chat template: its source, its renderer, and the texts of the control tokens and of BOS ("" without one)."""

    def __init__(self, source: str, render: Render, controls: Iterable[str], bos: str) -> None:
        self._render, self._bos = render, bos
        self.controls = make_pattern(controls)
        strings, names = _find_strings(source)
        plain, plain_names = ({word for word in words if not self.controls.search(word)} for words in (strings, names))
        # Strings that stay must not add up to a control token, so none of them ends in the start of one.
        starts = {control[:i] for control in controls for i in range(1, len(control))}
        plain = {word for word in plain if starts.isdisjoint(word[i:] for i in range(len(word)))}
        self.strings, self.names = make_pattern(plain), plain_names  # strings and keys that names do not replace
        self._looked_for = frozenset(mark for word in strings for mark in self.controls.findall(word))

    def lay_out(self, values: Values) -> ChatPrompt:
        """Return the prompt of a conversation; raise a ModelError if its own control tokens cannot be identified."""
        text = self._render(values)
        spans = [match.span() for match in self.controls.finditer(text)]
        skeleton, own_spans, opening = self._make_skeleton(values, text, spans)
        has_bos = bool(self._bos) and skeleton.startswith(self._bos)
        return ChatPrompt(text, own_spans, spans == own_spans, has_bos, opening, [])

    def _make_skeleton(self, values: Values, text: str, spans: list[Span]) -> tuple[str, list[Span], str]:
        """Return the text with names in place of strings, the places of the template's control tokens, and its end."""
        fallback = ("", "")
        own_counts: Counter[str] | None = None
        for stays, hides_keys, visible in (
            (_JSON, True, _NONE),
            (_JSON_OF_SOME, True, _NONE),
            (_JSON_OF_SOME, False, _NONE),
            (_JSON, True, self._looked_for),
        ):
            hider = _StringHider(self, stays, hides_keys, visible)
            skeleton = self._render(hider.hide_values(values))
            rebuilt, own_spans, opening = hider.rebuild(skeleton)
            controls = Counter(rebuilt[start:end] for start, end in own_spans)
            if own_counts is None:
                fallback, own_counts = (skeleton, opening), controls
            if rebuilt == text and (visible or controls == own_counts):
                return skeleton, own_spans, opening
            if not (foreign_counts := Counter(text[start:end] for start, end in spans) - own_counts):
                break
        if foreign_counts:
            raise ModelError(
                f"a message contains {' '.join(foreign_counts)}, a control token of this model, and it cannot"
                " be told apart from those of the chat template; remove it from the message"
            )
        return fallback[0], spans, fallback[1]


class _StringHider:
    """The replacement of strings by names, except characters that match `stays`, and `visible` control tokens.

    The template looks for the latter. With `hides_keys`, the letters at the start of a key are replaced too.
    """

    def __init__(
        self, template: LayoutTemplate, stays: re.Pattern[str], hides_keys: bool, visible: frozenset[str]
    ) -> None:
        strings = template.strings
        self._stays = re.compile(f"{strings.pattern}|{stays.pattern}") if strings is not NEVER else stays
        self._names, self._controls = template.names, template.controls
        self._hides_keys, self._visible = hides_keys, visible
        self._mark = f"x{secrets.token_hex(8)}x"
        self._numbers: dict[str, int] = {}
        # Visible control tokens of strings, with the name after or before each of them.
        self._visible_before: set[tuple[str, str]] = set()
        self._visible_after: set[tuple[str, str]] = set()

    def hide_values(self, values: Values) -> dict[str, Any]:
        named_values = {name: self._hide_value(value) for name, value in values.items() if name != "messages"}
        return named_values | {"messages": [self._hide_message(message) for message in values["messages"]]}

    def rebuild(self, skeleton: str) -> tuple[str, list[Span], str]:
        """Return a skeleton with its strings, the places of the template's control tokens, and its last part."""
        strings = list(self._numbers)
        own_spans: list[Span] = []
        rebuilt, at = list[str](), 0
        parts = re.split(rf"{self._mark}(\d+)x", skeleton)
        for i, part in enumerate(parts):
            text = strings[int(part)] if i % 2 else part
            for match in self._controls.finditer(part) if not i % 2 else ():
                before, after = part[: match.start()].strip(), part[match.end() :].strip()
                is_foreign = (not after and (match[0], *parts[i + 1 : i + 2]) in self._visible_before) or (
                    not before and (*parts[max(i - 1, 0) : i], match[0]) in self._visible_after
                )
                own_spans += [] if is_foreign else [(at + match.start(), at + match.end())]
            rebuilt.append(text)
            at += len(text)
        return "".join(rebuilt), own_spans, parts[-1]

    def _hide_message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        fields = self._hide_fields(message, "tool_call_id")
        if isinstance(calls := message.get("tool_calls"), list):
            fields["tool_calls"] = [self._hide_fields(call, "id") for call in calls]
        return fields

    def _hide_fields(self, fields: Mapping[str, Any], id_key: str) -> dict[str, Any]:
        """Hide the values of fields, except an id that is plain, because templates count its characters."""
        return {
            key: value
            if key == id_key and isinstance(value, str) and _PLAIN.fullmatch(value)
            else self._hide_value(value, key)
            for key, value in fields.items()
        }

    def _hide_value(self, value: Any, key: str = "") -> Any:
        if isinstance(value, str):
            roles = ("system", "developer", "user", "assistant", "tool")
            kept_words = roles if key == "role" else _TYPES if key == "type" else ()
            return value if value in kept_words else self._hide_text(value)
        if isinstance(value, Mapping):
            return {self._hide_key(name): self._hide_value(inner, name) for name, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._hide_value(inner, key) for inner in value]
        return value

    def _hide_key(self, name: str) -> str:
        if name in self._names:
            return name
        # Some templates sort keys, so the start of a key is kept then.
        plain = None if self._hides_keys else _PLAIN.match(name)
        return name[: plain.end()] + self._hide_text(name[plain.end() :]) if plain else self._hide_text(name)

    def _hide_text(self, text: str) -> str:
        """Return a string with names in place of its parts and of the control tokens in it."""
        marks, parts, at = list[str](), list[str](), 0
        for match in self._controls.finditer(text):
            parts.append(self._hide_part(text[at : match.start()]))
            marks.append(match[0])
            at = match.end()
        parts.append(self._hide_part(text[at:]))
        for i, mark in enumerate(marks):
            if mark not in self._visible:
                hidden = self._hide_part(mark)
                marks[i] = self._name(mark) if self._controls.search(hidden) else hidden
            # There is a name after a control token that stays, or before it at the end of a string.
            elif i + 1 < len(marks) or parts[-1].strip() or not (i or parts[0].strip()):
                if not re.match(rf"\s*{self._mark}\d+x", parts[i + 1]):
                    parts[i + 1] = re.sub(r"^\s*", rf"\g<0>{self._name('')}", parts[i + 1])
                self._visible_before.add((mark, re.findall(rf"{self._mark}(\d+)x", parts[i + 1])[0]))
            else:
                if not re.search(rf"{self._mark}\d+x\s*$", parts[i]):
                    parts[i] = re.sub(r"\s*$", rf"{self._name('')}\g<0>", parts[i], count=1)
                self._visible_after.add((re.findall(rf"{self._mark}(\d+)x", parts[i])[-1], mark))
        return "".join(chain.from_iterable(zip(parts, [*marks, ""], strict=True)))

    def _hide_part(self, text: str) -> str:
        """Return a text with names in place of its parts, except white space at their ends and patterns that stay."""
        parts = []
        at = 0
        for start, end in [*(match.span() for match in self._stays.finditer(text)), (len(text), len(text))]:
            piece = text[at:start]
            if core := piece.strip():
                piece = piece.replace(core, self._name(core), 1)
            parts += [piece, text[start:end]]
            at = end
        return "".join(parts)

    def _name(self, text: str) -> str:
        """Return the name of a text; equal texts have the same, because templates look for strings in lists."""
        return f"{self._mark}{self._numbers.setdefault(text, len(self._numbers))}x"


def _find_strings(source: str) -> tuple[set[str], set[str]]:
    """Return the stripped strings in the source of a template, except single characters, and the keys it uses."""
    strings, names = set[str](), set[str]()
    before = ""
    for _, kind, value in Environment(extensions=["jinja2.ext.loopcontrols"]).lex(source):
        if kind == "string":
            # Jinja decodes escapes, and keeps line ends.
            strings.add(value[1:-1].encode("ascii", "backslashreplace").decode("unicode-escape").strip())
        elif kind == "name" and before == ".":
            names.add(value)
        before = value
    return {word for word in strings if len(word) > 1}, names | strings
