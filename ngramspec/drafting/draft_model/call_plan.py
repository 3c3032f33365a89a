"""`plan_call`: the decision to call the draft model for a chain of n-gram guesses, and the number of guesses it reads.

The expected gain is computed over all possible results of the model. For each result, it is the value of the best
chain (`ChainValue`), including the cost of the target's decode call. The first token of a draft may cost more than the
next ten. A likely guess is then worthless unless others follow it.

Example in units of T(1), the time of a one-token decode call, with a throughput of 1 token per T(1). A draft of 1, 2
or 3 tokens costs 1.0, 1.1 or 1.2 in addition to a plain decode call. A pass of the model takes 0.3. N-grams have one
guess, with a probability of 0.9:

    the guess alone                       0.9 - 1.0 = -0.1, so it would not be sent
    with two more guesses of 0.9          0.9 + 0.81 + 0.729 - 1.2 = 1.24
    minus two passes of the model         1.24 - 0.6 = 0.64, so the model is called
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ngramspec.drafting.draft import MarginalCost
from ngramspec.drafting.draft_model.agreement import LEVELS, AgreementModel
from ngramspec.drafting.draft_model.draft_model import DraftModel

MAX_AHEAD = 10  # maximum number of guesses that the model reads at once, and of further calls that are considered


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


class CallPlan(NamedTuple):
    """A call of the model that is expected to pay."""

    n_guesses: int  # number of guesses after the final ones that the model reads before its own guess
    gain: float  # expected gain in tokens, before the time of the model is subtracted


def plan_call(
    model: DraftModel,
    agreement: AgreementModel,
    final: Sequence[float],
    ps: Sequence[float],
    limit: int,
    price: MarginalCost,
    n_read: int,
) -> CallPlan | None:
    """Return the best call of the model; `None` means that the model should not be called.

    Args:
        model: Draft model.
        agreement: Statistics on the agreement of n-grams and model.
        final: Probabilities of the final guesses of the chain.
        ps: Probabilities of the n-grams' guesses after them.
        limit: Maximum length of the draft.
        price: Cost of one more token.
        n_read: Number of guesses that the model has read.
    """
    value = ChainValue()
    for chance in final:
        value = value.extend(chance, price)
    estimate_gain = _gain_of_further_calls(model, agreement, limit, price)
    best = gain_without_call = value.gain_with(ps, price) + price.rate * model.catch_up_cost(price)
    plan: CallPlan | None = None
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
            best, plan = net_gain, CallPlan(i, gain - gain_without_call)
    return plan


def _gain_of_further_calls(
    model: DraftModel, agreement: AgreementModel, limit: int, price: MarginalCost
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
