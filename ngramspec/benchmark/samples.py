"""`Samples`: how texts were drafted, token by token, in runs beside those that are timed.

    samples = Samples(benchmark)
    for sample in samples.run():
        ...                                     # they are also in samples.found

To see how a token was decided on takes time, so no such run is compared with any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import groupby

from ngramspec.benchmark.runs import Benchmark
from ngramspec.decoding.step import Step
from ngramspec.drafting.reliability import Reliability
from ngramspec.reports.report import Span

Piece = Callable[[int], bytes]
"""The bytes that a token stands for."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What a model wrote after a prompt, and what was drafted of it, refused tokens included."""

    category: str
    prompt: str
    spans: tuple[Span, ...]


@dataclass(slots=True)
class Samples:
    """A drafted run of the first prompt of each category.

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
        first = {case.category: case for case in reversed(benchmark.cases)}
        for category in dict.fromkeys(case.category for case in benchmark.cases):
            case = first[category]
            spans: list[Span] = []
            for step in decoder.generate(
                case.tokens,
                max_tokens=benchmark.max_tokens,
                sampling=benchmark.sampling,
                verify=benchmark.acceptance,
                detail=True,
            ):
                self.reliability.add(step.judged, step.tokens)
                spans += spans_of(step, decoder.vocabulary.piece)
            self.found.append(Sample(category, case.id, tuple(joined(spans))))
            yield self.found[-1]


def spans_of(step: Step, piece: Piece) -> Iterator[Span]:
    """A step's text, token by token. Refused tokens never were text; what is no whole character in them is U+FFFD."""
    # A text that ended inside its draft has no token at index `accepted`: the rest was not refused, only unread.
    for i, released in enumerate(step.pieces):
        refused = i == step.accepted and step.refused
        if refused:
            yield Span(b"".join(map(piece, step.refused)).decode(errors="replace"), "refused")
        yield Span(released, "kept" if i < step.accepted else "corrected" if refused else "")


def joined(spans: list[Span]) -> Iterator[Span]:
    """Neighbours with one mark as one span, those without text left out."""
    for mark, alike in groupby((span for span in spans if span.text), key=lambda span: span.mark):
        yield Span("".join(span.text for span in alike), mark)
