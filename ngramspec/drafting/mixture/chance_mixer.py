# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""The probability that a guess is right: `ChanceMixer` combines the sources, and `Correction` calibrates the result.

The method is that of the PAQ family of compressors (Mahoney 2005, "Adaptive weighing of context models for lossless
data compression"; Knoll and de Freitas 2012, "A machine learning perspective on predictive coding with PAQ8"):

1. For each *source* the guess is in a state, for example: the source saw this context four times, and this guess
   followed three times. A table stores for every state how often guesses in it were right, an adaptive probability.
2. Several *experts* compute weighted sums of the log-odds of these probabilities. Each expert has a separate *view* of
   the situation, which selects one of its weight sets. It learns by gradient descent on the coding cost of the
   estimate that it makes alone. A second mixing step blends the experts, and learns from the error of the result.
3. Categorical facts, such as the guessed token or the previous token, each add a separate *bias*. Its learning step
   shrinks as the bias converges (AdaGrad; Duchi, Hazan, Singer 2011).

The guesses are in numbered *cells*: the caller sets the inputs, `estimate` computes the probability, and `learn`
updates the weights.
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
TOKENS = cython.declare(cython.int, 2)  # number of the expert whose view is a hash of a token
BIASES = cython.declare(cython.int, 13)
FREE_ROOM = cython.declare(cython.int, 1 << 12)
TOKEN_ROOM = cython.declare(cython.int, 1 << 17)
PAIR_ROOM = cython.declare(cython.int, 1 << 18)
"""Numbers of biases: for facts without a token, for facts about one token, and for facts about two, in this order."""
RATE = cython.declare(cython.double, 0.02)
BLEND_RATE = cython.declare(cython.double, 0.001)
BIAS_RATE = cython.declare(cython.double, 0.3)
BIAS_SLOPE = cython.declare(cython.double, 1.5)
"""Initial sum of squared errors of a bias, without which its first step would be far too large."""
MEMORY = cython.declare(cython.double, 250.0)
"""Number of outcomes after which the probability of a state follows new outcomes at a constant rate."""
UNLIKELY = cython.declare(cython.double, 0.01)  # minimum probability of wrong guesses that are worth the time to learn
CONSTANT = cython.declare(cython.double, 0.3)
WEIGHT = cython.declare(cython.double, 0.25)
ABSENT = cython.declare(cython.int, -1)


class ChanceMixer:
    """Estimates the probability that each guess is right, and learns from the outcomes.

    At most `cells` guesses wait for their outcome. `sets` are the numbers of weight sets of each expert, and last of
    the blend. The mixer shares the weights and biases for tokens with that of a sequence that is decoded at the same
    time, its `sibling`.
    """

    def __init__(self, cells: int, sets: tuple[int, ...], sibling: ChanceMixer | None = None) -> None:
        # int32 of shape (cells, SOURCES): state of the guess in each source, or ABSENT.
        self.states = array("i", bytes(4 * cells * SOURCES))
        # int32 of shape (cells, EXPERTS + 1): numbers of the weight sets of the experts and of the blend.
        self.views = array("i", bytes(4 * cells * (EXPERTS + 1)))
        # int32 of shape (cells, BIASES): numbers of the biases, hashes of the facts in the part for their kind.
        self.facts = array("i", bytes(4 * cells * BIASES))
        self.p = array("d", bytes(8 * cells))  # float64 of shape (cells,): probabilities, set by `estimate`
        self._inputs = array("d", bytes(8 * cells * (SOURCES + 1)))
        self._outputs = array("d", bytes(8 * cells * EXPERTS))
        # The weights of the expert whose view is a token are in a separate array. `_first_sets` contains the first
        # weight set of each expert in its array.
        set_counts = [n if k != TOKENS else 0 for k, n in enumerate(sets[:EXPERTS])]
        self._first_sets = array("q", [sum(set_counts[:k]) if k != TOKENS else 0 for k in range(EXPERTS)])
        self._rate = array("d", [0.5]) * (SOURCES * STATES)
        self._counts = array("d", bytes(8 * SOURCES * STATES))
        self._log_odds = array("d", bytes(8 * SOURCES * STATES))
        self._weights = array("d", [WEIGHT]) * (sum(set_counts) * (SOURCES + 1))
        self._blend = array("d", [1.0 / EXPERTS]) * (sets[EXPERTS] * EXPERTS)
        self._bias = array("d", bytes(8 * FREE_ROOM))
        self._slope = array("d", [BIAS_SLOPE]) * FREE_ROOM
        if sibling is None:
            self._token_weights = array("d", [WEIGHT]) * (sets[TOKENS] * (SOURCES + 1))
            self._token_bias = array("d", bytes(8 * (TOKEN_ROOM + PAIR_ROOM)))
            self._token_slope = array("d", [BIAS_SLOPE]) * (TOKEN_ROOM + PAIR_ROOM)
        else:
            self._token_weights = sibling._token_weights
            self._token_bias, self._token_slope = sibling._token_bias, sibling._token_slope
        # The weights that do not depend on tokens, and those for single tokens, by name: the arrays themselves, for
        # reading and writing. Those for two tokens would reveal in a file which tokens followed each other.
        weights, last = memoryview(self._weights), self._first_sets[TOKENS + 1] * (SOURCES + 1)
        self.global_weights = {
            "rate": memoryview(self._rate),
            "seen": memoryview(self._counts),
            "odds": memoryview(self._log_odds),
            "first_weights": weights[:last],
            "last_weights": weights[last:],
            "blend": memoryview(self._blend),
            "bias": memoryview(self._bias),
            "slope": memoryview(self._slope),
        }
        self.token_weights = {
            "weights": memoryview(self._token_weights),
            "bias": memoryview(self._token_bias)[:TOKEN_ROOM],
            "slope": memoryview(self._token_slope)[:TOKEN_ROOM],
        }

    def estimate(self, cell: cython.Py_ssize_t) -> cython.double:
        """Return the probability that the guess in `cell` is right."""
        at: cython.Py_ssize_t = cell * (SOURCES + 1)
        blend: cython.Py_ssize_t = self.views[cell * (EXPERTS + 1) + EXPERTS] * EXPERTS
        z: cython.double = 0.0
        for i in range(SOURCES):
            state = self.states[cell * SOURCES + i]
            self._inputs[at + i] = self._log_odds[i * STATES + state] if state != ABSENT else 0.0
        self._inputs[at + SOURCES] = CONSTANT
        for k in range(EXPERTS):
            w = (self._first_sets[k] + self.views[cell * (EXPERTS + 1) + k]) * (SOURCES + 1)
            x = 0.0
            for i in range(SOURCES + 1):
                weight = self._token_weights[w + i] if k == TOKENS else self._weights[w + i]
                x += weight * self._inputs[at + i]
            x = min(max(x, -8.0), 8.0)
            self._outputs[cell * EXPERTS + k] = x
            z += self._blend[blend + k] * x
        for i in range(BIASES):
            fact = self.facts[cell * BIASES + i]
            z += self._bias[fact] if fact < FREE_ROOM else self._token_bias[fact - FREE_ROOM]
        x = 1.0 / (1.0 + exp(-min(max(z, -12.0), 12.0)))
        self.p[cell] = x
        return x

    def learn(self, cell: cython.Py_ssize_t, right: cython.bint) -> cython.void:
        """Learn the outcome of the guess in `cell`, after `estimate`; unlikely guesses that were wrong are skipped."""
        if not right and self.p[cell] < UNLIKELY:
            return
        y: cython.double = 1.0 if right else 0.0
        error: cython.double = y - self.p[cell]
        blend: cython.Py_ssize_t = self.views[cell * (EXPERTS + 1) + EXPERTS] * EXPERTS
        for k in range(EXPERTS):
            w = (self._first_sets[k] + self.views[cell * (EXPERTS + 1) + k]) * (SOURCES + 1)
            at = cell * EXPERTS + k
            step = RATE * (y - 1.0 / (1.0 + exp(-self._outputs[at])))
            for i in range(SOURCES + 1):
                if k == TOKENS:
                    self._token_weights[w + i] += step * self._inputs[cell * (SOURCES + 1) + i]
                else:
                    self._weights[w + i] += step * self._inputs[cell * (SOURCES + 1) + i]
            self._blend[blend + k] += BLEND_RATE * error * self._outputs[at]
        for i in range(SOURCES):
            if self.states[cell * SOURCES + i] == ABSENT:
                continue
            at = i * STATES + self.states[cell * SOURCES + i]
            count = self._counts[at]
            rate = self._rate[at]
            rate += (y - rate) / (count + 3.0)
            rate = min(max(rate, 0.002), 0.998)
            if count < MEMORY:
                self._counts[at] = count + 1.0
            self._rate[at] = rate
            self._log_odds[at] = log(rate / (1.0 - rate))
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
"""Number of the first curves, which are for facts without a token; the others are for facts about one token."""
POINTS = cython.declare(cython.int, 9)
REACH = cython.declare(cython.double, 7.99)  # range of the curves in log-odds, on both sides of 0; one point per 2
CORRECTION_RATE = cython.declare(cython.double, 0.1)


class Correction:
    """Calibrates probabilities by earlier outcomes, given several facts at once.

    The most likely of several candidates was chosen by its estimate, so noisy estimates are too high on average. Each
    fact has a curve over the log-odds of the estimate, linear between its points and initially 0. The values of the
    curves are added to the log-odds, and all curves learn from the error of the sum. This is the last stage of the
    compressors of the PAQ family (Mahoney 2005, section 4, "APM"), with additive curves as in a generalised additive
    model (Hastie and Tibshirani 1986). Learning steps shrink as a point converges (AdaGrad).

    At most `cells` estimates wait for their outcome. The curves for tokens are those of the `sibling`, if there is one.
    """

    def __init__(self, cells: int, sibling: Correction | None = None) -> None:
        # int32 of shape (cells, FACTS): numbers of the curves, hashes of the facts; below FREE_CURVES without a token.
        self.facts = array("i", bytes(4 * cells * FACTS))
        self.p = array("d", bytes(8 * cells))  # float64 of shape (cells,): corrected probability, set by `estimate`
        self._place = array("d", bytes(8 * cells))
        self._height = array("d", bytes(8 * FREE_CURVES * POINTS))
        self._slope = array("d", [1.0]) * (FREE_CURVES * POINTS)
        if sibling is None:
            self._token_height = array("d", bytes(8 * (CURVES - FREE_CURVES) * POINTS))
            self._token_slope = array("d", [1.0]) * ((CURVES - FREE_CURVES) * POINTS)
        else:
            self._token_height, self._token_slope = sibling._token_height, sibling._token_slope
        self.global_weights = {"height": memoryview(self._height), "slope": memoryview(self._slope)}
        self.token_weights = {"height": memoryview(self._token_height), "slope": memoryview(self._token_slope)}

    def estimate(self, cell: cython.Py_ssize_t, p: cython.double) -> cython.double:
        """Return the calibrated value of `p`, between 0 and 1 exclusive, given the facts in `cell`."""
        z: cython.double = log(p / (1.0 - p))
        place: cython.double = (min(max(z, -REACH), REACH) + 8.0) / 2.0
        point: cython.Py_ssize_t = cython.cast(cython.Py_ssize_t, place)
        share: cython.double = place - point
        self._place[cell] = place
        for i in range(FACTS):
            at = self.facts[cell * FACTS + i]
            height = self._height
            if at >= FREE_CURVES:
                at -= FREE_CURVES
                height = self._token_height
            at = at * POINTS + point
            z += height[at] * (1.0 - share) + height[at + 1] * share
        p = 1.0 / (1.0 + exp(-min(max(z, -12.0), 12.0)))
        self.p[cell] = p
        return p

    def learn(self, cell: cython.Py_ssize_t, right: cython.bint) -> cython.void:
        """Learn the outcome of the guess in `cell`, after `estimate`."""
        error: cython.double = (1.0 if right else 0.0) - self.p[cell]
        point: cython.Py_ssize_t = cython.cast(cython.Py_ssize_t, self._place[cell])
        share: cython.double = self._place[cell] - point
        near: cython.double = error * (1.0 - share)
        far: cython.double = error * share
        for i in range(FACTS):
            at = self.facts[cell * FACTS + i]
            height, slope = self._height, self._slope
            if at >= FREE_CURVES:
                at -= FREE_CURVES
                height, slope = self._token_height, self._token_slope
            at = at * POINTS + point
            slope[at] += near * near
            height[at] += CORRECTION_RATE * near / sqrt(slope[at])
            slope[at + 1] += far * far
            height[at + 1] += CORRECTION_RATE * far / sqrt(slope[at + 1])
