"""What comes of a beam search: `Hypothesis`, a text found, and `BeamStats`."""

from __future__ import annotations

from dataclasses import dataclass, field

from ngramspec.decoding.step import StopReason


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One of the texts found.

    Attributes:
        tokens: ids after the prompt, the one that ended it included.
        text: what they stand for, up to a stop string.
        score: sum of the natural logarithms of their probabilities.
        stop: why it ended; None while it is alive.
    """

    tokens: tuple[int, ...]
    text: str
    score: float
    stop: StopReason | None

    @property
    def finished(self) -> bool:
        """Whether it ended by itself, and not for want of room."""
        return self.stop in ("eog", "stop")


@dataclass(slots=True)
class BeamStats:
    """Counters of one search.

    Attributes:
        steps: of the search. Each makes the texts one token longer; the first needs only the prefill's row.
        passes: of the target, the prefill excluded. Without drafts there is one for each step but the first.
        drafted: tokens evaluated before any live text ended in them.
        accepted: how many of those later became the last token of a live text.
        batches: tokens in each pass.
        seconds: of target passes.
        draft_seconds: of all other work for the passes: drafting, reading logits, choosing.
        prefill_seconds: of the prefill.
    """

    steps: int = 0
    passes: int = 0
    drafted: int = 0
    accepted: int = 0
    batches: list[int] = field(default_factory=list)
    seconds: float = 0.0
    draft_seconds: float = 0.0
    prefill_seconds: float = 0.0

    @property
    def plain_passes(self) -> int:
        """How many passes the same search takes without drafts."""
        return max(0, self.steps - 1)

    @property
    def steps_per_pass(self) -> float:
        """Steps after the first per pass: 1.0 is plain beam search."""
        return self.plain_passes / self.passes if self.passes else 1.0

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens by which the texts grew per second, excluding the prefill and its token."""
        seconds = self.seconds + self.draft_seconds
        return self.plain_passes / seconds if seconds > 0 else None
