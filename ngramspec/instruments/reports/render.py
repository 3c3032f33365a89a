"""Reports as Markdown, in the style of llama-bench, as SVG charts, and as one HTML file without scripts and requests.

Texts of models and files are escaped. In addition, the page's Content-Security-Policy forbids scripts and requests.
There is no chart library, which would be larger than a report. Colours of charts are set by CSS classes, because
viewers other than browsers do not support CSS variables.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from html import escape
from pathlib import Path
from textwrap import wrap

from jinja2 import Environment

from ngramspec.instruments.reports.report import Bar, Bars, Lines, Passage, Report, Table, escape_controls

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


# --------------------------------------------------------------------------- HTML

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
_MAX_NAME = 30
_RANGE = 1.2  # minimum end of an axis as a multiple of its start, so that noise does not fill a chart


def svg(report: Report) -> str:
    """Return an SVG file with the chart, the title and the origin of a report."""
    height, shapes = _bars(report.bars, top=64)
    for text in (f"{report.origin}; {report.command}", *report.notes):
        for line in wrap(escape_controls(text), 104, break_on_hyphens=False):
            height += 16
            shapes.append(_text(24, height, line, "dim small"))
    whole, elements = height + 16, "\n".join(shapes)
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" class="chart" role="img" width="{WIDTH}" height="{whole}"\
 viewBox="0 0 {WIDTH} {whole}">
<title>{escape(escape_controls(report.title))}</title>
<style>
{_STYLE}
</style>
<rect class="ground" width="{WIDTH}" height="{whole}"/>
{_text(24, 32, report.title, "ink title")}
{_text(24, 52, report.bars.about, "dim")}
{elements}
</svg>
"""


def _chart(figure: Bars | Lines) -> str:
    """Return a chart for a page that contains `_STYLE`."""
    height, shapes = _bars(figure, top=12) if isinstance(figure, Bars) else _lines(figure)
    about = escape(escape_controls(figure.about))
    start_tag = f'<svg class="chart" role="img" viewBox="0 0 {WIDTH} {height}" aria-label="{about}">'
    return "\n".join([start_tag, *shapes, "</svg>"])


# --------------------------------------------------------------------------- bars


def _bars(figure: Bars, top: int) -> tuple[int, list[str]]:
    """Return the height and the elements of a bar chart."""
    names = [_short(bar.name) for bar in figure.bars]
    left = 36 + _CHARACTER * max(map(len, names), default=0)
    right = WIDTH - 36 - _CHARACTER * max((len(bar.label) for bar in figure.bars), default=0)
    base = figure.even[0] if figure.even else 0.0
    ends = [base, _RANGE * base, *(end for bar in figure.bars for end in (bar.value, bar.low, bar.high) if end)]
    scale = max(60.0, right - left) / ((max(ends) - min(ends)) or 1.0)

    def place(value: float) -> float:
        return left + scale * (value - min(ends))

    below = top + _ROW * len(figure.bars)
    shapes: list[str] = []
    for number, (name, bar) in enumerate(zip(names, figure.bars, strict=True)):
        shapes += _bar(bar, name, left, top + _ROW * number, place, base)
    if figure.even:
        at = place(base)
        shapes.append(f'<line class="even" x1="{at:.1f}" y1="{top}" x2="{at:.1f}" y2="{below}"/>')
        shapes.append(_text(at, below + 14, figure.even[1], "dim small", "middle"))
    return below + (24 if figure.even else 8), shapes


def _bar(bar: Bar, name: str, edge: float, top: float, place: Callable[[float], float], base: float) -> Iterator[str]:
    middle, below = top + _ROW / 2, top + _ROW / 2 + 4.5
    kind = "other" if bar.other else "loss" if round(bar.value, 2) < base else "gain"
    start, end = sorted((place(base), place(bar.value)))
    yield _text(edge - 8, below, name, "ink", "end")
    title = escape(escape_controls(f"{bar.name}: {bar.label}"))
    yield (
        f'<rect class="{kind}" x="{start:.1f}" y="{middle - _BAR / 2:.1f}" width="{end - start:.1f}"'
        f' height="{_BAR}" rx="2"><title>{title}</title></rect>'
    )
    if bar.low is not None and bar.high is not None:
        low, high = place(bar.low), place(bar.high)
        end = max(end, high)
        yield f'<line class="spread" x1="{low:.1f}" y1="{middle}" x2="{high:.1f}" y2="{middle}"/>'
        for x in (low, high):
            yield f'<line class="spread" x1="{x:.1f}" y1="{middle - 4}" x2="{x:.1f}" y2="{middle + 4}"/>'
    yield _text(end + 8, below, bar.label, "dim")


# --------------------------------------------------------------------------- lines

_TOP, _BOTTOM, _LEFT, _RIGHT = 16, 268, 64, WIDTH - 24


def _lines(figure: Lines) -> tuple[int, list[str]]:
    """Return the height and the elements of a line chart."""
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

    shapes: list[str] = []
    for y in up:
        _, at = place(across[0], y)
        shapes.append(f'<line class="grid" x1="{_LEFT}" y1="{at:.1f}" x2="{_RIGHT}" y2="{at:.1f}"/>')
        shapes.append(_text(_LEFT - 8, at + 4, f"{y:g}", "dim small", "end"))
    for x in across:
        shapes.append(_text(place(x, up[0])[0], _BOTTOM + 18, f"{x:g}", "dim small", "middle"))
    shapes.append(_text((_LEFT + _RIGHT) / 2, _BOTTOM + 38, figure.across, "dim", "middle"))
    shapes.append(
        f'<text class="dim" text-anchor="middle" transform="translate(16 {(_TOP + _BOTTOM) / 2}) rotate(-90)">'
        f"{escape(escape_controls(figure.up))}</text>"
    )
    height = _BOTTOM + 52
    for number, (name, line) in enumerate(figure.series.items()):
        kind = f"line{number % 5}"
        path = " ".join("{:.1f},{:.1f}".format(*place(*point)) for point in line)
        shapes.append(f'<polyline class="{kind}" style="fill: none" stroke-width="2" points="{path}"/>')
        for point in line:
            x, y = place(*point)
            about = f"{escape(escape_controls(name))}: {point[0]:g}, {point[1]:.4g}"
            shapes.append(f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"><title>{about}</title></circle>')
        if len(figure.series) > 1:
            shapes.append(
                f'<line class="{kind}" x1="{_LEFT}" y1="{height - 4}" x2="{_LEFT + 24}" y2="{height - 4}"'
                ' stroke-width="2"/>'
            )
            shapes.append(_text(_LEFT + 32, height, name, "dim"))
            height += 18
    return height, shapes


def _ticks(minimum: float, maximum: float, whole: bool) -> list[float]:
    """Return about five round numbers, at least two, whose range includes both limits; integers if `whole`."""
    maximum = max(maximum, minimum + 1e-9) if maximum > minimum else minimum + 1
    rough = (maximum - minimum) / 5
    power = 10 ** math.floor(math.log10(rough))
    step = next(n * power for n in (1, 2, 5, 10) if n * power >= rough)
    step = max(1, step) if whole else step
    first, last = math.floor(minimum / step + 1e-9), math.ceil(maximum / step - 1e-9)
    return [round(number * step, 12) for number in range(first, max(last, first + 1) + 1)]


# --------------------------------------------------------------------------- text


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(escape_controls(text))}</text>'


def _short(name: str) -> str:
    name = escape_controls(name).replace("\n", " ")
    return name if len(name) <= _MAX_NAME else f"{name[: _MAX_NAME - 1]}…"
