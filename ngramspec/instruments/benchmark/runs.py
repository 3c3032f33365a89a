"""Benchmark of plain and drafted decoding, with interleaved runs of the same prompts on the same target.

The compared runs differ only in the drafts, or in the policy that decides about them. Target, sampling, seed and prompt
are the same, and every run starts with the same prompt prefix in the KV cache. The order rotates from run to run (plain
drafted, drafted plain, ...), so a machine that slows down or warms up favours neither.

A repeat runs all prompts in order. Within it, drafters and policies keep the data that they learned from earlier
prompts, as in real use. Each repeat begins with new ones, so no drafter has seen a text before it drafts it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field
from typing import Any, Literal

from ngramspec.acceptance.verifier import Acceptance
from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.drafting.draft import Drafter
from ngramspec.instruments.prompts import Case
from ngramspec.policies.policy import Policy
from ngramspec.sampling.settings import Sampling
from ngramspec.steps import Stats, Step, StopReason
from ngramspec.tokens import common_prefix

Kind = Literal["plain", "drafted", "default"]
"""`plain` and `drafted` runs are compared. `default` is plain decoding on a target without exact mode, which is the
baseline for the cost of exact mode."""

Contender = tuple[Kind, str | None]
"""Kind of a run, and its policy if it has drafts."""


@dataclass(frozen=True, slots=True)
class Run:
    category: str  # category of the prompt
    prompt: str  # id of the prompt
    kind: Kind  # kind of run; see `Kind`
    repeat: int  # index of the repeat, from 0; the runs of a prompt in one repeat follow each other directly
    output: tuple[int, ...]  # emitted token ids, including that of the prefill
    seconds: float  # wall time from the prefill's token to the end: target passes, drafting, verification, Python
    prefill_seconds: float  # wall time before that; most of the prompt is in the KV cache already
    stats: Stats  # counters of the steps
    batches: Counter[int]  # target passes by batch size, including padding
    stop: StopReason | None  # reason for the end
    policy: str | None = None  # policy that decided the draft lengths; `None` for plain decoding

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens of target passes per second of decoding; `None` if the prefill's token ended the text."""
        return self.stats.tokens / self.seconds if self.stats.tokens and self.seconds > 0 else None

    def to_json(self) -> dict[str, Any]:
        """Return the run without its output; `pass_seconds` is the time of target passes."""
        stats = asdict(self.stats)
        stats["pass_seconds"] = stats.pop("seconds")
        del stats["prefill_seconds"]
        own = ("category", "prompt", "kind", "policy", "repeat", "seconds", "prefill_seconds", "tokens_per_second")
        batches = {str(size): passes for size, passes in sorted(self.batches.items())}
        return {name: getattr(self, name) for name in own} | stats | {"batches": batches, "stop": self.stop}


Difference = dict[str, Any]
"""The first difference between the drafted and the plain output of a prompt. Keys: "category", "prompt", "repeat",
"policy", "position" (number of equal tokens before), "plain" and "drafted" (token ids there; `None` if that output had
ended), and "margin", the distance between their logits in greedy decoding of bare logits."""


@dataclass(slots=True)
class Benchmark:
    """The runs of a benchmark, filled while `measure` is consumed."""

    drafted: SpeculativeDecoder  # decoder that is compared with plain decoding on its own target, in the same mode
    cases: Sequence[Case]  # prompts to run; at least one
    max_tokens: int  # maximum number of tokens per run, at least 2
    repeat: int = 3  # number of runs of each kind per prompt, at least 1
    sampling: Sampling = field(default_factory=Sampling)  # sampling settings of all runs
    acceptance: Acceptance = field(default_factory=Acceptance)  # rule of acceptance in all runs
    # A plain decoder on a target of the same model without exact mode, if the cost of exact mode is measured.
    default: SpeculativeDecoder | None = None
    other_policies: Sequence[str] = ()  # further policies, for decoders like `drafted`
    _: KW_ONLY
    # Function that returns a new drafter and a new policy of the given name, which have learned nothing.
    make_untrained: Callable[[str], tuple[Drafter | None, Policy]]
    runs: list[Run] = field(default_factory=list, init=False)
    # "category", "prompt", "tokens" and "seconds" of each prompt read into an empty KV cache.
    prefills: list[dict[str, Any]] = field(default_factory=list, init=False)
    differences: list[Difference] = field(default_factory=list, init=False)
    # For each category, the id of the first prompt, and the steps of its first run with `drafted`.
    texts: dict[str, tuple[str, list[Step]]] = field(default_factory=dict, init=False)
    _decoders: dict[Contender, SpeculativeDecoder] = field(init=False)

    def __post_init__(self) -> None:
        first = self.drafted

        def make_decoder(drafter: Drafter | None, policy: Policy | str = "cost") -> SpeculativeDecoder:
            # Exact mode must use the same batch sizes on all sides, whatever a probe of each would have chosen.
            options: dict[str, Any] = {"exact": first.exact, "kernels": first.kernels, "times": first.times.copy()}
            return SpeculativeDecoder(first.target, drafter=drafter, policy=policy, **options)

        self._decoders = {("plain", None): make_decoder(None), ("drafted", first.policy.name): first}
        for name in self.other_policies if first.drafter is not None else ():
            self._decoders["drafted", name] = make_decoder(*self.make_untrained(name))
        if self.default is not None:
            self._decoders["default", None] = self.default

    @property
    def policies(self) -> dict[str, SpeculativeDecoder]:
        """Decoders with drafts, by the name of their policy."""
        return {policy: decoder for (_, policy), decoder in self._decoders.items() if policy is not None}

    @property
    def total(self) -> int:
        return len(self.cases) * self.repeat * len(self._decoders)

    @property
    def complete(self) -> bool:
        return len(self.runs) == self.total

    @property
    def caveat(self) -> str | None:
        """Reason why plain and drafted outputs may differ; `None` if they must be equal."""
        if self.acceptance.lossy is not None:
            return f"{self.acceptance.lossy} changes the output"
        if self.acceptance.method == "rejection" and not self.sampling.greedy:
            return "rejection sampling: the output keeps its distribution, not its tokens"
        return None

    def warm_up(self) -> None:
        """Run every decoder once without counting the run."""
        for contender in self._decoders:
            self._run(self.cases[0], contender, 0, min(self.max_tokens, 16))

    def measure(self) -> Iterator[Run]:
        """Make the runs, one per `next`; if the caller stops early, the finished runs remain."""
        order, text_contender = list(self._decoders), ("drafted", self.drafted.policy.name)
        for repeat in range(self.repeat):
            self.forget()
            for number, case in enumerate(self.cases):
                self._prefill(case)
                # The first contender rotates from prompt to prompt. If the number of prompts is a multiple of that of
                # the contenders, it also rotates from repeat to repeat, so that all are first equally often.
                first = (number + repeat * (len(self.cases) % len(order) or 1)) % len(order)
                pair: dict[Contender, Run] = {}
                for contender in order[first:] + order[:first]:
                    pair[contender], steps = self._run(case, contender, repeat, self.max_tokens)
                    self.runs.append(pair[contender])
                    if contender == text_contender:
                        self.texts.setdefault(case.category, (case.id, steps))
                    yield pair[contender]
                for policy in self.policies if self.caveat is None else ():
                    self._compare(case, pair["plain", None], pair["drafted", policy])

    def forget(self) -> None:
        """Give the drafted decoders new drafters and policies, which have learned nothing; keep the costs of passes."""
        for name, decoder in self.policies.items():
            if decoder.drafter is not None:
                decoder.set_drafter(*self.make_untrained(name))

    def _prefill(self, case: Case) -> None:
        """Read the prompt into every target, so that all runs find the same tokens in the KV cache."""
        for decoder in filter(None, (self.drafted, self.default)):
            decoder.sequence.clear()
            start = time.perf_counter()
            decoder.read(case.tokens)
            seconds = time.perf_counter() - start
            if decoder is self.drafted:
                prefill = {"category": case.category, "prompt": case.id, "tokens": len(case.tokens), "seconds": seconds}
                self.prefills.append(prefill)

    def _run(self, case: Case, contender: Contender, repeat: int, max_tokens: int) -> tuple[Run, list[Step]]:
        options: dict[str, Any] = {"max_tokens": max_tokens, "sampling": self.sampling, "acceptance": self.acceptance}
        start = time.perf_counter()
        generation = self._decoders[contender].generate(case.tokens, **options)
        steps = [next(generation)]
        first = time.perf_counter()
        steps.extend(generation)
        end = time.perf_counter()
        stats = Stats()
        for step in steps:
            stats.add(step)
        kind, policy = contender
        run = Run(
            case.category,
            case.id,
            kind,
            repeat,
            output=tuple(token for step in steps for token in step.tokens),
            seconds=end - first,
            prefill_seconds=first - start,
            stats=stats,
            batches=Counter(step.batch for step in steps if step.batch),
            stop=steps[-1].stop,
            policy=policy,
        )
        return run, steps

    def _compare(self, case: Case, plain_run: Run, drafted_run: Run) -> None:
        """Record the first difference of two outputs, unless an earlier repeat of this prompt had one."""
        a, b = plain_run.output, drafted_run.output
        key = {"category": case.category, "prompt": case.id, "policy": drafted_run.policy}
        if a == b or any(key.items() <= entry.items() for entry in self.differences):
            return
        position = common_prefix(a, b)
        x, y = (output[position] if position < len(output) else None for output in (a, b))
        margin, sequence = None, self.drafted.sequence
        bare = self.sampling.greedy and not self.sampling.changes_logits
        if bare and x is not None and y is not None:
            sequence.clear()
            logits = sequence.prefill([*case.tokens, *a[:position]], aligned=self.drafted.exactness.aligned)
            margin = abs(float(logits[x]) - float(logits[y]))
        details = {"repeat": drafted_run.repeat, "position": position, "plain": x, "drafted": y, "margin": margin}
        self.differences.append(key | details)
