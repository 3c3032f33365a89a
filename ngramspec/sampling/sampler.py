"""`Sampler`: a `Sampling` at work on one text, and what it needs of a grammar; `ngramspec.llama` has the real ones.

`Forbidding` is one that also keeps to `TextRules`, in vLLM's way: where a text may end, and which words it may not
hold. What such a rule forbids depends on the tokens before it, so no logit bias can say it. `BudgetSampler` keeps
reasoning within its budget. `CloseCalls` counts the tokens that rounding could have decided, where drafts are allowed
to change last bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ngramspec.errors import GrammarError
from ngramspec.sampling.distribution import BadLogits, Distribution, point_mass
from ngramspec.sampling.reasoning_budget import ReasoningBudget, ReasoningCounter
from ngramspec.sampling.settings import Sampling
from ngramspec.tokens import Tokenizer


class GrammarState(Protocol):
    """A grammar at one position of its text. Tokens that it does not allow must not be accepted."""

    @property
    def vocabulary(self) -> Tokenizer: ...

    def allowed(self, ids: NDArray[np.integer]) -> NDArray[np.bool_]:
        """Return which of these tokens, shape (n,), may come next."""

    def allows(self, token: int) -> bool:
        """Return True if this token may come next."""

    def count_allowed(self, tokens: Sequence[int]) -> int:
        """Return how many of the tokens may come one after the other; the position stays."""

    def accept(self, token: int) -> None:
        """Advance by a token that is allowed."""

    def rollback(self, count: int) -> None:
        """Roll back the last `count` tokens."""

    def forced(self) -> bytes:
        """Return the text that must come next, as far as there is only one."""


class Sampler(Protocol):
    """A `Sampling` applied to one sequence, in the state that plain decoding would have at this position."""

    sampling: Sampling  # settings

    @property
    def bare(self) -> bool:
        """True if the sampler takes the most likely token of any row, whatever was accepted before."""

    @property
    def needs_tokens(self) -> bool:
        """True if the next draw depends on the tokens that were accepted."""

    @property
    def grammar(self) -> GrammarState | None:
        """Grammar at the current position; `None` allows any text."""

    def begin(self, prompt: Sequence[int]) -> None:
        """Start a sequence: the penalties look back on `prompt`, and the grammar is at its start."""

    def draw(self, logits: NDArray[np.float32], position: int, laws: list[Distribution] | None = None) -> int:
        """Return the next token: the most likely one in greedy decoding, otherwise the one that the seed draws.

        If the grammar forbids the token, another one is drawn from the tokens that it allows, as in llama.cpp.

        Args:
            logits: Logits of shape (n_vocab,).
            position: Index of the token in the sequence.
            laws: List to which the distribution of each of the one or two draws is added.

        Raises:
            BadLogits: the logits have nan or +inf, or none is finite.
            GrammarError: the grammar allows no token.
        """

    def distribution(self, logits: NDArray[np.float32]) -> Distribution:
        """Return the distribution of `draw`. Call one of the two per emitted token: samplers may be random."""

    def accept(self, token: int) -> None:
        """Add an emitted token to the sequence."""


@dataclass(frozen=True, slots=True)
class TextRules:
    """Rules of one text."""

    least: int = 0  # tokens that come before the text may end, by a token or a stop string
    ends: frozenset[int] = frozenset()  # tokens that end it, in addition to the vocabulary's own
    words: tuple[tuple[int, ...], ...] = ()  # token ids that may not follow each other in it, two or more each
    reasoning: ReasoningBudget | None = None  # maximum number of tokens in its reasoning; `None` means no limit


NO_RULES = TextRules()


class WrappedSampler:
    """Base class of samplers that change or observe the draws of another one, and leave the rest to it."""

    needs_tokens = True

    def __init__(self, sampler: Sampler) -> None:
        self.sampling: Sampling = sampler.sampling
        self._sampler = sampler

    @property
    def bare(self) -> bool:
        return False

    @property
    def grammar(self) -> GrammarState | None:
        return self._sampler.grammar

    def begin(self, prompt: Sequence[int]) -> None:
        self._sampler.begin(prompt)

    def accept(self, token: int) -> None:
        self._sampler.accept(token)

    def distribution(self, logits: NDArray[np.float32]) -> Distribution:
        return self._sampler.distribution(logits)


class Forbidding(WrappedSampler):
    """A sampler that does not see the logits of tokens that may not come now; `ends`: all tokens that end the text."""

    def __init__(self, sampler: Sampler, rules: TextRules, ends: Sequence[int]) -> None:
        super().__init__(sampler)
        self._ends, self._words = list(ends), rules.words
        self._early = rules.least
        self._longest = max(map(len, rules.words), default=1) - 1
        self._last: tuple[int, ...] = ()

    def accept(self, token: int) -> None:
        self._early -= 1
        self._last = (*self._last, token)[-self._longest :] if self._longest else ()
        super().accept(token)

    def draw(self, logits: NDArray[np.float32], position: int, laws: list[Distribution] | None = None) -> int:
        return self._sampler.draw(self._left(logits), position, laws)

    def distribution(self, logits: NDArray[np.float32]) -> Distribution:
        return self._sampler.distribution(self._left(logits))

    def _left(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """The logits without those of forbidden tokens."""
        forbidden = self._ends[:] if self._early > 0 else []
        forbidden += [last for *before, last in self._words if self._last[-len(before) :] == tuple(before)]
        if not forbidden:
            return logits
        left = logits.copy()
        left[forbidden] = -np.inf
        return left


class BudgetSampler(WrappedSampler):
    """A sampler that closes a block of reasoning when its budget is used up.

    The sampler inside chooses all tokens except the closing ones, which no setting can forbid.
    """

    def __init__(self, sampler: Sampler, budget: ReasoningBudget) -> None:
        super().__init__(sampler)
        self._budget = budget

    @property
    def closing(self) -> Sequence[int]:
        """Tokens that must come next to close reasoning; empty if any token may come."""
        return self._counter.closing

    def begin(self, prompt: Sequence[int]) -> None:
        self._sampler.begin(prompt)
        self._counter = ReasoningCounter(self._budget, self._can_close)

    def accept(self, token: int) -> None:
        self._sampler.accept(token)
        self._counter.accept(token)

    def draw(self, logits: NDArray[np.float32], position: int, laws: list[Distribution] | None = None) -> int:
        if not self.closing:
            return self._sampler.draw(logits, position, laws)
        if laws is not None:
            laws.append(point_mass(self.closing[0]))
        return self.closing[0]

    def distribution(self, logits: NDArray[np.float32]) -> Distribution:
        return point_mass(self.closing[0]) if self.closing else self._sampler.distribution(logits)

    def _can_close(self, tokens: Sequence[int]) -> bool:
        grammar = self._sampler.grammar
        return grammar is None or grammar.count_allowed(tokens) == len(tokens)


class CloseCalls(WrappedSampler):
    """A sampler that counts the tokens that rounding could have decided, and draws as the one inside it does.

    A pass over several tokens may give logits that differ in their last bits from single tokens', by no more than a
    measured bound. A token that stays the sampler's choice when its own logit falls by that much and all others rise by
    as much is the one that undrafted decoding would have taken after the same tokens; any other is a close call.
    Without filters of the distribution that is a proof; with filters it is the test that moves the token's own chances
    most.
    """

    def __init__(self, sampler: Sampler) -> None:
        super().__init__(sampler)
        self._bound = 0.0
        self._count = 0
        # These draw random numbers of their own, and a second draw would change the text.
        self._unrepeatable = self.sampling.selects or self.sampling.xtc_probability > 0

    @property
    def bare(self) -> bool:
        return self._bound == 0 and self._sampler.bare

    def arm(self, bound: float) -> None:
        """A pass was made whose logits may differ by so much, and what it left in the cache may move all later ones."""
        self._bound = bound

    def take(self) -> int:
        """Close calls since the last call."""
        count, self._count = self._count, 0
        return count

    def draw(self, logits: NDArray[np.float32], position: int, laws: list[Distribution] | None = None) -> int:
        token = self._sampler.draw(logits, position, laws)
        if self._bound > 0 and self._is_close(logits, token, position):
            self._count += 1
        return token

    def _is_close(self, logits: NDArray[np.float32], token: int, position: int) -> bool:
        """Return True if the draw changes when the token's logit falls by the bound and all others rise by it."""
        if self._unrepeatable:
            return True
        # Only differences between logits count, so the token's own logit can take the whole movement: 2 x the bound.
        # In its place, where that may be written to: a copy of the row takes longer than the draw.
        if not logits.flags.writeable:
            logits = logits.copy()
        logit = logits[token]
        logits[token] = logit - np.float32(2 * self._bound)
        try:
            return self._sampler.draw(logits, position) != token
        except (BadLogits, GrammarError):
            return True
        finally:
            logits[token] = logit
