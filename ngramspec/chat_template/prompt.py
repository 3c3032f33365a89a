"""Text of a prompt in which messages cannot add control tokens (`Layout`).

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
skeleton has the same control tokens. If this does not help, the text must contain only these control tokens; otherwise
the messages are rejected.
"""

from __future__ import annotations

import re
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from jinja2 import Environment

from ngramspec.chat_template.environment import Render, Values
from ngramspec.errors import ModelError

_NEVER = re.compile(r"(?!)")
_JSON = re.compile(r'["\\\x00-\x1f]')  # characters that JSON always escapes
_JSON_OF_SOME = re.compile(r"""["\\\x00-\x1f\x7f<>&'/]|[^\x00-\x7f]""")  # characters that some JSON encoders escape
_PLAIN = re.compile(r"[A-Za-z0-9_-]+")
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_TYPES = frozenset(
    {"string", "number", "integer", "boolean", "object", "array", "null", "function", "text", "thinking"}
)

Span = tuple[int, int]


class Layout(NamedTuple):
    """The text of a prompt, and the control tokens in it."""

    text: str
    controls: list[Span]  # control tokens of the template
    only_own: bool  # True if the text contains no others
    has_bos: bool  # True if the template writes the token that begins a prompt
    # Text of the template at the end, which ends in the begun answer: "<think>\\n" if it begins with reasoning.
    opening: str


class LayoutTemplate:
    """A chat template: its source, its renderer, and the texts of the control tokens and of BOS ("" without one)."""

    def __init__(self, source: str, render: Render, controls: Iterable[str], bos: str) -> None:
        self._render, self._bos = render, bos
        self._pattern = _make_pattern(controls)
        strings, self._names = _find_strings(source)
        self._source_strings = _make_pattern({word for word in strings if not self._pattern.search(word)})

    def lay_out(self, values: Values) -> Layout:
        """Return the prompt of a conversation; raise a ModelError if its own control tokens cannot be identified."""
        text = self._render(values)
        spans = [match.span() for match in self._pattern.finditer(text)]
        skeleton, own_spans, opening = self._make_skeleton(values, text, spans)
        return Layout(text, own_spans, spans == own_spans, bool(self._bos) and skeleton.startswith(self._bos), opening)

    def _make_skeleton(self, values: Values, text: str, spans: list[Span]) -> tuple[str, list[Span], str]:
        """Return the text with names in place of strings, the places of the template's control tokens, and its end."""
        fallback = ("", "")
        own_counts: Counter[str] | None = None
        for stays, hides_keys in ((_JSON, True), (_JSON_OF_SOME, True), (_JSON_OF_SOME, False)):
            hider = _StringHider(self._source_strings, self._names, stays, hides_keys)
            skeleton = self._render(hider.hide_values(values))
            rebuilt, own_spans, opening = hider.rebuild(skeleton, self._pattern)
            controls = Counter(match[0] for match in self._pattern.finditer(skeleton))
            if own_counts is None:
                fallback, own_counts = (skeleton, opening), controls
            if rebuilt == text and controls == own_counts:
                return skeleton, own_spans, opening
            if foreign_counts := Counter(text[start:end] for start, end in spans) - own_counts:
                continue  # with fewer names it may be possible to identify them
            break
        if foreign_counts:
            raise ModelError(
                f"a message contains {' '.join(foreign_counts)}, a control token of this model, and it cannot"
                " be told apart from those of the chat template; remove it from the message"
            )
        return fallback[0], spans, fallback[1]


class _StringHider:
    """The replacement of strings by names.

    Args:
        source_strings: Pattern of strings in the template's source, which are not replaced.
        names: Keys that the template uses, which are not replaced.
        stays: Pattern of characters that are not replaced.
        hides_keys: Whether the letters at the start of a key are replaced.
    """

    def __init__(
        self, source_strings: re.Pattern[str], names: frozenset[str], stays: re.Pattern[str], hides_keys: bool
    ) -> None:
        self._stays = re.compile(f"{source_strings.pattern}|{stays.pattern}") if source_strings is not _NEVER else stays
        self._names, self._hides_keys = names, hides_keys
        self._mark = f"x{secrets.token_hex(8)}x"
        self._numbers: dict[str, int] = {}

    def hide_values(self, values: Values) -> dict[str, Any]:
        """Return the template's variables with names in place of strings."""
        named_values = {name: self._hide_value(value) for name, value in values.items() if name != "messages"}
        return named_values | {"messages": [self._hide_message(message) for message in values["messages"]]}

    def rebuild(self, skeleton: str, controls: re.Pattern[str]) -> tuple[str, list[Span], str]:
        """Return a skeleton with its strings, the places of its control tokens, and the text after the last string."""
        strings = list(self._numbers)
        own_spans: list[Span] = []
        rebuilt, at = list[str](), 0
        parts = re.split(rf"{self._mark}(\d+)x", skeleton)
        for i, part in enumerate(parts):
            text = strings[int(part)] if i % 2 else part
            if not i % 2:
                own_spans += [(at + match.start(), at + match.end()) for match in controls.finditer(part)]
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
            kept_words = _ROLES if key == "role" else _TYPES if key == "type" else ()
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
        """Return a string with names in place of its parts, except white space at their ends and patterns that stay."""
        parts = []
        at = 0
        for start, end in [*(match.span() for match in self._stays.finditer(text)), (len(text), len(text))]:
            piece = text[at:start]
            if core := piece.strip():
                # Equal texts have the same name: templates check if a parameter is in the list of required ones.
                number = self._numbers.setdefault(core, len(self._numbers))
                piece = piece.replace(core, f"{self._mark}{number}x", 1)
            parts += [piece, text[start:end]]
            at = end
        return "".join(parts)


def _make_pattern(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that matches any of several texts, the longest first; without texts it matches nothing."""
    longest_first = sorted(texts, key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else _NEVER


def _find_strings(source: str) -> tuple[set[str], frozenset[str]]:
    """Return the stripped strings in the source of a template, and the names that it uses.

    Strings of one character are omitted, because almost every text contains them.
    """
    strings, names = set(), set()
    for _, kind, value in Environment(extensions=["jinja2.ext.loopcontrols"]).lex(source):
        if kind == "string":
            # Jinja decodes escapes, and keeps line ends.
            strings.add(value[1:-1].encode("ascii", "backslashreplace").decode("unicode-escape").strip())
        elif kind == "name":
            names.add(value)
    return {word for word in strings if len(word) > 1}, frozenset(names | strings)
