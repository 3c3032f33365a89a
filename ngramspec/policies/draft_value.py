# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""`DraftValue`: the value of each draft length, including the decode calls that continue its chain of guesses.

If a draft was accepted entirely, the rest of the chain can be sent in the next decode call, when its beginning is known
to be right. So if batches are expensive, an uncertain guess before certain ones is best left to a plain decode call.
The long draft follows when its first token is known to be right.

With P(i, k) = p_(i+1) * ... * p_(i+k), the value after i right tokens of the chain is

    W(i) = max over k of 1 + sum over j <= k of P(i, j) - lambda T(1 + k) + P(i, k) p_(i+k+1) W(i + k + 1)

where lambda is the value of time, in tokens per unit of T. The last term stands for the token that the target adds: if
it equals the next token of the chain, the chain continues after it. When the text leaves the chain, or the chain ends,
W is 0. This happens once, however the tokens are divided among decode calls. W is a net value, and negative if the
time of the rest is worth more than its tokens.

Example: p = (0.3, 0.99, 0.99, 0.99), lambda = 1, T(1) = 1, T(4) = 2.2 and T(5) = 2.5.

    draft of four tokens    1 + 0.3 + 0.297 + 0.294 + 0.291 - 2.5 = -0.32
    plain decode call       1 - 1 + 0.3 * W(1) = 0.52, with W(1) = 1 + 0.99 + 0.98 + 0.97 - 2.2 = 1.74

With probability 0.3, the token of the plain call is the first of the chain, and a draft of the other three follows.

The formula is the optimality equation for the average reward of a semi-Markov decision process (Puterman 1994, "Markov
Decision Processes", section 11.4) on a chain, solved from its end. Without the last term, it gives the best length for
a single decode call (Leviathan et al. 2023, section 3.1).
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

import cython

MAX_TOKENS = cython.declare(cython.int, 64)  # maximum number of tokens in a chain; later ones are ignored


class DraftValue:
    """Values of all lengths of a draft, for one draft at a time."""

    def __init__(self) -> None:
        # Gross values, float64 of shape (MAX_TOKENS + 1,). Entry k is the value in tokens of a decode call with k draft
        # tokens, before the cost of the call is subtracted: its expected tokens, and the net value W of later calls.
        self.gross = array("d", bytes(8 * (MAX_TOKENS + 1)))
        self._p = array("d", bytes(8 * (MAX_TOKENS + 1)))
        self._cost = array("d", bytes(8 * (MAX_TOKENS + 1)))
        self._later = array("d", bytes(8 * (MAX_TOKENS + 2)))

    def read(
        self,
        acceptance_probs: Sequence[float],
        costs: Sequence[tuple[int, float]],
        rate: cython.double,
        max_cost: cython.double,
    ) -> cython.int:
        """Compute `gross` for each length of a draft, up to the length that is returned; no batch fits longer ones.

        Args:
            acceptance_probs: See `Draft`.
            costs: See `PassTimes.optimal_batches`.
            rate: Value of a unit of time, lambda, in tokens.
            max_cost: Maximum time of a later decode call with a draft. It does not limit the first call: the caller
                compares the lengths that it may take.
        """
        n: cython.Py_ssize_t = min(len(acceptance_probs), len(costs) - 2, MAX_TOKENS)
        p, cost, gross, later = self._p, self._cost, self.gross, self._later
        for k in range(n + 1):
            _, cost[k] = costs[1 + k]
            p[k] = acceptance_probs[k] if k < n else 0.0
        later[n] = later[n + 1] = 0.0
        for i in range(max(0, n - 1), -1, -1):
            reach = n_expected = 1.0
            best = -math.inf
            for k in range(n - i + 1):
                if k > 0:
                    reach *= p[i + k - 1]
                    n_expected += reach
                value = n_expected + reach * p[i + k] * later[i + k + 1]
                if i == 0:
                    gross[k] = value
                elif k == 0 or cost[k] <= max_cost:
                    best = max(best, value - rate * cost[k])
            later[i] = best
        return n
