"""Tests of `TracedCostPolicy`: the numbers explain the length of each draft, and tracing changes no decision."""

from __future__ import annotations

from itertools import accumulate
from operator import mul
from typing import Any

import pytest
from support.decoder_loop import drive, make_decoder, make_model
from support.passes import draft, make_step, values_of

from ngramspec.cost.fixed_curves import make_fixed_curve
from ngramspec.cost.times import RestoreCost
from ngramspec.policies.cost import CostPolicy
from ngramspec.policies.traced_cost import TracedCostPolicy

TIMES = {1: 1.0, 2: 1.1, 3: 1.2, 4: 1.6, 5: 2.1, 64: 40.0}
"""The times of the example in `ngramspec.policies.cost`."""
STOPPED = "the drafter stopped: P(2) is below lambda times the lowest mean cost of further tokens, 0.7"


def explain(
    chances: list[float],
    times: dict[int, float] = TIMES,
    restore: RestoreCost | None = None,
    n_drafted: int | None = None,
    passes: int = 1,
) -> tuple[int, dict[str, Any]]:
    """Return the length that a new policy plans for a draft, and the details of its record; all drafts are refused."""
    policy, curve, sizes = TracedCostPolicy(CostPolicy()), make_fixed_curve(times), range(1, 65)
    for _ in range(passes):
        policy.begin()
        policy.limit()
        policy.price(curve, sizes)
        planned, _ = policy.plan(draft(chances), curve, sizes, restore)
        step = make_step(1, planned if n_drafted is None else n_drafted, 0, cost=9.0, draft_cost=0.0)
        policy.record(step)
    return planned, dict(step.policy_details)


def test_traced_request_has_the_drafts_of_an_untraced_one_and_explains_them() -> None:
    decoder = make_decoder(make_model(16), slope=0.1, drafter="mixture", policy="cost")
    policy, prompt = decoder.policy, [1, 2, 3, 4] * 8
    text, traced = drive(decoder, prompt, max_tokens=150, return_decisions=True)
    assert isinstance(decoder.policy, TracedCostPolicy)
    assert all(step.policy_details["reason"] for step in traced[1:])
    lengths = {len(step.drafted) for step in traced}
    assert len(lengths) > 2
    for step in traced:
        if not step.drafted:
            continue
        details: dict[str, Any] = dict(step.policy_details)
        planned = details["planned"]
        assert len(step.drafted) <= planned <= details["proposed"] <= details["limit"]
        costs = [details[f"T({1 + k})"] for k in range(details["proposed"] + 1)]
        assert costs == pytest.approx([1 + 0.1 * k for k in range(len(costs))])
        probs = accumulate(step.verified_draft.acceptance_probs, mul)
        assert [details[f"P({k})"] for k, _ in enumerate(step.drafted, 1)] == pytest.approx(list(probs))
        possible = [k for k, cost in enumerate(costs) if cost <= details["cap"]]
        assert planned == max(possible, key=lambda k: details[f"V({k})"])
    drive(decoder, prompt, max_tokens=9)
    assert decoder.policy is policy, "untraced requests run without the wrapper"
    decoder = make_decoder(make_model(16), slope=0.1, drafter="mixture", policy="cost")
    plain_text, plain = drive(decoder, prompt, max_tokens=150)
    assert (plain_text, [step.drafted for step in plain]) == (text, [step.drafted for step in traced])
    assert not any(step.policy_details for step in plain)


@pytest.mark.parametrize("chances", [[0.8, 0.8, 0.8, 0.8], [0.3, 0.99, 0.99, 0.99], [0.9, 0.2, 0.6, 0.1]])
def test_details_are_the_numbers_of_the_formulas(chances: list[float]) -> None:
    _, details = explain(chances)
    assert (details["lambda"], details["loss budget"], details["cap"]) == (1.0, 1.0, 1 + CostPolicy.STAKE)
    costs = [TIMES[n] for n in range(1, 6)]
    numbers = [[details[f"{name}({k + (name == 'T')})"] for k in range(5)] for name in "PTV"]
    assert numbers[0] == pytest.approx(list(accumulate(chances, mul, initial=1.0)))
    assert numbers[1] == costs
    assert numbers[2] == pytest.approx(values_of(chances, costs, 1.0, details["cap"]))


@pytest.mark.parametrize(
    ("chances", "times", "length", "reason"),
    [
        ([], TIMES, 0, "the drafter had no guess"),
        ([0.8, 0.8, 0.8], TIMES, 2, "T(4) is above the cap"),
        ([0.8, 0.02, 0.02], TIMES, 1, "V is lower for longer drafts"),
        ([0.8, 0.7], TIMES, 2, "the drafter had no further guess"),
        ([0.8, 0.2], {1: 1.0, 2: 1.05, 3: 1.1, 4: 1.8, 64: 60.0}, 2, STOPPED),
        ([0.99] * 63, {1: 1.0, 64: 1.0}, 63, "the limit of the policy"),
    ],
)
def test_reason_names_what_decided(chances: list[float], times: dict[int, float], length: int, reason: str) -> None:
    planned, details = explain(chances, times)
    assert (planned, details["reason"][: len(reason)]) == (length, reason)


def test_reason_names_a_cut_after_the_plan_and_a_budget_that_is_used_up() -> None:
    planned, details = explain([0.9, 0.9], n_drafted=1)
    assert planned == 2
    assert details["reason"].endswith("; cut where the text ends or the grammar forbids a token")
    assert explain([0.9] * 4, n_drafted=4, passes=4)[1]["reason"] == "the loss budget is used up"


def test_values_with_a_restore_cost_are_those_that_decide() -> None:
    planned, details = explain([0.99] * 4, {1: 1.0, 64: 1.5}, RestoreCost(0.05, 0.05, 0))
    assert planned == max(range(5), key=lambda k: details[f"V({k})"]) > 0
