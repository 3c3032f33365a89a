"""`Acceptance`: settings that select an acceptance rule; `RuleVerifier` applies it to the drafts of a sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ngramspec.acceptance.rules import RULES, Rows, Verdict, Watch, check_q, rejection_choice
from ngramspec.data import GrammarError
from ngramspec.drafting.draft import Chooser, Draft
from ngramspec.sampling.distribution import BadLogits
from ngramspec.sampling.rows import CoupledChoice, append_most_likely
from ngramspec.sampling.sampler import Sampler
from ngramspec.sampling.settings import Sampling

METHODS = ("greedy", "coupled", "match", "rejection")


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Settings of the acceptance of drafts; a ValueError means that one is out of range or contradicts another."""

    # One of `METHODS`; `None` means greedy at temperature 0, rejection with lenience, and otherwise coupled.
    method: str | None = None
    lenience: float = 1.0  # factor above 0; below 1 draft tokens are accepted more often than their probabilities allow
    typical: bool = False  # whether to use typical acceptance, as in Medusa

    def __post_init__(self) -> None:
        if self.method is not None and self.method not in METHODS:
            raise ValueError(f"acceptance must be one of {', '.join(METHODS)}, got {self.method!r}")
        if not 0 < self.lenience <= 1:
            raise ValueError(f"lenience must be above 0 and at most 1 (1: off), got {self.lenience}")
        if self.lenience < 1 and self.method in ("coupled", "match"):
            raise ValueError(
                f"lenience has no effect with acceptance {self.method!r}; use 'rejection', or temperature 0"
            )
        if self.typical and (self.lenience < 1 or self.method is not None):
            raise ValueError("typical acceptance cannot be combined with lenience or another acceptance rule")

    @property
    def lossy(self) -> str | None:
        """Description of the setting that changes the output, if any."""
        if self.typical:
            return "typical acceptance"
        return f"lenience {self.lenience:g}" if self.lenience < 1 else None

    def rule(self, sampling: Sampling, restriction: str = "") -> str:
        """Return the rule to apply: one of `METHODS`, or "typical"; `restriction`: see `TextRules.restriction`."""
        if self.method == "greedy" and not sampling.greedy:
            raise ValueError(f"acceptance 'greedy' requires temperature 0, got {sampling.temperature}")
        if sampling.samples_internally and (self.method == "rejection" or self.lossy):
            raise ValueError(
                f"mirostat cannot be combined with {self.lossy or 'rejection sampling'}: it samples by itself"
            )
        if sampling.greedy and self.typical:
            raise ValueError("typical acceptance requires a temperature above 0")
        if sampling.greedy and self.lossy and (sampling.changes_logits or restriction):
            obstacles = restriction or "penalties, logit biases or a grammar"
            raise ValueError(f"lenience at temperature 0 cannot be combined with {obstacles}")
        if sampling.greedy:
            return "greedy"  # with all mass on one token all methods emit the same tokens
        if self.typical:
            return "typical"
        if sampling.samples_internally or self.method == "match":
            return "match"
        return "rejection" if self.method == "rejection" or self.lossy else "coupled"


class Verifier(Protocol):
    """Interface that decides on the tokens of a sequence."""

    fixed_length: bool  # whether the length of a draft must be known before its tokens are drawn; see `Ask`

    def choose(self, position: int) -> Chooser | None: ...

    def verify(self, rows: Rows, draft: Draft, position: int) -> Verdict: ...


class RuleVerifier:
    """The verifier of the drafts of one sequence, whose sampler has begun it; `watch` is called with each decision."""

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

        There are at least len(draft) + 1 rows, or len(draft) if the last draft token ends the text; fewer are a
        ValueError. `position` is the index in the sequence of the token that row 0 decides. If a token after the first
        cannot be chosen (BadLogits, GrammarError), the verdict has the error and what was accepted before, which plain
        decoding would have emitted.
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
