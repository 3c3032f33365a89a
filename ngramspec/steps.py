"""Results of decoding: `Step` is the record of one target pass, and `Stats` are counters over many passes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Literal

from ngramspec.acceptance.rules import TokenDecision
from ngramspec.drafting.draft import NO_DRAFT, Draft
from ngramspec.sampling.distribution import Logprobs

SHORT = 16  # minimum number of passes for an estimate of the gain; with fewer it would be noise

StopReason = Literal["eog", "stop", "length", "context"]


@dataclass(slots=True)
class Step:
    """The record of one target pass, or of the prefill and its token (`batch` 0); it must not be changed."""

    tokens: tuple[int, ...]  # emitted token ids, in order; the last is the target's own, the others were drafted
    # Text that each token released. Text is held back while a character or a stop string may still be incomplete.
    pieces: tuple[str, ...] = ()
    _: KW_ONLY
    drafted: tuple[int, ...] = ()  # draft tokens that were sent to the target
    accepted: int = 0  # number of draft tokens that were emitted
    correct_guesses: int = 0  # number of correct tokens in the drafter's proposal, sent or not
    batch: int = 0  # tokens in the pass, including padding, branches and tokens that were evaluated again
    seconds: float = 0.0  # time of the target pass (of the whole prefill at the first step)
    # Cost of the target pass in plain passes, without interruptions (see `PassTimes`); 0 without a drafter.
    cost: float = 0.0
    correction: float = 0.0  # additional cost of earlier passes that this one confirmed
    is_surprising: bool = False  # whether the pass took another time than expected
    draft_cost: float = 0.0  # `draft_seconds` in plain passes
    draft_seconds: float = 0.0  # time of drafting and of preparing a rollback; 0 if the drafter was not called
    elapsed: float = 0.0  # wall time since the previous step, including its reader; 0 at the first or if not measured
    source: str = ""  # name of the drafter; "" without a draft
    close_calls: int = 0  # number of tokens that rounding could have decided, if counted (see `CloseCalls`)
    # Numbers that the policy's decision depended on; see `Policy.record`, and `TracedCostPolicy` for those of `cost`.
    policy_details: Mapping[str, float | str] = field(default_factory=dict)
    position: int = 0  # absolute index in the sequence of the first token that the pass decided
    stop: StopReason | None = None  # reason why the generation ended with this step; `None` if it did not
    stop_string: str | None = None  # stop string that ended the generation, if one did
    logprobs: tuple[Logprobs, ...] = ()  # log-probabilities of each emitted token, if requested
    # Decision on each draft token that was reached and on each of the target's own tokens, if requested.
    decisions: tuple[TokenDecision, ...] = ()
    verified_draft: Draft = NO_DRAFT  # draft that `decisions` refers to; see `Plan.verified_draft`

    @property
    def text(self) -> str:
        """Text that this step released."""
        return "".join(self.pieces)

    @property
    def draft_remainder(self) -> tuple[int, ...]:
        """Draft tokens that were not emitted."""
        return self.drafted[self.accepted :]


@dataclass(slots=True)
class Stats:
    """Counters over passes. `tokens` and `passes` exclude the prefill and the token it yields."""

    tokens: int = 0  # tokens emitted by target passes
    passes: int = 0  # target passes
    passes_without_draft: int = 0
    asked: int = 0  # passes for which the drafter was called
    missed: int = 0  # passes without a draft although the drafter's first guess was right
    drafted: int = 0  # draft tokens sent to the target
    accepted: int = 0  # draft tokens emitted
    drafted_at: list[int] = field(default_factory=list)  # draft tokens sent, by position in the draft
    tested_at: list[int] = field(default_factory=list)  # draft tokens reached (all before them accepted), by position
    accepted_at: list[int] = field(default_factory=list)  # draft tokens accepted, by position
    seconds: float = 0.0  # time of target passes
    draft_seconds: float = 0.0  # time of drafting; see `Step`
    cost: float = 0.0  # cost of passes and of drafting in plain passes; see `Step`
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0  # wall time from each first token to the last; see `Step.elapsed`
    generated: int = 0  # all emitted tokens, including those of the prefill
    close_calls: int = 0  # tokens that rounding could have decided; see `Step`
    surprises: int = 0  # passes that took another time than expected

    def add(self, done: Step) -> None:
        """Count a pass."""
        self.generated += len(done.tokens)
        self.close_calls += done.close_calls
        if done.batch == 0:
            self.prefill_seconds += done.seconds
            return
        self.tokens += len(done.tokens)
        self.passes += 1
        self.surprises += done.is_surprising
        self.seconds += done.seconds
        self.draft_seconds += done.draft_seconds
        self.cost += done.cost + done.draft_cost + done.correction
        self.decode_seconds += done.elapsed
        k = len(done.drafted)
        self.passes_without_draft += k == 0
        self.asked += done.draft_seconds > 0
        self.missed += k == 0 and done.correct_guesses > 0
        self.drafted += k
        self.accepted += done.accepted
        # If the text ended inside the draft, the positions after its end were not tested.
        n_tested = min(k, done.accepted + (done.accepted < len(done.tokens)))
        for at, count in ((self.drafted_at, k), (self.tested_at, n_tested), (self.accepted_at, done.accepted)):
            at.extend([0] * (k - len(at)))
            for i in range(count):
                at[i] += 1

    def merge(self, other: Stats) -> None:
        """Add the counters of another `Stats`."""
        for name in self.__dataclass_fields__:
            mine, theirs = getattr(self, name), getattr(other, name)
            if isinstance(mine, list):
                length = max(len(mine), len(theirs))
                pad = [x + [0] * (length - len(x)) for x in (mine, theirs)]
                setattr(self, name, [a + b for a, b in zip(*pad, strict=True)])
            else:
                setattr(self, name, mine + theirs)

    @property
    def tokens_per_pass(self) -> float:
        """Emitted tokens per target pass (MAT), including bonus tokens and passes without a draft; plain: 1.0."""
        return self.tokens / self.passes if self.passes else 1.0

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / drafted; `None` if nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens after the first, per second from the first to the last; `None` if no time was measured."""
        return self.tokens / self.decode_seconds if self.decode_seconds > 0 else None

    @property
    def is_disturbed(self) -> bool:
        """True if too many passes took another time than expected to show a gain."""
        return self.surprises > 0.2 * self.passes

    @property
    def estimated_gain(self) -> float | None:
        """Estimated time of plain decoding for these tokens, over the time that they took.

        `None` if nothing was drafted, if there are too few passes, or if they were disturbed. The gain never exceeds
        the tokens per pass: no pass with a draft is faster than one without.
        """
        if not (self.drafted and self.cost) or self.passes < SHORT or self.is_disturbed:
            return None
        return min(self.tokens / self.cost, self.tokens_per_pass)
