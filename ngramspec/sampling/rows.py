# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Compiled loops over rows of logits: the largest logits, the most likely tokens, and draws from candidates.

Without a C compiler, the numpy functions of `distribution` do the same. Both emit the same tokens: where the logarithms
of the C library could decide otherwise than numpy's, numpy decides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import cython
import numpy as np

from ngramspec.sampling.distribution import NoTokenLeft, gumbel_one, gumbel_pick, largest, softmax, top_token

if cython.compiled:
    from cython.cimports.libc.math import log
else:
    from math import log

CANDIDATE = np.dtype([("id", "<i4"), ("logit", "<f4"), ("p", "<f4")])
"""llama.cpp's `llama_token_data`."""

NO_TOKEN = cython.declare(cython.int, -1)
BLOCK = cython.declare(cython.Py_ssize_t, 64)  # logits that are compared at once
INFINITY = cython.declare(cython.double, float("inf"))
MAX_NOISE = cython.declare(cython.double, 36.8)  # above the Gumbel noise of any token
MARGIN = cython.declare(cython.double, 1e-9)  # above the rounding errors of two scores

# Of SplitMix64, see `distribution`; typed, because a literal above 2^31 would make Python integers.
GOLDEN = cython.declare(cython.ulonglong, 0x9E3779B97F4A7C15)
MIX_A = cython.declare(cython.ulonglong, 0xBF58476D1CE4E5B9)
MIX_B = cython.declare(cython.ulonglong, 0x94D049BB133111EB)


class Candidates:
    """Tokens with logits, in memory that llama.cpp's samplers use; each call replaces the tokens."""

    def __init__(self, n_vocab: int) -> None:
        self.data = np.empty(n_vocab, CANDIDATE)
        self._ids, self._logits, self._p = (self.data[name] for name in ("id", "logit", "p"))

    def take_all(self, row: Any) -> cython.Py_ssize_t:
        """Copy a row of logits of shape (n,), float32, in the order of its ids; return n.

        A BadLogits means that a logit is nan or +inf, or none is finite.
        """
        n: cython.Py_ssize_t = row.shape[0]
        if n > self._ids.shape[0]:
            raise ValueError(f"the row has {n} logits for a vocabulary of {self._ids.shape[0]} tokens")
        best: cython.float = -INFINITY
        if cython.compiled:
            for i in range(n):
                x: cython.float = row[i]
                if not x <= best:
                    best = x
                    if not x < INFINITY:
                        break
                self._ids[i] = i
                self._logits[i] = x
                self._p[i] = 0.0
        else:
            self._ids[:n], self._logits[:n], self._p[:n] = np.arange(n), row, 0
            best = row.max()
        if not -INFINITY < best < INFINITY:
            _reject(row)
        return n

    def take_largest(self, row: Any, count: cython.Py_ssize_t) -> cython.Py_ssize_t:
        """Copy the `count` largest logits of a row, the lowest ids among equals, as `take_all` does."""
        n: cython.Py_ssize_t = row.shape[0]
        if n > self._ids.shape[0]:
            raise ValueError(f"the row has {n} logits for a vocabulary of {self._ids.shape[0]} tokens")
        count = min(count, n)
        if not cython.compiled:
            if not np.isfinite(row.max()):
                _reject(row)
            ids = largest(row, count)
            self._ids[:count], self._logits[:count], self._p[:count] = ids, row[ids], 0
            return count
        # `_p` is a heap of the largest logits so far, the smallest of them first.
        best: cython.float = -INFINITY
        for i in range(count):
            x: cython.float = row[i]
            if not x < INFINITY:
                _reject(row)
            self._ids[i] = i
            self._logits[i] = self._p[i] = x
            best = max(best, x)
        for i in range(count // 2):
            self._sift(count // 2 - 1 - i, count)
        size: cython.Py_ssize_t = count
        at: cython.Py_ssize_t = _find_above(row, count, self._p[0])
        while at < n:
            x = row[at]
            if not x < INFINITY:
                _reject(row)
            self._ids[size] = at
            self._logits[size] = x
            size += 1
            best = max(best, x)
            self._p[0] = x
            self._sift(0, count)
            at = _find_above(row, at + 1, self._p[0])
        if not best > -INFINITY:
            _reject(row)
        # Later tokens may have displaced some of these from the largest.
        floor: cython.float = self._p[0]
        ties: cython.Py_ssize_t = 0
        for i in range(count):
            ties += self._p[i] == floor
        n = 0
        for i in range(size):
            x = self._logits[i]
            if x > floor or (x == floor and ties > 0):
                ties -= x == floor
                self._ids[n] = self._ids[i]
                self._logits[n] = x
                self._p[n] = 0.0
                n += 1
        return n

    def move_to_end(self, count: cython.Py_ssize_t, ids: Any, row: Any) -> cython.Py_ssize_t:
        """Move tokens to the end of the `count` tokens so far, or add them there; return their number.

        The tokens so far and `ids` (int32) are ascending; `row` contains all logits, shape (n,), float32.
        """
        n: cython.Py_ssize_t = 0
        k: cython.Py_ssize_t = 0
        for i in range(count):
            while k < ids.shape[0] and ids[k] < self._ids[i]:
                k += 1
            if k == ids.shape[0] or ids[k] != self._ids[i]:
                self._ids[n] = self._ids[i]
                self._logits[n] = self._logits[i]
                n += 1
        for i in range(ids.shape[0]):
            self._ids[n] = ids[i]
            self._logits[n] = row[ids[i]]
            self._p[n] = 0.0
            n += 1
        return n

    def _sift(self, at: cython.Py_ssize_t, count: cython.Py_ssize_t) -> None:
        """Move an entry of the heap down to its place."""
        x: cython.float = self._p[at]
        child: cython.Py_ssize_t = 2 * at + 1
        while child < count:
            if child + 1 < count and self._p[child + 1] < self._p[child]:
                child += 1
            if not self._p[child] < x:
                break
            self._p[at] = self._p[child]
            at = child
            child = 2 * at + 1
        self._p[at] = x

    def best(self, first: cython.Py_ssize_t, count: cython.Py_ssize_t) -> cython.int:
        """Return the most likely one of `count` tokens from index `first`, the lowest id among equals.

        A NoTokenLeft means that a logit is nan or +inf, or none is finite.
        """
        top: cython.float = -INFINITY
        token: cython.int = NO_TOKEN
        if cython.compiled:
            for i in range(first, first + count):
                x: cython.float = self._logits[i]
                if not x < INFINITY:
                    token = NO_TOKEN
                    break
                if x > top or (x == top and self._ids[i] < token):
                    top = x
                    token = self._ids[i]
        else:
            logits = self._logits[first : first + count]
            if np.isfinite(logits.max()):
                token = int(self._ids[first : first + count][logits == logits.max()].min())
        if token < 0:
            raise NoTokenLeft("no token is left to sample: the sampling settings move all logits out of range")
        return token

    def draw(
        self,
        first: cython.Py_ssize_t,
        count: cython.Py_ssize_t,
        seed: cython.ulonglong,
        position: cython.longlong,
        attempt: cython.ulonglong,
    ) -> cython.int:
        """Draw one of the tokens of `best`, as `gumbel_pick` does from their softmax."""
        token: cython.int = self.best(first, count)
        if count == 1:
            return token
        if not cython.compiled:
            return self._draw_with_numpy(first, count, seed, position, attempt)
        state: cython.ulonglong = _out(_out(0, seed), position)
        top: cython.double = -INFINITY
        for i in range(first, first + count):
            top = max(top, self._logits[i])
        # A constant in all scores changes nothing, so these lack the logarithm of the softmax's sum.
        score: cython.double = -INFINITY
        second: cython.double = -INFINITY
        for i in range(first, first + count):
            gap: cython.double = self._logits[i] - top
            need: cython.double = score - gap - MARGIN
            if need > MAX_NOISE:
                continue
            bits: cython.ulonglong = _out(state, self._ids[i] + (attempt << 32)) >> 12
            u: cython.double = (bits + 0.5) * 2.0**-52
            # The noise is less than -log(1 - u), and the sum below is less than exp(need).
            if need > 0 and (1 - u) * (1 + need * (1 + need / 2 * (1 + need / 3 * (1 + need / 4)))) > 1:
                continue
            x: cython.double = gap - log(-log(u))
            if x > score:
                second = score
                score = x
                token = self._ids[i]
            elif x > second:
                second = x
        if score - second < MARGIN:
            return self._draw_with_numpy(first, count, seed, position, attempt)
        return token

    def _draw_with_numpy(self, first: int, count: int, seed: int, position: int, attempt: int) -> int:
        candidates = self.data[first : first + count]
        return gumbel_pick(seed, position, softmax(candidates["id"], candidates["logit"]), attempt)


class CoupledChoice:
    """A `Chooser` that draws the tokens of a draft, which begins at `position`, with the noise of the verifier."""

    def __init__(self, seed: int, position: int) -> None:
        self._seed, self._position = seed, position

    def __call__(self, offset: cython.longlong, weights: Mapping[int, float]) -> Any:
        choice: cython.longlong = NO_TOKEN
        best: cython.double = -INFINITY
        state: cython.ulonglong = 0
        if cython.compiled:
            state = _out(_out(0, self._seed), self._position + offset)
        for token, weight in weights.items():
            noise: cython.double = 0
            if not cython.compiled:
                noise = gumbel_one(self._seed, self._position + offset, token)
            else:
                noise = -log(-log(((_out(state, token) >> 12) + 0.5) * 2.0**-52))
            score: cython.double = log(weight) + noise
            if score > best:
                best = score
                choice = token
        return choice


def append_most_likely(rows: Any, draft: Sequence[int], tokens: Any) -> cython.bint:
    """Append the most likely token of each row to a list, up to the first one that is not the draft's.

    Row i of the logits, float32 of shape (n, n_vocab), follows the first i tokens of the draft. Of equal logits, the
    lowest id counts. Return True if all appended tokens are the draft's. A BadLogits means that a logit is nan or +inf,
    or none is finite; the list then has the tokens of the earlier rows.
    """
    n: cython.Py_ssize_t = rows.shape[1]
    for r in range(rows.shape[0]):
        token: cython.Py_ssize_t = 0
        best: cython.float = rows[r, 0]
        if not cython.compiled:
            token = int(rows[r].argmax())
            best = rows[r, token]
        else:
            at: cython.Py_ssize_t = _find_above(rows[r], 1, best)
            # Nothing is larger than nan.
            while at < n and best < INFINITY:
                token = at
                best = rows[r, at]
                at = _find_above(rows[r], at + 1, best)
        if not -INFINITY < best < INFINITY:
            _reject(rows[r])
        tokens.append(token)
        if r >= len(draft) or draft[r] != token:
            return False
    return True


def _find_above(row: Any, start: cython.Py_ssize_t, limit: cython.float) -> cython.Py_ssize_t:
    """Return the index of the first logit from `start` on that is above a limit or nan; the length if none is."""
    n: cython.Py_ssize_t = row.shape[0]
    while start < n:
        if start + BLOCK <= n:
            # Compilers turn a sum without branches into vector instructions.
            count: cython.int = 0
            for i in range(BLOCK):
                count += row[start + i] <= limit
            if count == BLOCK:
                start += BLOCK
                continue
        for i in range(start, min(start + BLOCK, n)):
            if not row[i] <= limit:
                return i
        start += BLOCK
    return n


def _reject(row: Any) -> None:
    """Raise the error of a row of logits from which no token can be chosen."""
    top_token(np.asarray(row))


def _out(state: cython.ulonglong, counter: cython.ulonglong) -> cython.ulonglong:
    """Output number `counter` of SplitMix64 started at `state`; only compiled, since Python integers do not wrap."""
    z: cython.ulonglong = (counter + 1) * GOLDEN + state
    z = (z ^ (z >> 30)) * MIX_A
    z = (z ^ (z >> 27)) * MIX_B
    return z ^ (z >> 31)
