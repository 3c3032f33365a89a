"""What happened: `Step`, one target pass and the text that came of it, and `Stats`, the counters over many."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Literal

from ngramspec.acceptance.rules import TokenDecision
from ngramspec.drafting.draft import NO_DRAFT, Draft
from ngramspec.sampling.distribution import Logprobs

SHORT = 16  # passes below which an estimate of the gain would be noise
SLOWED = 0.05  # share of passes slowed down by other programs above which the gain is not estimated
FASTER, SLOWER = 0.5, 1.25  # nor is it if passes took less or more than this many times as long as the cost curve says

StopReason = Literal["eog", "stop", "length", "context"]
Disturbance = Literal["load", "speed"]  # other programs ran; passes took another time than measured before


@dataclass(slots=True)
class Step:
    """The record of one target pass, or of the prefill and the token it yields (`batch` 0); not to be changed."""

    tokens: tuple[int, ...]  # token ids emitted, in order; the last is the target's own, those before it were drafted
    # The text that each token released; text is held back while a character or a stop string may still be incomplete.
    pieces: tuple[str, ...] = ()
    _: KW_ONLY
    drafted: tuple[int, ...] = ()  # token ids sent as a draft
    accepted: int = 0  # how many of them were emitted
    correct_guesses: int = 0  # how many tokens of the drafter's proposal were right, sent or not
    batch: int = 0  # tokens in the pass, padding, branches and tokens that were evaluated again included
    seconds: float = 0.0  # of the target pass (of the whole prefill at the first step)
    # How many of `seconds` an interruption by the system added; see `CostCurve.undisturbed`.
    interruption_seconds: float = 0.0
    draft_seconds: float = 0.0  # spent on asking the drafter, and on being able to take a refused draft back
    plain_seconds: float = 0.0  # what a pass without a draft costs now; 0 when that was not measured
    # Time of the pass by the cost curve; 0 if there is no curve, or other programs ran while it was measured.
    expected_seconds: float = 0.0
    elapsed: float = 0.0  # since the step before, on the wall, its reader's time included; 0: the first, or not taken
    is_quiet: bool = True  # whether no other program slowed the pass down
    source: str = ""  # the drafter, or "" without a draft
    close_calls: int = 0  # tokens that rounding could have decided, where it was counted (see `CloseCalls`)
    # The numbers that the policy decided by; see `Policy.record`.
    policy_details: Mapping[str, float] = field(default_factory=dict)
    position: int = 0  # absolute index in the sequence of the first token that the pass decided
    stop: StopReason | None = None  # why the generation ended with this step, or None
    stop_string: str | None = None  # the stop string that ended it, where one did
    logprobs: tuple[Logprobs, ...] = ()  # of each emitted token, where they were asked for
    # How each drafted token that was reached, and each of the target's own, was decided on, if that was asked for.
    decisions: tuple[TokenDecision, ...] = ()
    verified_draft: Draft = NO_DRAFT  # the draft that `decisions` refers to; see `Plan.verified_draft`

    @property
    def text(self) -> str:
        """The text this step released."""
        return "".join(self.pieces)

    @property
    def refused(self) -> tuple[int, ...]:
        """Draft tokens that were not emitted."""
        return self.drafted[self.accepted :]


@dataclass(slots=True)
class Stats:
    """Counters over passes. `tokens` and `passes` exclude the prefill and the token it yields."""

    tokens: int = 0  # emitted by target passes
    passes: int = 0  # of the target
    passes_without_draft: int = 0
    drafted: int = 0  # draft tokens sent
    accepted: int = 0  # and emitted
    drafted_at: list[int] = field(default_factory=list)  # by position in the draft
    tested_at: list[int] = field(default_factory=list)  # how often a position was reached (all before it accepted)
    accepted_at: list[int] = field(default_factory=list)
    seconds: float = 0.0  # of target passes
    draft_seconds: float = 0.0  # of asking the drafter
    plain_seconds: float = 0.0  # what the same tokens would have taken one by one, by the cost curve
    expected_seconds: float = 0.0  # time of the passes by the cost curve; see `Step`
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0  # from each first token to the last, on the wall; see `Step.elapsed`
    generated: int = 0  # all tokens emitted, the prefill's included
    close_calls: int = 0  # see `Step`
    slowed: int = 0  # passes that other programs slowed down

    def add(self, done: Step) -> None:
        """Count a pass."""
        self.generated += len(done.tokens)
        self.close_calls += done.close_calls
        if done.batch == 0:
            self.prefill_seconds += done.seconds
            return
        self.tokens += len(done.tokens)
        self.passes += 1
        self.slowed += not done.is_quiet
        self.seconds += done.seconds
        self.draft_seconds += done.draft_seconds
        self.plain_seconds += done.plain_seconds * len(done.tokens)
        self.expected_seconds += done.expected_seconds
        self.decode_seconds += done.elapsed
        k = len(done.drafted)
        self.passes_without_draft += k == 0
        self.drafted += k
        self.accepted += done.accepted
        while len(self.drafted_at) < k:
            for counts in (self.drafted_at, self.tested_at, self.accepted_at):
                counts.append(0)
        # A text that ended inside the draft says nothing about the positions after its end.
        reached = done.accepted if done.accepted == len(done.tokens) else done.accepted + 1
        for i in range(k):
            self.drafted_at[i] += 1
            self.tested_at[i] += i < reached
            self.accepted_at[i] += i < done.accepted

    def merge(self, other: Stats) -> None:
        """Add another's counters to these."""
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
        """MAT: emitted tokens per target pass, bonus token and passes without a draft included; 1.0 is plain."""
        return self.tokens / self.passes if self.passes else 1.0

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / drafted; None when nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens after the first per second from the first to the last; None where nobody took the time."""
        return self.tokens / self.decode_seconds if self.decode_seconds > 0 else None

    @property
    def is_slowed(self) -> bool:
        """True if other programs slowed down too many passes to ignore it."""
        return self.slowed > SLOWED * self.passes

    @property
    def disturbance(self) -> Disturbance | None:
        """The reason why the times of these passes do not show the gain from drafts; `None` if they do.

        Passes of a disturbed answer cannot be compared with the cost of plain decoding, which was measured under other
        conditions.
        """
        if self.is_slowed or not self.expected_seconds:
            return "load"
        return None if FASTER <= self.seconds / self.expected_seconds <= SLOWER else "speed"

    @property
    def estimated_gain(self) -> float | None:
        """Estimated time of plain decoding for these tokens, over the time that they took.

        `None` if nothing was drafted, if there are too few passes, or if they were disturbed. Passes that were faster
        than expected count as expected, because plain decoding would have been faster too. The gain never exceeds the
        tokens per pass: no pass with a draft is faster than one without.
        """
        seconds = max(self.seconds, self.expected_seconds) + self.draft_seconds
        is_measured = seconds > 0 and self.plain_seconds > 0
        if not (self.drafted and is_measured) or self.passes < SHORT or self.disturbance is not None:
            return None
        return min(self.plain_seconds / seconds, self.tokens_per_pass)
