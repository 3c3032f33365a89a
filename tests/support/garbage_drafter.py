"""A user-defined drafter that breaks the rules of `Drafter.propose`."""

import math
import random

from ngramspec import Draft
from ngramspec.drafting.predictor import NGramDrafter


class Garbage(NGramDrafter):
    """N-gram drafter that proposes too many and unknown tokens, and drops sampled drafts that contain odd tokens."""

    wants_logits = True

    def __init__(self):
        super().__init__()
        self.random = random.Random(1)

    def propose(self, ask):
        draft, limit = super().propose(ask), ask.limit
        tokens = list(draft.tokens)
        if ask.choose is not None and any(token % 2 for token in tokens):
            tokens = []
        if self.random.random() < 0.3:
            tokens += self.random.choices([-1, 2, 10**9], k=2)
        return Draft(
            tokens + [1] * limit,
            q=({5: -3.0},) * 2,
            match_lengths=[-100] * self.random.randrange(3 * limit),
            acceptance_probs=self.random.choices([math.nan, -1.0, 7.0, 0.99], [1, 1, 4, 4], k=2 * limit),
        )

    def observe_logits(self, tokens, rows, n_accepted=0):
        try:
            rows[:] = 0
        except ValueError:  # The array is read-only, as it must be.
            return
        raise AssertionError("the logits of the target can be changed")

    def accept(self, tokens):
        super().accept(tokens)
        return 10**6
