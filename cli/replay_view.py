"""How a replay looks: a bar while it runs, tables when it is done."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ngramspec.replay.report import Figures

from .bench_view import WIDTH
from .console import printable, stderr, write_stdout

POSITIONS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
"""Draft positions shown; --json has all."""


@contextmanager
def replay_bar(total: int, *, quiet: bool) -> Iterator[Callable[[str], None]]:
    """A bar on stderr; the function it yields counts one conversation and names its category.

    Args:
        total: conversations to come.
        quiet: draw between conversations only, as a thread that draws would take its time out of what is timed.
    """
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    off = not stderr.is_terminal
    with Progress(*columns, console=stderr, transient=True, auto_refresh=not quiet, disable=off) as bar:
        task = bar.add_task("replaying", total=total)

        def done(category: str) -> None:
            bar.update(task, advance=1, description=printable(category))
            if quiet:
                bar.refresh()

        yield done


def show(
    heading: Sequence[str],
    sections: Mapping[str, tuple[str, Mapping[str, Figures]]],
    oracle: Mapping[str, Mapping[str, float]],
    footing: Sequence[str],
) -> None:
    """Print the report to stdout.

    Args:
        heading: lines above the tables.
        sections: by the name of the curve that was drafted by: what to say of it, and the figures by category.
        oracle: speedups of the copy-oracle by category and curve; may be empty.
        footing: lines below the tables.
    """
    parts: list[RenderableType] = [*heading]
    for name, (about, rows) in sections.items():
        limits = {category: speedups[name] for category, speedups in oracle.items() if name in speedups}
        parts += ["", f"Curve {name}: {about}", _gains(rows, name, limits)]
        if rows and rows["overall"]["max_draft"]:
            parts += ["", "Acceptance by position in the draft, of the drafts that reach so far:", _positions(rows)]
        if rows and rows["overall"]["calibration_error"] is not None:
            error = rows["overall"]["calibration_error"]
            parts += ["", f"Predicted against observed acceptance; expected calibration error {error:.4f}:"]
            parts.append(_reliability(rows["overall"]))
    parts += ["", *footing] if footing else []
    console = Console(highlight=False, emoji=False, width=None if sys.stdout.isatty() else WIDTH)
    with console.capture() as capture:
        for part in parts:
            console.print(
                printable(part) if isinstance(part, str) else part, markup=False, soft_wrap=isinstance(part, str)
            )
    write_stdout(capture.get())


def _gains(rows: Mapping[str, Figures], curve: str, limits: Mapping[str, float]) -> Table:
    """What was gained, and what it took."""
    timed = any("measured_speedup" in row for row in rows.values())
    headings = ["tokens", "per\npass", "accepted", "no\ndraft", *(["measured"] if timed else [])]
    headings += ["modelled" if timed else "speedup", *(["copy-\noracle"] if limits else [])]
    headings += ["us per\npass", "us per\nprompt\ntoken"]
    lines = []
    for category, row in rows.items():
        # A mean of counts tells nothing that their sum does not.
        cells = ["" if category == "macro" else f"{row['tokens']:.0f}", f"{row['tokens_per_pass']:.2f}"]
        cells += [_number(row["acceptance"], ".0%"), f"{row['no_draft_share']:.0%}"]
        if timed:
            cells.append(_number(row.get("measured_speedup"), ".3f", "x"))
        cells.append(f"{row['speedup'][curve]:.3f}x")
        if limits:
            cells.append(_number(limits.get(category), ".3f", "x"))
        cells += [f"{row['cpu_us_per_pass']:.1f}", f"{row['start_us_per_prompt_token']:.2f}"]
        lines.append([category, *cells])
    return _table(["category", *headings], lines, totals=2)


def _positions(rows: Mapping[str, Figures]) -> Table:
    shown = [p for p in POSITIONS if p <= rows["overall"]["max_draft"]]
    lines = []
    for category, row in rows.items():
        if category == "macro":
            continue
        rates = row["accept_by_position"]
        cells = [f"{row['drafted_per_pass']:.2f}", *(f"{rates[p - 1]:.2f}" if p <= len(rates) else "-" for p in shown)]
        lines.append([category, *cells])
    return _table(["category", "drafted", *map(str, shown)], lines, totals=1)


def _reliability(row: Figures) -> Table:
    lines = [
        [
            f"{cell['from']:.1f} - {cell['to']:.1f}",
            str(cell["count"]),
            _number(cell["predicted"], ".3f"),
            _number(cell["observed"], ".3f"),
        ]
        for cell in row["reliability"]
    ]
    return _table(["predicted", "positions", "mean", "observed"], lines, totals=0)


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, totals: int) -> Table:
    """Narrow enough for 80 columns; the last `totals` rows are set apart."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(headings[0], no_wrap=True)
    for heading in headings[1:]:
        table.add_column(heading, justify="right")
    for number, row in enumerate(rows):
        table.add_row(printable(row[0]), *row[1:], style="bold" if number >= len(rows) - totals else None)
    return table


def _number(value: Any, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"
