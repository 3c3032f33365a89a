"""`posted`: a benchmark as a `Report`, out of the very figures that `--json` tells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ngramspec.benchmark.report import OVERALL, Spread, Summary
from ngramspec.benchmark.samples import Samples
from ngramspec.cost.curve import CostCurve
from ngramspec.reports.report import Bar, Bars, Passage, Report, Section, Table
from ngramspec.reports.setup import COLUMNS, Setup
from ngramspec.reports.shapes import acceptance, calibration, costs, figure


@dataclass(frozen=True, slots=True)
class Measured:
    """What a benchmark found.

    Attributes:
        summaries: by policy; of each the overall ones last. May be empty.
        curves: the measured cost of a pass, by policy; None where none was measured.
        caveat: see `Benchmark.caveat`.
        drafts: whether anything was drafted.
        unfinished: how much of it was run, in words, where it was interrupted; else None.
        samples: None where none were taken.
    """

    summaries: Mapping[str, Sequence[Summary]]
    curves: Mapping[str, CostCurve | None]
    caveat: str | None
    drafts: bool
    unfinished: str | None
    samples: Samples | None


def posted(setup: Setup, command: str, measured: Measured) -> Report:
    """The report on a benchmark."""
    rows = [(policy, s) for policy, summaries in measured.summaries.items() for s in summaries]
    return Report(
        title=f"{setup.name}: drafted against plain decoding",
        table=_table(setup, rows, several=len(measured.summaries) > 1, caveat=measured.caveat),
        bars=_bars(rows, several=len(measured.summaries) > 1),
        origin=setup.line(),
        command=command,
        sections=list(_sections(rows, measured)),
        notes=list(_notes(measured)),
    )


def _name(policy: str, summary: Summary, several: bool) -> str:
    return f"{summary.category}, {policy}" if several else summary.category


def _table(setup: Setup, rows: Sequence[tuple[str, Summary]], *, several: bool, caveat: str | None) -> Table:
    """llama-bench's columns, and ours."""
    headings = [*COLUMNS, "test", "plain t/s", "drafted t/s", "gain", "same text"]
    cells = [
        [
            *setup.cells(),
            _name(policy, s, several),
            _speed(s.plain),
            _speed(s.drafted),
            _gain(s.ratio),
            _same(s, caveat),
        ]
        for policy, s in rows
    ]
    return Table(headings, cells)


def _bars(rows: Sequence[tuple[str, Summary]], *, several: bool) -> Bars:
    bars = [
        Bar(_name(policy, s, several), s.ratio.median, s.ratio.low, s.ratio.high, f"{s.ratio.median:.2f}x")
        for policy, s in rows
        if s.ratio is not None
    ]
    return Bars("Tokens per second, drafted / plain: median, least and most", bars, even=(1.0, "plain decoding"))


def _sections(rows: Sequence[tuple[str, Summary]], measured: Measured) -> list[Section]:
    several = len(measured.summaries) > 1
    headings = ["", "prompts", "plain t/s", "drafted t/s", "gain", "theory", "tokens per pass", "accepted", "no draft"]
    cells = [
        [
            _name(policy, s, several),
            str(s.prompts),
            _speed(s.plain),
            _speed(s.drafted),
            _gain(s.ratio),
            figure(s.predicted, ".2f", "x"),
            f"{s.stats.tokens_per_pass:.2f}",
            figure(s.stats.acceptance_rate, ".0%"),
            figure(s.without_draft, ".0%"),
            _same(s, measured.caveat),
        ]
        for policy, s in rows
    ]
    about = (
        "Plain and drafted decoding of the same prompts, in turns. A gain of 1.20x is 1.2 times as many tokens per"
        " second; theory is what Leviathan et al.'s formula expects, drafts being free."
    )
    sections = [
        Section("What is gained", about, [_bars(rows, several=several), Table([*headings, "same text"], cells)]),
    ]
    if any(s.stats.drafted for _, s in rows):
        overall = [row for row in rows if row[1].category == OVERALL]
        ordered = [*(row for row in rows if row not in overall), *overall]
        rates = {_name(policy, s, several): s.acceptance_by_position for policy, s in ordered}
        told = "Of the drafts of which all tokens before that position were accepted."
        sections.append(acceptance(rates, told, totals=len(overall)))
    curves = {policy: _ratios(curve) for policy, curve in measured.curves.items() if curve is not None}
    if curves:
        sections.append(costs(curves if several else {"measured": next(iter(curves.values()))}))
    if (samples := measured.samples) is not None:
        error = samples.reliability.calibration_error
        if error is not None:
            told = f"Of the drafts in the texts below; expected calibration error {error:.4f}."
            sections.append(calibration(samples.reliability.to_json(), told))
        passages = [Passage(f"{sample.category}: {sample.prompt}", sample.spans) for sample in samples.found]
        sections.append(Section("How it was drafted", "The first prompt's answer of each kind of text.", passages))
    return sections


def _notes(measured: Measured) -> list[str]:
    notes = ["t/s and gain: median (least-most) over prompts and repeats; each gain is that of two runs side by side"]
    if measured.unfinished is not None:
        notes.append(f"INCOMPLETE: {measured.unfinished}")
    if measured.caveat is not None:
        notes.append(f"the texts are not meant to be the same: {measured.caveat}")
    if not measured.drafts:
        notes.append("drafting is off: plain decoding was compared with itself")
    return notes


def _ratios(curve: CostCurve) -> dict[int, float]:
    seconds = {int(size): value for size, value in curve.to_json()["seconds"].items()}
    return {size: value / seconds[1] for size, value in seconds.items()}


def _speed(speed: Spread | None) -> str:
    return "-" if speed is None else f"{speed.median:.2f} ({speed.low:.2f}-{speed.high:.2f})"


def _gain(ratio: Spread | None) -> str:
    return "-" if ratio is None else f"{ratio.median:.2f}x ({ratio.low:.2f}-{ratio.high:.2f})"


def _same(summary: Summary, caveat: str | None) -> str:
    if caveat is not None:
        return "-"
    if summary.identical == summary.prompts:
        return "yes"
    return f"no ({summary.prompts - summary.identical} of {summary.prompts} differ)"
