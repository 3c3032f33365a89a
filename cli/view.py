"""How reports look: what goes to stdout and how wide, tables, bars of work in progress, lines said in several places.

Knows nothing of llama.cpp: a trace is shown without loading it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from ngramspec.drafting import uncompiled
from ngramspec.instruments.prompts import Skipped
from ngramspec.instruments.reports import report
from ngramspec.machine import Tuned, flags

from .console import Outcome, outcome, printable, progress_bar, write_stdout

LISTED = 10
"""Differences, skipped prompts and broken lines shown; the rest are counted, and --json has all."""

ACCEPTED, REFUSED, CORRECTION = "green", "strike red", "bright_blue"
"""Styles of drafted tokens, and of the target's own token in place of a refused one."""


def report_console() -> Console:
    """A console on stdout. One that is no terminal is 200 wide: a table in a file or a pipe must not be cut at 80."""
    return Console(highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else 200)


def print_report(parts: Sequence[RenderableType]) -> None:
    """Print lines and tables to stdout."""
    console = report_console()
    with console.capture() as capture:
        for part in parts:
            if isinstance(part, str):
                console.print(printable(part), soft_wrap=True)
            else:
                console.print(part)
    write_stdout(capture.get())


# ---------------------------------------------------------------------- tables


def figures_table(data: report.Table) -> Table:
    """A table of figures in columns so narrow that most fit into 80; totals stand out."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for column, heading in enumerate(data.headings):
        table.add_column(heading, justify="left" if column < data.text else "right", no_wrap=column < data.text)
    for number, row in enumerate(data.rows):
        cells = [*map(printable, row[: data.text]), *row[data.text :]]
        table.add_row(*cells, style="bold" if number >= len(data.rows) - data.totals else None)
    return table


def section_parts(sections: Iterable[report.Section]) -> Iterator[RenderableType]:
    """The tables of a report, each with what it shows; charts and texts are for its page."""
    for section in sections:
        if tables := [figures_table(one) for one in section.figures if isinstance(one, report.Table)]:
            yield ""
            yield f"{section.heading}: {section.about}"
            yield from tables


def facts_table(facts: Mapping[str, str]) -> Table:
    """A row per fact, without headings."""
    table = Table(show_header=False, box=None)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(name, Text(printable(value)))
    return table


# ---------------------------------------------------------------------- bars


def run_counted(done: Iterable[str], total: int, doing: str) -> Outcome:
    """Do pieces of work, each named when it is done, under a bar that says `doing` at first.

    An interruption ends them, and what they did stays. The bar is drawn only between them, as a drawing thread would
    disturb what is timed.
    """
    with outcome() as ended, _bar(MofNCompleteColumn(), TimeRemainingColumn()) as bar:
        task = bar.add_task(doing, total=total)
        bar.start()
        for name in done:
            bar.update(task, advance=1, description=printable(name))
            bar.refresh()
    return ended


def run_timed(begun: Iterable[str], seconds: float) -> Outcome:
    """The same for work that names what it begins, under a bar that fills with the time."""
    with outcome() as ended, _bar() as bar:
        task = bar.add_task("", total=seconds)
        bar.start()
        start = time.monotonic()
        for name in begun:
            bar.update(task, completed=min(seconds, time.monotonic() - start), description=name)
            bar.refresh()
    return ended


def _bar(*more: ProgressColumn) -> AbstractContextManager[Progress]:
    return progress_bar(TextColumn("{task.description}", markup=False), BarColumn(), *more, auto_refresh=False)


# ---------------------------------------------------------------------- lines


def slow_core() -> str | None:
    """A note that drafts come from plain Python, which slows down all that is measured; None if they do not."""
    return "warning: drafting is slow because its core is not compiled (see ngramspec info)" if uncompiled() else None


def tuned_line(kept: Tuned | None, *, left_out: bool) -> str:
    """What tuning found and whether it is used."""
    if kept is None:
        return "no; ngramspec tune finds the fastest settings"
    if not kept.changes or kept.ratio is None:
        return f"no faster settings found ({kept.date})"
    what = f"{flags(kept.changes)}, {1 / kept.ratio:.2f} times as fast where it matters ({kept.date})"
    if not kept.applied:
        return f"{what}; not used (ngramspec tune --apply saves it)"
    return f"{what}{'; ignored here' if left_out else ''}"


def listed(lines: Sequence[str], rest: str) -> list[str]:
    """The first of many lines, and how many they are, which `rest` says in words."""
    return [*lines[:LISTED], f"{len(lines)} {rest}"] if len(lines) > LISTED else list(lines)


def skipped_lines(skipped: Sequence[Skipped]) -> list[str]:
    """The prompts that were not run, with the reasons."""
    return listed([f"skipped {s['category']}/{s['id']}: {s['reason']}" for s in skipped], "prompts skipped in total")
