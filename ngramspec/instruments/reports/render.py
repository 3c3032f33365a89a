"""Reports as Markdown, in the style of llama-bench, as SVG charts, and as one HTML file without scripts and requests.

Texts of models and files are escaped, and the page's Content-Security-Policy forbids scripts and requests. Colours of
charts are set by CSS classes, because viewers other than browsers do not support CSS variables.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from textwrap import wrap
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from jinja2 import Environment

from ngramspec.instruments.reports.report import Bars, Lines, Passage, Report, Table, escape_controls

_SPECIAL = {ord(character): f"\\{character}" for character in "\\`*[]|"} | {ord("<"): "&lt;", ord("\n"): " "}


def markdown(report: Report) -> str:
    """Return the headline, the table, which is aligned as plain text, the notes, and how to get the figures again."""
    origin = f"{_cell(report.origin)}; {_code(report.command)}"
    headline = [f"**{_cell(report.headline)}**", ""] if report.headline else []
    below = (f"{line}\n" for line in (*map(_cell, report.notes), origin))
    return "\n".join([*headline, *_rows(report.table), "", *below])


def _rows(table: Table) -> list[str]:
    cells = [[_cell(cell) for cell in row] for row in (table.headings, *table.rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(table.headings))]
    rule = ["-" * w if i < table.text else f"{'-' * (w - 1)}:" for i, w in enumerate(widths)]
    padded_rows = [
        [c.ljust(w) if i < table.text else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        for row in cells
    ]
    return [f"| {' | '.join(row)} |" for row in (padded_rows[0], rule, *padded_rows[1:])]


def _code(text: str) -> str:
    """Return a text as inline code, inside a fence that is longer than any run of backticks in the text."""
    text = " ".join(escape_controls(text).split("\n"))
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    space = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{space}{text}{space}{fence}"


def _cell(text: str) -> str:
    return escape_controls(text).translate(_SPECIAL)


_FOLDER = Path(__file__).parent

_STYLE = (_FOLDER / "chart.css").read_text("utf-8").strip()
"""Style sheet of all charts, which must be inside an element of the class "chart"."""


def html(report: Report) -> str:
    """Return the whole page: the headline first, how to get the figures again last."""
    environment = Environment(autoescape=True, trim_blocks=True, finalize=_clean)
    environment.tests["table"] = lambda figure: isinstance(figure, Table)
    environment.tests["passage"] = lambda figure: isinstance(figure, Passage)
    page = environment.from_string((_FOLDER / "page.html").read_text("utf-8"))
    return page.render(report=report, chart=_chart, style=_STYLE) + "\n"


def _clean(value: object) -> object:
    return escape_controls(value) if type(value) is str else value  # markup was cleaned before


WIDTH = 760

_CHARACTER = 7.2  # approximate width in pixels of a character of 13 px
_ROW, _BAR = 30, 16
_TOP, _BOTTOM, _LEFT, _RIGHT = 16, 268, 64, WIDTH - 24  # edges of a line chart


def svg(report: Report) -> str:
    """Return an SVG file with the chart, the title and the origin of a report."""
    picture = _make_picture(xmlns="http://www.w3.org/2000/svg", width=str(WIDTH))
    SubElement(picture, "title").text = escape_controls(report.title)
    SubElement(picture, "style").text = _STYLE
    ground = _draw(picture, "rect", "ground", width=WIDTH)
    _text(picture, 24, 32, report.title, "ink title")
    _text(picture, 24, 52, report.bars.about, "dim")
    height = _draw_bars(picture, report.bars, top=64)
    for text in (f"{report.origin}; {report.command}", *report.notes):
        for line in wrap(escape_controls(text), 104, break_on_hyphens=False):
            height += 16
            _text(picture, 24, height, line, "dim small")
    for element in (picture, ground):
        element.set("height", str(height + 16))
    return _to_text(picture, height + 16) + "\n"


def _chart(figure: Bars | Lines) -> str:
    """Return a chart for a page that contains `_STYLE`."""
    picture = _make_picture(**{"aria-label": escape_controls(figure.about)})
    height = _draw_bars(picture, figure, top=12) if isinstance(figure, Bars) else _draw_lines(picture, figure)
    return _to_text(picture, height)


def _make_picture(**attributes: str) -> Element:
    return Element("svg", {"class": "chart", "role": "img"} | attributes)


def _to_text(picture: Element, height: int) -> str:
    picture.set("viewBox", f"0 0 {WIDTH} {height}")
    indent(picture, "")
    return tostring(picture, "unicode")


def _draw(parent: Element, tag: str, kind: str, text: str = "", **attributes: float | str) -> Element:
    """Add an SVG element; an underscore in the name of an attribute stands for a hyphen."""
    values = {
        name.replace("_", "-"): f"{value:.1f}" if isinstance(value, float) else str(value)
        for name, value in attributes.items()
    }
    element = SubElement(parent, tag, {"class": kind} | values)
    element.text = escape_controls(text)
    return element


def _text(parent: Element, x: float, y: float, text: str, kind: str, anchor: str = "start") -> None:
    _draw(parent, "text", kind, text, x=x, y=y, text_anchor=anchor)


def _draw_bars(picture: Element, figure: Bars, top: int) -> int:
    """Draw a bar chart, and return the height at which it ends."""
    names = [_short(bar.name) for bar in figure.bars]
    left = 36 + _CHARACTER * max(map(len, names), default=0)
    right = WIDTH - 36 - _CHARACTER * max((len(bar.label) for bar in figure.bars), default=0)
    # The axis ends at 1.2 or more, so that noise does not fill the chart.
    ends = [1.0, 1.2, *(end for bar in figure.bars for end in (bar.value, bar.low, bar.high) if end)]
    scale = max(60.0, right - left) / (max(ends) - min(ends))

    def place(value: float) -> float:
        return left + scale * (value - min(ends))

    for number, (name, bar) in enumerate(zip(names, figure.bars, strict=True)):
        middle = top + _ROW * (number + 0.5)
        kind = "other" if bar.other else "loss" if round(bar.value, 2) < 1 else "gain"
        start, end = sorted((place(1.0), place(bar.value)))
        _text(picture, left - 8, middle + 4.5, name, "ink", "end")
        rect = _draw(picture, "rect", kind, x=start, y=middle - _BAR / 2, width=end - start, height=_BAR, rx=2)
        SubElement(rect, "title").text = escape_controls(f"{bar.name}: {bar.label}")
        if bar.low is not None and bar.high is not None:
            low, high = place(bar.low), place(bar.high)
            end = max(end, high)
            for x1, x2, half in ((low, high, 0), (low, low, 4), (high, high, 4)):
                _draw(picture, "line", "spread", x1=x1, y1=middle - half, x2=x2, y2=middle + half)
        _text(picture, end + 8, middle + 4.5, bar.label, "dim")
    at, below = place(1.0), top + _ROW * len(figure.bars)
    _draw(picture, "line", "even", x1=at, y1=top, x2=at, y2=below)
    _text(picture, at, below + 14, "plain decoding", "dim small", "middle")
    return below + 24


def _draw_lines(picture: Element, figure: Lines) -> int:
    """Draw a line chart, and return the height at which it ends."""
    points = [point for line in figure.series.values() for point in line] or [(0.0, 0.0)]
    counts = all(float(x).is_integer() for x, _ in points) and max(x for x, _ in points) > 1
    across = _ticks(min(x for x, _ in points), max(x for x, _ in points), counts)
    lowest = min(figure.base, *(y for _, y in points))
    up = [lowest, *_ticks(lowest, max(y for _, y in points), False)[1:]]

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            _LEFT + (_RIGHT - _LEFT) * (x - across[0]) / (across[-1] - across[0]),
            _BOTTOM - (_BOTTOM - _TOP) * (y - up[0]) / (up[-1] - up[0]),
        )

    for y in up:
        _, at = place(across[0], y)
        _draw(picture, "line", "grid", x1=_LEFT, y1=at, x2=_RIGHT, y2=at)
        _text(picture, _LEFT - 8, at + 4, f"{y:g}", "dim small", "end")
    for x in across:
        _text(picture, place(x, up[0])[0], _BOTTOM + 18, f"{x:g}", "dim small", "middle")
    _text(picture, (_LEFT + _RIGHT) / 2, _BOTTOM + 38, figure.across, "dim", "middle")
    turn = f"translate(16 {(_TOP + _BOTTOM) / 2}) rotate(-90)"
    _draw(picture, "text", "dim", figure.up, text_anchor="middle", transform=turn)
    height = _BOTTOM + 52
    for number, (name, line) in enumerate(figure.series.items()):
        kind = f"line{number % 5}"
        path = " ".join("{:.1f},{:.1f}".format(*place(*point)) for point in line)
        _draw(picture, "polyline", kind, style="fill: none", stroke_width=2, points=path)
        for point in line:
            x, y = place(*point)
            circle = _draw(picture, "circle", kind, cx=x, cy=y, r=3.5)
            SubElement(circle, "title").text = f"{escape_controls(name)}: {point[0]:g}, {point[1]:.4g}"
        if len(figure.series) > 1:
            _draw(picture, "line", kind, x1=_LEFT, y1=height - 4, x2=_LEFT + 24, y2=height - 4, stroke_width=2)
            _text(picture, _LEFT + 32, height, name, "dim")
            height += 18
    return height


def _ticks(minimum: float, maximum: float, whole: bool) -> list[float]:
    """Return about five round numbers, at least two, whose range includes both limits; integers if `whole`."""
    maximum = max(maximum, minimum + 1e-9) if maximum > minimum else minimum + 1
    rough = (maximum - minimum) / 5
    power = 10 ** math.floor(math.log10(rough))
    step = next(n * power for n in (1, 2, 5, 10) if n * power >= rough)
    step = max(1, step) if whole else step
    first, last = math.floor(minimum / step + 1e-9), math.ceil(maximum / step - 1e-9)
    return [round(number * step, 12) for number in range(first, max(last, first + 1) + 1)]


def _short(name: str) -> str:
    name = escape_controls(name).replace("\n", " ")
    return name if len(name) <= 30 else f"{name[:29]}…"
