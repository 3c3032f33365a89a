"""`NGramDrafter`: the n-gram predictor as a drafter, with an estimate of each guess's acceptance."""

from __future__ import annotations

from collections.abc import Sequence

from ngramspec.draft import Choose, Draft, Outlook
from ngramspec.drafting.acceptance import AcceptanceModel, Cell, cell
from ngramspec.predictor import NGramPredictor

HOPELESS = 0.05
"""A draft ends when the probability that all of it is accepted has fallen below this: no curve pays for more."""

FEW = 4
"""Below this many tokens, one by one is faster than a batch."""


class NGramDrafter:
    """Drafts with an `NGramPredictor` and learns from every proposal, sent to the target or not.

    A proposal that the policy cut is compared with what was emitted all the same: that tells as much about
    the guesses as verifying them would have.
    """

    name = "ngram"

    def __init__(self, predictor: NGramPredictor | None = None) -> None:
        self.predictor = NGramPredictor() if predictor is None else predictor
        self._unread: list[int] = []
        self._model = AcceptanceModel()
        self._pending: tuple[tuple[int, ...], list[Cell]] = ((), [])
        self._streak = 0

    def begin(self, prompt: Sequence[int]) -> None:
        self.predictor.reset()
        self.predictor.update_batch(prompt)
        self._unread.clear()
        self._pending = ((), [])
        self._streak = 0

    def propose(
        self, limit: int, choose: Choose | None = None, *, blind: bool = False, outlook: Outlook | None = None
    ) -> Draft:
        # Read in lumps: a policy that is not asking for drafts should not pay for each token.
        if len(self._unread) < FEW:
            for token in self._unread:
                self.predictor.update(token)
        else:
            self.predictor.update_batch(self._unread)
        self._unread.clear()
        cells: list[Cell] = []
        acceptance: list[float] = []
        reach = 1.0

        def judge(match: int, count: int, support: int) -> bool:
            nonlocal reach
            cells.append(cell(match, count / support, support, self._streak + len(cells)))
            acceptance.append(self._model.estimate(cells[-1]))
            reach *= acceptance[-1]
            return reach >= HOPELESS and (outlook is None or reach >= outlook.worth * outlook.slopes[len(cells)])

        draft = self.predictor.predict(limit, choose, judge)
        self._pending = (draft.tokens, cells)
        if blind and draft.tokens:
            q, match, support = draft.q[0], draft.match[0], draft.support[0]
            p = self._model.estimate(cell(match, max(q.values()), support, self._streak))
            acceptance = [p] * limit
        return Draft(draft.tokens, draft.q, draft.match, draft.support, tuple(acceptance), self.name)

    def accept(self, tokens: Sequence[int]) -> int:
        self._unread += tokens
        guesses, cells = self._pending
        if not guesses:
            return 0
        self._pending = ((), [])
        hits = 0
        for guess, key, token in zip(guesses, cells, tokens, strict=False):
            right = guess == token
            self._model.learn(key, right)
            self._streak = self._streak + 1 if right else 0
            if not right:
                break
            hits += 1
        return hits
