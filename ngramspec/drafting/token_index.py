# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""`TokenIndex`: a text as token ids, and the positions at which each context of `ORDER` tokens occurred.

Every position i is stored under a hash of the `ORDER` tokens before it, and `links[i]` is the previous position with
the same hash. So a chain of links visits the occurrences of a context, the most recent first. Contexts with the same
hash share a chain, so a search must compare the tokens.

A negative token id is a seam between two texts (`SEAM`). The seam and the `ORDER` tokens after it are in no chain, and
a copy must end before it.

An index consists only of three arrays of 32-bit integers, so that it can be a memory-mapped file. The text and the
links take 4 bytes per token each. The length of `heads` is a power of two, and at most the number of tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import cython

Ints = Any  # a buffer of 32-bit integers: array("i"), or a memoryview of format "i"

ORDER = 3
NOWHERE = -1
SEAM = -1
SMALLEST = 1024

# These are typed, because an untyped literal above 2^31 would turn the other operands into Python integers.
SPREAD_A = cython.declare(cython.ulonglong, 0x9E3779B1)
SPREAD_B = cython.declare(cython.ulonglong, 0x85EBCA77)
SPREAD_C = cython.declare(cython.ulonglong, 0xC2B2AE3D)
STIR = cython.declare(cython.ulonglong, 0x2C1B3C6D)
WORD = cython.declare(cython.ulonglong, 0xFFFFFFFF)


def slot(a: cython.ulonglong, b: cython.ulonglong, c: cython.ulonglong, mask: cython.ulonglong) -> cython.ulonglong:
    """Return the chain of the context a, b, c (oldest first) in a table of `mask` + 1 chains."""
    h: cython.ulonglong = (a * SPREAD_A ^ b * SPREAD_B ^ c * SPREAD_C) & WORD
    h = ((h ^ (h >> 15)) * STIR) & WORD
    return (h ^ (h >> 13)) & mask


class TokenIndex:
    """A growing text and its chains."""

    def __init__(self) -> None:
        self.tokens = array("i", bytes(4 * SMALLEST))  # token ids; only the first `size` are tokens of the text
        self.links = array("i", bytes(4 * SMALLEST))  # int32, one per token; `NOWHERE` ends a chain
        self.heads = array("i", [NOWHERE]) * SMALLEST  # int32: last position of each chain; a power of two
        self.size = 0  # number of tokens in the text

    @classmethod
    def from_arrays(cls, tokens: Ints, links: Ints, heads: Ints, size: int) -> TokenIndex:
        """Return an index over existing arrays, such as those of a memory-mapped file.

        The arrays are writable buffers of format "i". They are used without a copy or a check, so they must be valid:
        every link is at least `NOWHERE` and less than its position, and every head is at least `NOWHERE` and less than
        `size`. Adding a token writes into `heads`, and copies the other arrays when they are full. A ValueError means
        that the lengths do not match.
        """
        if not 0 <= size <= len(tokens) or len(links) != len(tokens):
            raise ValueError(f"{size} of {len(tokens)} tokens with {len(links)} links are not a valid index")
        if len(heads) < 1 or len(heads) & (len(heads) - 1):
            raise ValueError(f"the number of heads must be a power of two, got {len(heads)}")
        index = cls()
        index.tokens, index.links, index.heads, index.size = tokens, links, heads, size
        return index

    @classmethod
    def build(cls, tokens: Ints, chains: int) -> TokenIndex:
        """Return an index of a whole text, used without a copy, with `chains` heads, a power of two. O(len(tokens))."""
        size = len(tokens)
        index = cls.from_arrays(tokens, array("i", bytes(4 * size)), array("i", [NOWHERE]) * chains, size)
        index._enter_all()
        return index

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens at the end."""
        for token in tokens:
            self.append(token)

    def append(self, token: cython.int) -> None:
        """Add a token at the end. Amortised O(1)."""
        n: cython.Py_ssize_t = self.size
        if n == len(self.tokens):
            self._grow()
        self.tokens[n] = token
        self.size = n + 1
        self._enter(n)

    def _enter(self, n: cython.Py_ssize_t) -> None:
        t = self.tokens
        if n < ORDER or t[n] < 0 or t[n - 1] < 0 or t[n - 2] < 0 or t[n - 3] < 0:
            self.links[n] = NOWHERE
            return
        h: cython.Py_ssize_t = slot(t[n - 3], t[n - 2], t[n - 1], len(self.heads) - 1)
        self.links[n] = self.heads[h]
        self.heads[h] = n

    def _enter_all(self) -> None:
        n: cython.Py_ssize_t
        for n in range(self.size):
            self._enter(n)

    def _grow(self) -> None:
        """Double the capacity, and use as many chains as there are tokens now, rounded up to a power of two."""
        n = self.size
        room = max(n, SMALLEST)
        self.tokens = _enlarge(self.tokens, room)
        self.links = _enlarge(self.links, room)
        self.heads = array("i", [NOWHERE]) * (1 << (room - 1).bit_length())
        self._enter_all()


def _enlarge(ints: Ints, room: int) -> array[int]:
    return array("i", memoryview(ints).tobytes() + bytes(4 * room))
