"""`NGramDrafter`: the n-gram predictor as a drafter, with an estimate of each guess's acceptance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ngramspec.draft import NO_DRAFT, Choose, Draft
from ngramspec.drafting.acceptance import AcceptanceModel, Cell, cell
from ngramspec.predictor import NGramPredictor

FIRST_LOOK = 4
"""Tokens to look up before deciding whether more are worth the microseconds."""

HOPELESS = 0.1
"""Probability of a whole first look below which a longer draft is not looked up."""


class NGramDrafter:
    """Drafts with an `NGramPredictor` and learns from every proposal, sent to the target or not.

    A proposal that the policy cut is compared with what was emitted all the same: that tells as much about
    the guesses as verifying them would have.
    """

    name = "ngram"

    def __init__(self, predictor: NGramPredictor | None = None) -> None:
        self.predictor = predictor or NGramPredictor()
        self._model = AcceptanceModel()
        self._pending: tuple[tuple[int, ...], list[Cell]] = ((), [])
        self._streak = 0

    def begin(self, prompt: Sequence[int]) -> None:
        self.predictor.reset()
        self.predictor.update_batch(prompt)
        self._pending = ((), [])
        self._streak = 0

    def propose(self, limit: int, choose: Choose | None = None, *, blind: bool = False) -> Draft:
        draft = self.predictor.predict(min(limit, FIRST_LOOK), choose)
        if not draft.tokens:
            self._pending = ((), [])
            return NO_DRAFT
        cells, acceptance = self._judge(draft)
        if len(draft) == FIRST_LOOK < limit:
            whole = 1.0
            for p in acceptance:
                whole *= p
            if whole >= HOPELESS:
                draft = self.predictor.predict(limit, choose)
                cells, acceptance = self._judge(draft)
        self._pending = (draft.tokens, cells)
        if blind:
            first = max(draft.q[0].values())
            p = self._model.estimate(cell(draft.match[0], first, draft.support[0], self._streak))
            acceptance = [p] * limit
        return replace(draft, acceptance=tuple(acceptance))

    def _judge(self, draft: Draft) -> tuple[list[Cell], list[float]]:
        streak, estimate = self._streak, self._model.estimate
        cells = [
            cell(match, q[token], support, streak + i)
            for i, (token, q, match, support) in enumerate(
                zip(draft.tokens, draft.q, draft.match, draft.support, strict=True)
            )
        ]
        return cells, [estimate(key) for key in cells]

    def accept(self, tokens: Sequence[int]) -> None:
        guesses, cells = self._pending
        self._pending = ((), [])
        for guess, key, token in zip(guesses, cells, tokens, strict=False):
            right = guess == token
            self._model.learn(key, right)
            self._streak = self._streak + 1 if right else 0
            if not right:
                break
        self.predictor.update_batch(tokens)
