# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""`RejectedRowPredictions`: the target's predictions after rejected tokens, as a source of candidates.

The logits after a rejected token continue from a wrong token. Even so, their most likely token is a guess of the target
itself, here called an answer. It costs only the time of reading the logits, and is used in two ways:

- *In place*: at the same position of the text it is often right, more often at a larger distance from the rejected
  token (Jacobi iteration, as in lookahead decoding; Fu et al. 2024, arXiv 2402.02057).
- *Pooled*: after the same 1 to 4 tokens anywhere, it is used like the continuation of an n-gram in the text.

Both are added to the candidates. Then the log-odds of every candidate are corrected by the previous accuracy of such
answers (`Correction`). A position without an answer is not changed.
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
POOL_SLOTS = cython.declare(cython.ulonglong, 1 << 12)
"""Number of slots for contexts of each length in the pool; a new context replaces another one in the same slot."""
PLACES = cython.declare(cython.int, 64)
FACTS = cython.declare(cython.int, 6)
NO_TOKEN = cython.declare(cython.int, -1)


class RejectedRowPredictions:
    """Stores the answers of one text, and corrects the probabilities of candidates by them."""

    def __init__(self, cells: int) -> None:
        self.correction = Correction(cells)  # correction by the accuracy of earlier answers
        self._checks = array("Q", bytes(8 * ORDERS * POOL_SLOTS))
        self._answers = array("i", bytes(4 * ORDERS * POOL_SLOTS))
        self._runs = array("i", bytes(4 * ORDERS * POOL_SLOTS))
        self._places = array("q", [NO_TOKEN]) * PLACES
        self._tokens = array("i", bytes(4 * PLACES))
        self._depths = array("i", bytes(4 * PLACES))
        self._call_numbers = array("q", bytes(8 * PLACES))
        self._tokens_before = array("i", bytes(4 * PLACES * 3))
        self._n_calls = 0
        # Answers at the position of the last `find_predictions`: in place, and after the same context.
        self.place_token = self.pool_token = NO_TOKEN

    def begin(self) -> None:
        """Drop the answers; the correction keeps its statistics."""
        self._n_calls = 0
        for i in range(PLACES):
            self._places[i] = NO_TOKEN
        for i in range(ORDERS * POOL_SLOTS):
            self._runs[i] = 0

    def record(self, h: History, start: cython.Py_ssize_t, answers: Sequence[int]) -> None:
        """Store the answers of a decode call after the rejected tokens, which `h` contains from position `start` on."""
        t = h.tokens
        self._n_calls += 1
        for at, answer in enumerate(answers, start + 1):
            slot = at % PLACES
            self._places[slot] = at
            self._tokens[slot] = answer
            self._depths[slot] = cython.cast(cython.int, at - start)
            self._call_numbers[slot] = self._n_calls
            for i in range(3):
                self._tokens_before[slot * 3 + i] = t[at - 1 - i] if at > i else NO_TOKEN
            state = 0
            for order in range(1, ORDERS + 1):
                if at < order:
                    break
                token = t[at - order]
                state = mix(state, token + 1)
                slot = (state & (POOL_SLOTS - 1)) * ORDERS + order - 1
                if self._checks[slot] != state or self._answers[slot] != answer:
                    self._runs[slot] = 0
                self._checks[slot] = state
                self._answers[slot] = answer
                self._runs[slot] = min(self._runs[slot] + 1, 3)

    def find_predictions(self, h: History, end: cython.Py_ssize_t) -> cython.bint:
        """Find the answers for position `end`; return True if there is one."""
        self.place_token = self.pool_token = NO_TOKEN
        if self._n_calls == 0:
            return False
        t = h.tokens
        match: cython.int = 0
        slot: cython.Py_ssize_t = end % PLACES
        state: cython.ulonglong = 0
        self._in_place = self._in_pool = 0
        if self._places[slot] == end:
            self.place_token = self._tokens[slot]
            while match < 3 and end > match and self._tokens_before[slot * 3 + match] == t[end - 1 - match]:
                match += 1
            depth = self._depths[slot]
            depth = depth - 1 if depth < 3 else 2 if depth < 5 else 3
            self._in_place = 1 + (depth * 2 + (self._call_numbers[slot] != self._n_calls)) * 4 + match
        for order in range(1, ORDERS + 1):
            if end < order:
                break
            token = t[end - order]
            state = mix(state, token + 1)
            slot = (state & (POOL_SLOTS - 1)) * ORDERS + order - 1
            if self._runs[slot] == 0 or self._checks[slot] != state:
                break
            self.pool_token = self._answers[slot]
            self._in_pool = 1 + (order - 1) * 3 + self._runs[slot] - 1
        return self.place_token != NO_TOKEN or self.pool_token != NO_TOKEN

    def estimate(
        self, cell: cython.Py_ssize_t, token: cython.int, p: cython.double, top: cython.int, length: cython.int
    ) -> cython.double:
        """Return the probability of a candidate, which was `p`, corrected by the last `find_predictions`.

        `top` is the number of the last source that saw the candidate, plus 1, or 0 if none did.
        """
        facts = self.correction.facts
        f: cython.Py_ssize_t = cell * FACTS
        place_agreement: cython.int = 0 if self.place_token == NO_TOKEN else 2 if self.place_token == token else 1
        pool_agreement: cython.int = 0 if self.pool_token == NO_TOKEN else 2 if self.pool_token == token else 1
        agree: cython.int = (place_agreement == 2) + 2 * (pool_agreement == 2)
        facts[f] = self._in_place * 2 + place_agreement // 2
        facts[f + 1] = 96 + self._in_pool * 2 + pool_agreement // 2
        facts[f + 2] = 128 + (place_agreement * 3 + pool_agreement) * 7 + top
        facts[f + 3] = 192 + length * 4 + agree
        facts[f + 4] = 256 + self._in_place * 4 + agree
        facts[f + 5] = 400 + self._in_pool * 4 + agree
        return self.correction.estimate(cell, p)
