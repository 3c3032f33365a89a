"""Reports as data (`Report`): Markdown shows the table, SVG the bars, and HTML the sections.

With `origin` and `command` a reader can reproduce the figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:  # steps import numpy, which the command line need not load to show help
    from ngramspec.steps import Step

Mark = Literal["", "kept", "refused", "corrected"]
"""Outcome of a token: "" if it was not drafted, "kept" if the draft token was accepted, "refused" if it was rejected,
and "corrected" for the model's own token after a rejected one."""


@dataclass(frozen=True, slots=True)
class Table:
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    text: int = 1  # number of columns with text, counted from the left; the others contain figures
    totals: int = 0  # number of rows with totals, counted from the last row


class Bar(NamedTuple):
    name: str
    value: float
    low: float | None  # lower end of the spread; `None` means no spread
    high: float | None  # upper end of the spread; `None` means no spread
    label: str  # value as text
    other: bool = False  # whether the bar is no result: it is a baseline, or may be noise


@dataclass(frozen=True, slots=True)
class Bars:
    """A chart of speeds relative to plain decoding, from top to bottom; bars begin at 1."""

    about: str  # short description of the values
    bars: Sequence[Bar]


@dataclass(frozen=True, slots=True)
class Lines:
    about: str
    across: str  # title of the horizontal axis
    up: str  # title of the vertical axis
    series: Mapping[str, Sequence[tuple[float, float]]]  # points (across, up) of each line by name, joined in order
    base: float = 0.0  # start of the vertical axis if no point is below it


Span = tuple[str, Mark]
"""A piece of a text, and the outcome of its tokens."""


@dataclass(frozen=True, slots=True)
class Passage:
    """A text whose pieces are marked as drafted or not."""

    name: str
    spans: Sequence[Span]


Figure = Table | Bars | Lines | Passage


@dataclass(frozen=True, slots=True)
class Section:
    """A section of a page: its heading, an explanation of its figures, and the figures."""

    heading: str
    about: str
    figures: Sequence[Figure]


@dataclass(frozen=True, slots=True)
class Report:
    """A result for readers: the terminal shows it, and Markdown, SVG and HTML files contain it."""

    title: str
    command: str  # command that the user typed, or an equivalent one
    origin: str = ""  # short text with model, machine, build and so on
    table: Table = Table((), ())  # main table, for Markdown
    bars: Bars = Bars("", ())  # main chart, for SVG
    sections: Sequence[Section] = ()
    notes: Sequence[str] = ()  # facts that readers must know about the figures, one sentence each
    headline: str = ""  # main result
    setup: Sequence[str] = ()  # lines on the model, the machine and the settings, for the terminal
    details: Sequence[str] = ()  # further lines for the terminal; the last one contains the headline


Piece = Callable[[int], bytes]
"""Function that returns the bytes of a token."""


def spans_of(step: Step, piece: Piece) -> Iterator[Span]:
    """Yield the text of a step, token by token; incomplete characters in rejected tokens become U+FFFD."""
    # If the text ended inside its draft, it has no token at index `accepted`: the rest was not rejected, only unread.
    for i, text in enumerate(step.pieces):
        is_rejected = i == step.accepted and step.draft_remainder
        if is_rejected:
            yield b"".join(map(piece, step.draft_remainder)).decode(errors="replace"), "refused"
        yield text, "kept" if i < step.accepted else "corrected" if is_rejected else ""


def draft_section(about: str, texts: Mapping[str, tuple[str, Sequence[Step]]], piece: Piece) -> Section:
    """Return the section on one text of each category, given as the name of its prompt and its steps."""
    passages = []
    for category, (name, steps) in texts.items():
        spans = (span for step in steps for span in spans_of(step, piece) if span[0])
        merged_spans = [("".join(text for text, _ in group), mark) for mark, group in groupby(spans, key=itemgetter(1))]
        passages.append(Passage(f"{category}: {name}", merged_spans))
    return Section("Drafts", about, passages)


OVERALL = "overall"  # name of the row for all categories together

# Draft positions and sizes of a pass in a table; a chart contains all of them.
POSITIONS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)


def figure(value: float | None, form: str, unit: str = "") -> str:
    """Return the text of a cell; `None` becomes a dash."""
    return "-" if value is None else f"{value:{form}}{unit}"


MAX_LISTED = 10  # differences, skipped prompts or broken lines in a report; --json contains all of them


def limit_lines(lines: Sequence[str], rest: str) -> list[str]:
    """Return the first `MAX_LISTED` of many lines and a line with their number, which ends with `rest`."""
    return [*lines[:MAX_LISTED], f"{len(lines)} {rest}"] if len(lines) > MAX_LISTED else list(lines)


def acceptance(rates: Mapping[str, Sequence[float | None]], about: str, *, totals: int) -> Section:
    """Return the section on acceptance by position in the draft; the chart shows only the last `totals` rates."""
    by_place = {name: dict(enumerate(values, 1)) for name, values in rates.items()}
    places = [place for place in POSITIONS if any(place in values for values in by_place.values())]
    rows = [[name, *(figure(values.get(place), ".2f") for place in places)] for name, values in by_place.items()]
    series = {
        name: [(place, rate) for place, rate in by_place[name].items() if rate is not None]
        for name in list(rates)[len(rates) - totals :]
    }
    chart = Lines("Accepted, by position in the draft", "position in the draft", "accepted", series)
    return Section("Acceptance by position", about, [chart, Table(["", *map(str, places)], rows, totals=totals)])


def costs(curves: Mapping[str, Mapping[int, float]], switch: float | None = None) -> Section:
    """Return the section on the cost of passes, from the seconds by size and the cost of a change of size."""
    series = {
        name: [(size, value / seconds[1]) for size, value in sorted(seconds.items())]
        for name, seconds in curves.items()
    }
    sizes = [size for size in SIZES if any(size in seconds for seconds in curves.values())]
    # Sizes are rows, so that the table fits in a narrow terminal.
    rows = [[str(size), *(figure(dict(points).get(size), ".2f") for points in series.values())] for size in sizes]
    about = "Time of a pass over n tokens relative to a pass over one token. The lower it is, the more drafts pay."
    if switch:
        about += f" A change of size: {switch:.2f}."
    chart = Lines("Cost of a pass", "tokens in the pass", "relative to one token", series, base=1.0)
    return Section("Cost of a pass", about, [chart, Table(["tokens", *series], rows)])


CONTROLS: Mapping[int, int] = {
    **{number: 0x2400 + number for number in range(0x20) if chr(number) not in "\n\t"},
    0x7F: 0x2421,
    **dict.fromkeys(range(0x80, 0xA0), 0xFFFD),
}
"""Table for `str.translate` that replaces control characters except \\n and \\t by their symbols (ESC: ␛)."""

_ESCAPES = {**CONTROLS, **dict.fromkeys((0xFFFE, 0xFFFF), 0xFFFD)}


def escape_controls(text: str) -> str:
    """Return a text that is safe in XML and on terminals: control characters become their symbols."""
    return text.encode("utf-8", "replace").decode("utf-8").translate(_ESCAPES)
