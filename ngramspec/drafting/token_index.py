# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""`TokenIndex`: a text as token ids, and where each context of `ORDER` tokens was seen before.

Every position i is entered under a hash of the `ORDER` tokens before it; `links[i]` is the position entered there last
before i, so that a chain of links visits the occurrences of a context from the most recent back. Contexts that share a
hash share a chain, so walking it needs the tokens compared.

A negative token id is a seam between two texts (`SEAM`): it and the `ORDER` tokens after it are in no chain, and a copy
must stop at it.

Three arrays of 32-bit integers and nothing else, so that an index can be a memory-mapped file: 4 bytes a token
for the text, 4 for the links, and `heads`, a power of two of at most as many entries as there are tokens.
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

# Typed: a literal above 2^31 would make Python integers of whatever it meets.
SPREAD_A = cython.declare(cython.ulonglong, 0x9E3779B1)
SPREAD_B = cython.declare(cython.ulonglong, 0x85EBCA77)
SPREAD_C = cython.declare(cython.ulonglong, 0xC2B2AE3D)
STIR = cython.declare(cython.ulonglong, 0x2C1B3C6D)
WORD = cython.declare(cython.ulonglong, 0xFFFFFFFF)


def slot(a: cython.ulonglong, b: cython.ulonglong, c: cython.ulonglong, mask: cython.ulonglong) -> cython.ulonglong:
    """The chain of the context a, b, c (oldest first) in a table of `mask` + 1 chains."""
    h: cython.ulonglong = (a * SPREAD_A ^ b * SPREAD_B ^ c * SPREAD_C) & WORD
    h = ((h ^ (h >> 15)) * STIR) & WORD
    return (h ^ (h >> 13)) & mask


class TokenIndex:
    """A growing text and its chains."""

    def __init__(self) -> None:
        self.tokens = array("i", bytes(4 * SMALLEST))  # token ids; `size` of them count
        self.links = array("i", bytes(4 * SMALLEST))  # int32, one a token; `NOWHERE` ends a chain
        self.heads = array("i", [NOWHERE]) * SMALLEST  # int32, a power of two of them: the last position of each chain
        self.size = 0  # how many tokens the text has

    @classmethod
    def over(cls, tokens: Ints, links: Ints, heads: Ints, size: int) -> TokenIndex:
        """An index over arrays that are filled already, writable buffers of format "i", as those of a mapped file.

        They are used as they are, so they must be sound: every link is at least `NOWHERE` and less than its own
        position, every head at least `NOWHERE` and less than `size`. Adding to such an index writes into `heads`, and
        copies the rest once it is full. ValueError where lengths do not fit together.
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
        """An index of a whole text with `chains` (a power of two) heads; uses `tokens` as it is. O(len(tokens))."""
        size = len(tokens)
        index = cls.over(tokens, array("i", bytes(4 * size)), array("i", [NOWHERE]) * chains, size)
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
        """Room for twice as many tokens, and as many chains as there are tokens now, up to a power of two."""
        n = self.size
        room = max(n, SMALLEST)
        self.tokens = _enlarged(self.tokens, room)
        self.links = _enlarged(self.links, room)
        self.heads = array("i", [NOWHERE]) * (1 << (room - 1).bit_length())
        self._enter_all()


def _enlarged(ints: Ints, room: int) -> array[int]:
    return array("i", memoryview(ints).tobytes() + bytes(4 * room))
