"""Patterns of strings, brought into the words that `llama_cpp`'s converter knows, within what JSON writes unescaped."""

from __future__ import annotations

import re

_PART = re.compile(r"\\.|\[\^?(?:\\.|[^\]\\])*\]|\(\?:|\(\?|[*+?}][?+]|.", re.DOTALL)
_IN_CLASS = re.compile(r"\\.|.", re.DOTALL)
_CLASSES = {"d": "0-9", "w": "A-Za-z0-9_"}
_ESCAPED = '"\\\\\\x00-\\x1F'  # within a class: what JSON escapes
_ANY = f"[^{_ESCAPED}]"


def translated(pattern: object) -> str:
    """A pattern, anchored at both ends, of the strings in which `pattern` is found.

    Raises:
        ValueError: it is no pattern, or holds what is not known here; strings that JSON escapes are never matched.
    """
    if not isinstance(pattern, str):
        raise ValueError("it is not a string")
    try:
        re.compile(pattern)
    except (re.error, RecursionError) as error:
        raise ValueError(f"it does not parse: {error}") from error
    start, end = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
    inner = pattern[start : len(pattern) - end]
    parts = _PART.findall(inner)
    if (start or end) and _choice_outside(parts):
        raise ValueError("a choice between ends of the string cannot be said in a grammar")
    body = "".join(map(_part, parts))
    return f"^{'' if start else f'{_ANY}*'}({body}){'' if end else f'{_ANY}*'}$"


def _part(part: str) -> str:
    if part.startswith("\\"):
        return f"[{_escape(part[1])}]"
    if part.startswith("[") and len(part) > 1:
        return _class(part)
    if part == "(?:":
        return "("
    if part == ".":
        return _ANY
    if len(part) > 1 or part in '^$"' or part < " ":
        raise ValueError(f"{part!r} cannot be said in a grammar")
    return part


def _class(part: str) -> str:
    negated = part.startswith("[^")
    inside = "".join(
        _escape(one[1]) if one.startswith("\\") else f"\\x{ord(one):02X}" if one in '[^"' else one
        for one in _IN_CLASS.findall(part[1 + negated : -1])
    )
    if not negated and any(f"\\x{code:02X}" in inside for code in (0x22, 0x5C)):
        raise ValueError(f"{part!r} holds what JSON escapes, which cannot be said in a grammar")
    return f"[^{inside}{_ESCAPED}]" if negated else f"[{inside}]"


def _escape(character: str) -> str:
    """What stands behind a backslash, within a class."""
    if character in _CLASSES:
        return _CLASSES[character]
    if character.isalnum() or character in '"\\' or character < " ":
        raise ValueError(f"'\\{character}' cannot be said in a grammar")
    return f"\\x{ord(character):02X}" if ord(character) < 128 else character


def _choice_outside(parts: list[str]) -> bool:
    depth = 0
    for part in parts:
        depth += (part in {"(", "(?:"}) - (part == ")")
        if part == "|" and depth == 0:
            return True
    return False
