"""Layout of reports: width of stdout, tables, progress bars and lines that several commands print.

The module does not import llama.cpp, so that a trace can be shown without loading it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

from rich.box import SIMPLE_HEAD
from rich.console import Console, JustifyMethod, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from ngramspec.drafting import find_uncompiled_modules
from ngramspec.instruments.reports.report import Report
from ngramspec.instruments.reports.report import Table as Figures
from ngramspec.model_settings import Tuned, flags

from .console import MAX_COLUMNS, Outcome, capture_outcome, printable, progress_bar, write_stdout

ACCEPTED, REFUSED, CORRECTION = "green", "strike red", "bright_blue"
"""Styles of accepted and rejected draft tokens, and of the target's own token in place of a rejected one."""


def report_console() -> Console:
    """Return a console on stdout.

    In a file or a pipe it is 200 columns wide, so that tables are not cut at 80.
    """
    return Console(highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else 200)


def print_report(parts: Sequence[RenderableType]) -> None:
    """Print lines and tables to stdout; a terminal gets no broken words, and a pipe tables of at most 100 columns."""
    console = report_console()
    if not console.is_terminal:
        console.width = MAX_COLUMNS
    with console.capture() as capture:
        for part in parts:
            if isinstance(part, str):
                console.print(printable(part), soft_wrap=not console.is_terminal)
            else:
                console.print(part)
    write_stdout(capture.get())


# ---------------------------------------------------------------------- tables


def figures_table(data: Figures) -> Table:
    """Return a table of figures with narrow columns, so that most tables fit in 80 columns; totals are bold."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for column, heading in enumerate(data.headings):
        justify: JustifyMethod = "left" if column < data.text else "right"
        table.add_column(heading, justify=justify, no_wrap=column == 0, overflow="fold")
    for number, row in enumerate(data.rows):
        style = "bold" if number >= len(data.rows) - data.totals else None
        table.add_row(*map(printable, row), style=style)
    return table


def report_parts(report: Report) -> Iterator[RenderableType]:
    """Yield the lines and tables of a report; only the HTML page has charts and texts."""
    yield from (*report.setup, report.command)
    for section in report.sections:
        if tables := [figures_table(figure) for figure in section.figures if isinstance(figure, Figures)]:
            yield ""
            yield f"{section.heading}: {section.about}"
            yield from tables
    yield ""
    yield from (*report.notes, *(report.details or filter(None, [report.headline])))


def facts_table(facts: Mapping[str, str]) -> Table:
    """Return a table with one row per fact and without headings."""
    table = Table(show_header=False, box=None)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(name, Text(printable(value)))
    return table


# ---------------------------------------------------------------------- bars


def run_counted(names: Iterable[str], total: int, label: str) -> Outcome:
    """Run pieces of work under a progress bar, which shows `label` and then the names that finished pieces yield.

    An interruption ends the work and keeps its results so far. The bar is drawn only between pieces, because a thread
    that draws would disturb the timing.
    """
    with capture_outcome() as outcome, _bar(MofNCompleteColumn(), TimeRemainingColumn()) as bar:
        task = bar.add_task(label, total=total)
        bar.start()
        for name in names:
            bar.update(task, advance=1, description=printable(name))
            bar.refresh()
    return outcome


def run_timed(names: Iterable[str], seconds: float) -> Outcome:
    """Run pieces of work, which yield their names before they start, under a progress bar that fills with the time."""
    with capture_outcome() as outcome, _bar() as bar:
        task = bar.add_task("", total=seconds)
        bar.start()
        start = time.monotonic()
        for name in names:
            bar.update(task, completed=min(seconds, time.monotonic() - start), description=name)
            bar.refresh()
    return outcome


def _bar(*more: ProgressColumn) -> AbstractContextManager[Progress]:
    return progress_bar(TextColumn("{task.description}", markup=False), BarColumn(), *more, auto_refresh=False)


# ---------------------------------------------------------------------- lines


def slow_core() -> str | None:
    """Return a warning if drafts come from uncompiled Python code, which slows down all measurements, or `None`."""
    return (
        "warning: drafting is slow because its core is not compiled (see ngramspec info)"
        if find_uncompiled_modules()
        else None
    )


def tuning_line(tuning: Tuned | None, *, left_out: bool) -> str:
    """Return the result of tuning and its use in one line."""
    if tuning is None:
        return "no; ngramspec tune finds the fastest settings"
    what = f"{flags(tuning.changes)}, {1 / tuning.ratio:.2f} times as fast where it matters ({tuning.date})"
    return f"{what}; {'ignored here' if left_out else 'ngramspec tune --reset deletes it'}"
