"""`Report`: what is posted, as data, and as `markdown`; `svg` and `html` of this room draw it. Who measured makes one.

Report(title, table, origin, bars, sections)
         |      |       |     |     `- everything, for a page of HTML
         |      |       |     `------- the chart, for SVG
         |      |       `------------- the line that says how to get these figures again
         `------`--------------------- the heading and the table, for Markdown
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Mark = Literal["", "kept", "refused", "corrected"]
"""What became of a token: it was not drafted; drafted and kept, or refused; or the model's own in place of a refused
one."""


@dataclass(frozen=True, slots=True)
class Table:
    """Cells of text, row by row.

    Attributes:
        headings: of the columns.
        rows: as long as the headings each.
        text: how many columns, from the left, are text; the others are figures.
        totals: how many rows, from below, sum up the others.
    """

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    text: int = 1
    totals: int = 0


class Bar(NamedTuple):
    """A figure by its name; `low` and `high`: its spread, None if there is none; `label`: the figure in words."""

    name: str
    value: float
    low: float | None
    high: float | None
    label: str


@dataclass(frozen=True, slots=True)
class Bars:
    """A bar per figure.

    Attributes:
        about: what the figures are, in a line.
        bars: from above.
        even: where a line is drawn that says neither gain nor loss, and what it stands for; None: no line.
    """

    about: str
    bars: Sequence[Bar]
    even: tuple[float, str] | None = None


class Series(NamedTuple):
    """Points (across, up), joined in order; `guide`: it is no measurement, but what others are compared with."""

    name: str
    points: Sequence[tuple[float, float]]
    guide: bool = False


@dataclass(frozen=True, slots=True)
class Lines:
    """A chart of lines.

    Attributes:
        about: what is shown, in a line.
        across, up: what the axes count.
        series: the lines.
    """

    about: str
    across: str
    up: str
    series: Sequence[Series]


class Span(NamedTuple):
    """A piece of a text, and what became of it."""

    text: str
    mark: Mark = ""


@dataclass(frozen=True, slots=True)
class Passage:
    """A text, as it was drafted."""

    name: str
    spans: Sequence[Span]


Figure = Table | Bars | Lines | Passage


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a page: its heading, what its figures mean, and the figures."""

    heading: str
    about: str
    figures: Sequence[Figure]


@dataclass(frozen=True, slots=True)
class Report:
    """All that is posted; see above.

    Attributes:
        origin: model, machine, build and the like, in a line.
        command: what was typed, or what comes to the same.
        notes: what must be known of the figures, a sentence each.
    """

    title: str
    table: Table
    bars: Bars
    origin: str
    command: str
    sections: Sequence[Section] = ()
    notes: Sequence[str] = ()


# --------------------------------------------------------------------------- texts of models and files

CONTROLS: Mapping[int, int] = {
    **{number: 0x2400 + number for number in range(0x20) if chr(number) not in "\n\t"},
    0x7F: 0x2421,
    **dict.fromkeys(range(0x80, 0xA0), 0xFFFD),
}
"""For `str.translate`: the symbol of each (ESC: ␛), but not of \\n and \\t."""

_SHOWN = {**CONTROLS, **dict.fromkeys((0xFFFE, 0xFFFF), 0xFFFD)}


def shown(text: str) -> str:
    """Text of a model or a file as XML and terminals may hold it: control characters as their symbols."""
    return text.encode("utf-8", "replace").decode("utf-8").translate(_SHOWN)


# --------------------------------------------------------------------------- Markdown

_SPECIAL = {ord(character): f"\\{character}" for character in "\\`*[]|"} | {ord("<"): "&lt;", ord("\n"): " "}
