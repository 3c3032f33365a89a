"""Report on a benchmark, and parts of it that the terminal shows too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ngramspec.cost.paired import CHANCE
from ngramspec.instruments.benchmark.figures import Summary, describe_gain
from ngramspec.instruments.benchmark.runs import Benchmark
from ngramspec.instruments.reports import report as reports
from ngramspec.instruments.reports.report import OVERALL, Bar, Bars, Report, Section, Table, figure

UNCLEAR = "not clear"
"""Text in place of a gain that noise may explain."""

ABOUT = (
    "Medians over prompts and repeats. ratio: drafted / plain speed of two consecutive runs, if anything was drafted."
    f" gain: interval for the ratio from a sign test over these pairs; {UNCLEAR!r} if it may be noise."
)
"""Explanation of the columns."""


def benchmark_report(
    model: str,
    origin: str,
    command: str,
    benchmark: Benchmark,
    summaries: Mapping[str, Sequence[Summary]],
    more: Sequence[Section] = (),
) -> Report:
    """Return the report on a benchmark, with the same figures that `--json` writes.

    Args:
        model: Name of the model.
        origin: Description of the model, the machine and the conditions on one line.
        command: Command that the user typed.
        benchmark: Benchmark to report.
        summaries: Summaries by policy, the overall one last; may be empty.
        more: Sections to append.
    """
    several = len(summaries) > 1
    # The overall rows come last.
    rows = [(f"{s.category}, {policy}" if several else s.category, s) for policy, all in summaries.items() for s in all]
    rows.sort(key=lambda row: row[1].category == OVERALL)
    table = _speeds(rows, benchmark)
    bars = reports.gains("Tokens per second, drafted / plain: median of pairs", [*_bars(rows)])
    return Report(
        title=f"{model}: decoding with and without drafts",
        table=table,
        bars=bars,
        origin=origin,
        command=command,
        sections=[*_sections(rows, benchmark, table, bars), *more],
        notes=_notes(benchmark),
        headline="; ".join(
            f"{f'{policy}: ' if several else ''}{describe_gain(all, CHANCE / len(summaries))}"
            for policy, all in summaries.items()
        ),
    )


Rows = Sequence[tuple[str, Summary]]
"""Name and summary of each row, the overall ones last."""


def _speeds(rows: Rows, benchmark: Benchmark) -> Table:
    cells = [
        [
            name,
            str(s.prompts),
            speed(s.plain),
            speed(s.drafted),
            # If nothing was drafted, the ratio is noise, and is shown only to show how much there is.
            figure(s.ratio if s.gain or benchmark.drafted.drafter is None else None, ".2f", "x"),
            _gain(s),
            f"{s.identical} of {s.prompts}" if benchmark.caveat is None else "-",
        ]
        for name, s in rows
    ]
    headings = ["category", "prompts", "plain t/s", "drafted t/s", "ratio", "gain", "same text"]
    return Table(headings, cells, totals=sum(s.category == OVERALL for _, s in rows))


def _gain(summary: Summary) -> str:
    """Return what the pairs show about a gain in one cell."""
    if summary.gain is None:
        return "-"
    return "{:.2f}-{:.2f}x".format(*summary.gain.interval or ()) if summary.is_clear else UNCLEAR


def _bars(rows: Rows) -> Iterator[Bar]:
    for name, s in rows:
        if s.ratio is not None and s.gain is not None:
            low, high = s.gain.interval or (None, None)
            label = f"{s.ratio:.2f}x" + ("" if s.is_clear else f", {UNCLEAR}")
            yield Bar(name, s.ratio, low, high, label, other=not s.is_clear)


def _sections(rows: Rows, benchmark: Benchmark, table: Table, bars: Bars) -> Iterator[Section]:
    if not rows:
        return
    tables = [table]
    if benchmark.drafted.drafter is not None:
        passes = [
            [
                name,
                f"{s.stats.tokens_per_pass:.2f}",
                figure(s.stats.acceptance_rate, ".0%"),
                figure(s.share_without_draft, ".0%"),
            ]
            for name, s in rows
        ]
        tables.append(Table(["category", "tokens per pass", "accepted", "no draft"], passes, totals=table.totals))
    yield Section("Speed-up", ABOUT, [bars, *tables])
    if any(s.exact_price for _, s in rows):
        prices = [[name, speed(s.default), speed(s.plain), figure(s.exact_price, ".2f", "x")] for name, s in rows]
        price_table = Table(["category", "without", "exact", "ratio"], prices, totals=table.totals)
        yield Section("Cost of exact mode", "Plain tokens per second.", [price_table])
    if any(s.stats.drafted for _, s in rows):
        about = "Acceptance rate among the drafts whose earlier tokens were all accepted."
        yield reports.acceptance({name: s.acceptance_by_position for name, s in rows}, about, totals=table.totals)
    curves = {}
    for policy, decoder in benchmark.policies.items():
        ratios = decoder.times.to_json()["ratios"]
        curves[policy if len(benchmark.policies) > 1 else "measured"] = {int(n): x for n, x in ratios.items()}
    yield reports.costs(curves)


def text_sections(benchmark: Benchmark) -> Iterator[Section]:
    """Yield the section on the drafts in the first text of each category, if there are drafts."""
    if benchmark.drafted.drafter is not None and benchmark.texts:
        about = "The answer to the first prompt of each category."
        yield reports.draft_section(about, benchmark.texts, benchmark.drafted.vocabulary.piece)


def _notes(benchmark: Benchmark) -> list[str]:
    notes = []
    if not benchmark.complete:
        notes.append(f"INCOMPLETE: stopped after {len(benchmark.runs)} of {benchmark.total} runs")
    if benchmark.caveat is not None:
        notes.append(f"the texts are not expected to be the same: {benchmark.caveat}")
    if benchmark.drafted.drafter is None:
        notes.append("drafting is off: plain decoding was compared with itself, so the ratios show the noise")
    return notes


def speed(value: float | None) -> str:
    """Return a number of tokens per second as text."""
    return figure(value, ".1f" if value is not None and value < 100 else ".0f")
