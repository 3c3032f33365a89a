"""The interface of a sampler, which `ngramspec.llama` implements, and samplers that wrap another one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ngramspec import leaves
from ngramspec.data import GrammarError
from ngramspec.sampling.distribution import BadLogits, Distribution
from ngramspec.sampling.settings import Sampling, TextRules


class Sampler(Protocol):
    """A `Sampling` applied to one sequence, in the state that plain decoding would have at this position."""

    sampling: Sampling  # settings

    @property
    def is_argmax(self) -> bool:
        """True if the sampler takes the most likely token of any row, whatever was accepted before."""

    @property
    def needs_tokens(self) -> bool:
        """True if the next draw depends on the tokens that were accepted."""

    @property
    def grammar(self) -> leaves.Grammar | None:
        """Grammar at the current position; `None` allows any text."""

    def begin(self, prompt: Sequence[int]) -> None:
        """Start a sequence after a prompt, which the penalties include, with the grammar at its start."""

    def draw(self, logits: NDArray[np.float32], position: int, distributions: list[Distribution] | None = None) -> int:
        """Return the next token: the most likely one in greedy decoding, otherwise the one that the seed draws.

        If the grammar forbids the token, another one is drawn from the tokens that it allows, as in llama.cpp; if it
        allows none, that is a GrammarError. Invalid logits are a BadLogits (see `top_token`). The distribution of each
        of the one or two draws is added to `distributions`.
        """

    def distribution(self, logits: NDArray[np.float32]) -> Distribution:
        """Return the distribution of `draw`. Call one of the two per emitted token: samplers may be random."""

    def accept(self, token: int) -> None:
        """Add an emitted token to the sequence."""


class WrappedSampler:
    """Base class of samplers that change or observe the draws of another one, and leave the rest to it."""

    needs_tokens = True

    def __init__(self, sampler: Sampler) -> None:
        self.sampling: Sampling = sampler.sampling
        self._sampler = sampler

    @property
    def is_argmax(self) -> bool:
        return False

    @property
    def grammar(self) -> leaves.Grammar | None:
        return self._sampler.grammar

    def begin(self, prompt: Sequence[int]) -> None:
        self._sampler.begin(prompt)

    def accept(self, token: int) -> None:
        self._sampler.accept(token)

    def distribution(self, logits: NDArray[np.float32]) -> Distribution:
        return self._sampler.distribution(logits)


class TokenBanSampler(WrappedSampler):
    """A sampler that sets the logits of forbidden tokens to -inf; `stop_tokens` are all tokens that end the text."""

    def __init__(self, sampler: Sampler, rules: TextRules, stop_tokens: Sequence[int]) -> None:
        super().__init__(sampler)
        self._stop_tokens, self._bad_words = list(stop_tokens), rules.bad_words
        self._min_tokens_left = rules.min_tokens
        self._longest = max(map(len, rules.bad_words), default=1) - 1
        self._last: tuple[int, ...] = ()

    def accept(self, token: int) -> None:
        self._min_tokens_left -= 1
        self._last = (*self._last, token)[-self._longest :] if self._longest else ()
        super().accept(token)

    def draw(self, logits: NDArray[np.float32], position: int, distributions: list[Distribution] | None = None) -> int:
        return self._sampler.draw(self._ban_tokens(logits), position, distributions)

    def distribution(self, logits: NDArray[np.float32]) -> Distribution:
        return self._sampler.distribution(self._ban_tokens(logits))

    def _ban_tokens(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the logits, in which forbidden tokens have -inf."""
        forbidden = self._stop_tokens[:] if self._min_tokens_left > 0 else []
        forbidden += [last for *before, last in self._bad_words if self._last[-len(before) :] == tuple(before)]
        if not forbidden:
            return logits
        remaining = logits.copy()
        remaining[forbidden] = -np.inf
        return remaining


class RecordingSampler(WrappedSampler):
    """A sampler that keeps the distribution of every token that it draws, after all samplers."""

    def __init__(self, sampler: Sampler) -> None:
        super().__init__(sampler)
        self._distributions: list[Distribution] = []

    def pop_distributions(self) -> list[Distribution]:
        """Return the distributions since the last call, one for each token."""
        distributions, self._distributions = self._distributions, []
        return distributions

    def distribution(self, logits: NDArray[np.float32]) -> Distribution:
        distribution = self._sampler.distribution(logits)
        self._distributions.append(distribution)
        return distribution

    def draw(self, logits: NDArray[np.float32], position: int, distributions: list[Distribution] | None = None) -> int:
        distributions = [] if distributions is None else distributions
        token = self._sampler.draw(logits, position, distributions)
        self._distributions.append(distributions[-1])
        return token


class CloseCalls(WrappedSampler):
    """A sampler that draws from another one, and counts the tokens that rounding could have decided.

    The logits of a pass over several tokens may differ from those of single tokens in their last bits, by no more than
    a measured bound. The test lowers the logit of the drawn token by the bound and raises all others by it. If the
    sampler still draws the token, plain decoding would have drawn it after the same tokens; otherwise it is a close
    call. Without filters of the distribution this is a proof. With filters it is the test that changes the token's own
    probability most.
    """

    def __init__(self, sampler: Sampler) -> None:
        super().__init__(sampler)
        self._bound = 0.0
        self._count = 0
        # These samplers draw separate random numbers, so a second draw would change the text.
        self._unrepeatable = self.sampling.samples_internally or self.sampling.xtc_probability > 0

    @property
    def is_argmax(self) -> bool:
        return self._bound == 0 and self._sampler.is_argmax

    def arm(self, bound: float) -> None:
        """Set the bound after a pass whose logits may differ; its cache entries may change all later logits too."""
        self._bound = bound

    def take(self) -> int:
        """Return the number of close calls since the last `take`."""
        count, self._count = self._count, 0
        return count

    def draw(self, logits: NDArray[np.float32], position: int, distributions: list[Distribution] | None = None) -> int:
        token = self._sampler.draw(logits, position, distributions)
        if self._bound > 0 and self._is_close(logits, token, position):
            self._count += 1
        return token

    def _is_close(self, logits: NDArray[np.float32], token: int, position: int) -> bool:
        """Return True if the draw changes when the token's logit falls by the bound and all others rise by it."""
        if self._unrepeatable:
            return True
        # Only differences between logits matter, so it is enough to lower the token's own logit by 2 x the bound. The
        # row is changed in place if it is writable, because a copy takes longer than the draw.
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
