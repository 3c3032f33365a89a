"""How drafts are to be accepted: `Acceptance`, the `Rule` that it comes to, and the `RuleVerifier` that applies it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

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
class Rule:
    """The rule that decides on the drafts of a text."""

    name: str  # one of `METHODS`, or "typical"
    # (rows, draft, sampler, position, watch) -> verdict, by a function of `ngramspec.acceptance`.
    verify: Callable[[Rows, Draft, Sampler, int, Watch | None], Verdict]
    # (position of a draft's first token) -> what the drafter is to pick with; None for the likeliest.
    choose: Callable[[int], Chooser] | None = None
    blind: bool = False  # a draft's length must be settled before its tokens are drawn; see `Drafter.propose`
    lossy: str | None = None  # what changes the output, None if nothing does


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

    def resolve(self, sampling: Sampling) -> Rule:
        """The rule to apply where tokens are chosen by `sampling`. Raises ValueError: it contradicts the sampling."""
        if self.method == "greedy" and not sampling.greedy:
            raise ValueError(f"verify is 'greedy', but temperature is {sampling.temperature}, not 0")
        if sampling.selects and (self.method == "rejection" or self.lossy):
            raise ValueError(f"mirostat draws its tokens itself: no place for {self.lossy or 'rejection sampling'}")
        if sampling.greedy and self.typical:
            raise ValueError("typical acceptance needs a temperature above 0")
        if sampling.greedy and self.lossy and sampling.moves_logits:
            raise ValueError("lenience at temperature 0 compares bare logits: no penalties, logit biases or grammar")
        if sampling.greedy and self.lossy:
            return Rule("greedy", _of_tokens(verify_lenient_greedy, lenience=self.lenience), lossy=self.lossy)
        if sampling.greedy:
            # With all mass on one token all methods emit the same tokens, and greedy does it without noise.
            return Rule("greedy", _of_tokens(verify_greedy))
        if self.typical:
            return Rule("typical", _of_tokens(verify_typical), lossy=self.lossy)
        if sampling.selects or self.method == "match":
            return Rule("match", _of_tokens(verify_coupled))
        if self.method == "rejection" or self.lossy:

            def verify(rows: Rows, draft: Draft, *rest: Any) -> Verdict:
                return verify_rejection(rows, draft.tokens, draft.q, *rest, lenience=self.lenience)

            return Rule("rejection", verify, partial(rejection_choice, sampling), blind=True, lossy=self.lossy)
        return Rule("coupled", _of_tokens(verify_coupled), partial(coupled_choice, sampling))


def _of_tokens(verify: Callable[..., Verdict], **settings: float) -> Callable[..., Verdict]:
    """A rule that looks at nothing of a draft but its tokens."""
    return lambda rows, draft, *rest: verify(rows, draft.tokens, *rest, **settings)


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
        self.rule = how.resolve(sampler.sampling)
        self.blind = self.rule.blind
        self.sampler = sampler
        self._watch = watch

    def choose(self, position: int) -> Chooser | None:
        """What the drafter is to pick with, for a draft whose first token has index `position`."""
        return None if self.rule.choose is None else self.rule.choose(position)

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
        if self.rule.name in ("coupled", "match"):
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
            return self.rule.verify(counted(), draft, self.sampler, position, self._watch)
        except (BadLogits, GrammarError) as error:
            # A row is read only after every row before it has accepted its drafted token.
            accepted = read - 1
            placed = type(error)(f"at position {position + accepted} of the text: {error}")
            if not accepted:
                raise placed from error
            return Verdict(draft.tokens[:accepted], accepted, placed)
