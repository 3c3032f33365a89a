# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""`History`: the tokens of one request, and the positions at which each context of 1 to `ORDERS` tokens occurred.

A chain of links visits the occurrences of a context, the most recent first. Contexts with the same hash share a chain,
so a search must compare the tokens. Adding a token takes amortised O(1), and 4 bytes plus 8 for each order.

`AnswerStore` contains the answers to earlier requests.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace

import cython

from ngramspec.drafting.acceptance_estimator import DecayingRate
from ngramspec.sampling.settings import Sampling
from ngramspec.tokens import common_prefix

ORDERS = cython.declare(cython.int, 4)
NOWHERE = cython.declare(cython.int, -1)
REACH = cython.declare(cython.int, 25)
STEPS = cython.declare(cython.int, 32)
STEP = cython.declare(cython.int, 8)
# These are typed, because an untyped literal above 2^31 would turn the other operands into Python integers.
SPREAD = cython.declare(cython.ulonglong, 0x85EBCA6B)
STIR = cython.declare(cython.ulonglong, 0x1E3779B1)
WORD = cython.declare(cython.ulonglong, (1 << 59) - 1)

SMALLEST = 4096  # initial capacity in tokens; the capacity is always a power of two


def mix(state: cython.ulonglong, value: cython.ulonglong) -> cython.ulonglong:
    """Return the next state of a hash over small integers, below 2^59; its low bits are mixed best."""
    state = ((state ^ (value * SPREAD)) * STIR) & WORD
    return state ^ (state >> 29)


def doublings(n: cython.Py_ssize_t, maximum: cython.int) -> cython.int:
    """Return the class of a count: 0, 1, 2 to 3, 4 to 7, and so on; at most `maximum`."""
    k: cython.int = 0
    while n > 0 and k < maximum:
        n >>= 1
        k += 1
    return k


class History:
    """A growing text and its chains. After its `size` tokens is room for 64 guesses, which serve as context too."""

    def __init__(self) -> None:
        self.tokens = array("i", bytes(4 * (SMALLEST + 64)))  # int32; only the first `size` are tokens of the text
        self.links = array("i", bytes(4 * SMALLEST * ORDERS))
        self.heads = array("i", [NOWHERE]) * (SMALLEST * ORDERS)
        self.capacity = SMALLEST
        self.size = 0  # number of tokens

    def clear(self) -> None:
        """Remove all tokens, but keep the allocated memory."""
        self.size = 0
        for i in range(self.capacity * ORDERS):
            self.heads[i] = NOWHERE

    def add(self, token: cython.int) -> None:
        """Add a token at the end."""
        n: cython.Py_ssize_t = self.size
        if n == self.capacity:
            self._grow()
        self.tokens[n] = token
        self.size = n + 1
        self._enter(n)

    def chain(self, state: cython.ulonglong, order: cython.Py_ssize_t) -> cython.Py_ssize_t:
        """Return the index in `heads` of a context's chain; `state` is the hash of its tokens, the latest first."""
        return (state & (self.capacity - 1)) * ORDERS + order - 1

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
        # The copy is made through bytes, because array() fills from a memoryview one Python integer at a time.
        self.tokens = array("i", memoryview(self.tokens).tobytes() + bytes(4 * n))
        self.links = array("i", memoryview(self.links).tobytes() + bytes(4 * n * ORDERS))
        self.capacity = 2 * n
        self.heads = array("i", [NOWHERE]) * (self.capacity * ORDERS)
        for i in range(n):
            self._enter(i)

    def near(self, end: cython.Py_ssize_t, place: cython.Py_ssize_t) -> cython.Py_ssize_t:
        """Return the position near `place` from which a copy continues at `end`, also after an edit.

        It is the first of these that exists; its number is stored in `match_kind`:

            0       `place`, if the token before it equals the token before `end`
            1       the nearest position less than `REACH` away that follows the same two tokens as `end`, among the
                    latest `STEPS` in their chain
            2, 3    the nearest position at most `STEP` away that follows the same token: after `place`, or before it
            4       `place`

        If `place` is below 1 or not below `size`, the result is `NOWHERE`, with 4 in `match_kind`.
        """
        t = self.tokens
        steps: cython.int = 0
        best: cython.Py_ssize_t = NOWHERE
        distance: cython.Py_ssize_t = REACH
        self.match_kind = 4
        if place < 1 or place >= self.size:
            return NOWHERE
        if t[place - 1] == t[end - 1]:
            self.match_kind = 0
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
                self.match_kind = 1
                return best
        for d in range(1, STEP + 1):
            if place + d < self.size and t[place + d - 1] == t[end - 1]:
                self.match_kind = 2
                return place + d
            if place - d >= 1 and t[place - d - 1] == t[end - 1]:
                self.match_kind = 3
                return place - d
        return place


REQUESTS = 1024  # maximum number of stored requests, the latest ones
ANSWERS = 4  # maximum number of stored answers to each request, the latest ones
LONGEST = 4096  # maximum number of stored tokens of an answer
CERTAIN = 0.9  # minimum probability at which the tokens of an earlier answer are drafted before any other guess
CLASSES = 7  # number of classes of agreeing tokens: 0, 1, 2 to 3, 4 to 7, and so on
HITS, TRIES, FADE = 8.0, 8.02, 0.99  # acceptance before the first outcome, and factor for older outcomes


class AnswerStore:
    """The latest answers to the latest requests, from which a repeated request is drafted.

    The same prompt with the same sampling settings nearly always gets the same answer: decoding is deterministic, and
    only rounding in batches of other sizes, or rules that are not sampling settings, can change it. A match in another
    text is weaker evidence, because it does not imply that the whole answer is the same.
    """

    def __init__(self) -> None:
        self._answers: dict[int, list[array[int]]] = {}  # answers by the hash of prompt and sampling
        # Acceptance rate of the next token by the class of the number of tokens that agree.
        self._rates = [DecayingRate(HITS, TRIES, fade=FADE) for _ in range(CLASSES)]

    def begin(self, prompt: Sequence[int], sampling: Sampling) -> CurrentAnswer:
        """Start the answer to a request, which is stored as it grows."""
        if sampling.greedy:
            sampling = replace(sampling, seed=0)  # the seed has no effect
        key = hash((tuple(prompt), sampling))
        # A dict keeps the order of insertion, so the first request is the least recently repeated one.
        earlier = self._answers.pop(key, [])
        tokens = array("i")
        self._answers[key] = [*earlier[1 - ANSWERS :], tokens]
        if len(self._answers) > REQUESTS:
            del self._answers[next(iter(self._answers))]
        return CurrentAnswer(tokens, [answer for answer in reversed(earlier) if answer], self._rates)


class CurrentAnswer:
    """An answer as it grows, and the earlier answers to the same request that agree with it."""

    def __init__(self, tokens: array[int], earlier: list[array[int]], rates: Sequence[DecayingRate]) -> None:
        self.earlier = earlier  # earlier answers that agree with this one so far, and continue; the latest first
        self._tokens, self._rates = tokens, rates
        self._length = 0  # number of tokens so far, including those beyond `LONGEST`, which are not stored

    def continuation(self, limit: int) -> tuple[list[int], tuple[float, ...]]:
        """Return the next tokens of an earlier answer, and the probability of each if those before it are right.

        The tokens end before the first one whose probability is below `CERTAIN`.
        """
        if not self.earlier:
            return [], ()
        start = self._length
        chances: list[float] = []
        tokens = self.earlier[0][start : start + limit]
        for n_agreeing in range(start, start + len(tokens)):
            chance = self._rates[_length_class(n_agreeing)].value
            if chance < CERTAIN:
                break
            chances.append(chance)
        return tokens[: len(chances)].tolist(), tuple(chances)

    def accept(self, tokens: Sequence[int]) -> None:
        """Add emitted tokens, and learn from them if the earlier answer was repeated."""
        start, end = self._length, self._length + len(tokens)
        if self.earlier:
            predictions = self.earlier[0][start:end]
            n_right = common_prefix(predictions, tokens)
            for n_agreeing in range(start, start + n_right):
                self._rates[_length_class(n_agreeing)].add(True)
            if n_right < len(predictions):
                self._rates[_length_class(start + n_right)].add(False)
            new_tokens = array("i", tokens)
            self.earlier = [answer for answer in self.earlier if len(answer) > end and answer[start:end] == new_tokens]
        self._length = end
        if end <= LONGEST:
            self._tokens.extend(tokens)


def _length_class(n_agreeing: int) -> int:
    return min(n_agreeing.bit_length(), CLASSES - 1)
