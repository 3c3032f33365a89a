"""Report on a benchmark, and parts of it that the terminal shows too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ngramspec.instruments.benchmark.figures import Spread, Summary, describe_gain
from ngramspec.instruments.benchmark.runs import Benchmark
from ngramspec.instruments.reports import report as reports
from ngramspec.instruments.reports.report import OVERALL, Bars, Report, Section, Table, figure

COLUMNS = "t/s and gain: median (minimum-maximum) over prompts and repeats; each gain compares two consecutive runs"
"""Note on the columns of the table, which is the last note of a report."""


def benchmark_report(
    model: str,
    columns: Mapping[str, str],
    origin: str,
    command: str,
    benchmark: Benchmark,
    summaries: Mapping[str, Sequence[Summary]],
    more: Sequence[Section] = (),
) -> Report:
    """Return the report on a benchmark, with the same figures that `--json` writes.

    Args:
        model: Name of the model.
        columns: Columns of llama-bench that describe the model and the machine, by their headings.
        origin: Longer description of them on one line.
        command: Command that the user typed.
        benchmark: Benchmark to report.
        summaries: Summaries by policy, the overall one last; may be empty.
        more: Sections to append.
    """
    several = len(summaries) > 1
    # The overall rows come last.
    rows = [(f"{s.category}, {policy}" if several else s.category, s) for policy, all in summaries.items() for s in all]
    rows.sort(key=lambda row: row[1].category == OVERALL)
    caveat = benchmark.caveat
    cells = [
        [*columns.values(), name, _range(s.plain), _range(s.drafted), _range(_ratio(s), "x"), _same(s, caveat)]
        for name, s in rows
    ]
    return Report(
        title=f"{model}: decoding with and without drafts",
        table=Table([*columns, "test", "plain t/s", "drafted t/s", "gain", "same text"], cells),
        bars=_gains(rows),
        origin=origin,
        command=command,
        sections=[*_sections(rows, benchmark), *more],
        notes=_notes(benchmark),
        headline="; ".join(
            f"{f'{policy}: ' if several else ''}{describe_gain(all)}" for policy, all in summaries.items()
        ),
    )


Rows = Sequence[tuple[str, Summary]]
"""Name and summary of each row, the overall ones last."""


def _ratio(summary: Summary) -> Spread | None:
    """Return the ratio; `None` if nothing was drafted, because then it is noise."""
    return summary.ratio if summary.gain else None


def _gains(rows: Rows) -> Bars:
    ratios = {name: (ratio.median, ratio.low, ratio.high) for name, s in rows if (ratio := _ratio(s)) is not None}
    return reports.gains("Tokens per second, drafted / plain: median, minimum and maximum", ratios, ".2f")


def _sections(rows: Rows, benchmark: Benchmark) -> Iterator[Section]:
    if not rows:
        return
    totals = sum(s.category == OVERALL for _, s in rows)
    speeds = [
        [
            name,
            str(s.prompts),
            speed(s.plain),
            speed(s.drafted),
            *ratio(s.ratio if benchmark.drafted.drafter is None else _ratio(s)),
            figure(s.predicted, ".2f", "x"),
            f"{s.identical} of {s.prompts}" if benchmark.caveat is None else "-",
        ]
        for name, s in rows
    ]
    about = (
        "Tokens per second of decoding, medians over prompts and repeats. ratio: drafted / plain for each run, if"
        " anything was drafted; its median can differ from the ratio of the two medians. theory: expected by the"
        " formula of Leviathan et al., if drafts take no time."
    )
    headings = ["", "prompts", "plain", "drafted", "ratio", "from-to", "theory", "identical"]
    tables = [Table(headings, speeds, totals=totals)]
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
        tables.append(Table(["", "tokens per pass", "accepted", "no draft"], passes, totals=totals))
    yield Section("Speed-up", about, [_gains(rows), *tables])
    if any(s.exact_price for _, s in rows):
        prices = [[name, speed(s.default), speed(s.plain), *ratio(s.exact_price)] for name, s in rows]
        table = Table(["", "without", "exact", "ratio", "from-to"], prices, totals=totals)
        yield Section("Cost of exact mode", "Plain tokens per second.", [table])
    if any(s.stats.drafted for _, s in rows):
        about = "Acceptance rate among the drafts whose earlier tokens were all accepted."
        yield reports.acceptance({name: s.acceptance_by_position for name, s in rows}, about, totals=totals)
    curves = {}
    for policy, decoder in benchmark.policies.items():
        ratios = decoder.times.to_json()["ratios"]
        curves[policy if len(benchmark.policies) > 1 else "measured"] = {int(n): x for n, x in ratios.items()}
    yield reports.costs(curves)


def text_sections(benchmark: Benchmark) -> Iterator[Section]:
    """Yield the sections on the calibration of all drafts and on the drafts in the first text of each category."""
    if benchmark.drafted.drafter is None or not benchmark.texts:
        return
    yield from reports.calibration(benchmark.reliability.to_json(), benchmark.reliability.calibration_error)
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
    return [*notes, COLUMNS]


def _range(spread: Spread | None, unit: str = "") -> str:
    return "-" if spread is None else f"{spread.median:.2f}{unit} ({spread.low:.2f}-{spread.high:.2f})"


def speed(spread: Spread | None) -> str:
    """Return the median of a spread as text, in tokens per second."""
    value = None if spread is None else spread.median
    return figure(value, ".1f" if value is not None and value < 100 else ".0f")


def ratio(spread: Spread | None) -> tuple[str, str]:
    """Return the median of a spread, and its range from minimum to maximum, as texts."""
    if spread is None:
        return "-", "-"
    return f"{spread.median:.2f}x", f"{spread.low:.2f}-{spread.high:.2f}"


def _same(summary: Summary, caveat: str | None) -> str:
    if caveat is not None:
        return "-"
    if summary.identical == summary.prompts:
        return "yes"
    return f"no ({summary.prompts - summary.identical} of {summary.prompts} differ)"
