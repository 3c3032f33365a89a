"""How a benchmark looks: a bar while it runs, tables and a verdict when it is done."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from rich.table import Table

from ngramspec.benchmark import Benchmark, Difference, Skipped
from ngramspec.benchmark_report import Spread, Summary, verdict

from .console import stderr, write_stdout

WIDTH = 200
"""Columns for a reader that is no terminal: a table in a file or a pipe must not be cut at 80."""

POSITIONS = 8
"""Draft positions shown; --json has all."""

LISTED = 10
"""Differences and skipped prompts shown; --json has all."""


@contextmanager
def bench_bar(total: int) -> Iterator[Callable[[str], None]]:
    """A bar on stderr; the function it yields counts one run and names it.

    It is drawn between runs only: a thread that redraws it would take its time out of the runs.
    """
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=stderr, transient=True, auto_refresh=False, disable=not stderr.is_terminal) as bar:
        task = bar.add_task("warming up", total=total)
        bar.refresh()

        def done(name: str) -> None:
            bar.update(task, advance=1, description=name)
            bar.refresh()

        yield done


def show(
    benchmark: Benchmark,
    summaries: Sequence[Summary],
    heading: Sequence[str],
    skipped: Sequence[Skipped],
    *,
    largest_difference: float | None,
    comparable: bool,
    complete: bool,
) -> None:
    """Print the report to stdout.

    Args:
        benchmark: what was run.
        summaries: its figures, the overall ones last; may be empty.
        heading: lines above the tables.
        skipped: prompts that were not run.
        largest_difference: of a logit between batch sizes, by the probe; None if not probed.
        comparable: whether plain and drafted outputs are meant to be equal.
        complete: whether all runs were made.
    """
    drafting = benchmark.drafted.drafter is not None
    parts: list[RenderableType] = [*heading]
    if not complete:
        parts.append(f"INCOMPLETE: stopped after {len(benchmark.runs)} of {benchmark.total} runs")
    if summaries:
        parts.append(_speeds(summaries, comparable))
        if drafting and any(s.stats.drafted for s in summaries):
            parts.append(_positions(summaries))
    parts += _prefill(benchmark)
    parts += _skipped(skipped)
    if comparable:
        parts += _differences(benchmark.differences, largest_difference)
    if not drafting:
        parts.append("drafting is off: plain decoding was compared with itself, a ratio shows how far runs scatter")
    parts.append(verdict(summaries, comparable=comparable) if summaries else "nothing measured")
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    with console.capture() as capture:
        for part in parts:
            console.print(part, markup=False, soft_wrap=isinstance(part, str))
    write_stdout(capture.get())


def _speeds(summaries: Sequence[Summary], comparable: bool) -> Table:
    table = Table(title="Tokens per second of decoding, medians over prompts and repeats", title_justify="left")
    table.add_column("category")
    headings = ["prompts", "plain", "drafted", "ratio", "least to most", "theory", "tokens per pass", "accepted"]
    headings += ["no draft"]
    if comparable:
        headings.append("identical")
    priced = any(s.exact_price for s in summaries)
    if priced:
        headings += ["exact price", "least to most"]
    for heading in headings:
        table.add_column(heading, justify="right")
    for s in summaries:
        if s is summaries[-1]:
            table.add_section()
        cells = [s.category, str(s.prompts), _number(s.plain, ".1f"), _number(s.drafted, ".1f"), *_spread(s.ratio)]
        cells += [_number(s.predicted, ".2f", "x"), f"{s.stats.tokens_per_pass:.2f}"]
        cells += [_number(s.stats.acceptance_rate, ".0%"), _number(s.without_draft, ".0%")]
        if comparable:
            cells.append(f"{s.identical} of {s.prompts}")
        if priced:
            cells += _spread(s.exact_price)
        table.add_row(*cells)
    return table


def _positions(summaries: Sequence[Summary]) -> Table:
    table = Table(title="Acceptance by draft position, of those tested", title_justify="left")
    table.add_column("category")
    table.add_column("alpha", justify="right")
    shown = min(POSITIONS, len(summaries[-1].acceptance_by_position))
    for position in range(1, shown + 1):
        table.add_column(str(position), justify="right")
    for s in summaries:
        if s is summaries[-1]:
            table.add_section()
        rates = s.acceptance_by_position[:shown]
        rates += [None] * (shown - len(rates))
        table.add_row(s.category, _number(s.alpha, ".2f"), *(_number(rate, ".2f") for rate in rates))
    return table


def _prefill(benchmark: Benchmark) -> list[str]:
    if not benchmark.prefills:
        return []
    speed = median(p.tokens / p.seconds for p in benchmark.prefills)
    length = median(p.tokens for p in benchmark.prefills)
    return [f"prefill, not counted above: median {length:.0f} tokens at {speed:.0f} tokens/s"]


def _skipped(skipped: Sequence[Skipped]) -> list[str]:
    lines = [f"skipped {s.category}/{s.id}: {s.reason}" for s in skipped[:LISTED]]
    if len(skipped) > LISTED:
        lines.append(f"{len(skipped)} prompts skipped in all")
    return lines


def _differences(differences: Sequence[Difference], largest: float | None) -> list[str]:
    lines = []
    for d in differences[:LISTED]:
        line = f"{d.category}/{d.prompt} differs after {d.position} equal tokens"
        if d.margin is not None:
            line += f", where the logits of both tokens are {d.margin:.3g} apart"
        lines.append(line)
    if len(differences) > LISTED:
        lines.append(f"{len(differences)} prompts differ in all")
    if differences and largest is not None:
        lines.append(f"(batch sizes alone change a logit by up to {largest:.3g} here; a larger gap would be a defect)")
    return lines


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"


def _spread(spread: Spread | None) -> tuple[str, str]:
    if spread is None:
        return "-", "-"
    return f"{spread.median:.2f}x", f"{spread.low:.2f} to {spread.high:.2f}"
