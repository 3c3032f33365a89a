"""`DraftModel`: a draft model that makes single guesses, after tokens that other drafters guessed.

model.open(price)                        # start a draft
model.pass_cost(2, price)                    # time of reading two tokens and guessing the next one
rows = yield from model.read_chain([5, 9], 0) # logits after the text, after 5, and after 5 9
model.guess(rows[-1], 2, choose)         # the model's guess at that position
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence

import numpy as np

from ngramspec.backend import Logits
from ngramspec.drafting.draft import Chooser, MarginalCost
from ngramspec.drafting.draft_model.model import ModelDrafter, ModelGuess
from ngramspec.drafting.draft_model.passes import PassRequest

PART = 1 / 2
"""Part of the loss budget that calls of the model may use; if all of it were lost, n-grams could not draft either."""


class DraftModel(ModelDrafter):
    """A `ModelDrafter` whose model can also be called for a chain that other drafters guess."""

    _caught_up = _is_disabled = False
    _spent_seconds = 0.0
    _calls_since_pass = 0

    def begin(self, prompt: Sequence[int]) -> None:
        super().begin(prompt)
        self._calls_since_pass = 0

    def accept(self, tokens: Sequence[int]) -> int:
        self._calls_since_pass += 1
        return super().accept(tokens)

    def open(self, price: MarginalCost) -> None:
        self.prefill_seconds = self._spent_seconds = 0.0
        self._caught_up = self._is_disabled = False
        if price.seconds and self._readable:
            self._time()

    def pass_cost(self, guesses: int, price: MarginalCost) -> float:
        """Return the time of reading `guesses` tokens and guessing the next one, in units of the price.

        It is infinite if the model cannot do so. It is also infinite if a rejection would lose more than the budget
        allows, including the time of reading the text. `catch_up_cost` charges for reading the text.
        """
        room = min(self.model.n_ctx - len(self._text), self.model.max_batch - 1) - guesses
        if self._is_disabled or not self._readable or room < 0:
            return math.inf
        if not price.seconds:
            return 0.0
        tokens = max(1, guesses if self._caught_up else guesses + 1)
        time_of = self._passes.seconds_per_sequence(tokens, self._n_sharing(price)) / price.seconds
        behind = 0.0  # seconds of reading the tokens since the last call of the model
        if self._has_read and not self._caught_up:
            behind = self._passes.read_seconds(len(self._text) - self._n_cached) - self._passes.token_seconds
        loss = (self._spent_seconds + behind) / price.seconds + time_of
        return math.inf if loss > PART * price.loss_budget else time_of

    def extra_pass_cost(self, price: MarginalCost) -> float:
        """Return the time of one more guess, in units of the price."""
        return self._passes.seconds_per_sequence(1, self._n_sharing(price)) / price.seconds if price.seconds else 0.0

    def _n_sharing(self, price: MarginalCost) -> int:
        """Return the number of sequences that share a pass if all request one; requests of too few are declined."""
        return price.texts if self._passes.joint else 1

    def catch_up_cost(self, price: MarginalCost) -> float:
        """Return the additional cost of the first call in a draft, in units of the price.

        It is the time of reading the unread tokens, divided by the number of decode calls since the last call of the
        model. If the model has read nothing yet, the expected later decode calls count too; see `ModelDrafter` for the
        reason.
        """
        unread = len(self._text) - self._n_cached
        if self._caught_up or unread <= 1 or not price.seconds:
            return 0.0
        reading = self._passes.read_seconds(unread) - self._passes.token_seconds
        passes = self._calls_since_pass + self._remaining_calls()
        return reading / price.seconds / passes if passes else math.inf

    def estimate_gain(self, limit: int, price: MarginalCost) -> float:
        """Return the expected gain, in tokens, of a draft that the model makes alone."""
        return self._payoff.gain(limit, price) - price.rate * self.catch_up_cost(price) if price.seconds else math.inf

    def read_chain(
        self, guesses: Sequence[int], n_read: int, gain: float = math.inf
    ) -> Generator[PassRequest, Logits | None, Logits | None]:
        """Request a pass of the model over the next guesses of the chain, which may be empty only in the first call.

        Args:
            guesses: Tokens of the chain to read.
            n_read: Number of tokens of the chain that the model has read and that are still valid; 0 in the first call.
            gain: Expected gain; see `PassRequest`.

        Returns:
            The logits after each guess, and in the first call also those after the text; `None` if it was declined.
        """
        first = not self._caught_up
        last = len(self._text) - 1
        if first:
            self._n_cached = min(self._n_cached, last)
        # True if the unread tokens of the text and the guesses fit into one pass.
        fits = len(self._text) - self._n_cached + len(guesses) <= self.model.max_batch
        if first and self._n_cached < last and not (self._has_read and fits):
            if (yield self._request(0, (), 1 + len(guesses), gain)) is None:
                return None
            self._read(last)
            gain = math.inf
        start = self._n_cached if first else len(self._text) + n_read
        text = self._text[start:] if first else []
        # If a rollback requires a copy of the state, the copy is made after the text.
        copies = first and self.model.replays
        along = () if copies else guesses
        rows = yield self._request(start, [*text, *along], first + len(along), gain)
        if rows is None:
            return None
        self._spent_seconds += self._passes.seconds_per_sequence(max(1, first + len(guesses)), self._passes.texts)
        if first:
            self._has_read = self._caught_up = True
            self._calls_since_pass = 0
            self._n_cached = len(self._text)
        if copies:
            rows = rows.copy()
            self.model.checkpoint()
            if guesses:
                rows = np.concatenate([rows, (yield self._request(self._n_cached, guesses, len(guesses)))])
        return rows

    def _request(self, keep: int, tokens: Sequence[int], rows: int, gain: float = math.inf) -> PassRequest:
        return PassRequest(self._passes, self.model, keep, tokens, rows, gain)

    def guess(self, row: Logits, offset: int, choose: Chooser | None) -> ModelGuess | None:
        """Return the guess from the logits at a position; `None` also disables the model for the rest of the draft."""
        guess = super().guess(row, offset, choose)
        self._is_disabled = guess is None
        return guess
