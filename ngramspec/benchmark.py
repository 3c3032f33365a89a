"""`Benchmark`: plain and drafted decoding of the same prompts on the same target, run by run, interleaved.

    cases, skipped = prepare(target, load_prompts(None), max_tokens=128)
    benchmark = Benchmark(SpeculativeDecoder(target), cases, max_tokens=128, repeat=3)
    benchmark.warm_up()
    for run in benchmark.measure():
        ...                                     # every run is also in benchmark.runs

What is compared differs in one thing only, the drafts: target, sampling, seed and prompt are the same, and the
KV cache starts a run with the same prompt prefix, computed once. The order alternates from repeat to repeat
(plain drafted, drafted plain, ...), so that a machine that slows down or warms up favours neither. One drafted
decoder serves all prompts in order, as in real use: what it learnt on the earlier ones it keeps.

`ngramspec.benchmark_report` makes figures of the runs.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from ngramspec.decoder import SpeculativeDecoder
from ngramspec.errors import ModelError
from ngramspec.prompts_io import Prompt
from ngramspec.sampling import Sampling
from ngramspec.stats import Stats, Step, StopReason

Kind = Literal["plain", "drafted", "default"]
"""`plain` and `drafted` are the comparison. `default` is plain decoding on a target without exact mode: the
price of exactness is measured against it."""

WARM_UP_TOKENS = 16


class PromptTarget(Protocol):
    """What turns prompts into tokens; see `ngramspec.target.Target`."""

    n_ctx: int

    def tokenize(self, text: str) -> list[int]: ...

    def chat_prompt(self, messages: Sequence[dict[str, str]]) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt as token ids."""

    category: str
    id: str
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Skipped:
    """A prompt that cannot be run on this target, and why."""

    category: str
    id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Prefill:
    """Reading one prompt into an empty KV cache: its length in tokens, and seconds."""

    category: str
    prompt: str
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Run:
    """One generation.

    Attributes:
        category, prompt: whose it is.
        kind: see `Kind`.
        repeat: counted from 0; the runs of one repeat follow each other directly.
        output: token ids emitted, the prefill's included.
        seconds: wall clock from the prefill's token to the end: target passes, drafting, verification, Python.
        prefill_seconds: wall clock before that; most of the prompt is in the KV cache already.
        stats: the counters of its steps.
        batches: target passes by batch size, padding included.
        stop: why it ended.
    """

    category: str
    prompt: str
    kind: Kind
    repeat: int
    output: tuple[int, ...]
    seconds: float
    prefill_seconds: float
    stats: Stats
    batches: Counter[int]
    stop: StopReason | None

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens of target passes per second of decoding; None if the prefill's token ended the text."""
        return self.stats.tokens / self.seconds if self.stats.tokens and self.seconds > 0 else None


@dataclass(frozen=True, slots=True)
class Difference:
    """Where the drafted output of a prompt first left the plain one.

    Attributes:
        category, prompt, repeat: which pair of runs it was, the first one that differs.
        position: how many tokens were equal before.
        plain, drafted: the token ids there; None where that output had ended.
        margin: how far apart the target puts the logits of the two tokens when it reads the common text afresh;
            greedy decoding only. Rounding that depends on the batch size moves each logit by up to
            `ProbeReport.max_difference`, so it explains margins of up to about twice that.
    """

    category: str
    prompt: str
    repeat: int
    position: int
    plain: int | None
    drafted: int | None
    margin: float | None


def prepare(target: PromptTarget, prompts: Iterable[Prompt], max_tokens: int) -> tuple[list[Case], list[Skipped]]:
    """Tokenize prompts; those that leave no room for `max_tokens`, or that the chat template refuses, are skipped."""
    cases: list[Case] = []
    skipped: list[Skipped] = []
    for prompt in prompts:
        try:
            if prompt.text is not None:
                tokens = target.tokenize(prompt.text)
            else:
                tokens = target.chat_prompt(prompt.messages or ())
        except ModelError as error:
            skipped.append(Skipped(prompt.category, prompt.id, str(error)))
            continue
        if not tokens:
            skipped.append(Skipped(prompt.category, prompt.id, "no tokens"))
        elif len(tokens) + max_tokens > target.n_ctx:
            reason = f"{len(tokens)} tokens and {max_tokens} to generate are too long for a context of {target.n_ctx}"
            skipped.append(Skipped(prompt.category, prompt.id, reason))
        else:
            cases.append(Case(prompt.category, prompt.id, tuple(tokens)))
    return cases, skipped


@dataclass(slots=True)
class Benchmark:
    """The runs of a benchmark, filled while `measure` is consumed.

    Args:
        drafted: the decoder that is compared with plain decoding on its own target, in the same mode.
        cases: what to run; at least one.
        max_tokens: most tokens per run, at least 2.
        repeat: runs of each kind per case, at least 1.
        sampling: of all runs; None is greedy.
        verify: as in `SpeculativeDecoder.generate`.
        default: a plain decoder on a target of the same model without exact mode, or None.

    Raises:
        ValueError: no cases, or a number too small.
    """

    drafted: SpeculativeDecoder
    cases: Sequence[Case]
    max_tokens: int
    repeat: int = 3
    sampling: Sampling | None = None
    verify: str | None = None
    default: SpeculativeDecoder | None = None
    runs: list[Run] = field(default_factory=list, init=False)
    prefills: list[Prefill] = field(default_factory=list, init=False)
    differences: list[Difference] = field(default_factory=list, init=False)
    _decoders: dict[Kind, SpeculativeDecoder] = field(init=False)

    def __post_init__(self) -> None:
        if not self.cases or self.max_tokens < 2 or self.repeat < 1:
            raise ValueError("a benchmark needs a case, 2 tokens per run and 1 repeat, or more")
        plain = SpeculativeDecoder(self.drafted.target, drafter=None, exact=self.drafted.exact)
        # Exact mode must use the same batch sizes on both sides, whatever a probe of each would have chosen.
        plain.calibration = self.drafted.calibration
        self._decoders = {"plain": plain, "drafted": self.drafted}
        if self.default is not None:
            self._decoders["default"] = self.default

    @property
    def total(self) -> int:
        """How many runs `measure` makes."""
        return len(self.cases) * self.repeat * len(self._decoders)

    @property
    def complete(self) -> bool:
        """Whether `measure` came to its end."""
        return len(self.runs) == self.total

    @property
    def comparable(self) -> bool:
        """Whether plain and drafted outputs are meant to be equal: not with rejection sampling."""
        return self.verify != "rejection"

    def warm_up(self) -> None:
        """Run every decoder once, uncounted, after measuring what a drafted run of this length would measure."""
        prompt, drafted = self.cases[0].tokens, self.drafted
        if drafted.drafter is not None:
            drafted.target.prefill(prompt, aligned=drafted.exact)
            drafted.calibration.ensure_curve(drafted.target, self.max_tokens)
        for decoder in self._decoders.values():
            self._generate(decoder, prompt, min(self.max_tokens, WARM_UP_TOKENS))

    def measure(self) -> Iterator[Run]:
        """Make the runs, one per `next`; stopping early leaves those made."""
        order = list(self._decoders)
        for number, case in enumerate(self.cases):
            self._prefill(case)
            for repeat in range(self.repeat):
                # Over prompts too, or an odd number of repeats would have one kind go first more often.
                for kind in order if (number + repeat) % 2 == 0 else reversed(order):
                    run = self._run(case, kind, repeat)
                    self.runs.append(run)
                    yield run
            if self.comparable:
                self._compare(case)

    def _prefill(self, case: Case) -> None:
        """Read the prompt into every target, so that all runs find the same tokens in the KV cache."""
        for kind, decoder in self._decoders.items():
            if kind == "plain":  # the same target as drafted
                continue
            decoder.target.clear()
            began = time.perf_counter()
            decoder.target.prefill(case.tokens, aligned=decoder.exact)
            seconds = time.perf_counter() - began
            if kind == "drafted":
                self.prefills.append(Prefill(case.category, case.id, len(case.tokens), seconds))

    def _run(self, case: Case, kind: Kind, repeat: int) -> Run:
        steps, prefill_seconds, seconds = self._generate(self._decoders[kind], case.tokens, self.max_tokens)
        stats = Stats()
        for step in steps:
            stats.add(step)
        output = tuple(token for step in steps for token in step.tokens)
        batches = Counter(step.batch for step in steps if step.batch)
        return Run(
            case.category, case.id, kind, repeat, output, seconds, prefill_seconds, stats, batches, steps[-1].stop
        )

    def _generate(
        self, decoder: SpeculativeDecoder, prompt: Sequence[int], max_tokens: int
    ) -> tuple[list[Step], float, float]:
        """(steps, seconds of the prefill, seconds of the rest)."""
        steps: list[Step] = []
        began = time.perf_counter()
        generation = decoder.generate(prompt, max_tokens=max_tokens, sampling=self.sampling, verify=self.verify)
        steps.append(next(generation))
        first = time.perf_counter()
        steps.extend(generation)
        return steps, first - began, time.perf_counter() - first

    def _compare(self, case: Case) -> None:
        """Note the first difference between the outputs of a case's pairs, if there is one."""
        runs = [run for run in self.runs if (run.category, run.prompt) == (case.category, case.id)]
        outputs = {(run.kind, run.repeat): run.output for run in runs}
        for repeat in range(self.repeat):
            plain, drafted = outputs["plain", repeat], outputs["drafted", repeat]
            if plain == drafted:
                continue
            position = first_difference(plain, drafted)
            a, b = (out[position] if position < len(out) else None for out in (plain, drafted))
            margin = None
            if (self.sampling is None or self.sampling.greedy) and a is not None and b is not None:
                target = self.drafted.target
                target.clear()
                logits = target.prefill([*case.tokens, *plain[:position]], aligned=self.drafted.exact)
                margin = abs(float(logits[a]) - float(logits[b]))
            self.differences.append(Difference(case.category, case.id, repeat, position, a, b, margin))
            return


def first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two outputs share from the start."""
    shorter = min(len(a), len(b))
    return next((i for i in range(shorter) if a[i] != b[i]), shorter)
