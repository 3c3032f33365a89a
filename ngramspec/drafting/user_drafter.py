"""`UserDrafter`: a drafter from a user's file (`--drafter FILE.py:Class`), which cannot change the text."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from ngramspec.drafting.draft import Ask, Draft, Drafter
from ngramspec.sampling.settings import Sampling
from ngramspec.tokens import Tokenizer, common_prefix
from ngramspec.user_class import UserCodeError, construct, load_class, user_code

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class UserDrafter(Drafter):
    """Calls a user's drafter, removes token ids that a verifier cannot process, and records q of the drawn tokens.

    Only `propose` raises the errors of the user's code: when it is called, no emitted token can be lost.
    """

    def __init__(self, name: str, vocabulary: Tokenizer | None = None) -> None:
        self.name, self.vocabulary = name, vocabulary
        self._n_vocab = None if vocabulary is None else vocabulary.n_vocab
        self._user = construct(name, load_class(name, Drafter), {})
        self._user.vocabulary = vocabulary
        self._tokens: tuple[int, ...] = ()  # tokens of the last proposal
        self._error: UserCodeError | None = None

    @property
    def wants_logits(self) -> bool:  # type: ignore[override]
        """True if the user's drafter reads logits."""
        return self._user.wants_logits

    @property
    def prediction(self) -> Sequence[int] | None:
        """Text that the next answer is likely to copy; `None` if the user's drafter does not support one."""
        return self._user.prediction

    @prediction.setter
    def prediction(self, tokens: Sequence[int] | None) -> None:
        if self._user.prediction is not None:
            self._user.prediction = tokens

    def clone_for_sequence(self) -> UserDrafter:
        return UserDrafter(self.name, self.vocabulary)

    def begin(self, prompt: Sequence[int]) -> None:
        self._tokens, self._error = (), None
        self._call(self._user.begin, list(prompt))

    def propose(self, ask: Ask) -> Draft:
        self._tokens, limit, choose = (), ask.limit, ask.choose
        if self._error is not None:
            raise self._error
        picks: list[int] = []
        q: list[Mapping[int, float]] = []

        def pick(_: int, weights: Mapping[int, float]) -> int:
            assert choose is not None
            shares = self._shares(weights)
            q.append(shares)
            picks.append(choose(len(picks), shares))
            return picks[-1]

        with user_code(self.name):
            draft = self._user.propose(
                Ask(limit, None if choose is None else pick, fixed_length=ask.fixed_length, price=ask.price)
            )
            if not isinstance(draft, Draft):
                raise UserCodeError(f"{self.name}: propose must return a Draft, not {type(draft).__name__}")
            # A drawn token stays in the draft: if it could be removed, q would not be its distribution.
            tokens = tuple(picks[:limit]) or self._usable(draft.tokens, limit)
        if choose is not None and not picks:
            # A token that was not drawn has probability 1, because it does not depend on random numbers.
            q = [{token: 1.0} for token in tokens]
        self._tokens = tokens

        def per_token(numbers: Sequence[Any]) -> tuple[Any, ...]:
            return tuple(numbers[: len(tokens)]) if len(numbers) >= len(tokens) else ()

        # With a fixed length, the caller estimates from earlier outcomes, without using the drawn tokens.
        chances = () if ask.fixed_length else per_token(draft.acceptance_probs)
        lengths, counts = per_token(draft.match_lengths), per_token(draft.context_counts)
        return Draft(tokens, tuple(q[:limit]), lengths, counts, chances, str(draft.source or self.name))

    def accept(self, tokens: Sequence[int]) -> int:
        guesses, self._tokens = self._tokens, ()
        self._call(self._user.accept, tuple(tokens))
        return common_prefix(guesses, tokens)

    def observe_logits(self, tokens: Sequence[int], rows: NDArray[np.float32], n_accepted: int = 0) -> None:
        rows = rows.view()
        rows.flags.writeable = False
        self._call(self._user.observe_logits, tuple(tokens), rows, n_accepted)

    def set_sampling(self, sampling: Sampling) -> None:
        self._call(self._user.set_sampling, sampling)

    def _call(self, call: Callable[..., object], *arguments: Any) -> None:
        """Call a method of the user's drafter; `propose` later raises its error."""
        if self._error is None:
            try:
                with user_code(self.name):
                    call(*arguments)
            except UserCodeError as error:
                self._error = error

    def _usable(self, tokens: Iterable[int], limit: int) -> tuple[int, ...]:
        """Return the tokens before the first one outside the vocabulary, at most `limit`."""
        try:
            ids = [operator.index(token) for token in tokens]
        except TypeError as error:
            raise UserCodeError(f"{self.name}: propose must return a Draft of token ids: {error}") from error
        return tuple(takewhile(self._is_known, ids[:limit]))

    def _shares(self, weights: Mapping[int, float]) -> dict[int, float]:
        """Return positive weights as probabilities."""
        valid = {token: weight for token, weight in weights.items() if weight > 0 and self._is_known(token)}
        total = sum(valid.values())
        if not 0 < total < math.inf:
            raise ValueError("choose requires positive weights of tokens in the vocabulary")
        return {token: weight / total for token, weight in valid.items()}

    def _is_known(self, token: int) -> bool:
        return token >= 0 and (self._n_vocab is None or token < self._n_vocab)
