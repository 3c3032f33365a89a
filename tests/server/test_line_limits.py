"""Tests of the end of a suggestion by time, with a mock clock, and by lines, however the text is split into tokens."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial

from hypothesis import example, given
from hypothesis import strategies as st

from ngramspec.server.llama_server import LineLimits
from ngramspec.tool_calls.deltas import Delta

Arrival = tuple[float, str]
"""(seconds, text)."""


def told(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def shown(arrivals: Sequence[Arrival], seconds: float | None = None, indent: int = 0) -> tuple[list[str], bool]:
    """Return the text shown at each arrival and at the end, and True if a limit ended the text."""
    now = iter([at for at, _ in arrivals])
    limits = LineLimits(seconds, indent, clock=lambda: next(now))
    parts = []
    for _, text in arrivals:
        parts.append(told(limits.push(text)))
        if limits.ended:
            return parts, True
    return [*parts, told(limits.finish())], False


def test_line_limits_after_deadline_end_with_complete_line() -> None:
    cases: list[tuple[list[Arrival], str, bool]] = [
        # The time starts at the first token, not at the request.
        ([(100.0, "a\n"), (100.9, "b\n"), (101.1, "c\nd"), (101.2, "e")], "a\nb\nc\n", True),
        # A line is completed, however long it takes.
        ([(0.0, "a"), (2.0, "b"), (9.0, "c\n")], "abc\n", True),
        ([(0.0, "a\nb"), (5.0, "c"), (6.0, "d\n")], "a\nbcd\n", True),
        # The text after the end of the line belongs to later lines, even in the same piece.
        ([(0.0, "a"), (1.5, "b\n\nc\nd")], "ab\n", True),
        ([(0.0, "a\n"), (1.0, "b\n")], "a\nb\n", False),
        # Tokens without text, such as the first half of a character, start the time as well.
        ([(0.0, ""), (0.9, "a\n"), (1.1, "b\n"), (1.2, "c")], "a\nb\n", True),
    ]
    for arrivals, text, ended in cases:
        parts, was_ended = shown(arrivals, seconds=1.0)
        assert ("".join(parts), was_ended) == (text, ended)


@given(text=st.text("ab \t\n", max_size=40), indent=st.integers(0, 4), cuts=st.lists(st.integers(0, 40), max_size=8))
@example("x\n    y\n   \n    z", 4, [])
@example("x\n\t\t\t\ty\n\t\tz", 4, [3, 8])
@example("x\n    y\n  ", 4, [1, 2, 3])  # The text ended; the line might have continued with enough indentation.
def test_line_limits_with_indent_end_before_less_indented_line(text: str, indent: int, cuts: list[int]) -> None:
    """The output has all lines before the first one, except line 1, that is indented less than the limit."""
    kept = text
    for start in [i + 1 for i, character in enumerate(text) if character == "\n"] if indent else []:
        line = text[start:]
        margin = len(line) - len(line.lstrip(" \t"))
        if margin < indent and margin < len(line):
            kept = text[:start]
            break
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [(0.0, text[a:b]) for a, b in itertools.pairwise(edges)]
    parts, ended = shown(pieces, indent=indent, seconds=1.0)
    assert ("".join(parts), ended) == (kept, kept != text)


def test_line_limits_apply_deadline_and_indent_together() -> None:
    shown_by_both = partial(shown, seconds=1.0, indent=2)
    assert shown_by_both([(0.0, "a\n"), (2.0, "  b\n  c")]) == (["a\n", "  b\n"], True)
    assert shown_by_both([(0.0, "a\n"), (2.0, "b\n  c")]) == (["a\n", ""], True)
    assert shown_by_both([(0.0, "a\n"), (0.5, " "), (0.6, " b\n")]) == (["a\n", "", "  b\n", ""], False)
    assert shown([(0.0, "a\n "), (9.0, "b\n")]) == (["a\n ", "b\n", ""], False)


def test_line_limits_after_end_return_no_text() -> None:
    limits = LineLimits(indent=4)
    assert told(limits.push("a\nb")) == "a\n"
    assert (limits.ended, limits.push("    c"), limits.finish()) == (True, [], [])
