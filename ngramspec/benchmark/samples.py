"""`Samples`: how texts were drafted, token by token, in runs beside those that are timed.

    samples = Samples(benchmark)
    for sample in samples.run():
        ...                                     # they are also in samples.found

To see how a token was decided on takes time, so no such run is compared with any other. As in those that are timed,
what drafts has not seen the text before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ngramspec.benchmark.runs import Benchmark
from ngramspec.decoding.marked import MarkedText
from ngramspec.drafting.reliability import Reliability
from ngramspec.reports.report import Span


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
