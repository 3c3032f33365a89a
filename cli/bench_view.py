"""How a benchmark looks: tables and a verdict when it is done."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median

from rich.console import RenderableType
from rich.table import Table

from ngramspec.benchmark.report import Spread, Summary, verdicts
from ngramspec.benchmark.runs import Benchmark, Difference
from ngramspec.prompts import Skipped
from ngramspec.reports.shapes import figure

from .view import LISTED, figures_table, print_report, skipped_lines

POSITIONS = 6
"""Draft positions shown; --json has all."""


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
    parts += skipped_lines(skipped)
    if comparable:
        several = len(summaries) > 1
        parts += _differences(benchmark.differences, largest_difference, benchmark.drafted.footing.same, several)
        parts += _close_calls(benchmark)
    if not drafting:
        parts.append("drafting is off: plain decoding was compared with itself, a ratio shows how far runs scatter")
    parts += more
    parts += verdicts(summaries, benchmark.caveat)
    print_report(parts)


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

    def column_per_policy(cell: Callable[[Summary], str], speed: bool = False) -> Table:
        rows = []
        for s in furthest:
            cells = [cell(k[s.category]) if s.category in k else "-" for k in known]
            rows.append([s.category, *([_speed(s.plain)] if speed else []), *cells])
        headings = ["category", *(["plain"] if speed else []), *summaries]
        return figures_table(headings, rows, totals=1)

    return [
        "",
        "Tokens per second: plain, and drafted / plain, medians over prompts and repeats:",
        column_per_policy(lambda s: _spread(s.ratio)[0], speed=True),
        "",
        "Tokens per pass:",
        column_per_policy(lambda s: f"{s.stats.tokens_per_pass:.2f}"),
        "",
        "Accepted of the drafted tokens:",
        column_per_policy(lambda s: figure(s.stats.acceptance_rate, ".0%")),
    ]


def _speeds(summaries: Sequence[Summary], comparable: bool) -> Table:
    headings = [
        "category",
        "prompts",
        "plain",
        "drafted",
        "ratio",
        "from-to",
        "theory",
        *(["identical"] if comparable else []),
    ]
    rows = []
    for s in summaries:
        cells = [str(s.prompts), _speed(s.plain), _speed(s.drafted), *_spread(s.ratio)]
        cells.append(figure(s.predicted, ".2f", "x"))
        if comparable:
            cells.append(f"{s.identical} of {s.prompts}")
        rows.append([s.category, *cells])
    return figures_table(headings, rows, totals=1)


def _drafts(summaries: Sequence[Summary]) -> Table:
    shown = min(POSITIONS, len(summaries[-1].acceptance_by_position))
    headings = ["category", "tokens per pass", "accepted", "no draft", *(str(i) for i in range(1, shown + 1))]
    rows = []
    for s in summaries:
        rates = [*s.acceptance_by_position, *[None] * shown][:shown]
        cells = [f"{s.stats.tokens_per_pass:.2f}", figure(s.stats.acceptance_rate, ".0%")]
        cells += [figure(s.without_draft, ".0%"), *(figure(rate, ".2f") for rate in rates)]
        rows.append([s.category, *cells])
    return figures_table(headings, rows, totals=1)


def _prices(summaries: Sequence[Summary]) -> Table:
    rows = [[s.category, _speed(s.default), _speed(s.plain), *_spread(s.exact_price)] for s in summaries]
    return figures_table(["category", "without", "exact", "ratio", "from-to"], rows, totals=1)


def _prefill(benchmark: Benchmark) -> list[str]:
    if not benchmark.prefills:
        return []
    speed = median(p.tokens / p.seconds for p in benchmark.prefills)
    length = median(p.tokens for p in benchmark.prefills)
    return [f"prefill, not counted above: median {length:.0f} tokens at {speed:.0f} tokens/s"]


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


def _speed(speed: Spread | None) -> str:
    value = None if speed is None else speed.median
    return figure(value, ".1f" if value is not None and value < 100 else ".0f")


def _spread(spread: Spread | None) -> tuple[str, str]:
    if spread is None:
        return "-", "-"
    return f"{spread.median:.2f}x", f"{spread.low:.2f}-{spread.high:.2f}"
