# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""`ContextCounts`: which tokens followed the same context before, how often, and after how long a match.

At a position of a chain the candidates are the tokens seen there by any of these sources:

    0 to 3           contexts of 1 to 4 tokens in this request, the latest `LOOKED_AT` occurrences of each
    RECALLED         contexts of 3 tokens in memory (`TokenIndex`), as many of each index
    RECALLED_LONG    those among them where 5 tokens or more match
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import cython

if cython.compiled:
    from cython.cimports.ngramspec.drafting.mixture.history import History, mix
    from cython.cimports.ngramspec.drafting.token_index import TokenIndex, slot
else:
    from ngramspec.drafting.mixture.history import History, mix
    from ngramspec.drafting.token_index import TokenIndex, slot

ORDERS = cython.declare(cython.int, 4)
LOOKED_AT = cython.declare(cython.int, 8)  # occurrences of a context that count, the latest ones
STEPS = cython.declare(cython.int, 24)
"""Links of a chain followed to find them: contexts that share a hash take up some."""
LONGEST = cython.declare(cython.int, 32)  # matches are measured up to this length in tokens
CANDIDATES = cython.declare(cython.int, 10)
PLACES = cython.declare(cython.int, 32)  # places in memory that a chain continues from
SOURCES = cython.declare(cython.int, 6)
RECALLED = cython.declare(cython.int, 4)
RECALLED_LONG = cython.declare(cython.int, 5)
NOWHERE = cython.declare(cython.int, -1)


class ContextCounts:
    """Candidates by position, and what the sources say of them at the position gathered last.

    Args:
        positions: how many a chain has at most.
    """

    def __init__(self, positions: int) -> None:
        # int32 of shape (positions,): how many candidates each position has.
        self.found = array("i", bytes(4 * positions))
        # int32 of shape (positions, CANDIDATES): token ids of the candidates.
        self.tokens = array("i", bytes(4 * positions * CANDIDATES))
        self.seen = array("i", bytes(4 * SOURCES))  # int32 of shape (SOURCES,): how often each source saw the context
        # int32 of shape (CANDIDATES, SOURCES): how often each candidate followed the context, by source.
        self.count = array("i", bytes(4 * CANDIDATES * SOURCES))
        # int32 of the same shape: 1 where the candidate is what followed the context last.
        self.latest = array("i", bytes(4 * CANDIDATES * SOURCES))
        self._slots = array("q", bytes(8 * (ORDERS + 1)))
        self._indexes = array("i", bytes(4 * PLACES))
        self._places = array("q", bytes(8 * PLACES))
        self._matches = array("i", bytes(4 * PLACES))
        self._kept = 0
        self._recalled = 0
        self.best = NOWHERE  # the position in the request where the longest match continues
        self.best_token = -1  # what follows the longest match; -1 if there is none

    def clear(self, at: cython.Py_ssize_t) -> None:
        """No candidates at a position, and no sightings."""
        self.found[at] = 0
        self.best_token = -1
        for i in range(SOURCES):
            self.seen[i] = 0

    def enter(self, at: cython.Py_ssize_t, token: cython.int) -> cython.int:
        """The number of a candidate at a position, entered if it is new; -1 if there is no room."""
        n: cython.int = self.found[at]
        for i in range(n):
            if self.tokens[at * CANDIDATES + i] == token:
                return i
        if n == CANDIDATES:
            return -1
        self.tokens[at * CANDIDATES + n] = token
        for i in range(SOURCES):
            self.count[n * SOURCES + i] = 0
            self.latest[n * SOURCES + i] = 0
        self.found[at] = n + 1
        return n

    def follow(self, h: History, at: cython.Py_ssize_t, end: cython.Py_ssize_t) -> cython.int:
        """Gather what followed this context before in the request; the length of the longest match."""
        t = h.tokens
        longest: cython.int = 0
        top: cython.int = ORDERS if end >= ORDERS else cython.cast(cython.int, end)
        state: cython.ulonglong = 0
        for order in range(1, top + 1):
            token = t[end - order]
            state = mix(state, token + 1)
            self._slots[order] = h.chain(state, order)
        for order in range(top, 0, -1):
            e = h.heads[self._slots[order]]
            seen = 0
            steps = 0
            while e != NOWHERE and seen < LOOKED_AT and steps < STEPS:
                steps += 1
                same = True
                for i in range(1, order + 1):
                    if t[e - i] != t[end - i]:
                        same = False
                        break
                if same:
                    c = self.enter(at, t[e])
                    if c >= 0:
                        self.count[c * SOURCES + order - 1] += 1
                        if seen == 0:
                            self.latest[c * SOURCES + order - 1] = 1
                    match = order
                    if order == ORDERS:
                        while match < LONGEST and e > match and end > match and t[e - match - 1] == t[end - match - 1]:
                            match += 1
                    if match > longest:
                        longest = match
                        self.best = e
                        self.best_token = t[e]
                    seen += 1
                e = h.links[e * ORDERS + order - 1]
            self.seen[order - 1] = seen
        return longest

    def recall(
        self,
        h: History,
        memory: Sequence[TokenIndex],
        at: cython.Py_ssize_t,
        end: cython.Py_ssize_t,
        longest: cython.int,
    ) -> cython.int:
        """Gather what followed this context in memory; the length of the longest match.

        A position of a chain continues from the places that matched at the position before, as long as any still does.
        Their next tokens are close by in memory, whereas a new search would wait for a dozen places far apart.
        """
        t = h.tokens
        before: cython.int = self._kept if at > 0 else 0
        index: TokenIndex
        self._kept = 0
        self._recalled = 0
        if end < 3:
            return 0
        for i in range(before):
            index = memory[self._indexes[i]]
            e = self._places[i] + 1
            if e < index.size and index.tokens[e - 1] == t[end - 1]:
                match = self._matches[i]
                match = match + 1 if match < LONGEST else LONGEST
                self._recall_at(at, index.tokens[e], self._indexes[i], e, match, longest)
        if self._kept > 0:
            return self._recalled
        for number in range(len(memory) - 1, -1, -1):
            index = memory[number]
            if index.size == 0:
                continue
            m = index.tokens
            e = index.heads[slot(t[end - 3], t[end - 2], t[end - 1], len(index.heads) - 1)]
            seen = steps = 0
            while e > 2 and seen < LOOKED_AT and steps < STEPS:
                steps += 1
                match = 0
                while match < LONGEST and e > match and end > match and m[e - match - 1] == t[end - match - 1]:
                    match += 1
                if match >= 3:
                    seen += 1
                    self._recall_at(at, m[e], number, e, match, longest)
                e = index.links[e]
        return self._recalled

    def _recall_at(
        self,
        at: cython.Py_ssize_t,
        token: cython.int,
        number: cython.int,
        place: cython.Py_ssize_t,
        match: cython.int,
        longest: cython.int,
    ) -> None:
        """Count one place in memory, where `token` follows `match` equal tokens; called from the latest place back."""
        # A seam is nobody's guess; and with many indexes there may be no room left.
        if token < 0 or self._kept == PLACES:
            return
        self._indexes[self._kept] = number
        self._places[self._kept] = place
        self._matches[self._kept] = match
        self._kept += 1
        c: cython.int = self.enter(at, token)
        if c >= 0:
            self.count[c * SOURCES + RECALLED] += 1
            if self.seen[RECALLED] == 0:
                self.latest[c * SOURCES + RECALLED] = 1
            if match >= 5:
                self.count[c * SOURCES + RECALLED_LONG] += 1
                if self.seen[RECALLED_LONG] == 0:
                    self.latest[c * SOURCES + RECALLED_LONG] = 1
        self.seen[RECALLED] += 1
        if match >= 5:
            self.seen[RECALLED_LONG] += 1
        if match > self._recalled:
            self._recalled = match
            if match > longest + 4 or longest == 0:
                self.best_token = token
