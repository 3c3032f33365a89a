# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""`Answers`: what the target said behind refused tokens, as a source of candidates.

The rows after a refused token continue from one that does not stand, but what they hold most likely is the target's own
guess of what comes, and costs nothing but reading it:

- *in place*: at the same place of the text it is often right all the same, the more often the further it is from the
  fault (Jacobi iteration, as in lookahead decoding; Fu et al. 2024, arXiv 2402.02057);
- *pooled*: after the same 1 to 4 tokens anywhere it is what followed them, as an n-gram that was written down is.

Both enter candidates; and each candidate's log-odds are corrected by how such answers fared (`Correction`). Where
nothing was answered, nothing is changed. Constant time per answer and per position.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import cython

if cython.compiled:
    from cython.cimports.ngramspec.drafting.mixture.chance_mixer import Correction
    from cython.cimports.ngramspec.drafting.mixture.history import History, mix
else:
    from ngramspec.drafting.mixture.chance_mixer import Correction
    from ngramspec.drafting.mixture.history import History, mix

ORDERS = cython.declare(cython.int, 4)
ROOM = cython.declare(cython.ulonglong, 1 << 12)
"""Contexts in the pool, of each length; one that shares its place with another takes it."""
PLACES = cython.declare(cython.int, 64)
FACTS = cython.declare(cython.int, 6)
NOBODY = cython.declare(cython.int, -1)


class Answers:
    """Keeps answers of one text, and corrects the chances of candidates by them.

    Args:
        cells: how many candidates can wait for their outcome.

    Attributes:
        aligned: the answer in place at the position looked at last; -1: none.
        pooled: the answer behind the same context; -1: none.
    """

    def __init__(self, cells: int) -> None:
        self.correction = Correction(cells)  # what such answers are worth
        self._checks = array("Q", bytes(8 * ORDERS * ROOM))
        self._answers = array("i", bytes(4 * ORDERS * ROOM))
        self._runs = array("i", bytes(4 * ORDERS * ROOM))
        self._places = array("q", [NOBODY]) * PLACES
        self._tokens = array("i", bytes(4 * PLACES))
        self._depths = array("i", bytes(4 * PLACES))
        self._passes = array("q", bytes(8 * PLACES))
        self._behind = array("i", bytes(4 * PLACES * 3))
        self._heard = 0
        self.aligned = self.pooled = NOBODY

    def begin(self) -> None:
        """Forget the answers; what they were worth stays."""
        if self._heard == 0:
            return
        self._heard = 0
        for i in range(PLACES):
            self._places[i] = NOBODY
        for i in range(ORDERS * ROOM):
            self._runs[i] = 0

    def hear(self, h: History, start: cython.Py_ssize_t, answers: Sequence[int]) -> None:
        """Keep what the target said.

        Args:
            h: whose tokens from `start` on are the refused ones, and before it the text and the accepted ones.
            start: position of the first refused token.
            answers: after it, after the next, and so on.
        """
        t = h.tokens
        self._heard += 1
        for at, answer in enumerate(answers, start + 1):
            slot = at % PLACES
            self._places[slot] = at
            self._tokens[slot] = answer
            self._depths[slot] = cython.cast(cython.int, at - start)
            self._passes[slot] = self._heard
            for i in range(3):
                self._behind[slot * 3 + i] = t[at - 1 - i] if at > i else NOBODY
            state = 0
            for order in range(1, ORDERS + 1):
                if at < order:
                    break
                token = t[at - order]
                state = mix(state, token + 1)
                slot = (state & (ROOM - 1)) * ORDERS + order - 1
                if self._runs[slot] == 0 or self._checks[slot] != state or self._answers[slot] != answer:
                    self._runs[slot] = 0
                self._checks[slot] = state
                self._answers[slot] = answer
                self._runs[slot] = min(self._runs[slot] + 1, 3)

    def look(self, h: History, end: cython.Py_ssize_t) -> cython.bint:
        """Find the answers for position `end`; whether there is any."""
        self.aligned = self.pooled = NOBODY
        if self._heard == 0:
            return False
        t = h.tokens
        match: cython.int = 0
        slot: cython.Py_ssize_t = end % PLACES
        state: cython.ulonglong = 0
        self._in_place = self._in_pool = 0
        if self._places[slot] == end:
            self.aligned = self._tokens[slot]
            while match < 3 and end > match and self._behind[slot * 3 + match] == t[end - 1 - match]:
                match += 1
            depth = self._depths[slot]
            depth = depth - 1 if depth < 3 else 2 if depth < 5 else 3
            self._in_place = 1 + (depth * 2 + (self._passes[slot] != self._heard)) * 4 + match
        for order in range(1, ORDERS + 1):
            if end < order:
                break
            token = t[end - order]
            state = mix(state, token + 1)
            slot = (state & (ROOM - 1)) * ORDERS + order - 1
            if self._runs[slot] == 0 or self._checks[slot] != state:
                break
            self.pooled = self._answers[slot]
            self._in_pool = 1 + (order - 1) * 3 + self._runs[slot] - 1
        return self.aligned != NOBODY or self.pooled != NOBODY

    def estimate(
        self, cell: cython.Py_ssize_t, token: cython.int, p: cython.double, top: cython.int, length: cython.int
    ) -> cython.double:
        """What `p` means for a candidate in view of the answers found last.

        Args:
            cell, token, p: of the candidate.
            top: the longest context that it was seen behind, as a source; 0: none.
            length: the class of the longest match.
        """
        facts = self.correction.facts
        f: cython.Py_ssize_t = cell * FACTS
        aligned: cython.int = 0 if self.aligned == NOBODY else 2 if self.aligned == token else 1
        pooled: cython.int = 0 if self.pooled == NOBODY else 2 if self.pooled == token else 1
        agree: cython.int = (aligned == 2) + 2 * (pooled == 2)
        facts[f] = self._in_place * 2 + aligned // 2
        facts[f + 1] = 96 + self._in_pool * 2 + pooled // 2
        facts[f + 2] = 128 + (aligned * 3 + pooled) * 7 + top
        facts[f + 3] = 192 + length * 4 + agree
        facts[f + 4] = 256 + self._in_place * 4 + agree
        facts[f + 5] = 400 + self._in_pool * 4 + agree
        return self.correction.estimate(cell, p)
