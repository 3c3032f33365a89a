"""`TracedCostPolicy`: a `CostPolicy` that also reports why a draft has its length, for `ngramspec trace --numbers`.

The decoder uses it for requests with `return_decisions`. For the example of `ngramspec.policies.cost`, with lambda = 1,
the reason is "T(4) is above the cap":

    limit         63       maximum length of the proposal, if the request and the context have room for it
    proposed      3        length of the drafter's proposal
    planned       2        chosen length, before it is cut where the text ends or the grammar forbids a token
    loss budget   1.0      time that drafts may still lose
    lambda        1.0      value of time: recent tokens per T(1), at least those of plain decoding
    cap           1.5      maximum T(1 + k): a plain decode call and half of the loss budget, or `CostPolicy.SURE`
    P(2)          0.64     probability that the first two tokens are accepted
    T(3)          1.2      cost of the decode call with a draft of two tokens, in units of T(1)
    V(2)          1.24     expected tokens, plus the value of later calls (`DraftValue`), minus lambda T(3)

`plan` chooses the k with the largest V(k) among those with T(1 + k) up to the cap. Charges and credits for changes of
the batch size are not shown, so V of the chosen k need not be the largest. With a `RestoreCost`, V and the cap contain
it, and the tokens to evaluate again are part of T.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from ngramspec.cost.times import PassTimes, RestoreCost
from ngramspec.drafting.draft import Draft, MarginalCost
from ngramspec.policies.cost import CostPolicy
from ngramspec.policies.policy import Policy
from ngramspec.steps import Step


class TracedCostPolicy(Policy):
    """Wraps a `CostPolicy` and stores the numbers and the reason of each draft length in `Step.policy_details`."""

    def __init__(self, policy: CostPolicy) -> None:
        self.name, self.policy = policy.name, policy
        self._price: MarginalCost | None = None
        # Details of unrecorded decode calls. On a GPU, a call is planned before the last one is recorded.
        self._waiting: deque[dict[str, float | str]] = deque()

    def begin(self) -> None:
        self._waiting.clear()
        self.policy.begin()

    def limit(self) -> int:
        limit, reason = self.policy.limit(), "the request or the context ends here"
        if limit == 0:
            measures = self.policy.measures_plain
            reason = "measuring the speed without drafts" if measures else "drafting has no time left in its budget"
        self._waiting.append({"reason": reason, "limit": limit})
        return limit

    def price(self, times: PassTimes | None, sizes: Sequence[int]) -> MarginalCost | None:
        self._price = self.policy.price(times, sizes)
        return self._price

    def plan(
        self, draft: Draft, times: PassTimes | None, sizes: Sequence[int], restore: RestoreCost | None = None
    ) -> tuple[int, int]:
        planned, size = self.policy.plan(draft, times, sizes, restore)
        details, (budget, rate, max_cost, costs, values) = self._waiting[-1], self.policy.numbers
        details |= {"proposed": len(draft), "planned": planned}
        named = {"loss budget": budget, "lambda": rate, "cap": max_cost}
        details |= {name: number for name, number in named.items() if not math.isnan(number)}
        chain_probs = accumulate(draft.acceptance_probs[: len(draft)], mul, initial=1.0)
        for k, (prob, cost, value) in enumerate(zip(chain_probs, costs, values, strict=False)):
            details |= {f"P({k})": prob, f"T({1 + k})": cost, f"V({k})": value}
        details["reason"] = self._find_reason(draft, planned, int(details["limit"]))
        return planned, size

    def record(self, done: Step) -> None:
        self.policy.record(done)
        details = self._waiting.popleft()
        if len(done.drafted) < details.get("planned", 0):  # type: ignore[operator]
            details["reason"] = f"{details['reason']}; cut where the text ends or the grammar forbids a token"
        done.policy_details = details

    def _find_reason(self, draft: Draft, planned: int, limit: int) -> str:
        """Return why the draft has its length; the first reason that applies decided."""
        n, price, (budget, _, max_cost, costs, values) = len(draft), self._price, self.policy.numbers
        better = [k for k in range(planned + 1, min(n + 1, len(values))) if values[k] > values[planned]]
        expensive = [k for k in better if costs[k] > max_cost]
        if self.policy.is_probe:
            reason = "a probe of a batch size that was not seen recently"
        elif not draft:
            reason = "the drafter had no guess"
        elif budget < 0:
            reason = "the loss budget is used up"
        elif not values:
            reason = "the cost of decode calls is unknown"
        elif expensive:
            reason = f"T({1 + expensive[0]}) is above the cap"
        elif better:
            reason = "the batch size of an earlier decode call is cheaper"
        elif planned + 1 == len(values) <= n:
            reason = "larger batches are not allowed, or not before smaller ones were seen"
        elif planned < n:
            reason = "V is lower for longer drafts"
        elif planned >= limit:
            reason = "the limit of the policy"
        elif price is None or price.worth_extending(math.prod(draft.acceptance_probs[:n]), n):
            reason = (
                "the drafter had no further guess or reached its minimum P, or the request or the context ends here"
            )
        else:
            # The rule of `MarginalCost.worth_extending`: a further token is at most as probable as the chain. The cost
            # is the lowest mean over all longer drafts, because T may rise less after an expensive token.
            cost = f"lambda times the lowest mean cost of further tokens, {price.rate * price.slopes[n]:.3g}"
            reason = f"the drafter stopped: P({n}) is below {cost}"
        return reason


def with_trace(policy: Policy) -> Policy:
    """Return the policy for a traced request."""
    return TracedCostPolicy(policy) if isinstance(policy, CostPolicy) else policy
