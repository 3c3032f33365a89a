"""Output of commands: reports on stdout, files for sharing, progress bars, and the line after an answer.

The module does not import llama.cpp, so that a trace can be shown without loading it.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from errno import EACCES, EISDIR
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, JustifyMethod, RenderableType
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column, Table
from rich.text import Text

from ngramspec.cost.times import STEEP, PassTimes
from ngramspec.cpu.cores import CpuLoad
from ngramspec.drafting import find_uncompiled_modules
from ngramspec.instruments.reports.render import html, markdown, svg
from ngramspec.instruments.reports.report import Report
from ngramspec.instruments.reports.report import Table as Figures
from ngramspec.sampling.settings import option, options
from ngramspec.steps import SHORT, Stats
from ngramspec.storage import atomic_path

from .console import (
    MAX_COLUMNS,
    Outcome,
    fail,
    is_mid_line,
    note,
    pluralize,
    print_stdout,
    printable,
    stderr,
    usage_error,
    write_stdout,
)

if TYPE_CHECKING:
    from ngramspec.cpu.thread_governor import ThreadGovernor
    from ngramspec.decoding.decoder import SpeculativeDecoder

ACCEPTED, REFUSED, CORRECTION = "green", "strike red", "bright_blue"
"""Styles of accepted and rejected draft tokens, and of the target's own token in place of a rejected one."""


def print_report(parts: Sequence[RenderableType]) -> None:
    """Print lines and tables to stdout; a terminal gets no broken words, and a pipe tables of at most 100 columns."""
    width = None if sys.stdout.isatty() else MAX_COLUMNS
    console = Console(highlight=False, markup=False, emoji=False, width=width)
    for part in parts:
        if isinstance(part, str):
            print_stdout(console, printable(part), soft_wrap=not console.is_terminal)
        else:
            print_stdout(console, part)


def _figures_table(data: Figures) -> Table:
    """Return a table of figures with narrow columns, so that most tables fit in 80 columns; totals are bold."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for column, heading in enumerate(data.headings):
        justify: JustifyMethod = "left" if column < data.text else "right"
        table.add_column(heading, justify=justify, no_wrap=column == 0, overflow="fold")
    for number, row in enumerate(data.rows):
        table.add_row(*map(printable, row), style="bold" if number >= len(data.rows) - data.totals else None)
    return table


def report_parts(report: Report) -> Iterator[RenderableType]:
    """Yield the lines and tables of a report; only the HTML page has charts and texts."""
    yield from (*report.setup, report.command)
    for section in report.sections:
        if tables := [_figures_table(figure) for figure in section.figures if isinstance(figure, Figures)]:
            yield ""
            yield f"{section.heading}: {section.about}"
            yield from tables
    yield ""
    yield from (*report.notes, *(report.details or filter(None, [report.headline])))


def names_table(rows: Iterable[Sequence[str]], *middle: Column) -> Table:
    """Return a table of names and their values; the last column uses the remaining width of the terminal."""
    table = Table(Column(no_wrap=True, style="bold"), *middle, Column(overflow="fold"), box=None, show_header=False)
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    return table


@contextmanager
def _progress_bar(*columns: str | ProgressColumn, auto_refresh: bool = True) -> Iterator[Progress]:
    """Yield a progress bar on stderr that is removed at the end; it is drawn after its start and only in a terminal."""
    off = not stderr.is_terminal or is_mid_line()
    bar = Progress(*columns, console=stderr, transient=True, auto_refresh=auto_refresh, disable=off)
    try:
        yield bar
    finally:
        bar.stop()


@contextmanager
def progress_bars(*columns: ProgressColumn) -> Iterator[Callable[[str, int, int | None], None]]:
    """Yield a callback for the progress of named work; no bar is shown when the last one is done."""
    with _progress_bar("{task.description}", BarColumn(), *(columns or [DownloadColumn()])) as bar:
        tasks: dict[str, TaskID] = {}

        def show(name: str, done: int, total: int | None) -> None:
            if name not in tasks:
                tasks[name] = bar.add_task(name)
            bar.update(tasks[name], completed=done, total=total)
            if done == total:
                bar.stop()
            else:
                bar.start()

        yield show


@contextmanager
def counting_bar(doing: str, *columns: ProgressColumn) -> Iterator[Callable[[int, int], None]]:
    with progress_bars(*(columns or [MofNCompleteColumn()])) as show:
        yield partial(show, doing)


def run_pieces(names: Iterable[str], total: int = 0, label: str = "", *, seconds: float = 0.0) -> Outcome:
    """Run pieces of work, which yield their names, under a progress bar; an interruption keeps the results so far.

    The bar shows `label` and counts the finished pieces, or fills with the time if `seconds` limits it.
    """
    start, columns = time.monotonic(), () if seconds else (MofNCompleteColumn(), TimeRemainingColumn())
    # The bar is drawn only between pieces, because a thread that draws would disturb the timing.
    text = TextColumn("{task.description}", markup=False)
    with Outcome() as outcome, _progress_bar(text, BarColumn(), *columns, auto_refresh=False) as bar:
        task = bar.add_task(label, total=seconds or total)
        bar.start()
        for number, name in enumerate(names, 1):
            done = min(seconds, time.monotonic() - start) if seconds else number
            bar.update(task, completed=done, description=printable(name))
            bar.refresh()
    return outcome


def slow_core() -> str | None:
    """Return a warning if drafts come from uncompiled Python code, which slows down all measurements, or `None`."""
    if not find_uncompiled_modules():
        return None
    return "warning: drafting is slow because its core is not compiled (see ngramspec info)"


LIMITS = {"length": "stopped at the token limit (-n/--predict)", "context": "stopped because the context is full"}
"""Notes for answers that a limit ended, by the stop reason."""

_RARE = 0.1  # share of passes up to which drafts are too rare for a gain


class AnswerReport:
    """Report after each answer: a line with its speed, and notes for the user that are each shown once."""

    def __init__(self) -> None:
        self._shown: set[str] = set()

    def show(
        self,
        stats: Stats,
        decoder: SpeculativeDecoder,
        governor: ThreadGovernor,
        ending: str,
        *,
        seed: int | None = None,
        intro: str = "",
    ) -> None:
        """Report on an answer that ended for a stop reason or was "stopped", "interrupted" or "failed"."""
        is_busy = (governor.state.other_cores or 0) > CpuLoad.QUIET
        gain = None if decoder.drafter is None else format_gain(stats, decoder.times, is_busy=is_busy)
        figures = ", ".join(filter(None, (format_speed(stats), gain)))
        parts = [intro, ending if ending in ("stopped", "interrupted", "failed") else "", figures]
        if seed is not None and self._is_new(f"seed {seed}"):
            parts.append(f"seed {seed}")
        note("; ".join(filter(None, parts)))
        if ending in LIMITS:
            note(LIMITS[ending])
        if decoder.drafter is not None and (slow := slow_core()) is not None and self._is_new("core"):
            note(slow)
        if stats.close_calls and self._is_new("rounding"):
            calls = pluralize(stats.close_calls, "token")
            note(f"note: rounding could have changed {calls}; --exact on prevents this")
        # Without -t, decoding leaves busy cores to other programs, with --exact off even if that changes bits.
        is_fixed = not governor.adapts and governor.threads > 1
        if is_fixed and is_busy and self._is_new("threads"):
            note("note: decoding would be faster without -t or with --exact off: other programs use the same cores")

    def _is_new(self, name: str) -> bool:
        is_new = name not in self._shown
        self._shown.add(name)
        return is_new


def format_speed(stats: Stats) -> str:
    text, speed = pluralize(stats.generated, "token"), stats.tokens_per_second
    return text if speed is None else f"{text} at {speed:,.{1 if speed < 1000 else 0}f} tokens/s"


def format_gain(stats: Stats, times: PassTimes | None = None, *, is_busy: bool = False) -> str | None:
    """Return the gain from drafts, or the one reason for its absence; `None` if the answer is too short.

    Without `times`, as in a trace, the cost of batches is unknown.
    """
    if stats.passes < SHORT:
        return None
    gain = stats.estimated_gain
    if gain is not None and round(gain, 2) > 1:
        return f"{gain:.2f} times as fast with drafts"
    if reason := _explain_drafts(stats):
        return reason
    if stats.is_disturbed:
        return "gain unknown: other programs ran" if is_busy else "gain unknown: times varied"
    if times is None:
        return "no gain"
    # With the fewer threads that other programs leave, a batch costs more in plain passes.
    reason = "no gain: other programs ran" if is_busy else "no gain: batches are expensive here"
    return reason if times.pairs and times.ratio(4) >= STEEP else "no gain: little repeated"


def _explain_drafts(stats: Stats) -> str:
    """Return the reason for no gain that the drafts show whatever passes cost, or ""."""
    # The policy stops calling a drafter that saves nothing, which shows what repeats only after enough calls.
    if stats.asked < min(SHORT, stats.passes / 2):
        return "no gain: drafting took too long" if stats.asked else "no gain: nothing was drafted"
    drafts = stats.passes - stats.passes_without_draft
    if drafts + stats.missed <= _RARE * stats.asked:
        return "no gain: nothing repeated"
    # Even of disturbed passes it is known that so few tokens saved nothing. Wrong drafts are not the reason if they
    # were fewer than the correct guesses that were not sent.
    if drafts > stats.missed and 2 * stats.accepted <= (_RARE * stats.passes if stats.is_disturbed else stats.drafted):
        return "no gain: drafts were wrong"
    return ""


@dataclass(frozen=True, slots=True)
class Output:
    """Options for the results of a command, which are shown on stdout and written to the requested files.

    Each file is written completely or not at all. If one of them is written to stdout, nothing else may be written
    there.
    """

    markdown: bool = option(False, help="Print only a Markdown table and the command that reproduces it.")
    svg: str | None = option(None, metavar="FILE|-", help="Write a chart as SVG; -: to stdout.")
    html: str | None = option(None, metavar="FILE|-", help="Write an HTML page with tables and charts; -: to stdout.")
    as_json: str | None = option(
        None, "--json", metavar="FILE|-", help="Write all results as JSON; -: to stdout instead of the table."
    )

    @property
    def _names(self) -> dict[str, str]:
        """Name of each requested file, or "-" for stdout, by its option."""
        table = "-" if self.markdown else None
        names = {"--markdown": table, "--svg": self.svg, "--html": self.html, "--json": self.as_json}
        return {flag: name for flag, name in names.items() if name is not None}

    def check(self) -> None:
        """End the program if files are the same or not writable; commands call it before anything that takes time."""
        flags_by_file: dict[str, str] = {}
        for flag, name in self._names.items():
            check_writable(name)
            other_flag = flags_by_file.setdefault("-" if name == "-" else os.path.realpath(name), flag)
            if other_flag != flag and (name == "-" or not _in_place(Path(name))):
                where, other = ("stdout", "a file") if name == "-" else (name, "another file")
                usage_error(f"{other_flag} and {flag} cannot both be written to {where}; name {other}")

    def write(self, report: Report, document: dict[str, Any], outcome: Outcome) -> None:
        """Show a report unless a file is written to stdout, write the requested files, and raise what ended the run."""
        try:
            if "-" not in self._names.values():
                print_report([*report_parts(report)])
        finally:
            # The files are written even if the reader of stdout, such as head, has ended.
            writers = {"--markdown": markdown, "--svg": svg, "--html": html}
            for flag, name in self._names.items():
                _write(name, writers[flag](report) if flag in writers else json.dumps(document, indent=2) + "\n")
        outcome.reraise()


def check_writable(name: str) -> None:
    """End the program if a file is known not to be writable."""
    if name == "-":
        return
    path = Path(name)
    try:
        if path.is_dir():
            raise IsADirectoryError(EISDIR, os.strerror(EISDIR))
        if path.exists() and not os.access(path, os.W_OK):
            raise PermissionError(EACCES, os.strerror(EACCES))
        if not _in_place(path):
            TemporaryFile(dir=path.resolve().parent).close()
    except OSError as error:
        fail(f"cannot write {name}: {error.strerror or error}")


def _in_place(path: Path) -> bool:
    """Return True for devices and pipes, which must be written in place and not replaced by a file."""
    return path.exists() and not path.is_file()


def _write(name: str, text: str) -> None:
    """Write a file completely or not at all; "-" means stdout."""
    if name == "-":
        write_stdout(text)
        return
    try:
        if _in_place(Path(name)):
            Path(name).write_text(text, "utf-8")
            return
        with atomic_path(Path(name).resolve(), mode=0o666) as temporary:
            temporary.write_text(text, "utf-8")
    except OSError as error:
        fail(f"cannot write {name}: {error.strerror or error}")


def command_line(command: str, arguments: Sequence[str | None], option_values: Mapping[str, Any], *groups: Any) -> str:
    """Return the command line that repeats this run, with base names of files and the changed options of `groups`."""
    words = ["ngramspec", *command.split(), *(_file_name(name) for name in arguments if name is not None)]
    values = dict(option_values)
    for group in groups:
        specs = options(group.__class__)
        for field in fields(group):
            if (value := getattr(group, field.name)) != field.default:
                values.setdefault(specs[field.name].flags[0], value)
    for flag, value in values.items():
        for item in value if isinstance(value, list | tuple) else [value]:
            if item is not None and item is not False:
                words += [flag] if item is True else [flag, _format_value(flag, item)]
    return shlex.join(words)


def _format_value(flag: str, value: Any) -> str:
    """Return a value as the user types it; an adapter's name that contains a comma is quoted."""
    if not isinstance(value, tuple):
        return _file_name(str(value))
    name, scale = value
    text = _file_name(name) if flag == "--lora" else f"{_file_name(name)}:{scale:.9g}"
    return '"{}"'.format(text.replace('"', '""')) if {",", '"'} & set(text) else text


def _file_name(text: str) -> str:
    return Path(text).name or text if {"/", os.sep} & set(text) and Path(text).exists() else text
