"""`Benchmark`: plain and drafted decoding of the same prompts on the same target, run by run, interleaved.

The runs compared differ only in the drafts, or in the policy behind them: target, sampling, seed and prompt are the
same, and every run starts with the same prompt prefix in the KV cache. The order rotates from run to run (plain
drafted, drafted plain, ...), so that a machine that slows down or warms up favours none.

In a repeat, all prompts in order, drafters and policies keep what they learnt on the earlier prompts, as in real use;
the next begins with what has learnt nothing, so that no text is ever drafted by what has seen it before.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

from ngramspec.acceptance.verifier import Acceptance
from ngramspec.decoding.decoder import SpeculativeDecoder
from ngramspec.drafting.chances import Reliability
from ngramspec.drafting.draft import NO_DRAFT, Draft, Drafter
from ngramspec.instruments.prompts import Case
from ngramspec.policies.policy import Policy
from ngramspec.sampling.settings import Sampling
from ngramspec.steps import Stats, Step, StopReason
from ngramspec.tokens import common_prefix

Kind = Literal["plain", "drafted", "default"]
"""`plain` and `drafted` are the comparison. `default` is plain decoding on a target without exact mode: the
price of exactness is measured against it."""

Contender = tuple[Kind, str | None]
"""Kind of runs, and the policy of those with drafts."""

WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Run:
    """One generation."""

    category: str  # of its prompt
    prompt: str  # its id
    kind: Kind  # see `Kind`
    repeat: int  # counted from 0; the runs of a prompt in one repeat follow each other directly
    output: tuple[int, ...]  # token ids emitted, the prefill's included
    seconds: float  # wall clock from the prefill's token to the end: target passes, drafting, verification, Python
    prefill_seconds: float  # wall clock before that; most of the prompt is in the KV cache already
    stats: Stats  # the counters of its steps
    batches: Counter[int]  # target passes by batch size, padding included
    stop: StopReason | None  # why it ended
    policy: str | None = None  # what decided how much to draft; None for plain decoding

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens of target passes per second of decoding; None if the prefill's token ended the text."""
        return self.stats.tokens / self.seconds if self.stats.tokens and self.seconds > 0 else None


Difference = dict[str, Any]
"""Where the drafted output of a prompt first left the plain one: "category", "prompt", "repeat", "policy", "position"
(how many tokens were equal before), the "plain" and the "drafted" token id there (None where that output had ended),
and in greedy decoding of bare logits the "margin" between the two tokens' logits. Rounding that depends on the batch
size moves each logit by up to `ProbeReport.max_difference`, so it explains margins of up to twice that."""


@dataclass(slots=True)
class Benchmark:
    """The runs of a benchmark, filled while `measure` is consumed."""

    drafted: SpeculativeDecoder  # the decoder that is compared with plain decoding on its own target, in the same mode
    cases: Sequence[Case]  # what to run; at least one
    max_tokens: int  # most tokens per run, at least 2
    repeat: int = 3  # runs of each kind per case, at least 1
    sampling: Sampling = field(default_factory=Sampling)  # of all runs
    acceptance: Acceptance = field(default_factory=Acceptance)  # of drafts, in all runs
    # A plain decoder on a target of the same model without exact mode, or None.
    default: SpeculativeDecoder | None = None
    others: Sequence[str] = ()  # further policies, for decoders like `drafted`
    _: KW_ONLY
    # Makes a drafter, and the policy of that name, which have learnt nothing.
    unlearnt: Callable[[str], tuple[Drafter | None, Policy]]
    runs: list[Run] = field(default_factory=list, init=False)
    # "category", "prompt", "tokens" and "seconds" of each prompt read into an empty KV cache.
    prefills: list[dict[str, Any]] = field(default_factory=list, init=False)
    differences: list[Difference] = field(default_factory=list, init=False)
    # By category, the first prompt's id, and the steps of its first run by `drafted`.
    texts: dict[str, tuple[str, list[Step]]] = field(default_factory=dict, init=False)
    reliability: Reliability = field(default_factory=Reliability, init=False)  # of what `drafted` proposed in its runs
    _decoders: dict[Contender, SpeculativeDecoder] = field(init=False)

    def __post_init__(self) -> None:
        first = self.drafted

        def like_first(drafter: Drafter | None, policy: Policy | str = "cost") -> SpeculativeDecoder:
            # Exact mode must use the same batch sizes on all sides, whatever a probe of each would have chosen.
            how: dict[str, Any] = {"exact": first.exact, "calibration": first.calibration}
            return SpeculativeDecoder(first.target, drafter=drafter, policy=policy, **how)

        self._decoders = {("plain", None): like_first(None), ("drafted", first.policy.name): first}
        for name in self.others if first.drafter is not None else ():
            self._decoders["drafted", name] = like_first(*self.unlearnt(name))
        if self.default is not None:
            self._decoders["default", None] = self.default

    @property
    def policies(self) -> dict[str, SpeculativeDecoder]:
        """The drafted decoders, by the name of their policy."""
        return {policy: decoder for (_, policy), decoder in self._decoders.items() if policy is not None}

    def runs_of(self, policy: str) -> list[Run]:
        """The runs drafted by a policy, and those they are compared with."""
        return [run for run in self.runs if run.policy in (policy, None)]

    @property
    def total(self) -> int:
        """How many runs `measure` makes."""
        return len(self.cases) * self.repeat * len(self._decoders)

    @property
    def complete(self) -> bool:
        """Whether `measure` came to its end."""
        return len(self.runs) == self.total

    @property
    def slowed(self) -> float:
        """Share of passes that other programs slowed down, or that had fewer threads because of them."""
        passes = sum(run.stats.passes for run in self.runs)
        return sum(run.stats.slowed for run in self.runs) / passes if passes else 0.0

    @property
    def caveat(self) -> str | None:
        """Why plain and drafted outputs are not meant to be equal; None where they are."""
        if self.acceptance.lossy is not None:
            return f"{self.acceptance.lossy} changes the output"
        if self.acceptance.method == "rejection" and not self.sampling.greedy:
            return "rejection sampling: the output keeps its distribution, not its tokens"
        return None

    def warm_up(self) -> None:
        """Run every decoder once, uncounted, after measuring what a drafted run of this length would measure."""
        drafted = self.drafted
        if drafted.drafter is not None:
            drafted.read(self.cases[0].tokens)
            drafted.calibration.ensure_curve(drafted.target, self.max_tokens)
        for contender in self._decoders:
            self._run(self.cases[0], contender, 0, min(self.max_tokens, WARM_UP_TOKENS))
        # Measured once, but from here on refreshed by the passes of each on its own, as in real use.
        for other in self.policies.values():
            if other is not drafted:
                other.calibrate(drafted.calibration)

    def measure(self) -> Iterator[Run]:
        """Make the runs, one per `next`; stopping early leaves those made."""
        order, shown = list(self._decoders), ("drafted", self.drafted.policy.name)
        for repeat in range(self.repeat):
            self.forget()
            for number, case in enumerate(self.cases):
                self._prefill(case)
                # From run to run, and where the prompts are a multiple, from repeat to repeat: all go first as often.
                first = (number + repeat * (len(self.cases) % len(order) or 1)) % len(order)
                pair: dict[Contender, Run] = {}
                for contender in order[first:] + order[:first]:
                    pair[contender], steps, proposals = self._run(case, contender, repeat, self.max_tokens)
                    self.runs.append(pair[contender])
                    if contender == shown:
                        self.texts.setdefault(case.category, (case.id, steps))
                        for proposal, step in zip(proposals, steps, strict=True):
                            self.reliability.add(proposal or NO_DRAFT, step.tokens)
                    yield pair[contender]
                for policy in self.policies if self.caveat is None else ():
                    self._compare(case, pair["plain", None], pair["drafted", policy])

    def forget(self) -> None:
        """Let the drafted decoders begin again with what has learnt nothing; what was measured of passes stays."""
        for name, decoder in self.policies.items():
            if decoder.drafter is not None:
                decoder.set_drafter(*self.unlearnt(name))

    def _prefill(self, case: Case) -> None:
        """Read the prompt into every target, so that all runs find the same tokens in the KV cache."""
        for decoder in filter(None, (self.drafted, self.default)):
            decoder.target.clear()
            began = time.perf_counter()
            decoder.read(case.tokens)
            seconds = time.perf_counter() - began
            if decoder is self.drafted:
                read = {"category": case.category, "prompt": case.id, "tokens": len(case.tokens), "seconds": seconds}
                self.prefills.append(read)

    def _run(
        self, case: Case, contender: Contender, repeat: int, most: int
    ) -> tuple[Run, list[Step], list[Draft | None]]:
        """Generate once: the run, its steps, and what was proposed for each of them."""
        how: dict[str, Any] = {"max_tokens": most, "sampling": self.sampling, "acceptance": self.acceptance}
        began = time.perf_counter()
        decoder = self._decoders[contender]
        generation = decoder.generate(case.tokens, **how)
        steps, proposals = [next(generation)], [decoder.drafts.proposal]
        first = time.perf_counter()
        for step in generation:
            steps.append(step)
            proposals.append(decoder.drafts.proposal)
        ended = time.perf_counter()
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
            seconds=ended - first,
            prefill_seconds=first - began,
            stats=stats,
            batches=Counter(step.batch for step in steps if step.batch),
            stop=steps[-1].stop,
            policy=policy,
        )
        return run, steps, proposals

    def _compare(self, case: Case, plain: Run, drafted: Run) -> None:
        """Note where two outputs of a case differ, unless an earlier repeat's did."""
        a, b = plain.output, drafted.output
        whose = {"category": case.category, "prompt": case.id, "policy": drafted.policy}
        if a == b or any(whose.items() <= noted.items() for noted in self.differences):
            return
        position = common_prefix(a, b)
        x, y = (output[position] if position < len(output) else None for output in (a, b))
        margin, target = None, self.drafted.target
        bare = self.sampling.greedy and not self.sampling.moves_logits
        if bare and x is not None and y is not None:
            target.clear()
            logits = target.prefill([*case.tokens, *a[:position]], aligned=self.drafted.exactness.aligned)
            margin = abs(float(logits[x]) - float(logits[y]))
        found = {"repeat": drafted.repeat, "position": position, "plain": x, "drafted": y, "margin": margin}
        self.differences.append(whose | found)
