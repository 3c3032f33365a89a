# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""How likely a guess is right: `ChanceMixer` mixes what several sources say, `Correction` corrects what came of it.

As in the PAQ family of compressors (Mahoney 2005, "Adaptive weighing of context models for lossless data
compression"; Knoll and de Freitas 2012, "A machine learning perspective on predictive coding with PAQ8"):

1. Each *source* sees the guess in some state (how often it saw this context, how often this guess followed...).
   A table keeps, for every state, how often guesses in that state were right: an adaptive probability.
2. Those probabilities, as log-odds, are weighed and added by several *experts* at a time. Each expert chooses one of
   its weight sets by a view of the situation of its own, and learns by gradient descent on the coding cost of what it
   alone would have said. A second mixing blends the experts; it learns from what all of it said.
3. Facts with no order among them (which token is guessed, which token came before) each add a *bias* of their
   own, learnt with a step that shrinks as a bias settles (AdaGrad; Duchi, Hazan, Singer 2011).

The guesses lie in numbered *cells*: inputs are put in, `estimate` computes, `learn` corrects.
"""

from __future__ import annotations

from array import array

import cython

if cython.compiled:
    from cython.cimports.libc.math import exp, log, sqrt
else:
    from math import exp, log, sqrt

SOURCES = cython.declare(cython.int, 8)
STATES = cython.declare(cython.int, 128)
EXPERTS = cython.declare(cython.int, 4)
TOKENS = cython.declare(cython.int, 2)  # the expert whose view is a hash of a token
BIASES = cython.declare(cython.int, 13)
FREE_ROOM = cython.declare(cython.int, 1 << 12)
TOKEN_ROOM = cython.declare(cython.int, 1 << 17)
PAIR_ROOM = cython.declare(cython.int, 1 << 18)
"""Biases of facts without a token in them, of facts about one token, and about two, in this order."""
RATE = cython.declare(cython.double, 0.02)
BLEND_RATE = cython.declare(cython.double, 0.001)
BIAS_RATE = cython.declare(cython.double, 0.3)
BIAS_SLOPE = cython.declare(cython.double, 1.5)
"""Sum of squared errors that a bias starts with, so that its first step is not its largest by far."""
MEMORY = cython.declare(cython.double, 250.0)
"""Outcomes after which a state's probability follows the newest at a constant rate."""
UNLIKELY = cython.declare(cython.double, 0.01)  # a wrong guess below it teaches nothing that is worth the time
CONSTANT = cython.declare(cython.double, 0.3)
WEIGHT = cython.declare(cython.double, 0.25)
ABSENT = cython.declare(cython.int, -1)


def _within(z: cython.double, most: cython.double) -> cython.double:
    return most if z > most else -most if z < -most else z


class ChanceMixer:
    """Estimates the probability that each guess is right, and learns from the outcomes.

    Args:
        cells: how many guesses can wait for their outcome.
        sets: how many weight sets each expert chooses from, and how many there are to blend the experts.
        beside: a mixer for another text at the same time; what either learns about tokens, both know.

    Attributes:
        states: int32 of shape (cells, SOURCES): the state in which each source sees the guess, or ABSENT.
        views: int32 of shape (cells, EXPERTS + 1): the numbers of the weight sets, of the experts and of the blend.
        facts: int32 of shape (cells, BIASES): hashes of the facts, each the number of a bias; below
            FREE_ROOM + TOKEN_ROOM + PAIR_ROOM, and in the part of it that its kind has.
        p: float64 of shape (cells,): the probability that the guess is right, as `estimate` found it.
    """

    def __init__(self, cells: int, sets: tuple[int, ...], beside: ChanceMixer | None = None) -> None:
        self.states = array("i", bytes(4 * cells * SOURCES))
        self.views = array("i", bytes(4 * cells * (EXPERTS + 1)))
        self.facts = array("i", bytes(4 * cells * BIASES))
        self.p = array("d", bytes(8 * cells))
        self._inputs = array("d", bytes(8 * cells * (SOURCES + 1)))
        self._said = array("d", bytes(8 * cells * EXPERTS))
        # The expert whose view is a token has weights of its own; where those of each begin among their kind:
        others = [n if k != TOKENS else 0 for k, n in enumerate(sets[:EXPERTS])]
        self._from = array("q", [sum(others[:k]) if k != TOKENS else 0 for k in range(EXPERTS)])
        self._rate = array("d", [0.5]) * (SOURCES * STATES)
        self._seen = array("d", bytes(8 * SOURCES * STATES))
        self._odds = array("d", bytes(8 * SOURCES * STATES))
        self._weights = array("d", [WEIGHT]) * (sum(others) * (SOURCES + 1))
        self._blend = array("d", [1.0 / EXPERTS]) * (sets[EXPERTS] * EXPERTS)
        self._bias = array("d", bytes(8 * FREE_ROOM))
        self._slope = array("d", [BIAS_SLOPE]) * FREE_ROOM
        if beside is None:
            self._token_weights = array("d", [WEIGHT]) * (sets[TOKENS] * (SOURCES + 1))
            self._token_bias = array("d", bytes(8 * (TOKEN_ROOM + PAIR_ROOM)))
            self._token_slope = array("d", [BIAS_SLOPE]) * (TOKEN_ROOM + PAIR_ROOM)
        else:
            self._token_weights = beside._token_weights
            self._token_bias, self._token_slope = beside._token_bias, beside._token_slope

    def shared(self) -> dict[str, memoryview]:
        """Weights that do not depend on tokens, by name: the arrays themselves, for reading and writing."""
        weights, last = memoryview(self._weights), self._from[TOKENS + 1] * (SOURCES + 1)
        return {
            "rate": memoryview(self._rate),
            "seen": memoryview(self._seen),
            "odds": memoryview(self._odds),
            "first_weights": weights[:last],
            "last_weights": weights[last:],
            "blend": memoryview(self._blend),
            "bias": memoryview(self._bias),
            "slope": memoryview(self._slope),
        }

    def about_tokens(self) -> dict[str, memoryview]:
        """The same of what was learnt about single tokens; what is known of two would tell what followed what."""
        return {
            "weights": memoryview(self._token_weights),
            "bias": memoryview(self._token_bias)[:TOKEN_ROOM],
            "slope": memoryview(self._token_slope)[:TOKEN_ROOM],
        }

    def estimate(self, cell: cython.Py_ssize_t) -> cython.double:
        """The probability that the guess in `cell` is right."""
        at: cython.Py_ssize_t = cell * (SOURCES + 1)
        blend: cython.Py_ssize_t = self.views[cell * (EXPERTS + 1) + EXPERTS] * EXPERTS
        z: cython.double = 0.0
        for i in range(SOURCES):
            state = self.states[cell * SOURCES + i]
            self._inputs[at + i] = self._odds[i * STATES + state] if state != ABSENT else 0.0
        self._inputs[at + SOURCES] = CONSTANT
        for k in range(EXPERTS):
            w = (self._from[k] + self.views[cell * (EXPERTS + 1) + k]) * (SOURCES + 1)
            x = 0.0
            for i in range(SOURCES + 1):
                weight = self._token_weights[w + i] if k == TOKENS else self._weights[w + i]
                x += weight * self._inputs[at + i]
            x = _within(x, 8.0)
            self._said[cell * EXPERTS + k] = x
            z += self._blend[blend + k] * x
        for i in range(BIASES):
            fact = self.facts[cell * BIASES + i]
            z += self._bias[fact] if fact < FREE_ROOM else self._token_bias[fact - FREE_ROOM]
        x = 1.0 / (1.0 + exp(-_within(z, 12.0)))
        self.p[cell] = x
        return x

    def learn(self, cell: cython.Py_ssize_t, right: cython.bint) -> cython.void:
        """Learn whether the guess in `cell`, as estimated last, was right; a wrong one that was unlikely is skipped."""
        if not right and self.p[cell] < UNLIKELY:
            return
        y: cython.double = 1.0 if right else 0.0
        error: cython.double = y - self.p[cell]
        blend: cython.Py_ssize_t = self.views[cell * (EXPERTS + 1) + EXPERTS] * EXPERTS
        for k in range(EXPERTS):
            w = (self._from[k] + self.views[cell * (EXPERTS + 1) + k]) * (SOURCES + 1)
            at = cell * EXPERTS + k
            step = RATE * (y - 1.0 / (1.0 + exp(-self._said[at])))
            for i in range(SOURCES + 1):
                if k == TOKENS:
                    self._token_weights[w + i] += step * self._inputs[cell * (SOURCES + 1) + i]
                else:
                    self._weights[w + i] += step * self._inputs[cell * (SOURCES + 1) + i]
            self._blend[blend + k] += BLEND_RATE * error * self._said[at]
        for i in range(SOURCES):
            if self.states[cell * SOURCES + i] == ABSENT:
                continue
            at = i * STATES + self.states[cell * SOURCES + i]
            seen = self._seen[at]
            rate = self._rate[at]
            rate += (y - rate) / (seen + 3.0)
            if rate < 0.002:
                rate = 0.002
            elif rate > 0.998:
                rate = 0.998
            if seen < MEMORY:
                self._seen[at] = seen + 1.0
            self._rate[at] = rate
            self._odds[at] = log(rate / (1.0 - rate))
        self._learn_facts(cell, error)

    def _learn_facts(self, cell: cython.Py_ssize_t, error: cython.double) -> cython.void:
        for i in range(BIASES):
            at = self.facts[cell * BIASES + i]
            if at < FREE_ROOM:
                self._slope[at] += error * error
                self._bias[at] += BIAS_RATE * error / sqrt(self._slope[at])
            else:
                at -= FREE_ROOM
                self._token_slope[at] += error * error
                self._token_bias[at] += BIAS_RATE * error / sqrt(self._token_slope[at])


FACTS = cython.declare(cython.int, 6)
CURVES = cython.declare(cython.int, 1 << 13)
FREE_CURVES = cython.declare(cython.int, 512)
"""The first curves are for facts without a token in them, the others for facts about one token."""
POINTS = cython.declare(cython.int, 9)
REACH = cython.declare(cython.double, 7.99)  # log-odds covered, to both sides of 0; a point at every 2
CORRECTION_RATE = cython.declare(cython.double, 0.1)


class Correction:
    """Corrects probabilities by what they turned out to mean, in view of several facts at once.

    The most likely of several candidates was chosen for its estimate, so it is overestimated where estimates are noisy.
    Each fact has a curve over the log-odds of the estimate, linear between its points and 0 at first. What the curves
    say is added to the log-odds, and all of them learn from the error of the sum. It is the last stage of the
    compressors of the PAQ family (Mahoney 2005, section 4, "APM"), with curves that add up, as in a generalised
    additive model (Hastie and Tibshirani 1986); steps shrink as a point settles (AdaGrad).

    Args:
        cells: how many estimates can wait for their outcome at a time.
        beside: one for another text at the same time; what either learns about tokens, both know.

    Attributes:
        facts: int32 of shape (cells, FACTS): hashes of the facts, each the number of a curve; below CURVES, and
            below FREE_CURVES if no token is in it.
        p: float64 of shape (cells,): the corrected probability, as `estimate` found it.
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

    def shared(self) -> dict[str, memoryview]:
        """Weights that do not depend on tokens, by name: the arrays themselves, for reading and writing."""
        return {"height": memoryview(self._height), "slope": memoryview(self._slope)}

    def about_tokens(self) -> dict[str, memoryview]:
        """Weights for single tokens, in the same form."""
        return {"height": memoryview(self._token_height), "slope": memoryview(self._token_slope)}

    def estimate(self, cell: cython.Py_ssize_t, p: cython.double) -> cython.double:
        """Return the calibrated value of `p`, between 0 and 1 exclusive, given the facts in `cell`."""
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

    def learn(self, cell: cython.Py_ssize_t, right: cython.bint) -> cython.void:
        """Learn whether the guess in `cell`, as last estimated, was right."""
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
            height[at] += CORRECTION_RATE * near / sqrt(slope[at])
            slope[at + 1] += far * far
            height[at + 1] += CORRECTION_RATE * far / sqrt(slope[at + 1])
