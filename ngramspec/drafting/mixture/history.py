# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""`History`: the tokens of one request, and where each context of 1 to `ORDERS` tokens was seen before.

A chain of links visits the occurrences of a context from the most recent back. Contexts that share a hash share a
chain, so walking it needs the tokens compared. Adding a token takes amortised O(1), and 4 bytes plus 8 for each order.
"""

from __future__ import annotations

from array import array

import cython

ORDERS = cython.declare(cython.int, 4)
NOWHERE = cython.declare(cython.int, -1)
REACH = cython.declare(cython.int, 25)
STEPS = cython.declare(cython.int, 32)
STEP = cython.declare(cython.int, 8)
# Typed: a literal above 2^31 would make Python integers of whatever it meets.
SPREAD = cython.declare(cython.ulonglong, 0x85EBCA6B)
STIR = cython.declare(cython.ulonglong, 0x1E3779B1)
WORD = cython.declare(cython.ulonglong, (1 << 59) - 1)

SMALLEST = 4096  # tokens there is room for at first: a power of two, as ever after


def mix(state: cython.ulonglong, value: cython.ulonglong) -> cython.ulonglong:
    """One step of a hash over small integers; the low bits of the result are the best mixed. Below 2^59."""
    state = ((state ^ (value * SPREAD)) * STIR) & WORD
    return state ^ (state >> 29)


def doublings(n: cython.Py_ssize_t, most: cython.int) -> cython.int:
    """The class of a count: 0, 1, 2 to 3, 4 to 7, ... and what is left in class `most`."""
    k: cython.int = 0
    while n > 0 and k < most:
        n >>= 1
        k += 1
    return k


class History:
    """A growing text and its chains, with room for 64 guesses after its `size` tokens: context like any other."""

    def __init__(self) -> None:
        self.tokens = array("i", bytes(4 * (SMALLEST + 64)))  # int32; the first `size` count
        self.links = array("i", bytes(4 * SMALLEST * ORDERS))
        self.heads = array("i", [NOWHERE]) * (SMALLEST * ORDERS)
        self.room = SMALLEST
        self.size = 0  # how many tokens there are

    def clear(self) -> None:
        """Forget everything, and keep the room."""
        self.size = 0
        for i in range(self.room * ORDERS):
            self.heads[i] = NOWHERE

    def add(self, token: cython.int) -> None:
        """Add a token at the end."""
        n: cython.Py_ssize_t = self.size
        if n == self.room:
            self._grow()
        self.tokens[n] = token
        self.size = n + 1
        self._enter(n)

    def chain(self, state: cython.ulonglong, order: cython.Py_ssize_t) -> cython.Py_ssize_t:
        """Where in `heads` the chain of a context begins; `state` is the hash of its tokens, the latest first."""
        return (state & (self.room - 1)) * ORDERS + order - 1

    def _enter(self, n: cython.Py_ssize_t) -> None:
        state: cython.ulonglong = 0
        for order in range(1, ORDERS + 1):
            if n < order:
                self.links[n * ORDERS + order - 1] = NOWHERE
                continue
            token = self.tokens[n - order]
            state = mix(state, token + 1)
            slot = self.chain(state, order)
            self.links[n * ORDERS + order - 1] = self.heads[slot]
            self.heads[slot] = n

    def _grow(self) -> None:
        i: cython.Py_ssize_t
        n: cython.Py_ssize_t = self.size
        # Through bytes: an array made from a memoryview is filled one Python integer at a time.
        self.tokens = array("i", memoryview(self.tokens).tobytes() + bytes(4 * n))
        self.links = array("i", memoryview(self.links).tobytes() + bytes(4 * n * ORDERS))
        self.room = 2 * n
        self.heads = array("i", [NOWHERE]) * (self.room * ORDERS)
        for i in range(n):
            self._enter(i)

    def near(self, end: cython.Py_ssize_t, place: cython.Py_ssize_t) -> cython.Py_ssize_t:
        """The position around `place` from which a copy is continued at `end`, so that it continues after an edit.

        The first of these that exists, with its number in `how`:

            0       `place`, if the token before it is the token before `end`
            1       the nearest position less than `REACH` away that follows the same two tokens as `end` does, of the
                    latest `STEPS` in their chain
            2, 3    the nearest at most `STEP` away that follows the same one token: later than `place`, or earlier
            4       `place`

        `NOWHERE`, with 4 in `how`, if `place` is below 1 or not below `size`.
        """
        t = self.tokens
        steps: cython.int = 0
        best: cython.Py_ssize_t = NOWHERE
        distance: cython.Py_ssize_t = REACH
        self.how = 4
        if place < 1 or place >= self.size:
            return NOWHERE
        if t[place - 1] == t[end - 1]:
            self.how = 0
            return place
        if end >= 2:
            last = t[end - 1]
            before = t[end - 2]
            e = self.heads[self.chain(mix(mix(0, last + 1), before + 1), 2)]
            while e != NOWHERE and steps < STEPS:
                steps += 1
                d = e - place if e > place else place - e
                if d < distance and e >= 2 and t[e - 1] == t[end - 1] and t[e - 2] == t[end - 2]:
                    distance = d
                    best = e
                e = self.links[e * ORDERS + 1]
            if best != NOWHERE:
                self.how = 1
                return best
        for d in range(1, STEP + 1):
            if place + d < self.size and t[place + d - 1] == t[end - 1]:
                self.how = 2
                return place + d
            if place - d >= 1 and t[place - d - 1] == t[end - 1]:
                self.how = 3
                return place - d
        return place
