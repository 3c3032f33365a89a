"""`Tally`: what a request cost, for the line of the log, and what it still has at work, to be stopped when it ends.

The tally of the request at hand is found by `current`: what the handlers of all dialects do is counted without their
help.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field

from ngramspec.batching.request import Done, Ticket


@dataclass(slots=True)
class Tally:
    """Counters over the engine's work for one HTTP request.

    Attributes:
        prompt_tokens: of all prompts, cached ones included.
        cached: those of them that were in the cache.
        tokens: generated.
        drafted, accepted: draft tokens.
        seconds: of generating, prompts not included.
        tickets: of what is still at work.
    """

    prompt_tokens: int = 0
    cached: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    seconds: float = 0.0
    tickets: list[Ticket] = field(default_factory=list)

    def add(self, prompt_tokens: int, done: Done) -> None:
        self.prompt_tokens += prompt_tokens
        self.cached += done.cached
        self.tokens += done.stats.generated
        self.drafted += done.stats.drafted
        self.accepted += done.stats.accepted
        self.seconds += done.seconds

    def cancel(self) -> None:
        """Stop what is still at work."""
        while self.tickets:
            self.tickets.pop().cancel()


current: ContextVar[Tally | None] = ContextVar("tally", default=None)
