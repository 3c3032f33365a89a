"""`posted`: a benchmark as a `Report`, out of the very figures that `--json` tells, and samples of drafted texts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ngramspec.benchmark.report import OVERALL, Spread, Summary
from ngramspec.benchmark.runs import Benchmark
from ngramspec.cost.curve import CostCurve
from ngramspec.decoding.marked import MarkedText
from ngramspec.drafting.reliability import Reliability
from ngramspec.reports.report import Bar, Bars, Passage, Report, Section, Span, Table
from ngramspec.reports.shapes import acceptance, calibration, costs, figure
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


@dataclass(frozen=True, slots=True)
class Sample:
    """What a model wrote after a prompt, and what was drafted of it, refused tokens included."""

    category: str
    prompt: str
    spans: tuple[Span, ...]


@dataclass(slots=True)
class Samples:
    """A drafted run of the first prompt of each category, with how each token was decided on.

    That takes time, so no such run is compared with any other. As in those that are timed, what drafts has not seen the
    text before.

    Args:
        benchmark: whose prompts, and whose first decoder; its KV cache is overwritten.

    Attributes:
        found: the samples so far.
        reliability: of the odds that the sent drafts were given.
    """

    benchmark: Benchmark
    found: list[Sample] = field(default_factory=list, init=False)
    reliability: Reliability = field(default_factory=Reliability, init=False)

    @property
    def total(self) -> int:
        """How many samples `run` takes."""
        return len({case.category for case in self.benchmark.cases})

    def run(self) -> Iterator[Sample]:
        """Take the samples, one per `next`; stopping early leaves those taken."""
        benchmark, decoder = self.benchmark, self.benchmark.drafted
        benchmark.forget()
        first = {case.category: case for case in reversed(benchmark.cases)}
        for category in dict.fromkeys(case.category for case in benchmark.cases):
            case = first[category]
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
            self.found.append(Sample(category, case.id, tuple(text.spans)))
            yield self.found[-1]


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
