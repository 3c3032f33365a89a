"""`Acceptance` and `Verifier`: which rule decides on drafts, and that rule at work on one text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from ngramspec.acceptance.lossy import verify_lenient_greedy, verify_typical
from ngramspec.acceptance.rules import (
    Row,
    Rows,
    Verdict,
    Watch,
    coupled_choice,
    rejection_choice,
    verify_coupled,
    verify_greedy,
    verify_rejection,
)
from ngramspec.drafting.draft import Choose, Draft
from ngramspec.errors import GrammarError
from ngramspec.sampling.distribution import BadLogits
from ngramspec.sampling.sampler import Sampler
from ngramspec.sampling.settings import Sampling

METHODS = ("greedy", "coupled", "match", "rejection")


@dataclass(frozen=True, slots=True)
class Acceptance:
    """How drafts are accepted. Raises ValueError for what cannot be, or contradicts itself.

    Attributes:
        method: one of `METHODS`; None is greedy at temperature 0, rejection with lenience, else coupled.
        lenience: below 1, drafted tokens are accepted more often than the law allows; above 0.
        typical: typical acceptance, as Medusa does it.
    """

    method: str | None = None
    lenience: float = 1.0
    typical: bool = False

    def __post_init__(self) -> None:
        if self.method is not None and self.method not in METHODS:
            raise ValueError(f"verify is {self.method!r}, but must be one of: {', '.join(METHODS)}")
        if not 0 < self.lenience <= 1:
            raise ValueError(f"lenience is {self.lenience}, but must be above 0 and at most 1 (1: off)")
        if self.lenience < 1 and self.method in ("coupled", "match"):
            raise ValueError(f"lenience has no say in verify {self.method!r}; use 'rejection', or temperature 0")
        if self.typical and (self.lenience < 1 or self.method is not None):
            raise ValueError("typical acceptance is a rule of its own; leave out verify and lenience")

    @property
    def lossy(self) -> str | None:
        """What changes the output, if anything does."""
        if self.typical:
            return "typical acceptance"
        return f"lenience {self.lenience:g}" if self.lenience < 1 else None

    def name_for(self, sampling: Sampling) -> str:
        """The rule that this comes to: one of `METHODS`, or "typical".

        Raises:
            ValueError: it contradicts the sampling.
        """
        if self.method == "greedy" and not sampling.greedy:
            raise ValueError(f"verify is 'greedy', but temperature is {sampling.temperature}, not 0")
        if sampling.selects and (self.method == "rejection" or self.lossy):
            raise ValueError(f"mirostat draws its tokens itself: no place for {self.lossy or 'rejection sampling'}")
        if sampling.greedy and self.typical:
            raise ValueError("typical acceptance needs a temperature above 0")
        if sampling.greedy and self.lossy and sampling.moves_logits:
            raise ValueError("lenience at temperature 0 compares bare logits: no penalties, logit biases or grammar")
        if sampling.greedy:
            # With all mass on one token all methods emit the same tokens, and greedy does it without noise.
            return "greedy"
        if self.typical:
            return "typical"
        return "match" if sampling.selects else self.method or ("rejection" if self.lossy else "coupled")


class Verification(Protocol):
    """What the decoding loop needs of whatever decides on the tokens; see `Verifier`."""

    @property
    def blind(self) -> bool:
        """Whether a draft's length must be settled before its tokens are drawn; see `Drafter.propose`."""

    def choose(self, position: int) -> Choose | None: ...

    def verify(self, rows: Rows, draft: Draft, position: int) -> Verdict: ...


class Verifier:
    """One way of verifying logits, at work on one text.

    Args:
        sampler: chooses the tokens; it has begun the text.
        acceptance: how drafts are accepted, or the method's name.
        watch: is told of every judgement.

    Attributes:
        name: one of `METHODS`, or "typical".

    Raises:
        ValueError: an acceptance that contradicts the sampling.
    """

    def __init__(
        self, sampler: Sampler, acceptance: Acceptance | str | None = None, watch: Watch | None = None
    ) -> None:
        how = acceptance if isinstance(acceptance, Acceptance) else Acceptance(acceptance)
        self.name = how.name_for(sampler.sampling)
        self.sampler = sampler
        self._lenience = how.lenience
        self._watch = watch

    @property
    def blind(self) -> bool:
        """See `Verification`."""
        return self.name == "rejection"

    def choose(self, position: int) -> Choose | None:
        """What the drafter is to pick with, for a draft whose first token has index `position`."""
        if self.name == "coupled":
            return coupled_choice(self.sampler.sampling, position)
        return rejection_choice(self.sampler.sampling, position) if self.name == "rejection" else None

    def verify(self, rows: Rows, draft: Draft, position: int) -> Verdict:
        """Verify a draft (an empty one: just choose a token); see `ngramspec.acceptance.rules`.

        Raises BadLogits and GrammarError at the first row only. At a later one the verdict holds the error and what
        was accepted before: the sampler has moved on by that, and plain decoding would have emitted it.
        """
        read = 0

        def counted() -> Iterator[Row]:
            nonlocal read
            for row in rows:
                read += 1
                yield row

        try:
            return self._decide(counted(), draft, position)
        except (BadLogits, GrammarError) as error:
            # No row is read before all the ones before it accepted their drafted token.
            if read < 2:
                raise
            return Verdict(draft.tokens[: read - 1], read - 1, error)

    def _decide(self, rows: Rows, draft: Draft, position: int) -> Verdict:
        tokens, sampler, watch = draft.tokens, self.sampler, self._watch
        if self.name == "greedy" and self._lenience < 1:
            return verify_lenient_greedy(rows, tokens, self._lenience, sampler, position, watch)
        if self.name == "greedy":
            return verify_greedy(rows, tokens, sampler, position, watch)
        if self.name == "typical":
            return verify_typical(rows, tokens, sampler, position, watch)
        if self.name == "rejection":
            return verify_rejection(rows, tokens, draft.q, sampler, position, watch, lenience=self._lenience)
        return verify_coupled(rows, tokens, sampler, position, watch)
