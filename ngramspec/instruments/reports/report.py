"""`Report`: figures as data, to be shown to others: Markdown has its table, SVG its bars, HTML its sections.

`origin` and `command` say how to get the figures again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:  # steps need numpy, which the command line does without where it only shows help
    from ngramspec.steps import Step

Mark = Literal["", "kept", "refused", "corrected"]
"""What became of a token: it was not drafted; drafted and kept, or refused; or the model's own in place of a refused
one."""


@dataclass(frozen=True, slots=True)
class Table:
    """Cells of text, row by row."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    text: int = 1  # how many columns, from the left, are text; the others are figures
    totals: int = 0  # how many rows, from below, sum up the others


class Bar(NamedTuple):
    """A figure by its name."""

    name: str
    value: float
    # low, high: its spread, None if there is none.
    low: float | None
    high: float | None
    label: str  # the figure in words
    other: bool = False  # it is not ours, but what ours is compared with


@dataclass(frozen=True, slots=True)
class Bars:
    """A bar per figure, from above."""

    about: str  # what the figures are, in a line
    bars: Sequence[Bar]
    # Where a line is drawn that says neither gain nor loss, and what it stands for; None: no line.
    even: tuple[float, str] | None = None


@dataclass(frozen=True, slots=True)
class Lines:
    """A chart of lines."""

    about: str
    # across, up: what the axes count.
    across: str
    up: str
    series: Mapping[str, Sequence[tuple[float, float]]]  # the lines by name: points (across, up), joined in order
    guide: str | None = None  # the name of the one that is no measurement, but what others are compared with


Span = tuple[str, Mark]
"""A piece of a text, and what became of it."""


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
    """All that is reported; see above."""

    title: str
    table: Table
    bars: Bars
    origin: str  # model, machine, build and the like, in a line
    command: str  # what was typed, or what comes to the same
    sections: Sequence[Section] = ()
    notes: Sequence[str] = ()  # what must be known of the figures, a sentence each
    headline: str = ""  # the main result


# --------------------------------------------------------------------------- drafted texts

Piece = Callable[[int], bytes]
"""The bytes that a token stands for."""

Texts = Mapping[str, tuple[str, Sequence["Step"]]]
"""A text of each category: its prompt's name, and its steps."""


def spans_of(step: Step, piece: Piece) -> Iterator[Span]:
    """A step's text, token by token. Refused tokens never were text; what is no whole character in them is U+FFFD."""
    # A text that ended inside its draft has no token at index `accepted`: the rest was not refused, only unread.
    for i, released in enumerate(step.pieces):
        refused = i == step.accepted and step.refused
        if refused:
            yield b"".join(map(piece, step.refused)).decode(errors="replace"), "refused"
        yield released, "kept" if i < step.accepted else "corrected" if refused else ""


def drafted_texts(about: str, texts: Texts, piece: Piece) -> Section:
    """How texts were drafted."""
    passages = []
    for category, (name, steps) in texts.items():
        spans = (span for step in steps for span in spans_of(step, piece) if span[0])
        joined = [("".join(text for text, _ in group), mark) for mark, group in groupby(spans, key=itemgetter(1))]
        passages.append(Passage(f"{category}: {name}", joined))
    return Section("Drafts", about, passages)


# --------------------------------------------------------------------------- figures and sections of several reports

OVERALL, MACRO = TOTALS = "overall", "macro"
"""The rows that stand for all kinds of text: all tokens together, and the mean of the kinds."""

POSITIONS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
"""Draft positions in a table; a chart has all."""

SIZES = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 32, 64)
"""Sizes of a pass in a table; likewise."""


def figure(value: float | None, form: str, unit: str = "") -> str:
    """A figure for a cell; a dash where there is none."""
    return "-" if value is None else f"{value:{form}}{unit}"


def gains(about: str, known: Mapping[str, tuple[float, float | None, float | None]], form: str) -> Bars:
    """Speeds over that of plain decoding, by name: the figure, its least and its greatest value."""
    bars = [Bar(name, value, low, high, f"{value:{form}}x") for name, (value, low, high) in known.items()]
    return Bars(about, bars, even=(1.0, "plain decoding"))


def acceptance(rates: Mapping[str, Sequence[float | None]], about: str, *, totals: int) -> Section:
    """Acceptance by position in the draft, by name; the chart shows the last `totals`, which sum up the others."""
    longest = max(map(len, rates.values()), default=0)
    places = [place for place in POSITIONS if place <= longest]
    rows = [
        [name, *(figure(found[place - 1] if place <= len(found) else None, ".2f") for place in places)]
        for name, found in rates.items()
    ]
    series = {
        name: [(place, rate) for place, rate in enumerate(found, 1) if rate is not None]
        for name, found in list(rates.items())[len(rates) - totals :]
    }
    chart = Lines("Accepted, by position in the draft", "position in the draft", "accepted", series)
    return Section("Acceptance by position", about, [chart, Table(["", *map(str, places)], rows, totals=totals)])


def costs(curves: Mapping[str, Mapping[int, float]], switch: float | None = None) -> Section:
    """Cost curves: the seconds by size, and the cost of a change of size."""
    series = {
        name: [(size, value / seconds[1]) for size, value in sorted(seconds.items())]
        for name, seconds in curves.items()
    }
    sizes = [size for size in SIZES if any(size in seconds for seconds in curves.values())]
    rows = [[name, *(figure(dict(points).get(size), ".2f") for size in sizes)] for name, points in series.items()]
    about = "Time of a pass over n tokens relative to a pass over one token. The lower it is, the more drafts pay."
    if switch:
        about += f" A change of size: {switch:.2f}."
    chart = Lines("Cost of a pass", "tokens in the pass", "relative to one token", series)
    return Section("Cost of a pass", about, [chart, Table(["", *map(str, sizes)], rows)])


def calibration(cells: Sequence[Mapping[str, Any]], error: float | None) -> list[Section]:
    """How right the odds were that drafts were given, if any were; of `Reliability` its cells and its error."""
    if error is None:
        return []
    about = f"All positions of all proposed drafts, verified or not; expected calibration error {error:.4f}."
    known = [cell for cell in cells if cell["count"]]
    right = "perfect calibration"
    points = [(cell["predicted"], cell["observed"]) for cell in known]
    rows = [
        [f"{c['from']:.1f}-{c['to']:.1f}", str(c["count"]), f"{c['predicted']:.3f}", f"{c['observed']:.3f}"]
        for c in known
    ]
    series = {"observed": points, right: [(0.0, 0.0), (1.0, 1.0)]}
    chart = Lines("Acceptance probability", "predicted", "observed", series, guide=right)
    return [Section("Calibration", about, [chart, Table(["probability", "positions", "mean", "observed"], rows)])]


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
