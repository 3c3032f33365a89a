"""Tests of `TracedCostPolicy`: the numbers explain the length of each draft, and tracing changes no decision."""

from __future__ import annotations

import math
from itertools import accumulate
from operator import mul
from typing import Any

import pytest
from support.decoder_loop import drive, make_decoder, make_model
from support.passes import draft, make_step

from ngramspec.cost.fixed_curves import make_fixed_curve
from ngramspec.cost.times import RestoreCost
from ngramspec.policies.cost import CostPolicy
from ngramspec.policies.draft_value import DraftValue
from ngramspec.policies.traced_cost import TracedCostPolicy
from ngramspec.steps import Step

PROMPT = [1, 2, 3, 4] * 8
SLOPE = 0.1
TIMES = {1: 1.0, 2: 1.1, 3: 1.2, 4: 1.6, 5: 2.1, 64: 40.0}
"""The times of the example in `ngramspec.policies.cost`."""
STOPPED = "the drafter stopped: P(2) is below lambda times the lowest mean cost of further tokens, 0.7"


def decode(*, return_decisions: bool) -> list[Step]:
    decoder = make_decoder(make_model(16), slope=SLOPE, drafter="mixture", policy="cost")
    return drive(decoder, PROMPT, max_tokens=150, return_decisions=return_decisions)[1]


def explain(
    chances: list[float],
    times: dict[int, float] = TIMES,
    restore: RestoreCost | None = None,
    n_drafted: int | None = None,
) -> tuple[int, dict[str, Any]]:
    """Return the length that a new policy plans for a draft, and the details of its record."""
    policy, curve, sizes = TracedCostPolicy(CostPolicy()), make_fixed_curve(times), range(1, 65)
    policy.begin()
    policy.limit()
    policy.price(curve, sizes)
    planned, _ = policy.plan(draft(chances), curve, sizes, restore)
    n_drafted = planned if n_drafted is None else n_drafted
    step = make_step(1, n_drafted, 0, cost=1.0, draft_cost=0.0)
    policy.record(step)
    return planned, dict(step.policy_details)


def test_traced_request_has_the_text_and_drafts_of_an_untraced_one() -> None:
    plain, traced = decode(return_decisions=False), decode(return_decisions=True)
    assert [(step.tokens, step.drafted) for step in plain] == [(step.tokens, step.drafted) for step in traced]
    assert not any(step.policy_details for step in plain)
    assert all(step.policy_details["reason"] for step in traced[1:])


def test_numbers_of_a_pass_explain_its_draft() -> None:
    drafted = [step for step in decode(return_decisions=True) if step.drafted]
    assert len({len(step.drafted) for step in drafted}) > 1
    for step in drafted:
        details: dict[str, Any] = dict(step.policy_details)
        planned = details["planned"]
        assert len(step.drafted) <= planned <= details["proposed"] <= details["limit"]
        lengths = range(details["proposed"] + 1)
        assert [details[f"T({1 + k})"] for k in lengths] == pytest.approx([1 + SLOPE * k for k in lengths])
        probs = accumulate(step.verified_draft.acceptance_probs, mul, initial=1.0)
        assert [details[f"P({k})"] for k, _ in enumerate(step.drafted, 1)] == pytest.approx(list(probs)[1:])
        assert planned == max(
            (k for k in lengths if details[f"T({1 + k})"] <= details["cap"]), key=lambda k: details[f"V({k})"]
        )


@pytest.mark.parametrize("chances", [[0.8, 0.8, 0.8, 0.8], [0.3, 0.99, 0.99, 0.99], [0.9, 0.2, 0.6, 0.1]])
def test_details_are_the_numbers_of_the_formulas(chances: list[float]) -> None:
    _, details = explain(chances)
    assert (details["lambda"], details["loss budget"], details["cap"]) == (1.0, 1.0, 1 + CostPolicy.STAKE)
    value = DraftValue()
    value.read(chances, make_fixed_curve(TIMES).optimal_batches(range(1, 65)), 1.0, details["cap"])
    for k in range(5):
        assert details[f"P({k})"] == pytest.approx(math.prod(chances[:k]))
        assert details[f"T({1 + k})"] == TIMES[1 + k]
        assert details[f"V({k})"] == pytest.approx(value.gross[k] - TIMES[1 + k])


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


def test_reason_names_a_cut_after_the_plan() -> None:
    planned, details = explain([0.9, 0.9], n_drafted=1)
    assert planned == 2
    assert details["reason"].endswith("; cut where the text ends or the grammar forbids a token")


def test_values_with_a_restore_cost_are_those_that_decide() -> None:
    planned, details = explain([0.99] * 4, {1: 1.0, 64: 1.5}, RestoreCost(0.05, 0.05, 0))
    assert planned == max(range(5), key=lambda k: details[f"V({k})"]) > 0


def test_reason_names_a_budget_that_is_used_up() -> None:
    policy, curve, sizes = TracedCostPolicy(CostPolicy()), make_fixed_curve(TIMES), range(1, 65)
    reasons = []
    for n_drafted in (4, 4, 4, 4):
        policy.begin()
        policy.limit()
        policy.price(curve, sizes)
        policy.plan(draft([0.9] * 4), curve, sizes)
        step = make_step(1, n_drafted, 0, cost=9.0, draft_cost=0.0)
        policy.record(step)
        reasons.append(step.policy_details["reason"])
    assert "the loss budget is used up" in reasons


def test_untraced_request_runs_without_the_wrapper() -> None:
    decoder = make_decoder(make_model(16), drafter="mixture", policy="cost")
    policy = decoder.policy
    drive(decoder, PROMPT, max_tokens=9, return_decisions=True)
    assert isinstance(decoder.policy, TracedCostPolicy)
    drive(decoder, PROMPT, max_tokens=9)
    assert decoder.policy is policy
    assert isinstance(policy, CostPolicy)
    assert policy.numbers is None
