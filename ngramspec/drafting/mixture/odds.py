# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""`ChanceMixer`: how likely a guess is right, by logistic mixing of what several sources say, learnt online.

As in the PAQ family of compressors (Mahoney 2005, "Adaptive weighing of context models for lossless data
compression"; Knoll and de Freitas 2012, "A machine learning perspective on predictive coding with PAQ8"):

1. Each *source* sees the guess in some state (how often it saw this context, how often this guess followed...).
   A table keeps, for every state, how often guesses in that state were right: an adaptive probability.
2. Those probabilities, as log-odds, are weighed and added. The weights come from two sets, each chosen by a
   different view of the situation, and are learnt by gradient descent on the coding cost.
3. Facts with no order among them (which token is guessed, which token came before) each add a *bias* of their
   own, learnt with a step that shrinks as a bias settles (AdaGrad; Duchi, Hazan, Singer 2011).

The guesses under judgement lie in numbered *cells*: inputs are put in, `judge` computes, `learn` corrects.
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
BIASES = cython.declare(cython.int, 9)
FREE_ROOM = cython.declare(cython.int, 1 << 12)
TOKEN_ROOM = cython.declare(cython.int, 1 << 16)
PAIR_ROOM = cython.declare(cython.int, 1 << 16)
"""Biases of facts without a token in them, of facts about one token, and about two, in this order."""
RATE = cython.declare(cython.double, 0.02)
BIAS_RATE = cython.declare(cython.double, 0.15)
MEMORY = cython.declare(cython.double, 250.0)
"""Outcomes after which a state's probability follows the newest at a constant rate."""
CONSTANT = cython.declare(cython.double, 0.3)
WEIGHT = cython.declare(cython.double, 0.25)
ABSENT = cython.declare(cython.int, -1)


@cython.cclass
class ChanceMixer:
    """Estimates the probability that each guess is right, and learns from the outcomes.

    Args:
        cells: how many guesses can be under judgement at a time.
        sets: how many weight sets each of the two views chooses from.

    Attributes:
        states: int32 of shape (cells, SOURCES): the state in which each source sees the guess, or ABSENT.
        views: int32 of shape (cells, 2): the number of the weight set that each view chooses.
        facts: int32 of shape (cells, BIASES): hashes of the facts, each the number of a bias; below
            FREE_ROOM + TOKEN_ROOM + PAIR_ROOM, and in the part of it that its kind has.
        p: float64 of shape (cells,): the probability that the guess is right, as `judge` found it.
    """

    def __init__(self, cells: int, sets: tuple[int, int]) -> None:
        self.states = array("i", bytes(4 * cells * SOURCES))
        self.views = array("i", bytes(4 * cells * 2))
        self.facts = array("i", bytes(4 * cells * BIASES))
        self.p = array("d", bytes(8 * cells))
        self._inputs = array("d", bytes(8 * cells * (SOURCES + 1)))
        self._rate = array("d", [0.5]) * (SOURCES * STATES)
        self._seen = array("d", bytes(8 * SOURCES * STATES))
        self._odds = array("d", bytes(8 * SOURCES * STATES))
        self._first = array("d", [WEIGHT]) * (sets[0] * (SOURCES + 1))
        self._second = array("d", [WEIGHT]) * (sets[1] * (SOURCES + 1))
        room = FREE_ROOM + TOKEN_ROOM + PAIR_ROOM
        self._bias = array("d", bytes(8 * room))
        self._slope = array("d", [1.0]) * room

    def beside(self) -> ChanceMixer:
        """A mixer with cells of its own that learns together with this one: what either learns, both know."""
        other: ChanceMixer = ChanceMixer(len(self.p), (1, 1))
        other._rate, other._seen, other._odds = self._rate, self._seen, self._odds
        other._first, other._second = self._first, self._second
        other._bias, other._slope = self._bias, self._slope
        return other

    def shared(self) -> dict[str, memoryview]:
        """What was learnt that has no token in it, by name: the arrays themselves, to be read or written to."""
        return {
            "rate": memoryview(self._rate),
            "seen": memoryview(self._seen),
            "odds": memoryview(self._odds),
            "first": memoryview(self._first),
            "second": memoryview(self._second),
            "bias": memoryview(self._bias)[:FREE_ROOM],
            "slope": memoryview(self._slope)[:FREE_ROOM],
        }

    def about_tokens(self) -> dict[str, memoryview]:
        """The same of what was learnt about single tokens; of two it could be told what followed what."""
        end = FREE_ROOM + TOKEN_ROOM
        return {"bias": memoryview(self._bias)[FREE_ROOM:end], "slope": memoryview(self._slope)[FREE_ROOM:end]}

    def expect(self, source: int, state: int, p: float) -> None:
        """The probability that a state starts from."""
        self._rate[source * STATES + state] = p
        self._odds[source * STATES + state] = log(p / (1.0 - p))

    @cython.ccall
    @cython.exceptval(check=False)
    def judge(self, cell: cython.Py_ssize_t) -> cython.double:
        """The probability that the guess in `cell` is right."""
        i: cython.Py_ssize_t
        state: cython.int
        x: cython.double
        a: cython.Py_ssize_t = self.views[cell * 2] * (SOURCES + 1)
        b: cython.Py_ssize_t = self.views[cell * 2 + 1] * (SOURCES + 1)
        at: cython.Py_ssize_t = cell * (SOURCES + 1)
        z: cython.double = CONSTANT * (self._first[a + SOURCES] + self._second[b + SOURCES])
        self._inputs[at + SOURCES] = CONSTANT
        for i in range(SOURCES):
            state = self.states[cell * SOURCES + i]
            x = 0.0
            if state != ABSENT:
                x = self._odds[i * STATES + state]
                z += x * (self._first[a + i] + self._second[b + i])
            self._inputs[at + i] = x
        z *= 0.5
        for i in range(BIASES):
            z += self._bias[self.facts[cell * BIASES + i]]
        if z > 12.0:
            z = 12.0
        elif z < -12.0:
            z = -12.0
        x = 1.0 / (1.0 + exp(-z))
        self.p[cell] = x
        return x

    @cython.ccall
    @cython.exceptval(check=False)
    def learn(self, cell: cython.Py_ssize_t, right: cython.bint) -> cython.void:
        """Learn whether the guess in `cell`, as last judged, was right."""
        i: cython.Py_ssize_t
        at: cython.Py_ssize_t
        seen: cython.double
        rate: cython.double
        y: cython.double = 1.0 if right else 0.0
        error: cython.double = y - self.p[cell]
        step: cython.double = RATE * error
        a: cython.Py_ssize_t = self.views[cell * 2] * (SOURCES + 1)
        b: cython.Py_ssize_t = self.views[cell * 2 + 1] * (SOURCES + 1)
        for i in range(SOURCES + 1):
            self._first[a + i] += step * self._inputs[cell * (SOURCES + 1) + i]
            self._second[b + i] += step * self._inputs[cell * (SOURCES + 1) + i]
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
        for i in range(BIASES):
            at = self.facts[cell * BIASES + i]
            self._slope[at] += error * error
            self._bias[at] += BIAS_RATE * error / sqrt(self._slope[at])
