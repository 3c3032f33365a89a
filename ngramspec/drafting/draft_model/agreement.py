"""`AgreementModel`: the probability of a guess by n-grams and a draft model. `plan_call` decides on calls of the model.

At each position, n-grams guess a token at no cost, with a calibrated probability p. The draft model takes time, and
guesses a token with its own probability m. In each case (`CONSENSUS` and the next ones), the probability is mixed from
p and m in the domain of log-odds, with weights learnt online. This is logistic mixing, as in compressors of the PAQ
family (Mahoney 2005, section 3).

Example with the initial weights, for p = 0.6 (log-odds 0.41) and m = 0.8 (log-odds 1.39):

    both guess the same token    0.8 + 0.3 * 0.41 + 0.8 * 1.39 = 2.03     probability 0.88
    they differ, the model's     0.0 - 0.3 * 0.41 + 0.7 * 1.39 = 0.85     probability 0.70
    they differ, the n-grams'    -0.7 + 0.6 * 0.41 - 0.5 * 1.39 = -1.15   probability 0.24

Before the model is called, only p is known. For each class of p, `Prospects` counts how often the two agreed, and how
often they were then right. For disagreement it counts the probability class of the chosen guess, and how often the
guess was right. A single mean of all cases would not suffice: if a draft token costs time, calling the model is useful
because bad guesses are not sent.

`plan_call` computes the expected gain over all possible results of the model. For each result, it is the value of the
best chain (`ChainValue`), including the cost of the target's decode call. The first token of a draft may cost more than
the next ten. A likely guess is then worthless unless others follow it. Example in units of T(1), the time of a
one-token decode call, with a throughput of 1 token per T(1). A draft of 1, 2 or 3 tokens costs 1.0, 1.1 or 1.2 in
addition to a plain decode call, and a pass of the model 0.3. N-grams have one guess, with a probability of 0.9:

    the guess alone                       0.9 - 1.0 = -0.1, so it would not be sent
    with two more guesses of 0.9          0.9 + 0.81 + 0.729 - 1.2 = 1.24
    minus two passes of the model         1.24 - 0.6 = 0.64, so the model is called
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple

from ngramspec.drafting.acceptance_estimator import DecayingRate
from ngramspec.drafting.draft import MarginalCost
from ngramspec.drafting.draft_model.model import ModelDrafter

# Cases of a guess: both make it; only the model; only the n-grams; the model, without a guess of the n-grams.
CONSENSUS, MODEL, NGRAMS, ALONE = range(4)
# Initial weights for each case: the constant, and the weights of the log-odds of p and m.
START = ((0.8, 0.3, 0.8), (0.0, -0.3, 0.7), (-0.7, 0.6, -0.5), (0.2, 0.0, 0.8))
RATE = 0.02  # learning rate of the weights
# Upper ends of the classes of p; the first class is for positions without a guess of the n-grams.
EDGES = (0.0, 0.1, 0.3, 0.5, 0.7, 0.85, 0.95)
LEVELS = (0.45, 0.8)  # limits between poor, fair and good guesses, the classes of the chosen guess if the two differ
# Initial rates: how often the two agree, as a part of p, and how often they are then right, at least p.
AGREEMENT_RATE, CONSENSUS_RATE = 0.9, 0.85
# Initial rates if the two differ: how often each class of `LEVELS` occurs, and how often it is right.
DISAGREEMENT_RATES = ((0.3, 0.3), (0.3, 0.6), (0.4, 0.9))
# Weights of the initial rates and of earlier texts, in outcomes, and the factor for older outcomes at each new one.
STRENGTH, CARRY_WEIGHT, FADE = 4.0, 8.0, 0.98
NONE = 0.02  # value that replaces p if n-grams have no guess
MAX_AHEAD = 10  # maximum number of guesses that the model reads at once, and of further calls that are considered
# A position for which the model was called: p and m, the guesses of the n-grams and the model, and the chosen guess. If
# n-grams had no guess, p is 0 and their guess -1.
Observation = tuple[float, float, int, int, int]


class Prospects:
    """Expected results of calling the model, if the n-grams' guess has the probability p; 0 if they have none."""

    def __init__(self, p: float) -> None:
        self.agreement = _rate(AGREEMENT_RATE * p)  # rate of the model making the same guess
        self.consensus = _rate(max(CONSENSUS_RATE, p))  # rate of that guess being right
        self._disagreements = [(_rate(share), _rate(right)) for share, right in DISAGREEMENT_RATES]

    def begin(self) -> None:
        for rate in (self.agreement, self.consensus, *chain.from_iterable(self._disagreements)):
            rate.carry(CARRY_WEIGHT)

    def add(self, agrees: bool, chance: float, right: bool) -> None:
        """Count a result of the model; `chance` is the probability of the chosen guess, which was `right` or not."""
        self.agreement.add(agrees)
        if agrees:
            self.consensus.add(right)
            return
        level = sum(chance > edge for edge in LEVELS)
        for i, (share, _) in enumerate(self._disagreements):
            share.add(i == level)
        self._disagreements[level][1].add(right)

    @property
    def disagreements(self) -> tuple[tuple[float, float], ...]:
        """Share and acceptance rate of each class of `LEVELS`, for chosen guesses if the two differ."""
        total = sum(share.value for share, _ in self._disagreements)
        return tuple((share.value / total, right.value) for share, right in self._disagreements)


class AgreementModel:
    """Mixes the probabilities of n-grams and a draft model. Each method takes constant time."""

    def __init__(self) -> None:
        self._weights = [list(weights) for weights in START]
        self._records = [Prospects(p) for p in (0.0, *EDGES)]
        self._all = Prospects(0.5)

    def clone_for_sequence(self) -> AgreementModel:
        """Return an instance for another sequence at the same time: both share the weights, but not the counts."""
        clone = AgreementModel()
        clone._weights = self._weights
        return clone

    def begin(self) -> None:
        """Let earlier results count less; otherwise a model that failed in one text would never be called again."""
        for record in (*self._records, self._all):
            record.begin()

    def estimate(self, case: int, p: float, m: float) -> float:
        """Return the probability that a guess is right; see the module docstring."""
        bias, p_weight, m_weight = self._weights[case]
        log_odds = bias + p_weight * _log_odds(p or NONE) + m_weight * _log_odds(m)
        return 1.0 / (1.0 + math.exp(-log_odds))

    def prospects(self, p: float | None = None) -> Prospects:
        """Return the expected results of the model if the n-grams' guess has probability p; `None` means any guess."""
        return self._all if p is None else self._records[_class(p)]

    def learn(self, observation: Observation, token: int) -> None:
        """Learn from the emitted token at a position for which the model was called."""
        p, m, guess, answer, better = observation
        agrees = guess == answer
        theirs = CONSENSUS if agrees else MODEL if guess >= 0 else ALONE
        chance = self.estimate(theirs if better == answer else NGRAMS, p, m)
        for record in (self._records[_class(p)], self._all):
            record.add(agrees, chance, better == token)
        self._mix(theirs, p, m, answer == token)
        if theirs == MODEL:
            self._mix(NGRAMS, p, m, guess == token)

    def _mix(self, case: int, p: float, m: float, right: bool) -> None:
        error = RATE * (right - self.estimate(case, p, m))
        weights = self._weights[case]
        for i, feature in enumerate((1.0, _log_odds(p or NONE), _log_odds(m))):
            weights[i] += error * feature


def _rate(prior: float) -> DecayingRate:
    return DecayingRate(fade=FADE, prior=prior, strength=STRENGTH)


def _class(p: float) -> int:
    return sum(p > edge for edge in EDGES)


def _log_odds(p: float) -> float:
    p = min(max(p, 1e-3), 1.0 - 1e-3)
    return math.log(p / (1.0 - p))


class ChainValue(NamedTuple):
    """Expected gain of a chain of guesses, in tokens, including the cost of the target's decode call.

    >>> price = MarginalCost(1.0, [0.4, 0.1, 0.1], costs=lambda: [0.0, 1.0, 1.1, 1.2])
    >>> value = ChainValue().extend(0.9, price)
    >>> value.best_gain, round(value.gain_with([0.9, 0.9], price), 3)
    (0.0, 1.239)
    """

    tokens: float = 0.0  # expected number of accepted tokens
    reach: float = 1.0  # probability that all tokens are accepted
    best_gain: float = 0.0  # gain of the best prefix of the chain, after the cost of its tokens is subtracted
    length: int = 0  # number of guesses in the chain

    def extend(self, chance: float, price: MarginalCost) -> ChainValue:
        """Return the value of the chain with one more guess, which is right with probability `chance`."""
        reach = self.reach * chance
        tokens, length = self.tokens + reach, self.length + 1
        return ChainValue(tokens, reach, max(self.best_gain, tokens - price.rate * price.costs[length]), length)

    def gain_with(self, chances: Sequence[float], price: MarginalCost) -> float:
        """Return the gain of the best prefix of the chain with these further guesses."""
        tokens, reach, best_gain, rate, costs = self.tokens, self.reach, self.best_gain, price.rate, price.costs
        for length, chance in enumerate(chances, self.length + 1):
            reach *= chance
            tokens += reach
            best_gain = max(best_gain, tokens - rate * costs[length])
        return best_gain


def plan_call(
    model: ModelDrafter,
    agreement: AgreementModel,
    final: Sequence[float],
    ps: Sequence[float],
    limit: int,
    price: MarginalCost,
    n_read: int,
) -> int | None:
    """Return the number of guesses that the model reads before its own guess; `None` if it should not be called.

    `final` are the probabilities of the final guesses of the chain, of which the model has read `n_read`, and `ps`
    those of the n-grams' guesses after them.
    """
    value = ChainValue()
    for chance in final:
        value = value.extend(chance, price)
    estimate_gain = _gain_of_further_calls(model, agreement, limit, price)
    best = value.gain_with(ps, price) + price.rate * model.catch_up_cost(price)
    plan: int | None = None
    gain_if_different, all_agree = 0.0, 1.0
    for i in range(min(len(ps), limit - len(final) - 1, MAX_AHEAD) + 1):
        prospects = agreement.prospects(ps[i] if i < len(ps) else 0.0)
        for share, chance in prospects.disagreements:
            differs = all_agree * (1.0 - prospects.agreement.value)
            gain_if_different += differs * share * estimate_gain(value.extend(chance, price))
        all_agree *= prospects.agreement.value
        gain = gain_if_different
        if all_agree:
            value = value.extend(prospects.consensus.value, price)
            gain += all_agree * max(value.gain_with(ps[i + 1 :], price), estimate_gain(value))
        net_gain = gain - price.rate * model.pass_cost(len(final) + i - n_read, price)
        if net_gain > best:
            best, plan = net_gain, i
    return plan


def _gain_of_further_calls(
    model: ModelDrafter, agreement: AgreementModel, limit: int, price: MarginalCost
) -> Callable[[ChainValue], float]:
    """Return a function for the gain of a chain after which the model may be called while its guesses are good."""
    prospects = agreement.prospects()
    agreement_rate = prospects.agreement.value
    outcomes = [((1.0 - agreement_rate) * share, chance) for share, chance in prospects.disagreements]
    outcomes.append((agreement_rate, prospects.consensus.value))
    # For each minimum probability of a good guess: how often a guess is good, and how often a good guess is right.
    good_guesses = []
    for level in LEVELS:
        good = [(share, chance) for share, chance in outcomes if chance > level]
        frequency = sum(share for share, _ in good)
        if frequency:
            good_guesses.append((frequency, sum(share * chance for share, chance in good) / frequency))
    call_cost = price.rate * model.extra_pass_cost(price)

    def estimate_gain(value: ChainValue) -> float:
        best = value.best_gain
        for frequency, chance in good_guesses:
            still_good, gain, chain = 1.0, 0.0, value
            for _ in range(min(limit - value.length, MAX_AHEAD)):
                gain += still_good * ((1.0 - frequency) * chain.best_gain - call_cost)
                still_good *= frequency
                chain = chain.extend(chance, price)
                best = max(best, gain + still_good * chain.best_gain)
        return best

    return estimate_gain
