"""Values of JSON as grammar: numbers between two bounds, how often something is repeated, and patterns of strings.

Patterns are brought into the words that `llama_cpp`'s converter knows, within what JSON writes unescaped.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from itertools import groupby
from os.path import commonprefix
from typing import Any

_MOST = 2000  # llama.cpp takes a larger bound of a repetition for none
_DIGITS = 15


def repeated(item: str, least: int, most: int | None, block: tuple[str, int] | None = None) -> str:
    """An item so many times; `block` is the name of a rule that is so many of them. ValueError: too many, or no way."""
    if most is not None and most < least:
        raise ValueError("the least count is above the most")
    most_counted = _MOST * (block[1] if block else 1)
    if max(least, most or 0) > most_counted:
        raise ValueError(f"no more than {most_counted} can be counted in a grammar")
    parts = []
    if block is not None and least > _MOST:
        parts.append(f"{block[0]}{{{least // block[1]}}}")
        least, most = least % block[1], None if most is None else most - least // block[1] * block[1]
    if most is None:
        return " ".join([*parts, f"{item}{{{least},}}"])
    if block is not None and most > _MOST:
        # Single ones up to nearly two blocks, so that every count has one way at most to be reached at each place.
        blocks = (most - least - (block[1] - 1)) // block[1]
        parts += [f"{item}{{{least}}}" if least else "", f"{block[0]}{{0,{blocks}}}"]
        least, most = 0, most - least - blocks * block[1]
    return " ".join(part for part in [*parts, f"{item}{{{least},{most}}}"] if part)


def literal(text: str) -> str:
    """A text as it stands, as a part of a rule."""
    escaped = "".join(c if c.isprintable() and c not in '"\\' else f"\\U{ord(c):08X}" for c in text)
    return f'"{escaped}"'


def one_of(texts: Collection[str], depth: int = 100) -> str:
    """Any of these texts, as alternatives that share their beginnings.

    llama.cpp follows every alternative that may still come: 10,000 whole texts take it seconds for each token, as a
    tree they take milliseconds. Beginnings below `depth` branches are not shared: it reads brackets by recursion.
    """
    parts: list[str] = []
    for _, group in groupby(sorted(set(texts)), key=lambda text: text[:1]):
        same = list(group)
        shared = commonprefix(same)  # noqa: RUF071 (of characters, as is meant here)
        if len(same) == 1 or not depth:
            parts += map(literal, same)
        else:
            parts.append(f"{literal(shared)} ({one_of([text[len(shared) :] for text in same], depth - 1)})")
    return " | ".join(parts)


def number_rule(schema: Mapping[str, Any], *, whole: bool, strict: bool = True) -> str:
    """Numbers within the bounds of a schema, without exponents; unless `strict`, within the next whole bounds."""
    low, low_in = _bound(schema, "minimum", "exclusiveMinimum", 1, whole=whole, strict=strict)
    high, high_in = _bound(schema, "maximum", "exclusiveMaximum", -1, whole=whole, strict=strict)
    choices = []
    if high is None or high >= 0:
        start, closed = (0, True) if low is None or low < 0 else (low, low_in)
        choices += _magnitudes(start, closed, high, high_in, whole=whole)
    if low is None or low < 0:
        start, closed = (0, False) if high is None or high >= 0 else (-high, high_in)
        below = _magnitudes(start, closed, None if low is None else -low, low_in, whole=whole)
        choices += [f'"-" ({" | ".join(below)})'] if below else []
    if not choices:
        raise ValueError("no number is within the bounds")
    return f"({' | '.join(choices)})"


def _bound(
    schema: Mapping[str, Any], closed: str, open_: str, sign: int, *, whole: bool, strict: bool
) -> tuple[int | None, bool]:
    """A bound as a whole number, and whether it belongs to the numbers itself; `sign`: 1 of the lower, else -1."""
    found: list[tuple[int, bool]] = []
    for keyword, included in ((closed, True), (open_, False)):
        value = schema.get(keyword)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ValueError(f"{keyword} is not a number")
        if whole:
            found.append((math.ceil(sign * value) if included else math.floor(sign * value) + 1, True))
        elif strict and value != int(value):
            raise ValueError(f"{keyword} of a number can only be said in a grammar where it is whole")
        else:
            found.append((math.floor(sign * value), included))
    if not found:
        return None, True
    best = max(bound for bound, _ in found)
    return sign * best, all(included for bound, included in found if bound == best)


def _magnitudes(low: int, low_in: bool, high: int | None, high_in: bool, *, whole: bool) -> list[str]:
    """Ways to write the numbers from `low` to `high`, neither of them negative."""
    if high is not None and (high < low or (high == low and not (low_in and high_in))):
        return []
    start = low if low_in else low + 1
    if whole:
        last = high if high is None or high_in else high - 1
        return _between(start, last)
    fraction = f'("." [0-9]{{1,{_DIGITS}}})?'
    inner = _between(start, None if high is None else high - 1)
    ways = [f"({' | '.join(inner)}) {fraction}"] if inner else []
    if not low_in:
        ways.append(f'"{low}." [0-9]{{0,{_DIGITS - 1}}} [1-9]')
    if high is not None and high_in:
        ways.append(f'"{high}" ("." "0"{{1,{_DIGITS}}})?')
    return ways


def _between(low: int, high: int | None) -> list[str]:
    """Ways to write the whole numbers from `low` to `high`."""
    if high is None:
        length = len(str(low))
        return [*_between(low, 10**length - 1), f"[1-9] [0-9]{{{length},{max(length, _DIGITS)}}}"]
    ways = []
    for length in range(len(str(low)), len(str(high)) + 1):
        first, last = max(low, 10 ** (length - 1) if length > 1 else 0), min(high, 10**length - 1)
        if first <= last:
            ways.append(_same_length(str(first), str(last)))
    return ways


def _same_length(first: str, last: str) -> str:
    rest = len(first) - 1
    if first == last:
        return f'"{first}"'
    if first[0] == last[0]:
        return f'"{first[0]}" ({_same_length(first[1:], last[1:])})'
    if not rest:
        return f"[{first}-{last}]"
    ways, low, high = [], int(first[0]), int(last[0])
    if first[1:].strip("0"):
        ways.append(f'"{low}" ({_same_length(first[1:], "9" * rest)})')
        low += 1
    if last[1:].strip("9"):
        ways.append(f'"{high}" ({_same_length("0" * rest, last[1:])})')
        high -= 1
    if low <= high:
        ways.append(f"[{low}-{high}] [0-9]{{{rest}}}")
    return " | ".join(ways)


# --------------------------------------------------------------------------- patterns

_PART = re.compile(r"\\.|\[\^?(?:\\.|[^\]\\])*\]|\(\?:|\(\?|[*+?}][?+]|.", re.DOTALL)
_IN_CLASS = re.compile(r"(\\.|.)(?:-(\\.|.))?", re.DOTALL)
_CLASSES = {"d": "0-9", "w": "A-Za-z0-9_"}
_ESCAPED = '"\\\\\\x00-\\x1F'  # within a class: what JSON escapes
_ANY = f"[^{_ESCAPED}]"
_WRITTEN = ((0x20, 0x21), (0x23, 0x5B), (0x5D, 0x10FFFF))  # from which character to which JSON escapes none


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
    inside = ""
    for first, last in _IN_CLASS.findall(part[1 + negated : -1]):
        for one in (first, last):
            if one.startswith("\\"):
                _escape(one[1])  # which refuses what is not known
        start, end = ord(first[-1]), ord((last or first)[-1])
        ranges = [(max(start, low), min(end, high)) for low, high in _WRITTEN if start <= high and end >= low]
        inside += _CLASSES.get(first[1:]) or "".join(f"\\U{low:08X}-\\U{high:08X}" for low, high in ranges)
        if not negated and not ranges:
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
