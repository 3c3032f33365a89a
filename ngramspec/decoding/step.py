"""What happened: `Step`, one target pass as data, and `Stats`, the counters over many of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ngramspec.acceptance.rules import Judgement
from ngramspec.drafting.draft import Draft
from ngramspec.sampling.logprobs import Logprobs

StopReason = Literal["eog", "stop", "length", "context"]


@dataclass(frozen=True, slots=True)
class Detail:
    """How the tokens of a pass were decided on.

    Attributes:
        position: absolute index in the sequence of the first token that the pass decided.
        draft: what was judged: what was sent, and, where a grammar cut a draft that was drawn blindly, the
            forbidden token behind it, which is refused unsent.
        judgements: one for each drafted token that was reached, one for each token of the target's own, in order.
    """

    position: int
    draft: Draft
    judgements: tuple[Judgement, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """One target pass, or the prefill's first token (`batch` 0).

    Attributes:
        tokens: token ids emitted, in order; the last is the target's own, those before it were drafted.
        pieces: the text that each of them released, same length; text is held back while a character or a
            stop string may still be incomplete.
        drafted: token ids sent as a draft.
        accepted: how many of them were emitted.
        batch: tokens in the pass, padding and tokens that were evaluated again included.
        seconds: of the target pass (of the whole prefill at the first step).
        draft_seconds: spent on asking the drafter, and on what lets a refused draft be taken back.
        plain_seconds: what a pass without a draft costs now; 0 when nobody measured.
        source: the drafter, or "" without a draft.
        stop: why the generation ended with this step, or None.
        stop_string: the stop string that ended it, where one did.
        entropy: smoothed normalised entropy of the target, 0 to 1, by which the draft was limited (see
            `EntropyPolicy`); None for any policy that does not look at it, and for the first step.
        gamma: that limit, in tokens; what was asked for may be less, at the end of a text or a context.
        logprobs: of each emitted token, where they were asked for.
        detail: how each token was decided on, where that was asked for.
        close_calls: tokens that rounding could have decided otherwise than in undrafted decoding (see
            `ngramspec.exactness.close_calls`), where `exact="auto"` did not take settings that rule it out.
    """

    tokens: tuple[int, ...]
    pieces: tuple[str, ...]
    drafted: tuple[int, ...] = ()
    accepted: int = 0
    batch: int = 0
    seconds: float = 0.0
    draft_seconds: float = 0.0
    plain_seconds: float = 0.0
    source: str = ""
    stop: StopReason | None = None
    stop_string: str | None = None
    entropy: float | None = None
    gamma: int | None = None
    logprobs: tuple[Logprobs, ...] = ()
    detail: Detail | None = None
    close_calls: int = 0

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
    """Counters over steps. Tokens and passes leave the prefill and the token it yields out.

    Attributes:
        tokens: emitted by target passes.
        passes: target passes.
        passes_without_draft: passes whose batch held no draft.
        drafted, accepted: draft tokens sent, and emitted.
        drafted_at, accepted_at: the same by position in the draft.
        tested_at: how often a position was reached (all before it were accepted).
        seconds: of target passes.
        draft_seconds: of asking the drafter.
        plain_seconds: what the same tokens would have taken one by one, by the cost curve.
        prefill_seconds: of prefills.
        generated: all tokens emitted, the prefill's included.
        close_calls: see `Step`.
    """

    tokens: int = 0
    passes: int = 0
    passes_without_draft: int = 0
    drafted: int = 0
    accepted: int = 0
    drafted_at: list[int] = field(default_factory=list)
    tested_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    seconds: float = 0.0
    draft_seconds: float = 0.0
    plain_seconds: float = 0.0
    prefill_seconds: float = 0.0
    generated: int = 0
    close_calls: int = 0

    def add(self, step: Step) -> None:
        """Count a step."""
        self.generated += len(step.tokens)
        self.close_calls += step.close_calls
        if step.batch == 0:
            self.prefill_seconds += step.seconds
            return
        self.tokens += len(step.tokens)
        self.passes += 1
        self.seconds += step.seconds
        self.draft_seconds += step.draft_seconds
        self.plain_seconds += step.plain_seconds * len(step.tokens)
        k = len(step.drafted)
        self.passes_without_draft += k == 0
        self.drafted += k
        self.accepted += step.accepted
        while len(self.drafted_at) < k:
            for counts in (self.drafted_at, self.tested_at, self.accepted_at):
                counts.append(0)
        # A text that ended inside the draft says nothing about the positions after its end.
        reached = step.accepted if step.accepted == len(step.tokens) else step.accepted + 1
        for i in range(k):
            self.drafted_at[i] += 1
            self.tested_at[i] += i < reached
            self.accepted_at[i] += i < step.accepted

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
        """Emitted tokens per second of decoding (target passes and drafting, without the prefill)."""
        seconds = self.seconds + self.draft_seconds
        return self.tokens / seconds if seconds > 0 else None

    @property
    def estimated_gain(self) -> float | None:
        """Plain decoding's time for these tokens, by the cost curve, over the time taken; None if unmeasured."""
        seconds = self.seconds + self.draft_seconds
        return self.plain_seconds / seconds if seconds > 0 and self.plain_seconds > 0 else None
