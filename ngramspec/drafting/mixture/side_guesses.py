# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""`SideGuesses`: side branches of a draft: the likeliest tokens beside the chain, and what the target said behind them.

Where the text leaves the chain, a row of the same pass can have asked already what the target says there. A row is
worth its *reach*, the probability that the text comes through it, so those with the largest reaches are taken, best
first. With reaches known that is the optimum that Sequoia finds by dynamic programming from averages (Chen et al. 2024,
arXiv 2402.12374, section 3.1).

Nodes have numbers: those of the chain the number of guesses before them, those beside it the numbers after these. The
candidates that may follow a node lie in the guesser's cells of that number.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import cython

from ngramspec.drafting.chances import FadingRate
from ngramspec.drafting.draft import Question, TokenPrice
from ngramspec.drafting.mixture.guesser import Guesser

CANDIDATES = cython.declare(cython.int, 10)
POSITIONS = cython.declare(cython.int, 64)
NOBODY = cython.declare(cython.int, -1)


class SideGuesses:
    """Finds what may be asked beside a chain, and begins the next chain with what the target then said.

    Args:
        guesser: made the chain, which waits for its outcome.

    Attributes:
        trust: how often the target says the same in the pass after: nearly always, except for rounding and for what was
            drawn anew.
    """

    def __init__(self, guesser: Guesser) -> None:
        self._guesser = guesser
        self.trust = FadingRate(50.0, 50.5, fade=0.99)
        self.begin()
        self._parent = array("i", bytes(4 * POSITIONS))
        self._token = array("i", bytes(4 * POSITIONS))
        self._depth = array("i", bytes(4 * POSITIONS))
        self._fork = array("i", bytes(4 * POSITIONS))
        self._goes_on = array("i", bytes(4 * POSITIONS))
        self._reach = array("d", bytes(8 * POSITIONS))
        # Of each candidate the probability that it is right; below 0 once it has a row.
        self._left = array("d", bytes(8 * POSITIONS * CANDIDATES))
        # Of each node the likeliest candidate without a row, and the reach that its row would have.
        self._offered = array("i", bytes(4 * POSITIONS))
        self._offer = array("d", bytes(8 * POSITIONS))

    def begin(self) -> None:
        """Start a text."""
        # What the target said: behind the tokens that `accept` is told of next, and behind the text.
        self._heard: Sequence[int] = ()
        self._said: Sequence[int] = ()

    def hear(self, answers: Sequence[int]) -> None:
        """See `Drafter.hear`."""
        self._heard = answers

    def repeat(self, limit: int) -> int:
        """Begin the chain with what the target said; how many tokens that are."""
        known = self._said[:limit]
        for at, token in enumerate(known):
            self._guesser.look(at)
            self._guesser.put(at, token)
        return len(known)

    def accept(self, tokens: Sequence[int]) -> int:
        """Learn whether the target said the same again; how many tokens it had said."""
        for said, token in zip(self._said, tokens, strict=False):
            self.trust.add(said == token)
            if said != token:
                break
        repeated = len(self._said)
        self._said, self._heard = self._heard, ()
        return repeated

    def find(
        self,
        chances: Sequence[float],
        sent: cython.int,
        limit: cython.int,
        leaves: cython.int,
        least: cython.double,
        price: TokenPrice,
    ) -> list[Question]:
        """What to ask beside the chain: see `Drafter.questions`.

        Args:
            chances: of the chain's tokens, each if those before it are right.
            least, price: as in `Guesser.guess`; asking ends there.
        """
        guesser: Guesser = self._guesser
        reach: cython.double = 1.0
        found: list[Question] = []
        start: cython.int = guesser.pending
        if sent == start and sent < POSITIONS - 1:
            self._offer[start] = 0.0
            if guesser.look(start) < 0:
                guesser.counts.found[start] = 0
            start += 1
        self._start = start
        for node in range(min(sent + 1, start)):
            self._depth[node] = self._fork[node] = node
            self._reach[node] = reach
            if node < guesser.pending:
                self._rate(node, chances[node], guesser.guesses[node] if node < sent else -1)
                reach *= chances[node]
            elif guesser.counts.found[node] > 0:
                self._rate(node, guesser.correction.p[node], -1)
        # A token known a pass ahead takes a row there.
        share: cython.double = max(0.0, 1.0 - price.rate * price.slopes[sent])
        limit = min(limit, POSITIONS - start, cython.cast(cython.int, len(price.slopes)) - 1 - sent)
        for n in range(start, start + limit):
            best = NOBODY
            reach = 0.0
            for node in range(n):
                if sent < node < start or (leaves == 0 and (node < start or self._goes_on[node])):
                    continue
                if self._offer[node] > reach:
                    reach = self._offer[node]
                    best = node
            if best == NOBODY or reach < least or not price.pays(share * reach, sent + n - start):
                break
            # The first row after a side node goes on with its branch; any other is a branch more.
            if best < start or self._goes_on[best]:
                leaves -= 1
            else:
                self._goes_on[best] = 1
            cell = best * CANDIDATES + self._offered[best]
            self._parent[n] = best
            self._token[n] = guesser.counts.tokens[cell]
            self._depth[n] = self._depth[best] + 1
            self._fork[n] = self._fork[best]
            self._goes_on[n] = 0
            self._reach[n] = reach
            self._left[cell] = -1.0
            self._next(best)
            path = []
            node = n
            while node >= start:
                path.append(self._token[node])
                node = self._parent[node]
            path.reverse()
            found.append(Question(self._fork[n], tuple(path), reach))
            self._look(n)
        return found

    def _look(self, node: cython.int) -> None:
        """Judge the candidates after a node beside the chain."""
        guesser: Guesser = self._guesser
        t = guesser.history.tokens
        at: cython.int = node
        self._offer[node] = 0.0
        while at >= self._start:
            t[guesser.history.size + self._depth[at] - 1] = self._token[at]
            at = self._parent[at]
        for i in range(at):
            t[guesser.history.size + i] = guesser.guesses[i]
        if guesser.look_aside(node, self._depth[node], self._fork[node]) >= 0:
            self._rate(node, guesser.correction.p[node], -1)

    def _rate(self, node: cython.int, chance: cython.double, taken: cython.int) -> None:
        """Set the probability of each candidate: together they are right at most once.

        Args:
            node: after which they come.
            chance: that the token right after it in the chain is right; of a node at an end, its likeliest candidate.
            taken: that token; -1: there is none.
        """
        guesser: Guesser = self._guesser
        cell: cython.int = node * CANDIDATES
        first: cython.int = -1
        others: cython.double = 0.0
        for c in range(guesser.counts.found[node]):
            if taken < 0:
                if first < 0 or guesser.mixer.p[cell + c] > guesser.mixer.p[cell + first]:
                    first = c
            elif guesser.counts.tokens[cell + c] == taken:
                first = c
        for c in range(guesser.counts.found[node]):
            if c != first:
                others += guesser.mixer.p[cell + c]
        scale: cython.double = (1.0 - chance) / others if others > 1.0 - chance else 1.0
        for c in range(guesser.counts.found[node]):
            if c != first:
                self._left[cell + c] = scale * guesser.mixer.p[cell + c]
            else:
                # What stands in the chain is no question.
                self._left[cell + c] = chance if taken < 0 else -1.0
        self._next(node)

    def _next(self, node: cython.int) -> None:
        """Find the likeliest candidate after a node that has no row."""
        chance: cython.double = 0.0
        for c in range(self._guesser.counts.found[node]):
            if self._left[node * CANDIDATES + c] > chance:
                chance = self._left[node * CANDIDATES + c]
                self._offered[node] = c
        self._offer[node] = self._reach[node] * chance
