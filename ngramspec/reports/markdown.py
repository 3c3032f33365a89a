"""A report as Markdown, in the style of llama-bench: a table that lines up as it is, and the line of its origin."""

from __future__ import annotations

import re

from ngramspec.reports.controls import shown
from ngramspec.reports.report import Report, Table

_SPECIAL = {ord(character): f"\\{character}" for character in "\\`*[]|"} | {ord("<"): "&lt;", ord("\n"): " "}


def markdown(report: Report) -> str:
    """The table, the line of its origin, and the notes."""
    origin = f"{_cell(report.origin)}; {_code(report.command)}"
    return "\n".join([*_table(report.table), "", *(f"{line}\n" for line in (origin, *map(_cell, report.notes)))])


def _table(table: Table) -> list[str]:
    cells = [[_cell(cell) for cell in row] for row in (table.headings, *table.rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(table.headings))]
    rule = ["-" * w if i < table.text else f"{'-' * (w - 1)}:" for i, w in enumerate(widths)]
    padded = [
        [c.ljust(w) if i < table.text else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        for row in cells
    ]
    return [f"| {' | '.join(row)} |" for row in (padded[0], rule, *padded[1:])]


def _code(text: str) -> str:
    """Text as it is; a fence longer than any run of backticks in it ends where it should."""
    text = " ".join(shown(text).split("\n"))
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    space = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{space}{text}{space}{fence}"


def _cell(text: str) -> str:
    return shown(text).translate(_SPECIAL)
