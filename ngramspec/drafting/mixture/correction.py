# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""`Correction`: what the probability of the likeliest candidate turned out to mean, by several facts at once.

The likeliest of several candidates was chosen for its estimate, so it is overestimated where estimates are noisy;
and what the other candidates were given says more than each of them alone. Each fact has a curve over the log-odds of
the estimate, linear between its points and 0 at first. What the curves say is added to the log-odds, and all of them
learn from the error of the sum. It is the last stage of the compressors of the PAQ family (Mahoney 2005, section 4,
"APM"), with curves that add up, as in a generalised additive model (Hastie and Tibshirani 1986), instead of tables
that are averaged; steps shrink as a point settles (AdaGrad; Duchi, Hazan, Singer 2011).
"""

from __future__ import annotations

from array import array

import cython

if cython.compiled:
    from cython.cimports.libc.math import exp, log, sqrt
else:
    from math import exp, log, sqrt

FACTS = cython.declare(cython.int, 6)
CURVES = cython.declare(cython.int, 1 << 13)
FREE_CURVES = cython.declare(cython.int, 512)
"""The first curves are for facts without a token in them, the others for facts about one token."""
POINTS = cython.declare(cython.int, 9)
REACH = cython.declare(cython.double, 7.99)
"""Log-odds covered, to both sides of 0; a point at every 2."""
RATE = cython.declare(cython.double, 0.1)


@cython.cclass
class Correction:
    """Corrects probabilities, and learns from the outcomes.

    Args:
        cells: how many estimates can wait for their outcome at a time.
        beside: one that it shares with what both learn about tokens; see there.

    Attributes:
        facts: int32 of shape (cells, FACTS): hashes of the facts, each the number of a curve; below CURVES, and
            below FREE_CURVES if no token is in it.
        p: float64 of shape (cells,): the corrected probability, as `judge` found it.
    """

    def __init__(self, cells: int, beside: Correction | None = None) -> None:
        self.facts = array("i", bytes(4 * cells * FACTS))
        self.p = array("d", bytes(8 * cells))
        self._place = array("d", bytes(8 * cells))
        self._height = array("d", bytes(8 * FREE_CURVES * POINTS))
        self._slope = array("d", [1.0]) * (FREE_CURVES * POINTS)
        if beside is None:
            self._token_height = array("d", bytes(8 * (CURVES - FREE_CURVES) * POINTS))
            self._token_slope = array("d", [1.0]) * ((CURVES - FREE_CURVES) * POINTS)
        else:
            self._token_height, self._token_slope = beside._token_height, beside._token_slope

    def beside(self) -> Correction:
        """One for another text at the same time: what either learns about tokens, both know; all else is apart."""
        return Correction(len(self.p), self)

    def shared(self) -> dict[str, memoryview]:
        """What was learnt that has no token in it, by name: the arrays themselves, to be read or written to."""
        return {"height": memoryview(self._height), "slope": memoryview(self._slope)}

    def about_tokens(self) -> dict[str, memoryview]:
        """The same of what was learnt about single tokens."""
        return {"height": memoryview(self._token_height), "slope": memoryview(self._token_slope)}

    @cython.ccall
    @cython.exceptval(check=False)
    def judge(self, cell: cython.Py_ssize_t, p: cython.double) -> cython.double:
        """What `p`, between 0 and 1 exclusive, means in view of the facts in `cell`."""
        i: cython.Py_ssize_t
        at: cython.Py_ssize_t
        z: cython.double = log(p / (1.0 - p))
        place: cython.double = (min(max(z, -REACH), REACH) + 8.0) / 2.0
        left: cython.Py_ssize_t = cython.cast(cython.Py_ssize_t, place)
        share: cython.double = place - left
        self._place[cell] = place
        for i in range(FACTS):
            at = self.facts[cell * FACTS + i]
            height = self._height
            if at >= FREE_CURVES:
                at -= FREE_CURVES
                height = self._token_height
            at = at * POINTS + left
            z += height[at] * (1.0 - share) + height[at + 1] * share
        p = 1.0 / (1.0 + exp(-min(max(z, -12.0), 12.0)))
        self.p[cell] = p
        return p

    @cython.ccall
    @cython.exceptval(check=False)
    def learn(self, cell: cython.Py_ssize_t, right: cython.bint) -> cython.void:
        """Learn whether the guess in `cell`, as last judged, was right."""
        i: cython.Py_ssize_t
        at: cython.Py_ssize_t
        error: cython.double = (1.0 if right else 0.0) - self.p[cell]
        left: cython.Py_ssize_t = cython.cast(cython.Py_ssize_t, self._place[cell])
        share: cython.double = self._place[cell] - left
        near: cython.double = error * (1.0 - share)
        far: cython.double = error * share
        for i in range(FACTS):
            at = self.facts[cell * FACTS + i]
            height, slope = self._height, self._slope
            if at >= FREE_CURVES:
                at -= FREE_CURVES
                height, slope = self._token_height, self._token_slope
            at = at * POINTS + left
            slope[at] += near * near
            height[at] += RATE * near / sqrt(slope[at])
            slope[at + 1] += far * far
            height[at + 1] += RATE * far / sqrt(slope[at + 1])
