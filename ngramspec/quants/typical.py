"""`typical_gain`: the speed-up from drafts on typical text by a cost curve, in a replay with a drafter by chance.

The drafter is a Markov chain with the acceptance of ngramspec's drafter in recorded conversations (`acceptance.json`).
"""

from __future__ import annotations

import json
import random
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from ngramspec.cost.times import PassTimes
from ngramspec.drafting.draft import Ask, Draft, Drafter
from ngramspec.instruments.replay.replay import Recording, Replay

RIGHT, WRONG = 1, 2  # token ids of a guess; the answer repeats the first

_PRIOR = json.loads(Path(__file__).with_name("acceptance.json").read_bytes())
_RATES: Sequence[float] = _PRIOR["rates"]  # acceptance in each class of guesses; no guess in the first class
_FIRST, _NEXT = ([list(accumulate(row)) for row in _PRIOR[name]] for name in ("after_wrong", "after_right"))
"""Cumulative probabilities of the class of a guess, by the class of the one before it."""


class TypicalDrafter(Drafter):
    """A drafter whose guesses have an estimated acceptance that depends on that of the guess before."""

    name = "typical"

    def __init__(self) -> None:
        self._random = random.Random(1)
        self._last = 0, False  # class of the last guess before the chain, and whether it was right
        self._chain: list[tuple[int, bool]] = []  # the same for the next guesses; class 0 means that there is no guess

    def begin(self, prompt: Sequence[int]) -> None:
        self._chain.clear()

    def propose(self, ask: Ask) -> Draft:
        while len(self._chain) < ask.limit and (not self._chain or self._chain[-1][0]):
            self._extend()
        guesses = [guess for guess in self._chain[: ask.limit] if guess[0]]
        tokens = tuple(RIGHT if right else WRONG for _, right in guesses)
        return Draft(tokens, acceptance_probs=tuple(_RATES[kind] for kind, _ in guesses), source=self.name)

    def accept(self, tokens: Sequence[int]) -> int:
        right = 0
        for _ in tokens:
            if not self._chain:
                self._extend()
            self._last = self._chain.pop(0)
            if self._last[1]:
                right += 1
            else:
                self._chain.clear()
        return right

    def _extend(self) -> None:
        """Add a guess to the chain, or class 0 for its end."""
        kind, was_right = self._chain[-1] if self._chain else self._last
        # The drafter continues a chain as if all of its guesses were right.
        rows = _NEXT if self._chain or was_right else _FIRST
        new = bisect_right(rows[kind][:-1], self._random.random())
        self._chain.append((new, self._random.random() < _RATES[new]))


def typical_gain(curve: PassTimes) -> float:
    """Return the speed with drafts / the speed of plain decoding, on typical text with these costs of a pass."""
    replay = Replay(TypicalDrafter(), curve=curve)
    return replay.run(Recording("typical", "1", [RIGHT], [RIGHT] * 2000)).speedup(curve)
