"""`benchmark_report`: a benchmark as a `Report`, and drafted texts for it to show."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ngramspec.drafting.chances import Reliability
from ngramspec.instruments.benchmark.figures import Spread, Summary
from ngramspec.instruments.benchmark.runs import Benchmark
from ngramspec.instruments.prompts import Case
from ngramspec.instruments.reports.report import (
    OVERALL,
    Bar,
    Bars,
    MarkedText,
    Passage,
    Report,
    Section,
    Table,
    acceptance,
    calibration,
    costs,
    figure,
)
from ngramspec.version import __version__

COLUMNS = ("model", "size", "params", "backend", "threads")
"""llama-bench's headings of what was measured on."""


@dataclass(frozen=True, slots=True)
class Setup:
    """A model, loaded, and the machine that runs it.

    Attributes:
        name: the model's, for people.
        model: llama.cpp's words for architecture, size and quantisation.
        size_bytes, parameters: of the model.
        backend: what computes: CPU, or the kind of GPU.
        threads: on the CPU.
        machine: processor and system.
        build: of llama.cpp, with what it was built for, as `ngramspec.llama.devices.build` says it.
        compiled: whether the core of drafting is; it is slow where it is not.
    """

    name: str
    model: str
    size_bytes: int
    parameters: int
    backend: str
    threads: int
    machine: str
    build: str
    compiled: bool = True

    def cells(self) -> tuple[str, ...]:
        """Under `COLUMNS`."""
        size, unit = (self.size_bytes / 2**30, "GiB") if self.size_bytes >= 2**30 else (self.size_bytes / 2**20, "MiB")
        count, scale = (self.parameters / 1e9, "B") if self.parameters >= 1e9 else (self.parameters / 1e6, "M")
        return self.model, f"{size:.2f} {unit}", f"{count:.2f} {scale}", self.backend, str(self.threads)

    def line(self) -> str:
        """Model, machine, backend and build."""
        version = self.build.partition(";")[0]
        features = " ".join(dict.fromkeys(re.findall(r"(\w+) = [1-9]", self.build)))
        built = f"{version} ({features})" if features else version
        own = f"ngramspec {__version__}" + ("" if self.compiled else ", its core not compiled")
        return f"{self.name} ({self.model}); {self.machine}; {self.backend}; {built}; {own}"


class DraftedTexts:
    """A drafted run of the first prompt of each category, with how each token was decided on.

    That takes time, so no such run is compared with any other. As in those that are timed, what drafts has not seen the
    text before.

    Args:
        benchmark: whose prompts, and whose first decoder; its KV cache is overwritten.

    Attributes:
        passages: the texts so far, refused tokens included.
        reliability: of the odds that the sent drafts were given.
        total: how many texts `run` makes.
    """

    def __init__(self, benchmark: Benchmark) -> None:
        self._benchmark = benchmark
        self._first = {case.category: case for case in reversed(benchmark.cases)}
        self.total = len(self._first)
        self.passages: list[Passage] = []
        self.reliability = Reliability()

    def run(self) -> Iterator[Case]:
        """Make the texts, one per `next`; stopping early leaves those made."""
        benchmark, decoder = self._benchmark, self._benchmark.drafted
        benchmark.forget()
        for category in dict.fromkeys(case.category for case in benchmark.cases):
            case = self._first[category]
            text = MarkedText(decoder.vocabulary.piece)
            for step in decoder.generate(
                case.tokens,
                max_tokens=benchmark.max_tokens,
                sampling=benchmark.sampling,
                verify=benchmark.acceptance,
                detail=True,
            ):
                self.reliability.add(step.judged, step.tokens)
                text.add(step)
            self.passages.append(Passage(f"{category}: {case.id}", text.spans))
            yield case


def benchmark_report(
    setup: Setup,
    command: str,
    benchmark: Benchmark,
    summaries: Mapping[str, Sequence[Summary]],
    texts: DraftedTexts | None = None,
) -> Report:
    """The report on a benchmark, out of the very figures that `--json` writes.

    Args:
        setup: what was measured on.
        command: what was typed.
        benchmark: what was run.
        summaries: its figures, by policy; of each the overall ones last. May be empty.
        texts: that the page shows.
    """
    rows = [(policy if len(summaries) > 1 else None, s) for policy, found in summaries.items() for s in found]
    return Report(
        title=f"{setup.name}: drafted against plain decoding",
        table=_table(setup, rows, benchmark.caveat),
        bars=_bars(rows),
        origin=setup.line(),
        command=command,
        sections=_sections(rows, benchmark, texts),
        notes=_notes(benchmark),
    )


Rows = Sequence[tuple[str | None, Summary]]
"""Each with the name of its policy, where there are several."""


def _name(policy: str | None, summary: Summary) -> str:
    return summary.category if policy is None else f"{summary.category}, {policy}"


def _table(setup: Setup, rows: Rows, caveat: str | None) -> Table:
    """llama-bench's columns, and ours."""
    cells = [
        [*setup.cells(), _name(policy, s), _speed(s.plain), _speed(s.drafted), _gain(s.ratio), _same(s, caveat)]
        for policy, s in rows
    ]
    return Table([*COLUMNS, "test", "plain t/s", "drafted t/s", "gain", "same text"], cells)


def _bars(rows: Rows) -> Bars:
    bars = [
        Bar(_name(policy, s), s.ratio.median, s.ratio.low, s.ratio.high, f"{s.ratio.median:.2f}x")
        for policy, s in rows
        if s.ratio is not None
    ]
    return Bars("Tokens per second, drafted / plain: median, least and most", bars, even=(1.0, "plain decoding"))


def _gains(rows: Rows, caveat: str | None) -> Table:
    headings = ["", "prompts", "plain t/s", "drafted t/s", "gain", "theory", "tokens per pass", "accepted", "no draft"]
    cells = [
        [
            _name(policy, s),
            str(s.prompts),
            _speed(s.plain),
            _speed(s.drafted),
            _gain(s.ratio),
            figure(s.predicted, ".2f", "x"),
            f"{s.stats.tokens_per_pass:.2f}",
            figure(s.stats.acceptance_rate, ".0%"),
            figure(s.without_draft, ".0%"),
            _same(s, caveat),
        ]
        for policy, s in rows
    ]
    return Table([*headings, "same text"], cells)


def _sections(rows: Rows, benchmark: Benchmark, texts: DraftedTexts | None) -> list[Section]:
    about = (
        "Plain and drafted decoding of the same prompts, in turns. A gain of 1.20x is 1.2 times as many tokens per"
        " second; theory is what Leviathan et al.'s formula expects, drafts being free."
    )
    sections = [Section("What is gained", about, [_bars(rows), _gains(rows, benchmark.caveat)])]
    if any(s.stats.drafted for _, s in rows):
        overall = [row for row in rows if row[1].category == OVERALL]
        ordered = [*(row for row in rows if row not in overall), *overall]
        rates = {_name(policy, s): s.acceptance_by_position for policy, s in ordered}
        about = "Of the drafts of which all tokens before that position were accepted."
        sections.append(acceptance(rates, about, totals=len(overall)))
    curves = {}
    for policy, decoder in benchmark.policies.items():
        if (curve := decoder.calibration.curve) is not None:
            seconds = curve.to_json()["seconds"]
            curves[policy if len(benchmark.policies) > 1 else "measured"] = {int(n): x for n, x in seconds.items()}
    if curves:
        sections.append(costs(curves))
    if texts is not None:
        error = texts.reliability.calibration_error
        if error is not None:
            about = f"Of the drafts in the texts below; expected calibration error {error:.4f}."
            sections.append(calibration(texts.reliability.to_json(), about))
        about = "The first prompt's answer of each kind of text."
        sections.append(Section("How it was drafted", about, texts.passages))
    return sections


def _notes(benchmark: Benchmark) -> list[str]:
    notes = ["t/s and gain: median (least-most) over prompts and repeats; each gain is that of two runs side by side"]
    if not benchmark.complete:
        notes.append(f"INCOMPLETE: stopped after {len(benchmark.runs)} of {benchmark.total} runs")
    if benchmark.caveat is not None:
        notes.append(f"the texts are not meant to be the same: {benchmark.caveat}")
    if benchmark.drafted.drafter is None:
        notes.append("drafting is off: plain decoding was compared with itself")
    return notes


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
