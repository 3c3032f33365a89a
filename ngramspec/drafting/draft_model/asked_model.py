"""`DraftModel`: a draft model that is asked for single guesses, after tokens that others guessed.

model.open(price)                        # a draft begins
model.costs(2, price)                    # the time of two tokens and the guess behind them
rows = yield from model.reads([5, 9], 0) # the logits after the text, after 5, and after 5 9
model.guess(rows[-1], 2, choose)         # what the model would put there
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
"""Of what may be lost by a refusal, so much may go into questions: once all is lost others draft no more either."""


class DraftModel(ModelDrafter):
    """A `ModelDrafter` whose model can also be asked about a chain that others guess."""

    _caught_up = _mute = False
    _spent = 0.0
    _since = 0

    def begin(self, prompt: Sequence[int]) -> None:
        super().begin(prompt)
        self._since = 0

    def accept(self, tokens: Sequence[int]) -> int:
        self._since += 1
        return super().accept(tokens)

    def open(self, price: MarginalCost) -> None:
        self.prefill_seconds = self._spent = 0.0
        self._caught_up = self._mute = False
        if price.seconds and self._readable:
            self._time()

    def costs(self, guesses: int, price: MarginalCost) -> float:
        """The time of reading so many guesses before the model's own, in units of the price; see `entry` for the text.

        Infinite where the model cannot, and where a refusal would lose more than may be lost, catching up included.
        """
        room = min(self.model.n_ctx - len(self._text), self.model.max_batch - 1) - guesses
        if self._mute or not self._readable or room < 0:
            return math.inf
        if not price.seconds:
            return 0.0
        tokens = max(1, guesses if self._caught_up else guesses + 1)
        time_of = self._passes.share(tokens, self._texts(price)) / price.seconds
        behind = 0.0  # seconds of reading what came since the model was asked last
        if self._has_read and not self._caught_up:
            behind = self._passes.reading(len(self._text) - self._held) - self._passes.token
        lost = (self._spent + behind) / price.seconds + time_of
        return math.inf if lost > PART * price.loss_budget else time_of

    def again(self, price: MarginalCost) -> float:
        """The time of one guess more, in units of the price."""
        return self._passes.share(1, self._texts(price)) / price.seconds if price.seconds else 0.0

    def _texts(self, price: MarginalCost) -> int:
        """Among how many texts a pass is divided, if all ask. Where too few do, their requests are declined."""
        return price.texts if self._passes.joint else 1

    def entry(self, price: MarginalCost) -> float:
        """How much more asking first in a draft must be worth, in units of the price.

        That is the time of reading what the model has not read, over the passes made without it since, and those that
        are expected where it has read nothing yet: see `ModelDrafter` for the reason.
        """
        unread = len(self._text) - self._held
        if self._caught_up or unread <= 1 or not price.seconds:
            return 0.0
        reading = self._passes.reading(unread) - self._passes.token
        passes = self._since + self._left()
        return reading / price.seconds / passes if passes else math.inf

    def promises(self, limit: int, price: MarginalCost) -> float:
        """Return the expected gain, in tokens, of a draft that the model makes alone."""
        return self._payoff.gain(limit, price) - price.rate * self.entry(price) if price.seconds else math.inf

    def reads(
        self, guesses: Sequence[int], known: int, gain: float = math.inf
    ) -> Generator[PassRequest, Logits | None, Logits | None]:
        """Let the model read `guesses`, the next of the chain, in one pass; the first time in a draft maybe none.

        Args:
            known: how many tokens of the chain it has read that still stand; 0 the first time.
            gain: what that is expected to bring; see `PassRequest`.

        Returns:
            The logits after each of them; the first time also those after the text. None: it was declined.
        """
        first = not self._caught_up
        last = len(self._text) - 1
        if first:
            self._held = min(self._held, last)
        # Whether what it has not read of the text fits in a pass with the guesses.
        fits = len(self._text) - self._held + len(guesses) <= self.model.max_batch
        if first and self._held < last and not (self._has_read and fits):
            if (yield self._request(0, (), 1 + len(guesses), gain)) is None:
                return None
            self._read(last)
            gain = math.inf
        held = self._held if first else len(self._text) + known
        text = self._text[held:] if first else []
        # Where rolling back needs a copy of a state, it is that behind the text.
        copies = first and self.model.replays
        along = () if copies else guesses
        rows = yield self._request(held, [*text, *along], first + len(along), gain)
        if rows is None:
            return None
        self._spent += self._passes.share(max(1, first + len(guesses)), self._passes.texts)
        if first:
            self._has_read = self._caught_up = True
            self._since = 0
            self._held = len(self._text)
        if copies:
            rows = rows.copy()
            self.model.checkpoint()
            if guesses:
                rows = np.concatenate([rows, (yield self._request(self._held, guesses, len(guesses)))])
        return rows

    def _request(self, keep: int, tokens: Sequence[int], rows: int, gain: float = math.inf) -> PassRequest:
        return PassRequest(self._passes, self.model, keep, tokens, rows, gain)

    def guess(self, row: Logits, offset: int, choose: Chooser | None) -> ModelGuess | None:
        """The guess by the logits at a place in the chain; None: none, and the model is not asked again this time."""
        guess = super().guess(row, offset, choose)
        self._mute = guess is None
        return guess
