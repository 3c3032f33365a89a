"""`RuleVerifier`: applies the acceptance rule of a sequence to its drafts."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from ngramspec.acceptance.lossy import Lenient, Typical
from ngramspec.acceptance.rejection import Rejection, check_q, rejection_choice
from ngramspec.acceptance.rules import Coupled, Greedy, Rows, Rule, Verdict, Watch
from ngramspec.acceptance.settings import Acceptance
from ngramspec.drafting.draft import Chooser, Draft
from ngramspec.errors import GrammarError
from ngramspec.sampling.distribution import BadLogits
from ngramspec.sampling.rows import CoupledChoice, append_most_likely
from ngramspec.sampling.sampler import Sampler

RULES: dict[str, type[Rule]] = {
    "greedy": Greedy,  # the tokens are those of plain greedy decoding
    "coupled": Coupled,  # the tokens are those of plain sampling with the same seed, whatever the draft
    "match": Coupled,  # the same, for drafts that were made without the noise of the seed
    "rejection": Rejection,  # the tokens are draws from the target's distribution; which ones depends on the drafts too
    "lenient": Lenient,  # greedy decoding that accepts tokens that are nearly as likely; this changes the output
    "typical": Typical,  # accepts plausible tokens; this changes the output
}


class Verifier(Protocol):
    """Interface that decides on the tokens of a sequence."""

    fixed_length: bool  # whether the length of a draft must be known before its tokens are drawn; see `Drafter.propose`

    def choose(self, position: int) -> Chooser | None: ...

    def verify(self, rows: Rows, draft: Draft, position: int) -> Verdict: ...


class RuleVerifier:
    """The verifier of the drafts of one sequence.

    Args:
        sampler: Sampler that chooses the tokens; it has begun the sequence.
        acceptance: Acceptance settings, or the name of a method.
        watch: Function that is called with each decision.

    Raises:
        ValueError: The acceptance contradicts the sampling.
    """

    def __init__(
        self, sampler: Sampler, acceptance: Acceptance | str | None = None, watch: Watch | None = None
    ) -> None:
        settings = acceptance if isinstance(acceptance, Acceptance) else Acceptance(acceptance)
        self.rule = settings.rule(sampler.sampling)
        self.fixed_length = self.rule == "rejection"
        self.sampler = sampler
        is_lenient = self.rule == "greedy" and settings.lenience < 1
        self._decide = RULES["lenient" if is_lenient else self.rule](sampler, settings.lenience, watch).decide
        self._is_plain_greedy = self.rule == "greedy" and not is_lenient and watch is None

    def choose(self, position: int) -> Chooser | None:
        """Return the chooser for a draft whose first token has index `position`."""
        if self.rule == "coupled":
            return CoupledChoice(self.sampler.sampling.seed, position)
        return rejection_choice(self.sampler.sampling, position) if self.rule == "rejection" else None

    def verify(self, rows: Rows, draft: Draft, position: int) -> Verdict:
        """Verify a draft, or choose one token if it is empty; rows after the first rejection are ignored.

        Args:
            rows: Logits, at least len(draft) + 1 rows; len(draft) if the last draft token ends the text.
            draft: Draft.
            position: Index in the sequence of the token that row 0 decides.

        Raises:
            BadLogits, GrammarError: The first token cannot be chosen. At a later one, the verdict has the error and
                what was accepted before, which plain decoding would have emitted.
            ValueError: The rows are too few, or rejection sampling lacks the distributions of the draft.
        """
        guesses, q, sampler = draft.tokens, draft.q, self.sampler
        if self.fixed_length:
            check_q(guesses, q)
        tokens: list[int] = []
        is_accepted = True
        try:
            if self._is_plain_greedy and sampler.is_argmax:
                is_accepted = append_most_likely(np.ascontiguousarray(rows, np.float32), guesses, tokens)
            else:
                accept = sampler.accept if sampler.needs_tokens else None
                for offset, (row, guess) in enumerate(zip(rows, (*guesses, None), strict=False)):
                    drawn_from = q[offset] if offset < len(q) else {}
                    token, is_accepted = self._decide(row, guess, position + offset, drawn_from)
                    if accept is not None:
                        accept(token)
                    tokens.append(token)
                    if not is_accepted:
                        break
        except (BadLogits, GrammarError) as error:
            # All earlier rows have accepted their draft tokens.
            located_error = type(error)(f"at position {position + len(tokens)} of the text: {error}")
            if not tokens:
                raise located_error from error
            return Verdict(tuple(tokens), len(tokens), located_error)
        if is_accepted and (not tokens or len(tokens) != len(guesses)):
            raise ValueError(f"a draft of {len(guesses)} tokens came with {len(tokens)} rows of logits")
        return Verdict(tuple(tokens), len(tokens) - (not is_accepted))
