# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""`SuffixAutomaton`: all contexts of a growing text, of any length, and what followed each of them.

The online automaton of Blumer, Blumer, Haussler, Ehrenfeucht, Chen and Seiferas (1985, "The smallest automaton
recognizing the subwords of a text"). A state stands for the contexts that were seen at the same places; a text of n
tokens has at most 2n - 1 states and 3n - 4 transitions, and adding a token takes amortised constant time. The
transitions lie in one hash table, so that the size of the vocabulary does not matter.

In addition to the paper's automaton, each transition counts how often it was taken. A token follows every suffix of the
text, one state for each step along the suffix links, and there may be any number of them: only `COUNTED` are counted
per token, the longest contexts first. So counts of short contexts may come out low in a text that repeats itself; what
follows them never gets lost.

Memory: 24 bytes a state, 20 a transition and at most 12 for its place in the hash table, with at most half as much to
spare.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import cython

if cython.compiled:
    from cython.cimports.ngramspec.drafting.mixture.history import mix
else:
    from ngramspec.drafting.mixture.history import mix

COUNTED = cython.declare(cython.int, 16)
NOWHERE = cython.declare(cython.int, -1)

SMALLEST = 1024  # states there is room for at first; as many transitions, and twice as many places in the hash table


class SuffixAutomaton:
    """A growing text. States are numbers, 0 is that of the empty context.

    Attributes:
        size: how many tokens the text has.
        states, edges: how many states and transitions.
        last: the state of the whole text.

    Of a state (int32, the first `states` count):
        length: of its longest context.
        link: the state of its longest suffix that was seen elsewhere too; -1 for the empty context.
        first: one of its transitions; the others hang on it by `sibling`. -1 at the end of the text.
        best: the transition taken most often, the most recent one among equals.
        latest: the transition taken last.
        total: how often any was taken.

    Of a transition (int32, the first `edges` count): `origin`, `token`, `goal`, `count`, and the next `sibling`.
    """

    def __init__(self) -> None:
        self.length = array("i", bytes(4 * SMALLEST))
        self.link = array("i", bytes(4 * SMALLEST))
        self.first = array("i", bytes(4 * SMALLEST))
        self.best = array("i", bytes(4 * SMALLEST))
        self.latest = array("i", bytes(4 * SMALLEST))
        self.total = array("i", bytes(4 * SMALLEST))
        self.origin = array("i", bytes(4 * SMALLEST))
        self.token = array("i", bytes(4 * SMALLEST))
        self.goal = array("i", bytes(4 * SMALLEST))
        self.count = array("i", bytes(4 * SMALLEST))
        self.sibling = array("i", bytes(4 * SMALLEST))
        self.slots = array("i", bytes(8 * SMALLEST))
        self.clear()

    def clear(self) -> None:
        """Forget the text, and keep the room."""
        for i in range(len(self.slots)):
            self.slots[i] = NOWHERE
        self.size = self.states = self.edges = 0
        self.last = self._state(0, NOWHERE)

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens at the end."""
        token: cython.int
        for token in tokens:
            self.add(token)

    def add(self, token: cython.int) -> None:
        """Add a token at the end. Amortised O(1): see the module."""
        steps: cython.int = 0
        edge: cython.Py_ssize_t = NOWHERE
        new: cython.Py_ssize_t = self._state(self.length[self.last] + 1, 0)
        p: cython.Py_ssize_t = self.last
        self.size += 1
        self.last = new
        # Contexts that this token never followed: each gets a transition, and no transition is ever removed.
        while p != NOWHERE:
            edge = self.find(p, token)
            if edge != NOWHERE:
                break
            self._connect(p, token, new, 1)
            p = self.link[p]
        if p == NOWHERE:
            return
        self.link[new] = self._split(p, edge)
        # The rest are suffixes of those, so it did follow them.
        while p != NOWHERE and steps < COUNTED:
            self._take(p, self.find(p, token))
            p = self.link[p]
            steps += 1

    def _split(self, p: cython.Py_ssize_t, edge: cython.Py_ssize_t) -> cython.Py_ssize_t:
        """The state whose longest context is the longest one of `p`, followed by the token of its transition `edge`.

        Longer contexts may have shared the goal of that transition. Now that the text has ended here they no longer
        do: the goal is then split.
        """
        old: cython.Py_ssize_t = self.goal[edge]
        token: cython.int = self.token[edge]
        if self.length[old] == self.length[p] + 1:
            return old
        copy: cython.Py_ssize_t = self._state(self.length[p] + 1, self.link[old])
        e: cython.Py_ssize_t = self.first[old]
        while e != NOWHERE:
            self._connect(copy, self.token[e], self.goal[e], self.count[e])
            e = self.sibling[e]
        # Only the end of the text has no transition, and its state is never split.
        self.best[copy] = self.find(copy, self.token[self.best[old]])
        self.latest[copy] = self.find(copy, self.token[self.latest[old]])
        self.link[old] = copy
        while p != NOWHERE:
            edge = self.find(p, token)
            if self.goal[edge] != old:
                break
            self.goal[edge] = copy
            p = self.link[p]
        return copy

    def _state(self, length: cython.int, link: cython.Py_ssize_t) -> cython.Py_ssize_t:
        """A new state without transitions."""
        n: cython.Py_ssize_t = self.states
        if n == len(self.length):
            self.length = _enlarged(self.length)
            self.link = _enlarged(self.link)
            self.first = _enlarged(self.first)
            self.best = _enlarged(self.best)
            self.latest = _enlarged(self.latest)
            self.total = _enlarged(self.total)
        self.length[n] = length
        self.link[n] = link
        self.first[n] = self.best[n] = self.latest[n] = NOWHERE
        self.total[n] = 0
        self.states = n + 1
        return n

    def _connect(
        self, state: cython.Py_ssize_t, token: cython.int, goal: cython.Py_ssize_t, count: cython.int
    ) -> cython.Py_ssize_t:
        """A new transition, taken `count` times, the last time just now."""
        n: cython.Py_ssize_t = self.edges
        if n == len(self.token):
            self.origin = _enlarged(self.origin)
            self.token = _enlarged(self.token)
            self.goal = _enlarged(self.goal)
            self.count = _enlarged(self.count)
            self.sibling = _enlarged(self.sibling)
        if 4 * n > 3 * len(self.slots):
            self._rehash()
        self.origin[n] = state
        self.token[n] = token
        self.goal[n] = goal
        self.count[n] = count - 1
        self.sibling[n] = self.first[state]
        self.first[state] = n
        self.total[state] += count - 1
        self.edges = n + 1
        self._enter(n)
        self._take(state, n)
        return n

    def _take(self, state: cython.Py_ssize_t, edge: cython.Py_ssize_t) -> None:
        """Count a transition once more."""
        best: cython.Py_ssize_t = self.best[state]
        self.count[edge] += 1
        self.total[state] += 1
        self.latest[state] = edge
        if best == NOWHERE or self.count[edge] >= self.count[best]:
            self.best[state] = edge

    def _enter(self, edge: cython.Py_ssize_t) -> None:
        mask: cython.Py_ssize_t = len(self.slots) - 1
        at: cython.Py_ssize_t = mix(mix(0, self.origin[edge] + 1), self.token[edge] + 1) & mask
        while self.slots[at] != NOWHERE:
            at = (at + 1) & mask
        self.slots[at] = edge

    def _rehash(self) -> None:
        i: cython.Py_ssize_t
        self.slots = array("i", [NOWHERE]) * (2 * len(self.slots))
        for i in range(self.edges):
            self._enter(i)

    def find(self, state: cython.Py_ssize_t, token: cython.int) -> cython.Py_ssize_t:
        """The transition of a state by a token; -1 if that never followed. O(1)."""
        mask: cython.Py_ssize_t = len(self.slots) - 1
        at: cython.Py_ssize_t = mix(mix(0, state + 1), token + 1) & mask
        edge: cython.Py_ssize_t = self.slots[at]
        while edge != NOWHERE and (self.origin[edge] != state or self.token[edge] != token):
            at = (at + 1) & mask
            edge = self.slots[at]
        return edge

    def counts(self, state: cython.Py_ssize_t) -> dict[int, int]:
        """How often each token followed a state's contexts. O(number of them)."""
        found = {}
        edge: cython.Py_ssize_t = self.first[state]
        while edge != NOWHERE:
            found[self.token[edge]] = self.count[edge]
            edge = self.sibling[edge]
        return found


def _enlarged(ints: array[int]) -> array[int]:
    """A copy with room for half as many again."""
    return array("i", memoryview(ints).tobytes() + bytes(4 * (len(ints) // 2)))
