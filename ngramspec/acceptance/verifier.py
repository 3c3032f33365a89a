"""How drafts are to be accepted: `Acceptance`, and the `RuleVerifier` that applies the rule it comes to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from ngramspec.acceptance.alternatives import (
    rejection_choice,
    verify_lenient_greedy,
    verify_rejection,
    verify_typical,
)
from ngramspec.acceptance.rules import (
    Row,
    Rows,
    Verdict,
    Watch,
    coupled_choice,
    verify_coupled,
    verify_greedy,
)
from ngramspec.drafting.draft import Chooser, Draft
from ngramspec.errors import GrammarError
from ngramspec.sampling.distribution import BadLogits
from ngramspec.sampling.noise import gumbel_pick
from ngramspec.sampling.sampler import Sampler
from ngramspec.sampling.settings import Sampling

METHODS = ("greedy", "coupled", "match", "rejection")


@dataclass(frozen=True, slots=True)
class Acceptance:
    """How drafts are accepted. Raises ValueError for a value out of range, or options that contradict each other."""

    method: str | None = None  # one of `METHODS`; None: greedy at temperature 0, rejection with lenience, else coupled
    lenience: float = 1.0  # above 0; below 1 drafted tokens are accepted more often than their probabilities allow
    typical: bool = False  # typical acceptance, as Medusa does it

    def __post_init__(self) -> None:
        if self.method is not None and self.method not in METHODS:
            raise ValueError(f"verify is {self.method!r}, but must be one of: {', '.join(METHODS)}")
        if not 0 < self.lenience <= 1:
            raise ValueError(f"lenience is {self.lenience}, but must be above 0 and at most 1 (1: off)")
        if self.lenience < 1 and self.method in ("coupled", "match"):
            raise ValueError(f"lenience has no say in acceptance {self.method!r}; use 'rejection', or temperature 0")
        if self.typical and (self.lenience < 1 or self.method is not None):
            raise ValueError("typical acceptance is a rule of its own; leave out any other, and lenience")

    @property
    def lossy(self) -> str | None:
        """What changes the output, if anything does."""
        if self.typical:
            return "typical acceptance"
        return f"lenience {self.lenience:g}" if self.lenience < 1 else None

    def rule(self, sampling: Sampling) -> str:
        """The rule to apply where tokens are chosen by `sampling`: one of `METHODS`, or "typical".

        Raises ValueError: it contradicts the sampling.
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
        if sampling.selects or self.method == "match":
            return "match"
        return "rejection" if self.method == "rejection" or self.lossy else "coupled"


class Verifier(Protocol):
    """What decides on the tokens of a text; `RuleVerifier` does so by a model's logits."""

    blind: bool  # whether a draft's length must be settled before its tokens are drawn; see `Drafter.propose`

    def choose(self, position: int) -> Chooser | None: ...

    def verify(self, rows: Rows, draft: Draft, position: int) -> Verdict: ...

    def answer(self, row: Row, position: int) -> int | None:
        """What the target would probably emit, given its logits; None if that cannot be told. Nothing is emitted."""


class RuleVerifier:
    """Verifies the drafts of one text. Raises ValueError for an acceptance that contradicts the sampling.

    Args:
        sampler: chooses the tokens; it has begun the text.
        acceptance: how drafts are accepted, or the method's name.
        watch: is told of every judgement.
    """

    def __init__(
        self, sampler: Sampler, acceptance: Acceptance | str | None = None, watch: Watch | None = None
    ) -> None:
        how = acceptance if isinstance(acceptance, Acceptance) else Acceptance(acceptance)
        self.rule, self._lenience = how.rule(sampler.sampling), how.lenience
        self.blind = self.rule == "rejection"
        self.sampler = sampler
        self._watch = watch

    def choose(self, position: int) -> Chooser | None:
        """What the drafter is to pick with, for a draft whose first token has index `position`."""
        if self.rule == "coupled":
            return coupled_choice(self.sampler.sampling, position)
        return rejection_choice(self.sampler.sampling, position) if self.rule == "rejection" else None

    def answer(self, row: Row, position: int) -> int | None:
        """See `Verifier`.

        It depends on what was emitted and on the draft before, not on a number that the next draft is judged by. So a
        draft of it is a rule's pick in the sense of `verify_rejection`, and its q is sure of it.
        """
        sampling = self.sampler.sampling
        if sampling.selects or sampling.xtc_probability > 0:
            return None  # these draw random numbers of their own, and another draw would change the text
        try:
            p = self.sampler.distribution(row)
        except (BadLogits, GrammarError):
            return None
        if self.rule in ("coupled", "match"):
            return gumbel_pick(sampling.seed, position, p)
        return int(p.ids[p.probs.argmax()])

    def verify(self, rows: Rows, draft: Draft, position: int) -> Verdict:
        """Verify a draft; an empty one: just choose a token.

        Raises BadLogits and GrammarError, with the position, at the first row only. At a later one the verdict holds
        the error and what was accepted before, which plain decoding would have emitted.
        """
        read = 0

        def counted() -> Iterator[Row]:
            nonlocal read
            for row in rows:
                read += 1
                yield row

        try:
            return self._verify(counted(), draft, position)
        except (BadLogits, GrammarError) as error:
            # A row is read only after every row before it has accepted its drafted token.
            accepted = read - 1
            placed = type(error)(f"at position {position + accepted} of the text: {error}")
            if not accepted:
                raise placed from error
            return Verdict(draft.tokens[:accepted], accepted, placed)

    def _verify(self, rows: Rows, draft: Draft, position: int) -> Verdict:
        """Apply the rule."""
        tokens, sampler, watch, lenience = draft.tokens, self.sampler, self._watch, self._lenience
        if self.rule == "rejection":
            return verify_rejection(rows, tokens, draft.q, sampler, position, watch, lenience=lenience)
        if self.rule == "typical":
            return verify_typical(rows, tokens, sampler, position, watch)
        if self.rule != "greedy":
            return verify_coupled(rows, tokens, sampler, position, watch)
        if lenience < 1:
            return verify_lenient_greedy(rows, tokens, sampler, position, watch, lenience=lenience)
        return verify_greedy(rows, tokens, sampler, position, watch)
