"""How a benchmark looks: a bar while it runs, tables and a verdict when it is done."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ngramspec.benchmark.report import Spread, Summary, verdicts
from ngramspec.benchmark.runs import Benchmark, Difference
from ngramspec.prompts import Skipped

from .console import stderr, write_stdout

WIDTH = 200
"""Columns for a reader that is no terminal: a table in a file or a pipe must not be cut at 80."""

POSITIONS = 6
"""Draft positions shown; --json has all."""

LISTED = 10
"""Differences and skipped prompts shown; --json has all."""


@contextmanager
def bench_bar(total: int) -> Iterator[Callable[[str], None]]:
    """A bar on stderr; the function it yields counts one run and names it.

    It is drawn between runs only: a thread that redraws it would take its time out of the runs.
    """
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=stderr, transient=True, auto_refresh=False, disable=not stderr.is_terminal) as bar:
        task = bar.add_task("warming up", total=total)
        bar.refresh()

        def done(name: str) -> None:
            bar.update(task, advance=1, description=name)
            bar.refresh()

        yield done


def show(
    benchmark: Benchmark,
    summaries: Mapping[str, Sequence[Summary]],
    heading: Sequence[str],
    skipped: Sequence[Skipped],
    *,
    largest_difference: float | None,
    more: Sequence[RenderableType] = (),
) -> None:
    """Print the report to stdout.

    Args:
        benchmark: what was run.
        summaries: its figures by policy, of each the overall ones last; may be empty.
        heading: lines above the tables.
        skipped: prompts that were not run.
        largest_difference: of a logit between batch sizes, by the probe; None if not probed.
        more: goes before the verdict.
    """
    comparable = benchmark.caveat is None
    drafting = benchmark.drafted.drafter is not None
    parts: list[RenderableType] = [*heading]
    if not benchmark.complete:
        parts.append(f"INCOMPLETE: stopped after {len(benchmark.runs)} of {benchmark.total} runs")
    measured = {policy: rows for policy, rows in summaries.items() if rows}
    if measured:
        first = next(iter(measured.values()))
        parts += _several(measured) if len(summaries) > 1 else _one(first, comparable, drafting)
        if any(s.exact_price for s in first):
            parts += ["", "The price of exact mode, plain tokens per second:", _prices(first)]
        parts.append("")
    parts += _prefill(benchmark)
    parts += _skipped(skipped)
    if comparable:
        several = len(summaries) > 1
        parts += _differences(benchmark.differences, largest_difference, benchmark.drafted.exact == "on", several)
        parts += _close_calls(benchmark)
    if not drafting:
        parts.append("drafting is off: plain decoding was compared with itself, a ratio shows how far runs scatter")
    parts += more
    parts += verdicts(summaries, benchmark.caveat)
    console = Console(highlight=False, emoji=False, width=None if sys.stdout.isatty() else WIDTH)
    with console.capture() as capture:
        for part in parts:
            console.print(part, markup=False, soft_wrap=isinstance(part, str))
    write_stdout(capture.get())


def _one(summaries: Sequence[Summary], comparable: bool, drafting: bool) -> list[RenderableType]:
    """The tables of one policy."""
    parts: list[RenderableType] = ["", "Tokens per second of decoding, medians over prompts and repeats:"]
    parts.append(_speeds(summaries, comparable))
    if drafting:
        parts += ["", "Passes and drafts, and acceptance by position in the draft, of those tested:"]
        parts.append(_drafts(summaries))
    return parts


def _several(summaries: Mapping[str, Sequence[Summary]]) -> list[RenderableType]:
    """A table per figure, with a column per policy."""
    # An interrupted benchmark may know more categories of some policies than of others.
    furthest = max(summaries.values(), key=len)
    known = [{s.category: s for s in rows} for rows in summaries.values()]

    def column_per_policy(figure: Callable[[Summary], str], speed: bool = False) -> Table:
        rows = []
        for s in furthest:
            cells = [figure(k[s.category]) if s.category in k else "-" for k in known]
            rows.append([s.category, *([_speed(s.plain)] if speed else []), *cells])
        return table([*(["plain"] if speed else []), *summaries], rows)

    return [
        "",
        "Tokens per second: plain, and drafted / plain, medians over prompts and repeats:",
        column_per_policy(lambda s: _spread(s.ratio)[0], speed=True),
        "",
        "Tokens per pass:",
        column_per_policy(lambda s: f"{s.stats.tokens_per_pass:.2f}"),
        "",
        "Accepted of the drafted tokens:",
        column_per_policy(lambda s: _number(s.stats.acceptance_rate, ".0%")),
    ]


def _speeds(summaries: Sequence[Summary], comparable: bool) -> Table:
    headings = ["prompts", "plain", "drafted", "ratio", "from-to", "theory", *(["identical"] if comparable else [])]
    rows = []
    for s in summaries:
        cells = [str(s.prompts), _speed(s.plain), _speed(s.drafted), *_spread(s.ratio)]
        cells.append(_number(s.predicted, ".2f", "x"))
        if comparable:
            cells.append(f"{s.identical} of {s.prompts}")
        rows.append([s.category, *cells])
    return table(headings, rows)


def _drafts(summaries: Sequence[Summary]) -> Table:
    shown = min(POSITIONS, len(summaries[-1].acceptance_by_position))
    headings = ["tokens per pass", "accepted", "no draft", *(str(i) for i in range(1, shown + 1))]
    rows = []
    for s in summaries:
        rates = [*s.acceptance_by_position, *[None] * shown][:shown]
        cells = [f"{s.stats.tokens_per_pass:.2f}", _number(s.stats.acceptance_rate, ".0%")]
        cells += [_number(s.without_draft, ".0%"), *(_number(rate, ".2f") for rate in rates)]
        rows.append([s.category, *cells])
    return table(headings, rows)


def _prices(summaries: Sequence[Summary]) -> Table:
    rows = [[s.category, _speed(s.default), _speed(s.plain), *_spread(s.exact_price)] for s in summaries]
    return table(["without", "exact", "ratio", "from-to"], rows)


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], first: str = "category") -> Table:
    """A row per category, narrow enough for 80 columns; the last row, that of all, is set apart."""
    made = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    made.add_column(first, no_wrap=True)
    for heading in headings:
        made.add_column(heading, justify="right")
    for row in rows:
        made.add_row(*row, style="bold" if row is rows[-1] and first == "category" else None)
    return made


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


def _differences(differences: Sequence[Difference], largest: float | None, exact: bool, several: bool) -> list[str]:
    lines = []
    for d in differences[:LISTED]:
        line = f"{d.policy}: " if several else ""
        line += f"{d.category}/{d.prompt} differs after {d.position} equal tokens"
        if d.margin is not None:
            line += f", where the logits of both tokens are {d.margin:.3g} apart"
        lines.append(line)
    if len(differences) > LISTED:
        lines.append(f"{len(differences)} {'outputs' if several else 'prompts'} differ in all")
    if differences and exact:
        lines.append("exact mode was to rule this out: please report it as a defect")
    elif differences and largest is not None:
        doubled = 2 * largest
        lines.append(
            f"(batch sizes alone change a logit by up to {largest:.3g} here, so two by up to {doubled:.3g};"
            " --exact on rules that out)"
        )
    return lines


def _close_calls(benchmark: Benchmark) -> list[str]:
    """How many drafted tokens rounding could have decided, where any could."""
    drafted = [run.stats for run in benchmark.runs if run.kind == "drafted"]
    calls = sum(stats.close_calls for stats in drafted)
    if not calls:
        return []
    tokens = sum(stats.generated for stats in drafted)
    return [f"{calls} of {tokens} tokens with drafts were so close that rounding could have decided otherwise"]


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"


def _speed(value: float | None) -> str:
    return _number(value, ".1f" if value is not None and value < 100 else ".0f")


def _spread(spread: Spread | None) -> tuple[str, str]:
    if spread is None:
        return "-", "-"
    return f"{spread.median:.2f}x", f"{spread.low:.2f}-{spread.high:.2f}"
