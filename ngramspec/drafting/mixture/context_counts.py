# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""`ContextCounts`: the tokens that followed the same context before, with their counts and the length of the match.

At a position of a chain, the candidates are the tokens that any of these sources has seen there:

    0 to 3           contexts of 1 to 4 tokens in this request: the latest `MAX_OCCURRENCES` occurrences of each
    MEMORY         contexts of 3 tokens in memory (`TokenIndex`): the latest `MAX_OCCURRENCES` occurrences in each index
    MEMORY_LONG    the occurrences in memory at which 5 tokens or more match

Example: the request is the tokens 7 5 6 8 9 5 6 2 3 5 6, and the next position is gathered. Source 0 looks for the last
token, 6; source 1 for 5 6; source 2 for 3 5 6, which did not occur before. Both 6 and 5 6 were followed by 2, before
that by 8. So the candidates are 2 and 8, in this order, each seen once by sources 0 and 1. The longest match has 2
tokens; `best_place` is the position 7 of token 2, and `best_token` is 2. Only contexts of 4 tokens are measured beyond
their length, up to `LONGEST` tokens. `ChanceMixer` turns these counts into probabilities.
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
MAX_OCCURRENCES = cython.declare(cython.int, 8)  # number of latest occurrences of a context that are counted
STEPS = cython.declare(cython.int, 24)
"""Maximum number of links followed to find them; contexts with the same hash are in the same chain."""
LONGEST = cython.declare(cython.int, 32)  # maximum length of a measured match, in tokens
CANDIDATES = cython.declare(cython.int, 10)
PLACES = cython.declare(cython.int, 32)  # maximum number of places in memory that a chain continues from
SOURCES = cython.declare(cython.int, 6)
MEMORY = cython.declare(cython.int, 4)
MEMORY_LONG = cython.declare(cython.int, 5)
NOWHERE = cython.declare(cython.int, -1)


class ContextCounts:
    """Candidates by position of a chain, and their counts in each source at the position gathered last."""

    def __init__(self, positions: int) -> None:
        # int32 of shape (positions,): number of candidates at each position.
        self.n_candidates = array("i", bytes(4 * positions))
        # int32 of shape (positions, CANDIDATES): token ids of the candidates.
        self.tokens = array("i", bytes(4 * positions * CANDIDATES))
        # int32 of shape (SOURCES,): occurrences of the context by source.
        self.occurrences = array("i", bytes(4 * SOURCES))
        # int32 of shape (CANDIDATES, SOURCES): number of times that each candidate followed the context, by source.
        self.count = array("i", bytes(4 * CANDIDATES * SOURCES))
        # int32 of the same shape: 1 if the candidate is the token that followed the context last.
        self.latest = array("i", bytes(4 * CANDIDATES * SOURCES))
        self._slots = array("q", bytes(8 * (ORDERS + 1)))
        self._indexes = array("i", bytes(4 * PLACES))
        self._places = array("q", bytes(8 * PLACES))
        self._matches = array("i", bytes(4 * PLACES))
        self._n_places = 0
        self._memory_match = 0
        self.best_place = NOWHERE  # position in the request at which the longest match continues
        self.best_token = -1  # token that follows the longest match; -1 without a match

    def clear(self, at: cython.Py_ssize_t) -> None:
        """Remove the candidates at a position and reset the occurrences."""
        self.n_candidates[at] = 0
        self.best_token = -1
        for i in range(SOURCES):
            self.occurrences[i] = 0

    def add_candidate(self, at: cython.Py_ssize_t, token: cython.int) -> cython.int:
        """Return the number of a candidate at a position, which is added if it is new; -1 if there is no room."""
        n: cython.int = self.n_candidates[at]
        for i in range(n):
            if self.tokens[at * CANDIDATES + i] == token:
                return i
        if n == CANDIDATES:
            return -1
        self.tokens[at * CANDIDATES + n] = token
        for i in range(SOURCES):
            self.count[n * SOURCES + i] = 0
            self.latest[n * SOURCES + i] = 0
        self.n_candidates[at] = n + 1
        return n

    def count_in_request(self, h: History, at: cython.Py_ssize_t, end: cython.Py_ssize_t) -> cython.int:
        """Gather the tokens that followed this context before in the request; return the longest match length."""
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
            n_seen = 0
            steps = 0
            while e != NOWHERE and n_seen < MAX_OCCURRENCES and steps < STEPS:
                steps += 1
                same = True
                for i in range(1, order + 1):
                    if t[e - i] != t[end - i]:
                        same = False
                        break
                if same:
                    c = self.add_candidate(at, t[e])
                    if c >= 0:
                        self.count[c * SOURCES + order - 1] += 1
                        if n_seen == 0:
                            self.latest[c * SOURCES + order - 1] = 1
                    match = order
                    if order == ORDERS:
                        while match < LONGEST and e > match and end > match and t[e - match - 1] == t[end - match - 1]:
                            match += 1
                    if match > longest:
                        longest = match
                        self.best_place = e
                        self.best_token = t[e]
                    n_seen += 1
                e = h.links[e * ORDERS + order - 1]
            self.occurrences[order - 1] = n_seen
        return longest

    def count_in_memory(
        self,
        h: History,
        memory: Sequence[TokenIndex],
        at: cython.Py_ssize_t,
        end: cython.Py_ssize_t,
        longest: cython.int,
    ) -> cython.int:
        """Gather the tokens that followed this context in memory; return the longest match length.

        A position of a chain continues from the places that matched at the previous position, while any still matches.
        Their next tokens are adjacent in RAM. A new search would wait for a dozen distant accesses. `longest` is the
        longest match length in the request.
        """
        t = h.tokens
        before: cython.int = self._n_places if at > 0 else 0
        index: TokenIndex
        self._n_places = 0
        self._memory_match = 0
        if end < 3:
            return 0
        for i in range(before):
            index = memory[self._indexes[i]]
            e = self._places[i] + 1
            if e < index.size and index.tokens[e - 1] == t[end - 1]:
                match = self._matches[i]
                match = match + 1 if match < LONGEST else LONGEST
                self._count_place(at, index.tokens[e], self._indexes[i], e, match, longest)
        if self._n_places > 0:
            return self._memory_match
        for number in range(len(memory) - 1, -1, -1):
            index = memory[number]
            if index.size == 0:
                continue
            m = index.tokens
            e = index.heads[slot(t[end - 3], t[end - 2], t[end - 1], len(index.heads) - 1)]
            n_seen = steps = 0
            while e > 2 and n_seen < MAX_OCCURRENCES and steps < STEPS:
                steps += 1
                match = 0
                while match < LONGEST and e > match and end > match and m[e - match - 1] == t[end - match - 1]:
                    match += 1
                if match >= 3:
                    n_seen += 1
                    self._count_place(at, m[e], number, e, match, longest)
                e = index.links[e]
        return self._memory_match

    def _count_place(
        self,
        at: cython.Py_ssize_t,
        token: cython.int,
        number: cython.int,
        place: cython.Py_ssize_t,
        match: cython.int,
        longest: cython.int,
    ) -> None:
        """Count a place in memory at which `token` follows `match` equal tokens; the latest place must come first."""
        # A seam between texts is not a token. With many indexes there may be no room left.
        if token < 0 or self._n_places == PLACES:
            return
        self._indexes[self._n_places] = number
        self._places[self._n_places] = place
        self._matches[self._n_places] = match
        self._n_places += 1
        c: cython.int = self.add_candidate(at, token)
        if c >= 0:
            self.count[c * SOURCES + MEMORY] += 1
            if self.occurrences[MEMORY] == 0:
                self.latest[c * SOURCES + MEMORY] = 1
            if match >= 5:
                self.count[c * SOURCES + MEMORY_LONG] += 1
                if self.occurrences[MEMORY_LONG] == 0:
                    self.latest[c * SOURCES + MEMORY_LONG] = 1
        self.occurrences[MEMORY] += 1
        if match >= 5:
            self.occurrences[MEMORY_LONG] += 1
        if match > self._memory_match:
            self._memory_match = match
            if match > longest + 4 or longest == 0:
                self.best_token = token
