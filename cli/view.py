"""How reports look: what goes to stdout and how wide, tables, bars of work in progress, lines said in several places.

Knows nothing of llama.cpp: a trace is shown without loading it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from ngramspec.decoding.step import Stats
from ngramspec.drafting.core import uncompiled
from ngramspec.prompts import Skipped

from .console import printable, progress_bar, write_stdout

LISTED = 10
"""Differences and skipped prompts shown; --json has all."""

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


def figures_table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, totals: int = 0) -> Table:
    """A row per category or the like, named in its first cell, narrow enough for 80 columns.

    The last `totals` rows are set apart.
    """
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(headings[0], no_wrap=True)
    for heading in headings[1:]:
        table.add_column(heading, justify="right")
    for number, row in enumerate(rows):
        table.add_row(printable(row[0]), *row[1:], style="bold" if number >= len(rows) - totals else None)
    return table


def facts_table(facts: Mapping[str, str]) -> Table:
    """A row per fact, without headings."""
    table = Table(show_header=False, box=None)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(name, Text(printable(value)))
    return table


# ---------------------------------------------------------------------- bars


@contextmanager
def counting_bar(total: int, doing: str, *, still: bool) -> Iterator[Callable[[str], None]]:
    """A bar on stderr; the function it yields counts one piece of work and names it.

    Args:
        total: pieces of work to come.
        doing: what is said before the first is done.
        still: draw only between pieces of work; a drawing thread would disturb what is timed.
    """
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with progress_bar(*columns, auto_refresh=not still) as bar:
        task = bar.add_task(doing, total=total)
        bar.start()

        def done(name: str) -> None:
            bar.update(task, advance=1, description=printable(name))
            if still:
                bar.refresh()

        yield done


@contextmanager
def timed_bar(seconds: float) -> Iterator[Callable[[str], None]]:
    """A bar on stderr that fills with the time; the function it yields names what is being done."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn())
    with progress_bar(*columns, auto_refresh=False) as bar:
        task = bar.add_task("", total=seconds)
        bar.start()
        began = time.monotonic()

        def doing(name: str) -> None:
            bar.update(task, completed=min(seconds, time.monotonic() - began), description=name)
            bar.refresh()

        yield doing


# ---------------------------------------------------------------------- lines


def summary(stats: Stats) -> str:
    """How fast it was, and by how much drafts sped it up by this machine's measured costs, where they did."""
    told = f"{stats.generated} token{'' if stats.generated == 1 else 's'}"
    if stats.tokens_per_second is not None:
        told += f" at {stats.tokens_per_second:.1f} tokens/s"
    # What does not show in the figure is not told as a gain.
    if stats.estimated_gain is not None and round(stats.estimated_gain, 2) > 1:
        told += f", about {stats.estimated_gain:.2f} times as fast as without drafts"
    return told


def rounding(stats: Stats) -> str | None:
    """A note on tokens decided by less than batch sizes move logits; None if there were none."""
    if not stats.close_calls:
        return None
    times = "once" if stats.close_calls == 1 else f"{stats.close_calls} times"
    return f"text may differ in rounding from undrafted decoding: {times} two tokens were that close (see --exact)"


def slow_core() -> str | None:
    """A note that drafts come from plain Python, which slows down all that is measured; None if they do not."""
    return "drafts are slow: their core was not compiled (see ngramspec info)" if uncompiled() else None


def skipped_lines(skipped: Sequence[Skipped]) -> list[str]:
    """The prompts that were not run, with the reasons."""
    lines = [f"skipped {s.category}/{s.id}: {s.reason}" for s in skipped[:LISTED]]
    return [*lines, f"{len(skipped)} prompts skipped in all"] if len(skipped) > LISTED else lines
