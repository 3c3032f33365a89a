# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""`Pointers`: places in the text that may be copied now, followed from one token to the next.

It takes some tokens to see if the text copies a place that has the same tokens before it. So a few places are stored
and followed, also across edits (`History.near`). New places are the latest ones after the last two tokens, and after
the last four. Each place predicts the token that is stored there.

The log-odds of each candidate are corrected (`Correction`) by the accuracy of such places. The correction depends on
the hits and misses of each place, and on the places that predict this candidate. A position without a prediction is not
changed.
"""

from __future__ import annotations

from array import array

import cython

if cython.compiled:
    from cython.cimports.ngramspec.drafting.mixture.chance_mixer import Correction
    from cython.cimports.ngramspec.drafting.mixture.history import History, doublings, mix
else:
    from ngramspec.drafting.mixture.chance_mixer import Correction
    from ngramspec.drafting.mixture.history import History, doublings, mix

POINTERS = cython.declare(cython.int, 3)
ORDERS = cython.declare(cython.int, 4)
FACTS = cython.declare(cython.int, 6)
FADE = cython.declare(cython.double, 0.9)  # factor for older confirmations at each new token
PATIENCE = cython.declare(cython.int, 6)  # maximum number of wrong predictions in a row before a place is dropped
STEPS = cython.declare(cython.int, 8)
"""Maximum number of links followed to find a context; contexts with the same hash are in the same chain."""
NOWHERE = cython.declare(cython.int, -1)
NO_TOKEN = cython.declare(cython.int, -1)


class Pointers:
    """Stores places of one text, and corrects the probabilities of candidates by their predictions."""

    def __init__(self, cells: int) -> None:
        self.correction = Correction(cells)  # correction by the accuracy of places
        # int32 of shape (POINTERS,): prediction of each place at the position of the last `find_predictions`.
        self.tokens = array("i", [NO_TOKEN]) * POINTERS
        self._kinds = array("i", bytes(4 * POINTERS))
        # The first half contains the places of the text, the strongest first. The second half follows them along a
        # chain.
        self._places = array("q", [NOWHERE]) * (2 * POINTERS)
        self._confirmations = array("d", bytes(8 * 2 * POINTERS))
        self._misses = array("i", bytes(4 * 2 * POINTERS))

    def begin(self) -> None:
        """Drop the places; the correction keeps its statistics."""
        for i in range(POINTERS):
            self._places[i] = NOWHERE

    def find_predictions(self, h: History, end: cython.Py_ssize_t, at: cython.Py_ssize_t) -> cython.bint:
        """Find the predictions of the places at position `end`, number `at` of a chain; return True if there is one.

        Along a chain, a place is followed only while its predictions equal the guesses.
        """
        has_prediction: cython.bint = False
        for i in range(POINTERS):
            k = POINTERS + i
            self.tokens[i] = NO_TOKEN
            self._kinds[i] = 0
            if at == 0:
                self._places[k] = h.near(end, self._places[i])
                self._confirmations[k] = self._confirmations[i]
                self._misses[k] = self._misses[i]
            place = self._places[k]
            if place == NOWHERE:
                continue
            if at > 0 and (place >= h.size or h.tokens[place - 1] != h.tokens[end - 1]):
                self._places[k] = NOWHERE
                continue
            has_prediction = True
            self.tokens[i] = h.tokens[place]
            n_confirmed = cython.cast(cython.Py_ssize_t, self._confirmations[k])
            self._kinds[i] = 1 + doublings(n_confirmed, 4) * 4 + min(self._misses[k], 3)
        return has_prediction

    def advance(self, token: cython.int) -> None:
        """Advance the places of the chain by its next guess, `token`, after `find_predictions`."""
        for i in range(POINTERS):
            self._follow(POINTERS + i, token, self.tokens[i])

    def add(self, h: History, token: cython.int) -> None:
        """Advance the places of the text by its next token; called before the token is added to `h`."""
        state: cython.ulonglong = 0
        for i in range(POINTERS):
            place = self._places[i] = h.near(h.size, self._places[i])
            if place != NOWHERE:
                self._follow(i, token, h.tokens[place])
        self._order()
        for order in range(1, ORDERS + 1):
            if h.size < order:
                break
            token_before = h.tokens[h.size - order]
            state = mix(state, token_before + 1)
            if order % 2 == 0:
                self._start_following(h, self._latest(h, state, order), token)

    def _follow(self, i: cython.int, token: cython.int, prediction: cython.int) -> None:
        """Advance place `i`, whose prediction was `prediction`, by one token."""
        if self._places[i] == NOWHERE:
            return
        self._places[i] += 1
        self._confirmations[i] *= FADE
        if token == prediction:
            self._confirmations[i] += 1.0
            self._misses[i] = 0
        elif self._misses[i] < PATIENCE:
            self._misses[i] += 1
        else:
            self._places[i] = NOWHERE

    def _latest(self, h: History, state: cython.ulonglong, order: cython.int) -> cython.Py_ssize_t:
        """Return the latest place after the last `order` tokens, whose hash is `state`; NOWHERE after `STEPS` links."""
        steps: cython.int = 0
        place: cython.Py_ssize_t = h.heads[h.chain(state, order)]
        while place >= order and steps < STEPS:
            steps += 1
            i = 1
            while i <= order and h.tokens[place - i] == h.tokens[h.size - i]:
                i += 1
            if i > order:
                return place
            place = h.links[place * ORDERS + order - 1]
        return NOWHERE

    def _start_following(self, h: History, place: cython.Py_ssize_t, token: cython.int) -> None:
        """Store a place instead of the weakest one, unless the weakest was confirmed recently."""
        if place == NOWHERE:
            return
        for i in range(POINTERS):
            if self._places[i] == place + 1:
                return
        i = POINTERS - 1
        if self._places[i] != NOWHERE and self._confirmations[i] >= 1.0:
            return
        self._places[i] = place
        self._confirmations[i] = 0.0
        self._misses[i] = 0
        self._follow(i, token, h.tokens[place])
        self._order()

    def _order(self) -> None:
        """Sort the places by their confirmations, and remove duplicates."""
        for i in range(1, POINTERS):
            for k in range(i):
                if self._places[i] == self._places[k]:
                    self._places[k if self._is_stronger(i, k) else i] = NOWHERE
        for i in range(1, POINTERS):
            for k in range(i, 0, -1):
                if not self._is_stronger(k, k - 1):
                    break
                self._places[k], self._places[k - 1] = self._places[k - 1], self._places[k]
                self._confirmations[k], self._confirmations[k - 1] = self._confirmations[k - 1], self._confirmations[k]
                self._misses[k], self._misses[k - 1] = self._misses[k - 1], self._misses[k]

    def _is_stronger(self, i: cython.int, k: cython.int) -> cython.bint:
        if self._places[i] == NOWHERE or self._places[k] == NOWHERE:
            return self._places[i] > self._places[k]
        if self._confirmations[i] != self._confirmations[k]:
            return self._confirmations[i] > self._confirmations[k]
        if self._misses[i] != self._misses[k]:
            return self._misses[i] < self._misses[k]
        return self._places[i] > self._places[k]

    def estimate(
        self, cell: cython.Py_ssize_t, token: cython.int, p: cython.double, length: cython.int
    ) -> cython.double:
        """Return the probability of a candidate, which was `p`, corrected by the last `find_predictions`."""
        facts = self.correction.facts
        f: cython.Py_ssize_t = cell * FACTS
        agree: cython.int = 0
        n_same: cython.int = 0
        n_other: cython.int = 0
        for i in range(POINTERS):
            facts[f + i] = i * 64 + self._kinds[i] * 2 + (self.tokens[i] == token)
            if self.tokens[i] == token:
                agree |= 1 << i
                n_same += 1
            elif self.tokens[i] != NO_TOKEN:
                n_other += 1
        facts[f + 3] = 192 + n_same * 4 + n_other
        facts[f + 4] = 208 + length * 8 + agree
        facts[f + 5] = 304 + self._kinds[0] * 8 + agree
        return self.correction.estimate(cell, p)
