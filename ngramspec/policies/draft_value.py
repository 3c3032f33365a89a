# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""`DraftValue`: what a draft is worth together with the passes after it, as far as its chain of guesses reaches.

A pass whose draft was right throughout leaves the rest of the chain to the next pass, which then knows that the chain
was right so far. So where batches are dear, an unsure guess with sure ones behind it is best left to a plain pass: the
long draft follows once its beginning is no bet any more.

With P(i, k) = p_(i+1) * ... * p_(i+k), the value of standing behind i right tokens of the chain is

    W(i) = max over k of 1 + sum over j <= k of P(i, j) - lambda T(1 + k) + P(i, k) p_(i+k+1) W(i + k + 1)

where lambda is what time is worth, in tokens. The last term is that of the token which the target adds: if it is the
chain's next one too, the chain goes on behind it. Where the chain is left, or ends, W is 0: that happens once, however
its tokens are cut into passes. It is the optimality equation for the average reward of a semi-Markov decision process
(Puterman 1994, "Markov Decision Processes", section 11.4) on a chain, solved from its end; without the last term, the
length that is best for one pass (Leviathan et al. 2023, section 3.1).
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

import cython

MOST = cython.declare(cython.int, 64)  # tokens of a chain that count, at most


class DraftValue:
    """Values of the lengths of one draft at a time."""

    def __init__(self) -> None:
        # float64 of shape (MOST + 1,): entry k, what a pass with a draft of k tokens is expected to emit, and what the
        # passes behind it are worth, in tokens.
        self.tokens = array("d", bytes(8 * (MOST + 1)))
        self._p = array("d", bytes(8 * (MOST + 1)))
        self._cost = array("d", bytes(8 * (MOST + 1)))
        self._behind = array("d", bytes(8 * (MOST + 2)))

    def read(
        self,
        chances: Sequence[float],
        costs: Sequence[tuple[int, float]],
        rate: cython.double,
        dearest: cython.double,
    ) -> cython.int:
        """Value the lengths of a draft, up to that which is returned; longer ones fit into no batch.

        Args:
            chances: of each guess, that it is right if all before it are.
            costs: entry n, the size and the time of the cheapest batch that holds n tokens.
            rate: tokens that a unit of that time is worth.
            dearest: what a pass with a draft may cost. No pass looked ahead to costs more.
        """
        n: cython.Py_ssize_t = min(len(chances), len(costs) - 2, MOST)
        p, cost, tokens, behind = self._p, self._cost, self.tokens, self._behind
        for k in range(n + 1):
            _, cost[k] = costs[1 + k]
            p[k] = chances[k] if k < n else 0.0
        behind[n] = behind[n + 1] = 0.0
        for i in range(max(0, n - 1), -1, -1):
            reach = expected = 1.0
            best = -math.inf
            for k in range(n - i + 1):
                if k > 0:
                    reach *= p[i + k - 1]
                    expected += reach
                value = expected + reach * p[i + k] * behind[i + k + 1]
                if i == 0:
                    tokens[k] = value
                elif k == 0 or cost[k] <= dearest:
                    best = max(best, value - rate * cost[k])
            behind[i] = best
        return n
